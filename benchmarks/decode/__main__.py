"""Runs the benchmark: `python -m benchmarks.decode --shape qwen3-4b --out DIR`. See docs/decode.md."""

from __future__ import annotations

import argparse
import gc
import json
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import transformers

from kvbench.harness.environment import commit

PARTS = ("correctness", "tune", "kernels", "steps")


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode", description=__doc__)
    parser.add_argument("--only", action="append", choices=PARTS, help="these parts; all of them without")
    parser.add_argument("--check", action="append", help="these checks of the correctness part; all without")
    parser.add_argument("--shape", default="qwen3-4b", help="qwen3-4b, qwen3-8b, ref, small, or a config.json")
    parser.add_argument("--slots", type=int, default=4096, help="budget")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64], help="sequences side by side")
    parser.add_argument(
        "--policy",
        action="append",
        help="of the steps part; kvpop and streaming_llm without",
    )
    parser.add_argument("--path", action="append", help="kernels, cache_kernels, graph; kernels without")
    parser.add_argument("--quick", action="store_true", help="five candidates for each product of the tune part")
    parser.add_argument(
        "--kernel", default="", help="of the tune part: kernels with this in their name, such as scorer"
    )
    parser.add_argument("--profile", action="store_true", help="kernels of each step by name")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("runs/decode"), help="folder of results.jsonl")
    given = parser.parse_args()
    device = torch.device(given.device)
    given.out.mkdir(parents=True, exist_ok=True)
    where = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    about = {
        "device": where,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit().sha,
    }
    rows: list[dict[str, Any]] = []
    failed: list[str] = []
    with (given.out / "results.jsonl").open("a", encoding="utf-8") as file:

        def emit(row: dict[str, Any]) -> None:
            rows.append(row)
            file.write(json.dumps({**row, **about}) + "\n")
            file.flush()
            print(
                "  " + ", ".join(f"{key} {_shown(value)}" for key, value in row.items() if key != "profile"), flush=True
            )

        for part in given.only or PARTS:
            began = time.perf_counter()
            print(f"== {part}", flush=True)
            try:
                failed += _run(part, given, device, emit)
            except Exception as error:  # noqa: BLE001 - a part that breaks should not hide what the others find
                traceback.print_exc()
                failed.append(f"{part} ({type(error).__name__})")
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            print(f"== {part}: {time.perf_counter() - began:.0f} s\n", flush=True)
    _table(rows)
    if failed:
        parser.exit(1, f"wrong: {', '.join(failed)}\n")


def _run(part: str, given: Any, device: torch.device, emit: Any) -> list[str]:
    from benchmarks.decode import correctness, parts, steps
    from kvbench.efficiency.clock import bandwidth

    if part == "correctness":
        return _correctness(correctness.checks(device.type), given.check, emit)
    with torch.inference_mode():
        speed = bandwidth(device)
        print(f"  memory moves {speed / 1e12:.2f} TB/s", flush=True)
        if part == "tune":
            parts.tune(given.shape, given.slots, given.rows, device, speed, given.quick, given.kernel, emit)
        elif part == "kernels":
            parts.kernels(given.shape, given.slots, given.rows, device, speed, emit)
        else:
            policies, paths = given.policy or ["kvpop", "streaming_llm"], given.path or ["kernels"]
            steps.measure(given.shape, policies, paths, given.slots, given.rows, device, speed, given.profile, emit)
    return []


def _correctness(checks: dict[str, Any], wanted: list[str] | None, emit: Any) -> list[str]:
    """Names of the checks that failed."""
    failed = []
    for name, check in checks.items():
        if wanted and name not in wanted:
            continue
        began = time.perf_counter()
        torch.manual_seed(0)
        problem = ""
        try:
            with torch.inference_mode():
                check()
        except Exception as error:  # noqa: BLE001 - one broken kernel should not hide what the others do
            problem = f"{type(error).__name__}: {error}"
            failed.append(name)
        row = {"part": "correctness", "check": name, "right": not problem, "seconds": time.perf_counter() - began}
        emit({**row, "problem": problem[:2000]} if problem else row)
    return failed


def _table(rows: list[dict[str, Any]]) -> None:
    """What was measured, short."""
    for row in rows:
        if row["part"] in ("tune", "kernels"):
            plain = f"{row['plain_us']:8.1f}" if row["plain_us"] else "       -"
            ratio = row["us"] / max(row["floor_us"], 1e-9)
            print(
                f"{row['kernel']:42} rows {row['rows']:3} {row['us']:8.1f} us "
                f" plain {plain}  floor {row['floor_us']:7.1f} {ratio:6.2f}x"
            )
        elif row["part"] == "steps":
            print(
                f"{row['policy']:15} {row['path']:14} rows {row['rows']:3} {row['ms']:8.3f} ms "
                f" floor {row['floor_ms']:7.3f} {row['ratio']:5.2f}x"
            )
    steps = {(row["path"], row["rows"], row["policy"]): row["ms"] for row in rows if row["part"] == "steps"}
    for (path, count, policy), ms in steps.items():
        if (base := steps.get((path, count, "streaming_llm"))) and policy != "streaming_llm":
            print(f"{policy} over streaming_llm, {path}, rows {count}: {100 * (ms / base - 1):+.1f} %")


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
