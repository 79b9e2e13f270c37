from __future__ import annotations

import dataclasses
import sys
from types import MappingProxyType

import pytest

from kvbench.cli import doctor as doctor_command
from kvbench.cli.main import main
from kvbench.core.task import Task
from kvbench.entries import ModelEntry, TaskEntry
from kvbench.plugins import BrokenPlugin, Registry

HEALTHY = Registry(
    policies=MappingProxyType({}),
    tasks=MappingProxyType({}),
    models=MappingProxyType({"m": ModelEntry(name="m", target="kvbench.entries:Entry", summary="", licence="MIT")}),
    origins=MappingProxyType({("model", "m"): "someone"}),
)


def plant(monkeypatch: pytest.MonkeyPatch, registry: Registry) -> None:
    monkeypatch.setattr(doctor_command, "load_registry", lambda: registry)


def test_a_healthy_installation(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    plant(monkeypatch, HEALTHY)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "transformers" in out
    assert "torch works" in out


def test_a_broken_plugin_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    plant(monkeypatch, dataclasses.replace(HEALTHY, broken=(BrokenPlugin("dist", "point", "[why]"),)))
    assert main(["doctor"]) == 1
    assert "Plugin 'point' of dist is left out: [why]" in capsys.readouterr().out.replace("\n", " ")


def test_a_target_that_points_nowhere_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = ModelEntry(name="m", target="kvbench.nowhere:M", summary="", licence="MIT")
    plant(monkeypatch, dataclasses.replace(HEALTHY, models=MappingProxyType({"m": lost})))
    assert main(["doctor"]) == 1
    assert "model m of someone: Cannot import 'kvbench.nowhere'" in capsys.readouterr().out.replace("\n", " ")


def test_a_torch_that_does_not_load_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(monkeypatch, HEALTHY)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["doctor"]) == 1
    assert "torch cannot be imported" in capsys.readouterr().out


def test_a_task_that_cannot_run_here_is_named_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task = TaskEntry(name="t", target="kvbench.core.task:Task", summary="")
    plant(monkeypatch, dataclasses.replace(HEALTHY, tasks=MappingProxyType({"t": task})))
    assert main(["doctor"]) == 0
    assert "every task can run here" in capsys.readouterr().out.replace("\n", " ")
    monkeypatch.setattr(Task, "unavailable", staticmethod(lambda: "It needs [luck]."))
    assert main(["doctor"]) == 0
    assert "task t cannot run here. It needs [luck]." in capsys.readouterr().out.replace("\n", " ")
