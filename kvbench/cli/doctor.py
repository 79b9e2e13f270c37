"""`kvbench doctor`: what is installed, and which plugin does not work."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvbench.core.errors import KvbenchError
from kvbench.core.task import Task
from kvbench.plugins import Registry, load_registry

PACKAGES = ("kvbench", "torch", "transformers", "safetensors", "tokenizers", "numpy", "pandas", "pyarrow", "scipy")


def doctor() -> None:
    """Show versions, try torch and every plugin; exit code 1 if something is broken."""
    console = Console()
    console.print(_versions())
    registry = load_registry()
    problems = [*_torch_problems(console), *_target_problems(registry), *map(str, registry.broken)]
    count = sum(len(entries) for entries in registry.by_kind().values())
    if not problems:
        missing = _missing(registry)
        for sentence in missing:
            console.print(f"[yellow]missing[/yellow]  {escape(sentence)}")
        able = "" if missing else "; every task can run here"
        console.print(f"[green]ok[/green]  {count} policies, tasks and models, all of them load{able}")
        return
    for problem in problems:
        console.print(f"[red]broken[/red]  {escape(problem)}")
    raise typer.Exit(1)


def _versions() -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_row("python", platform.python_version())
    for package in PACKAGES:
        try:
            table.add_row(package, version(package))
        except PackageNotFoundError:
            table.add_row(package, "[red]not installed[/red]")
    return table


def _torch_problems(console: Console) -> list[str]:
    """Import torch for real: a wheel for another machine installs well and fails here."""
    try:
        import torch
    except Exception as error:  # noqa: BLE001 - loading a shared library can fail in any way
        return [f"torch cannot be imported: {error}"]
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    console.print(f"torch works with {torch.get_num_threads()} CPU threads and {', '.join(gpus) or 'no CUDA device'}")
    return []


def _target_problems(registry: Registry) -> list[str]:
    """Import every target: an entry is a string until then, and may point nowhere."""
    problems = []
    for kind, entries in registry.by_kind().items():
        for name, entry in entries.items():
            try:
                entry.load()
            except KvbenchError as error:
                problems.append(f"{kind} {name} of {registry.origins[kind, name]}: {error}")
    return problems


def _missing(registry: Registry) -> list[str]:
    """Why tasks cannot run on this machine: nothing is broken, a package or a right is not there."""
    found = {}
    for name, entry in registry.tasks.items():
        task = entry.load()
        if isinstance(task, type) and issubclass(task, Task):
            found[name] = task.unavailable()
    return [f"task {name} cannot run here. {reason}" for name, reason in found.items() if reason is not None]
