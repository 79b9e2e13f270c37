"""`kvbench run`: measure policies, show the table, keep the rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvbench.harness.options import RunOptions, check
from kvbench.plugins import load_registry

if TYPE_CHECKING:
    from kvbench.core.result import Result
    from kvbench.harness.plan import Plan, Planned
    from kvbench.harness.session import Finished

_WHAT = "What to run"
_HOW = "How to run it"


def run(
    policy: Annotated[
        list[str] | None, typer.Option("--policy", help="A policy, or 'all'; repeat for more.", rich_help_panel=_WHAT)
    ] = None,
    cr: Annotated[
        list[str] | None,
        typer.Option(
            "--cr", help="Fraction of the cache removed: 0.88 or 7/8; repeat for more.", rich_help_panel=_WHAT
        ),
    ] = None,
    budget: Annotated[
        list[int] | None,
        typer.Option("--budget", help="Instead of --cr: slots per layer and KV head.", rich_help_panel=_WHAT),
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option("--task", help="A task; the reference tasks if left out.", rich_help_panel=_WHAT),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            metavar="TASK=PATH",
            help="Local copy of a task's data set: file or folder.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    gen_len: Annotated[
        list[int] | None,
        typer.Option("--gen-len", help="Most new tokens of an answer; 1024 if left out.", rich_help_panel=_WHAT),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A model's name, a folder, or a hub name; 'ref' if left out.", rich_help_panel=_WHAT),
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option(help="A suite's name (reference-v1) or TOML file: defaults for these.", rich_help_panel=_WHAT),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Problems a task; 32 if left out.", rich_help_panel=_WHAT)] = None,
    samples: Annotated[int | None, typer.Option(help="Answers a problem; 1.", rich_help_panel=_WHAT)] = None,
    seed: Annotated[
        list[int] | None, typer.Option("--seed", help="Of problems and sampling; 0.", rich_help_panel=_WHAT)
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; 0.", rich_help_panel=_WHAT)] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus of sampling; 1.", rich_help_panel=_WHAT)] = None,
    top_k: Annotated[int | None, typer.Option(help="Most candidates of sampling.", rich_help_panel=_WHAT)] = None,
    reference_length: Annotated[
        int | None,
        typer.Option(
            help="Tokens that the dense cache is taken to hold; longest prompt + --gen-len.", rich_help_panel=_WHAT
        ),
    ] = None,
    policy_arg: Annotated[
        list[str] | None,
        typer.Option("--policy-arg", metavar="NAME=VALUE", help="A hyper-parameter.", rich_help_panel=_WHAT),
    ] = None,
    checkpoint: Annotated[
        list[Path] | None,
        typer.Option("--checkpoint", metavar="DIR", help="Trained policy, not the shipped one.", rich_help_panel=_WHAT),
    ] = None,
    adapted_lm: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Run every policy on this checkpoint's LM.", rich_help_panel=_WHAT),
    ] = None,
    dense: Annotated[bool, typer.Option(help="Run the dense model for comparison.", rich_help_panel=_WHAT)] = True,
    dense_adapted: Annotated[
        bool | None,
        typer.Option(
            "--dense-adapted/--no-dense-adapted",
            help="Also run the dense model on each policy's own LM; off unless a suite asks for it.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the rows go.", rich_help_panel=_HOW)] = Path(
        "kvbench-runs"
    ),
    shard: Annotated[
        str, typer.Option(metavar="I/N", help="Only this part of the grid.", rich_help_panel=_HOW)
    ] = "1/1",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.", rich_help_panel=_HOW)] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.", rich_help_panel=_HOW)] = "auto",
    rows: Annotated[str, typer.Option(help="Sequences side by side: auto or a number.", rich_help_panel=_HOW)] = "auto",
    decode_path: Annotated[
        str, typer.Option(help="How steps run: auto, plain, graph or kernels.", rich_help_panel=_HOW)
    ] = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads.", rich_help_panel=_HOW)] = None,
    processes: Annotated[
        str,
        typer.Option(
            help="Cells measured side by side: auto (one a core for small models on a CPU) or a number.",
            rich_help_panel=_HOW,
        ),
    ] = "auto",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and stop.", rich_help_panel=_HOW)] = False,
) -> None:
    """Run policies on tasks and show what is left of the dense model. Interrupted runs go on where they were.

    Example: kvbench run --policy kvpop --cr 0.88
    """
    options = RunOptions(
        policies=tuple(policy or ()),
        crs=tuple(cr or ()),
        budgets=tuple(budget or ()),
        tasks=tuple(task or ()),
        data=tuple(data or ()),
        gen_lens=tuple(gen_len or ()),
        model=model,
        limit=limit,
        samples=samples,
        seeds=tuple(seed or ()),
        suite=suite,
        reference_length=reference_length,
        policy_args=tuple(policy_arg or ()),
        checkpoints=tuple(checkpoint or ()),
        adapted_lm=adapted_lm,
        dense=dense,
        dense_adapted=dense_adapted,
        out=out,
        shard=shard,
        device=device,
        dtype=dtype,
        rows=rows,
        decode_path=decode_path,
        threads=threads,
        processes=processes,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
    )
    registry = load_registry()
    checked = check(options, registry)

    from kvbench.harness.session import open_session, run_session

    session = open_session(checked, registry)
    console = Console()
    for sentence in session.plan.left_out:
        console.print(f"left out: {sentence}", markup=False, highlight=False, soft_wrap=True)
    if dry_run:
        _show_plan(session.plan, console)
        return
    if not session.plan.mine:
        console.print(f"This shard has none of the {len(session.plan.planned)} cells.", highlight=False)
        return
    with Screen(console) as screen:
        finished = run_session(session, screen)
    _show_result(finished, console)
    if finished.failed:
        raise typer.Exit(1)


class Screen:
    """Tells how a run goes on: a bar on a terminal, a line a cell elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[tokens]} tokens"),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task: TaskID | None = None
        self._todo = self._closed = self._tokens = 0

    def __enter__(self) -> Screen:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def started(self, todo: int, done: int) -> None:
        """Before the first cell."""
        self._todo = todo
        self._task = self._bar.add_task("cells", total=todo, tokens=0)
        if done:
            self._say(f"{done} of {todo + done} cells were done before")

    def cell(self, planned: Planned) -> Callable[[int], None]:
        """Before each cell."""
        assert self._task is not None
        cell = planned.cell
        self._bar.update(self._task, description=f"{cell.policy} {cell.cr or ''} {cell.task} {cell.gen_length}")
        return self._add

    def grading(self, done: int, completions: int) -> None:
        """After each completion that is graded."""
        assert self._task is not None
        self._bar.update(self._task, description=f"grading {done} of {completions}")

    def closed(self, result: Result) -> None:
        """After each cell."""
        assert self._task is not None
        self._closed += 1
        self._bar.update(self._task, completed=self._closed)
        if self._bar.disable or result.status != "ok":
            told = f"score {result.score:.3f}" if result.score is not None else f"{result.status}: {result.reason}"
            budget = "dense" if result.budget is None else f"{result.budget} slots"
            lm = f" on LM {(result.adapted_lm or '')[:8]}" if result.role == "dense_adapted" else ""
            place = f"{result.policy}{lm}, {budget}, {result.task}, length {result.gen_length}"
            self._say(f"[{self._closed}/{self._todo}] {place}: {told}")

    def _add(self, tokens: int) -> None:
        assert self._task is not None
        self._tokens += tokens
        self._bar.update(self._task, tokens=f"{self._tokens:,}")

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _show_plan(plan: Plan, console: Console) -> None:
    """Every cell with its budget, what is skipped, and at most how many tokens that makes."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("policy", "task", "length", "seed", "removed", "slots", "of", "problems", ""):
        table.add_column(heading, justify="right" if heading in {"length", "slots", "of", "problems"} else "left")
    tokens = 0
    for planned in plan.mine:
        cell = planned.cell
        if planned.skip is None:
            tokens += cell.problems * cell.samples * cell.gen_length
        table.add_row(
            cell.policy if cell.role != "dense_adapted" else f"{cell.policy} on LM {(cell.adapted_lm or '')[:8]}",
            cell.task,
            str(cell.gen_length),
            str(cell.seed),
            cell.cr or "",
            "all" if cell.slots is None else str(cell.slots),
            str(cell.reference_length),
            str(cell.problems * cell.samples),
            "" if planned.skip is None else f"skipped: {planned.skip}",
        )
    console.print(table)
    others = len(plan.planned) - len(plan.mine)
    elsewhere = f"; {others} more in other shards" if others else ""
    console.print(f"{len(plan.mine)} cells{elsewhere}, at most {tokens:,} new tokens", highlight=False)
    short = {(p.cell.task, p.cell.problems, p.cell.problems_requested) for p in plan.mine if p.cell.problems_requested}
    for task, there, requested in sorted(short):
        console.print(f"{task} has {there} of {requested} problems", highlight=False)


def _show_result(finished: Finished, console: Console) -> None:
    from kvbench.report.load import load
    from kvbench.report.tables import only, render, show

    stored = only(load([finished.folder]), {row.key for row in finished.rows})
    if console.is_terminal:
        show(stored, console)
    else:
        console.out(render(stored), end="", highlight=False)
    console.print(
        f"{len(finished.rows)} rows lie in {finished.folder}; 'kvbench table {finished.folder}' shows them again.",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
