"""Runs the benchmark: `python -m benchmarks.training --shape qwen3-4b --length 16384 --out DIR`. See docs/training.md."""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.training.table import render
from kvbench.harness.environment import commit

PARTS = ("correctness", "passes", "prefill", "steps")
FURTHER = ("tuning",)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__)
    parser.add_argument("--shape", default="qwen3-4b", help="qwen3-4b, qwen3-8b, ref, small, or a config.json")
    parser.add_argument("--length", type=int, default=16384, help="tokens of a row")
    parser.add_argument("--rows", type=int, default=1, help="rows of a step")
    parser.add_argument(
        "--only", action="append", choices=PARTS + FURTHER, help=f"these parts; without, {', '.join(PARTS)}"
    )
    parser.add_argument("--kind", action="append", choices=("dense", "flex", "kvpop"), help="these steps; all without")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384, 32768], help="of single passes")
    parser.add_argument("--prompt", type=int, default=32768, help="tokens of the prefill")
    parser.add_argument("--slots", type=int, default=4096, help="budget of the prefill")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of which the median is taken")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--table", type=Path, nargs="+", help="only prints these results.jsonl as tables")
    parser.add_argument("--out", type=Path, default=Path("runs/training-cost"), help="folder of results.jsonl")
    given = parser.parse_args()
    if given.table:
        sys.stdout.write(render(given.table))
        return
    device = torch.device(given.device)
    given.out.mkdir(parents=True, exist_ok=True)
    where = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    about = {
        "device": where,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit().sha,
    }
    failed = []
    with (given.out / "results.jsonl").open("a", encoding="utf-8") as file:

        def emit(row: dict[str, Any]) -> None:
            file.write(json.dumps({**row, **about}) + "\n")
            file.flush()
            print("\n".join(f"  {name}: {_shown(value)}" for name, value in row.items()) + "\n", flush=True)

        for part in given.only or PARTS:
            began = time.perf_counter()
            print(f"== {part}", flush=True)
            if part == "correctness":
                failed = _correctness(device, emit)
            else:
                _measure(part, given, device, emit)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            print(f"== {part}: {time.perf_counter() - began:.0f} s\n", flush=True)
    if failed:
        parser.exit(1, f"wrong: {', '.join(failed)}\n")


def _measure(part: str, given: Any, device: torch.device, emit: Callable[[dict[str, Any]], None]) -> None:
    from benchmarks.training import passes, prefill, steps, tuning

    if part == "passes":
        passes.measure(given.shape, given.lengths, device, given.repeats, emit)
    elif part == "tuning":
        tuning.measure(given.shape, given.length, device, given.repeats, emit)
    elif part == "prefill":
        prefill.measure(given.shape, given.prompt, given.slots, device, given.repeats, emit)
    else:
        kinds = given.kind or ["dense", "flex", "kvpop"]
        steps.measure(given.shape, given.length, given.rows, device, given.repeats, kinds, emit)


def _correctness(device: torch.device, emit: Callable[[dict[str, Any]], None]) -> list[str]:
    """Names of the checks that failed."""
    if device.type != "cuda":
        print("  the kernels need a GPU; here the plain forms run, which tests/ covers\n", flush=True)
        return []
    from benchmarks.training.correctness import CHECKS

    failed = []
    for name, check in CHECKS.items():
        began = time.perf_counter()
        torch.manual_seed(0)
        problem = ""
        try:
            check()
        except Exception as error:  # noqa: BLE001 - one broken kernel should not hide what the others do
            problem = f"{type(error).__name__}: {error}"
            failed.append(name)
        row = {"part": "correctness", "check": name, "right": not problem, "seconds": time.perf_counter() - began}
        emit({**row, "problem": problem[:2000]} if problem else row)
    return failed


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
