"""Decode steps of kvpress (NVIDIA, Apache-2.0) as rows that `kvbench table` shows beside those of `kvbench efficiency`.

kvpress needs an older transformers than kvbench, so it lives in an environment of its own, with kvbench's code but not its
requirements beside it:

    python -m venv kvpress && . kvpress/bin/activate
    pip install kvpress==0.5.5 "transformers<5.3" && pip install --no-deps . && pip install pluggy
    python benchmarks/kvpress_decode.py --shape qwen3-4b --press streaming_llm --press knorm --slots 4096 --batch 1 --out rows

Written from kvpress' public documentation: a `DecodingPress` compresses the cache to `target_size` entries every
`compression_interval` steps while a model runs inside `with press(model):`. The timing rule is that of kvbench (median of
steps in a row after warming up, floor from bytes over the bandwidth of the same run), with at least one whole interval timed:
`ms_per_step` is the median step, and `generation_s` counts the mean, compressions included.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from kvbench.efficiency.clock import STEPS_BESIDE, bandwidth, time_steps
from kvbench.efficiency.measure import memory_figures, step_figures
from kvbench.efficiency.memory import clear, one_error, peak
from kvbench.efficiency.options import command_line
from kvbench.efficiency.record import EfficiencyCell, EfficiencyResult, Figures
from kvbench.efficiency.stock import filled_cache
from kvbench.efficiency.store import EfficiencyStore
from kvbench.efficiency.traffic import Held, Moved, weights_held, weights_read
from kvbench.engine.audit import bytes_of
from kvbench.harness.environment import commit, environment
from kvbench.models.random_weights import find_shape, random_model
from kvbench.models.source import LoadedModel

PRESSES = {"streaming_llm": "StreamingLLMPress", "knorm": "KnormPress"}


class PressedStep:
    """One token a row, with kvpress' hooks on the model."""

    def __init__(self, loaded: LoadedModel, cache: Any, batch: int, length: int) -> None:
        self._model, self._cache, self._length = loaded.model, cache, length
        self._ids = torch.zeros(batch, 1, dtype=torch.int64, device=loaded.device)

    def __call__(self) -> bool:
        place = torch.tensor([self._length], device=self._ids.device)
        logits = self._model(
            self._ids,
            past_key_values=self._cache,
            position_ids=place.expand(len(self._ids), 1),
            cache_position=place,
            logits_to_keep=1,
        ).logits
        self._ids.copy_(logits[:, -1].argmax(-1, keepdim=True))
        self._length += 1
        return True


def measure(loaded: LoadedModel, cell: EfficiencyCell, press: Any, speed: float) -> Figures:
    assert cell.slots is not None
    assert cell.batch_asked is not None
    batch, device = cell.batch_asked, loaded.device
    with one_error(), torch.inference_mode():
        clear(device)
        cache = filled_cache(loaded, batch, cell.slots)
        with press(loaded.model):
            step = PressedStep(loaded, cache, batch, cell.gen_length - cell.steps - STEPS_BESIDE)
            times = time_steps(step, cell.steps, device)
        top = peak(device)
        kept = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
        kv, length = bytes_of(kept), max(tensor.shape[2] for tensor in kept)
    seconds = times.mean * cell.gen_length / 1000
    return Figures(
        path="plain",
        batch=batch,
        capacity=cell.slots,
        entries=float(length),
        **step_figures(times, batch, Moved(weights_read(loaded.model, batch), kv + kv // length), speed),
        **memory_figures(Held(weights_held(loaded.model), kv), top),
        curve=((cell.gen_length, times.median),),
        generation_s=seconds,
        generation_tokens_per_s=batch * cell.gen_length / seconds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Decode steps of kvpress.")
    parser.add_argument("--shape", required=True, help="a named shape or a config.json")
    parser.add_argument("--press", action="append", required=True, choices=sorted(PRESSES))
    parser.add_argument("--interval", action="append", type=int, help="steps between compressions; 1 and 512")
    parser.add_argument("--slots", type=int, required=True, help="entries that compression leaves")
    parser.add_argument("--gen-len", type=int, default=16384)
    parser.add_argument("--batch", action="append", type=int, help="sequences side by side; 1")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--out", type=Path, default=Path("kvbench-efficiency"))
    given = parser.parse_args()
    try:
        import kvpress
    except ImportError:
        sys.exit("kvpress is not installed here; its own environment is described at the top of this file.")
    path = find_shape(given.shape)
    if path is None:
        sys.exit(f"There is no shape {given.shape}.")
    device = torch.device(given.device)
    speed = bandwidth(device)
    clear(device)
    loaded = random_model(path, device, getattr(torch, given.dtype), given.gen_len)
    blank = EfficiencyCell(
        source=f"kvpress {version('kvpress')}",
        model=loaded.name,
        weights_hash=loaded.weights_hash,
        weights="random",
        policy="",
        slots=given.slots,
        reference_length=given.gen_len,
        gen_length=given.gen_len,
        batch_asked=1,
        prompt_length=0,
        steps=given.steps,
        decode_path="plain",
        dtype=given.dtype,
        device=device.type,
        device_name=environment(device.type).device_name,
    )
    with EfficiencyStore(given.out) as store:
        for name in given.press:
            for interval in given.interval or (1, 512):
                for batch in given.batch or (1,):
                    cell = replace(
                        blank,
                        policy=name,
                        policy_args=f"compression_interval={interval}",
                        batch_asked=batch,
                        steps=max(given.steps, interval),
                    )
                    row = EfficiencyResult(
                        cell=cell,
                        status="ok",
                        command=command_line(sys.argv, "python"),
                        commit=commit().sha,
                        environment=environment(device.type),
                    )
                    press = kvpress.DecodingPress(
                        base_press=getattr(kvpress, PRESSES[name])(),
                        compression_interval=interval,
                        target_size=given.slots,
                    )
                    try:
                        row = replace(row, figures=measure(loaded, cell, press, speed))
                    except torch.OutOfMemoryError as error:
                        row = replace(row, status="out_of_memory", reason=str(error)[:300])
                    clear(device)
                    store.add(row)
                    told = row.reason if row.figures is None else f"{row.figures.ms_per_step:.3f} ms"
                    print(name, interval, batch, told, flush=True)


if __name__ == "__main__":
    main()
