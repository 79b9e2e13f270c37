"""`kvbench efficiency`: what a decode step of each policy costs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from kvbench.efficiency.options import EfficiencyOptions, check_efficiency, command_line
from kvbench.harness.options import RunOptions
from kvbench.plugins import load_registry

if TYPE_CHECKING:
    from kvbench.efficiency.record import EfficiencyResult

_WHAT = "What to measure"
_HOW = "How to measure it"


def efficiency(
    shape: Annotated[
        str,
        typer.Option(
            help="A shape (qwen3-4b, llama-3.1-8b ...) or config.json with random weights, or a model's name or folder.",
            rich_help_panel=_WHAT,
        ),
    ] = "ref",
    policy: Annotated[
        list[str] | None, typer.Option("--policy", help="A policy; repeat for more.", rich_help_panel=_WHAT)
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
    gen_len: Annotated[
        list[int] | None,
        typer.Option("--gen-len", help="Tokens that the cache has seen; 16384 if left out.", rich_help_panel=_WHAT),
    ] = None,
    reference_length: Annotated[
        int | None,
        typer.Option(help="Tokens that --cr is a fraction of; each --gen-len if left out.", rich_help_panel=_WHAT),
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option("--batch", help="Sequences side by side; 1; repeat for more.", rich_help_panel=_WHAT),
    ] = None,
    largest: Annotated[
        bool, typer.Option("--largest", help="Also the largest batch that fits.", rich_help_panel=_WHAT)
    ] = False,
    memory: Annotated[
        float | None, typer.Option(help="GiB that the largest batch may take.", rich_help_panel=_WHAT)
    ] = None,
    points: Annotated[
        int, typer.Option(help="Lengths up to --gen-len at which steps are timed.", rich_help_panel=_WHAT)
    ] = 1,
    whole: Annotated[
        bool, typer.Option("--whole", help="Also generate in full and compare.", rich_help_panel=_WHAT)
    ] = False,
    prompt_len: Annotated[
        int, typer.Option(help="Tokens of the prompts whose reading is timed.", rich_help_panel=_WHAT)
    ] = 1024,
    dense: Annotated[bool, typer.Option(help="Measure the dense cache too.", rich_help_panel=_WHAT)] = True,
    stock: Annotated[bool, typer.Option(help="Measure stock transformers too.", rich_help_panel=_WHAT)] = True,
    scoring: Annotated[
        bool, typer.Option(help="Measure streaming_llm in as many slots, to tell scoring apart.", rich_help_panel=_WHAT)
    ] = True,
    policy_arg: Annotated[
        list[str] | None,
        typer.Option("--policy-arg", metavar="NAME=VALUE", help="A hyper-parameter.", rich_help_panel=_WHAT),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(help="Hyper-parameters of this training recipe (qwen3-4b) or TOML file.", rich_help_panel=_WHAT),
    ] = None,
    checkpoint: Annotated[
        list[Path] | None,
        typer.Option("--checkpoint", metavar="DIR", help="Trained policy of a real model.", rich_help_panel=_WHAT),
    ] = None,
    head_lengths: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Folder of 'kvbench run', or JSON: entries of each head of a policy without a hard budget.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Timed steps.", rich_help_panel=_HOW)] = 30,
    decode_path: Annotated[
        str, typer.Option(help="How steps run: auto, plain, graph or kernels.", rich_help_panel=_HOW)
    ] = "auto",
    audit: Annotated[
        bool, typer.Option(help="Count what is stored in every step, as 'kvbench run' does.", rich_help_panel=_HOW)
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.", rich_help_panel=_HOW)] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.", rich_help_panel=_HOW)] = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads.", rich_help_panel=_HOW)] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the rows go.", rich_help_panel=_HOW)] = Path(
        "kvbench-efficiency"
    ),
) -> None:
    """Measure time and memory of decode steps beside the floor under them. Interrupted runs go on where they were.

    Example: kvbench efficiency --shape qwen3-4b --policy kvpop --cr 0.75 --gen-len 16384
    """
    options = EfficiencyOptions(
        run=RunOptions(
            policies=tuple(policy or ()),
            crs=tuple(cr or ()),
            budgets=tuple(budget or ()),
            gen_lens=tuple(gen_len or (16384,)),
            model=shape,
            reference_length=reference_length,
            policy_args=tuple(policy_arg or ()),
            checkpoints=tuple(checkpoint or ()),
            out=out,
            device=device,
            dtype=dtype,
            decode_path=decode_path,
            threads=threads,
        ),
        batches=tuple(batch or ()),
        largest=largest,
        memory=memory,
        prompt=prompt_len,
        steps=steps,
        points=points,
        whole=whole,
        recipe=recipe,
        heads=head_lengths,
        dense=dense,
        stock=stock,
        scoring=scoring,
        audited=audit,
        command=command_line(sys.argv[1:]),
    )
    registry = load_registry()
    checked = check_efficiency(options, registry)

    from kvbench.efficiency.session import open_session, run_session
    from kvbench.efficiency.tables import render, show

    session = open_session(checked, registry)
    console = Console()
    speed = f"{session.bandwidth / 1e9:.1f} GB/s"
    console.print(f"{session.loaded.name}: {len(session.plan)} cells, a copy moves {speed}", highlight=False)
    rows = run_session(session, lambda row, done, count: _tell(console, row, done, count))
    if console.is_terminal:
        show(rows, console)
    else:
        console.out(render(rows), end="", highlight=False)
    console.print(
        f"{len(rows)} rows lie in {out}; 'kvbench table {out}' shows them again.",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    if any(row.status == "failed" for row in rows):
        raise typer.Exit(1)


def _tell(console: Console, row: EfficiencyResult, done: int, count: int) -> None:
    from kvbench.efficiency.crossing import Labels, removed

    batch = "largest" if row.cell.batch_asked is None else row.cell.batch_asked
    place = f"{Labels([row])(row)} {removed(row)} length {row.cell.gen_length} batch {batch}".replace("  ", " ")
    told = f"{row.status.replace('_', ' ')}: {row.reason}"
    if row.figures is not None:
        told = f"{row.figures.ms_per_step:.3f} ms, {row.figures.floor_ratio:.2f} x floor, {row.figures.path}"
    console.print(f"[{done}/{count}] {place}: {told}", markup=False, highlight=False, soft_wrap=True)
