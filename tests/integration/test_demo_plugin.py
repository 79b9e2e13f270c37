"""A third party's distribution, really built and installed, beside ours; then broken, twice there, and misspelt."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "demo_plugin"


def install(source: Path, site: Path) -> None:
    """Install a distribution into a folder, without a network: nothing is resolved and nothing is fetched."""
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check"]
    line = [sys.executable, "-m", "pip", "install", *options, "--target", str(site), str(source)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def kvbench(site: Path, *line: str) -> subprocess.CompletedProcess[str]:
    """Run the command line with the folder as part of the environment."""
    program = [sys.executable, "-m", "kvbench", *line]
    environment = {**os.environ, "PYTHONPATH": str(site), "COLUMNS": "300"}
    return subprocess.run(program, env=environment, cwd=site, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("setuptools", reason="building a distribution without a network needs setuptools here")
    folder = tmp_path_factory.mktemp("demo")
    # Building leaves files beside the source, so it happens on a copy.
    shutil.copytree(SOURCE, folder / "source")
    install(folder / "source", folder / "site")
    return folder / "site"


@pytest.fixture
def site(installed: Path, tmp_path: Path) -> Path:
    """A copy of the installation that a test may damage."""
    return Path(shutil.copytree(installed, tmp_path / "site"))


def rewrite(site: Path, old: str, new: str) -> None:
    module = site / "kvbench_demo" / "plugin.py"
    assert old in module.read_text()
    module.write_text(module.read_text().replace(old, new))
    shutil.rmtree(module.parent / "__pycache__", ignore_errors=True)


def test_it_stands_beside_ours(site: Path) -> None:
    done = kvbench(site, "list", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    listed = json.loads(done.stdout)
    distributions = {entry["name"]: entry["distribution"] for kind in listed.values() for entry in kind}
    assert distributions["demo_oldest"] == distributions["demo_addition"] == "kvbench-demo"
    assert distributions["full"] == "kvbench"


def test_it_is_described_with_its_parameters(site: Path) -> None:
    done = kvbench(site, "describe", "demo-oldest")
    assert done.returncode == 0
    assert "newest tokens that stay" in done.stdout


def test_its_targets_load(site: Path) -> None:
    program = """
from kvbench.plugins import load_registry
registry = load_registry()
print(registry.policy("demo-oldest").load(), registry.task("demo_addition").load())
"""
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        cwd=site,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "kvbench_demo.oldest.DemoOldest" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("from __future__", "import nowhere_at_all\nfrom __future__", "SyntaxError"),
        ("from kvbench.entries", "import nowhere_at_all\nfrom kvbench.entries", "No module named 'nowhere_at_all'"),
        ("demo_oldest", "full", "'full' is announced by kvbench (policies) and kvbench-demo (demo)"),
        (
            "def kvbench_tasks",
            "def kvbench_task",
            "There is no hook named 'kvbench_task'; did you mean 'kvbench_tasks'",
        ),
    ],
    ids=["syntax", "import", "duplicate", "misspelt"],
)
def test_broken_it_is_named_once_and_everything_else_works(site: Path, old: str, new: str, reason: str) -> None:
    rewrite(site, old, new)
    done = kvbench(site, "list", "--json")
    assert done.returncode == 0
    (warning,) = done.stderr.splitlines()
    assert warning.startswith("warning: Plugin 'demo' of kvbench-demo is left out: ")
    assert reason in warning
    listed = json.loads(done.stdout)
    assert {entry["distribution"] for kind in listed.values() for entry in kind} == {"kvbench"}


def test_its_policy_and_its_task_run_on_the_reference_model(site: Path, tmp_path: Path) -> None:
    line = ["--model", "ref", "--gen-len", "128", "--cr", "0.5", "--limit", "2", "--processes", "1"]
    out = str(tmp_path / "runs")
    done = kvbench(site, "run", "--policy", "demo-oldest", "--task", "demo-addition", *line, "--out", out)
    assert (done.returncode, done.stderr) == (0, "")
    assert "demo_oldest" in done.stdout
    rows = json.loads(kvbench(site, "table", out, "--format", "json").stdout)
    assert [(row["policy"], row["task"], row["status"], row["n"]) for row in rows] == [
        ("full", "demo_addition", "ok", 2),
        ("demo_oldest", "demo_addition", "ok", 2),
    ]
    dense, oldest = rows
    assert dense["score"] == 1
    assert oldest["evictions"] > 0
    assert oldest["violations"] == 0


def test_doctor_names_a_broken_plugin(site: Path) -> None:
    rewrite(site, "from kvbench.entries", "import nowhere_at_all\nfrom kvbench.entries")
    done = kvbench(site, "doctor")
    assert done.returncode == 1
    assert "Plugin 'demo' of kvbench-demo is left out: ModuleNotFoundError" in done.stdout
