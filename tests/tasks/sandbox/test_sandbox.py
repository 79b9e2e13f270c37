from __future__ import annotations

import json
import marshal
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbench_tasks.sandbox import box as box_module
from kvbench_tasks.sandbox import launch
from kvbench_tasks.sandbox.box import Box, Limits, SandboxError, unavailable
from tests.tasks.sandbox.hostile import processes

HERE = Path(__file__).parent
PACKAGE = Path(box_module.__file__).parent
SOMEBODY = 54321

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"no sandbox on this machine: {unavailable()}")

ECHO = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"
EVALUATE = """
import json, os, sys
for line in sys.stdin:
    print(json.dumps(eval(json.loads(line))), flush=True)
"""


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that every user can read and write, with the package in it; pytest's own are private."""
    folder = Path(tempfile.mkdtemp())
    (folder / "work").mkdir()
    shutil.copytree(PACKAGE, folder / "kvbench_tasks" / "sandbox", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(HERE / "hostile.py", folder)
    (folder / "secret").write_text("for nobody in a box")
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o644)
    yield folder
    shutil.rmtree(folder)


def python_of_everybody() -> str | None:
    """An interpreter that somebody else can start too; the one that runs the tests may lie in root's home."""
    for python in (os.path.realpath(sys.executable), "/usr/bin/python3"):
        enough = [python, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
        try:
            if subprocess.run(enough, user=SOMEBODY, group=SOMEBODY, extra_groups=[], cwd="/").returncode == 0:
                return python
        except OSError:
            continue
    return None


def run_hostile(public: Path, python: str, **user: Any) -> dict[str, Any]:
    done = subprocess.run(
        [python, "-B", "hostile.py", str(public / "work"), str(public / "secret"), str(PACKAGE / "box.py")],
        cwd=public,
        env={"PYTHONPATH": str(public), "HOME": str(Path.home())},
        capture_output=True,
        text=True,
        timeout=120,
        **user,
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


HARMLESS = {"harm": [], "control": True, "slow": {}, "left": [], "processes": {}, "victim": True}


def test_hostile_programs_achieve_nothing(public: Path) -> None:
    assert run_hostile(public, sys.executable) == HARMLESS | {"uid": os.getuid()}


def test_hostile_programs_of_an_ordinary_user_achieve_nothing(public: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("this is an ordinary user: the test before has shown it")
    python = python_of_everybody()
    if python is None:
        pytest.skip("there is no Python 3.11 that an ordinary user could start")
    report = run_hostile(public, python, user=SOMEBODY, group=SOMEBODY, extra_groups=[])
    assert report == HARMLESS | {"uid": SOMEBODY}


def test_a_box_holds_little() -> None:
    with Box(EVALUATE, Limits()) as box:
        assert box.ask("[os.getuid(), os.getgid(), os.getpid(), os.getppid(), os.getcwd()]", 5) == [
            launch.NOBODY,
            launch.NOBODY,
            2,
            1,
            "/tmp",
        ]
        assert box.ask("sorted(os.environ)", 5) == ["HOME", "LC_ALL", "PYTHONHASHSEED"]
        assert set(box.ask("os.listdir('/dev')", 5)) == set(launch.DEVICES)
        assert box.ask("[p for p in os.listdir('/proc') if p.isdecimal()]", 5) == ["1", "2"]
        assert box.ask("[os.path.realpath(f'/proc/self/fd/{n}')[:5] for n in range(3)]", 5) == [
            "/proc",
            "/proc",
            "/dev/",
        ]
        assert box.ask("sorted(os.listdir('/sys')) if os.path.exists('/sys') else None", 5) is None
        assert box.ask("open('/proc/net/dev').read().count(':')", 5) == 1  # lo, which is down
        assert box.ask("__import__('importlib.util').util.find_spec('pytest') is None", 5)


def test_a_guest_of_root_is_nobody_outside_too() -> None:
    marker = uuid.uuid4().hex
    with Box(f"{ECHO}\n# {marker}", Limits()) as box:
        box.ask(1, 5)
        (guest,) = (pid for pid, line in processes(marker).items() if "launch.py" not in line)
        status = Path(f"/proc/{guest}/status").read_text(encoding="utf-8")
    uid = launch.NOBODY if os.getuid() == 0 else os.getuid()
    assert f"\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n" in status


def test_a_conversation() -> None:
    with Box(ECHO, Limits()) as box:
        for message in (1, "two", ["\u2028", "ä\n"], {"x": None}):
            assert box.ask(message, 5) == message
        large = "x" * (4 << 20)
        assert box.ask(large, 20) == large


def test_no_answer() -> None:
    with Box("import time\ninput()\ntime.sleep(100)", Limits()) as box:
        start = time.monotonic()
        assert box.ask(1, 0.3) is None
        assert time.monotonic() - start < 5
    with Box("input()", Limits()) as box:
        assert box.ask(1, 5) is None
        assert box.ask(2, 5) is None
    with Box("input(); print('{')", Limits()) as box:
        assert box.ask(1, 5) is None
    with Box("input(); print('[' * 100_000)", Limits()) as box:
        assert box.ask(1, 5) is None
    with Box("input(); print('9' * 10_000)", Limits()) as box:
        assert box.ask(1, 5) is None
    with Box("input(); print('x' * 100_000)", Limits(reply=1000)) as box:
        assert box.ask(1, 5) is None


def test_a_guest_ends_with_whoever_started_it() -> None:
    holder = f"""
import sys, time
sys.path[:0] = {[path for path in sys.path if path]!r}
from kvbench_tasks.sandbox.box import Box, Limits
with Box("input(); print(1, flush=True)\\nimport time\\ntime.sleep(100)", Limits()) as box:
    box.ask(1, 5)
    print(box._process.pid, flush=True)
    time.sleep(100)
"""
    process = subprocess.Popen([sys.executable, "-c", holder], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    outer = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    process.communicate()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{outer}/stat").exists() and not is_zombie(outer):
        assert time.monotonic() < deadline, "the guest outlives the process that started it"
        time.sleep(0.02)


def is_zombie(pid: int) -> bool:
    """Ended, and whoever inherited it has not looked yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_why_there_is_no_box(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = unavailable.__wrapped__
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        assert "it needs Linux" in str(found())
    with monkeypatch.context() as patch:
        patch.setattr("platform.machine", lambda: "vax")
        assert "x86_64, aarch64, and this is vax" in str(found())
    broken = tmp_path / "launch.py"
    broken.write_text("import sys; sys.exit('unshare: Operation not permitted')")
    monkeypatch.setattr(box_module, "_LAUNCH", broken)
    assert found() == "unshare: Operation not permitted"
    with pytest.raises(SandboxError, match="not permitted"), Box(ECHO, Limits()):
        pass


def test_without_rights_the_launcher_says_what_it_lacks() -> None:
    """In a box there are no namespaces to be had: there the launcher fails as on a machine that forbids them."""
    source = (PACKAGE / "launch.py").read_text(encoding="utf-8").replace("sys.argv[1]", repr(marshal.dumps({}).hex()))
    guest = f"""
import json, subprocess, sys
input()
done = subprocess.run([sys.executable, "-c", {source!r}], capture_output=True, text=True)
print(json.dumps(done.stderr), flush=True)
"""
    with Box(guest, Limits()) as box:
        assert box.ask(1, 10) == "unshare: Operation not permitted\n"


def test_descriptors_beyond_those_of_select() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1200:
        pytest.skip(f"a process may open {hard} files only")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with Box(ECHO, Limits()) as box:
            assert box.ask("far", 5) == "far"
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_launcher_that_is_killed_is_no_guest_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    killed = tmp_path / "launch.py"
    killed.write_text("import os; os.kill(os.getpid(), 9)")
    monkeypatch.setattr(box_module, "_LAUNCH", killed)
    with pytest.raises(SandboxError, match="ended before it started"), Box(ECHO, Limits()):
        pass
