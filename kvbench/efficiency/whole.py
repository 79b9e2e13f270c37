"""A generation in full, token after token: what the sum of single steps is compared with."""

from __future__ import annotations

import time

import torch

from kvbench.efficiency.clock import synchronize
from kvbench.efficiency.measure import Subject
from kvbench.efficiency.memory import clear, one_error
from kvbench.efficiency.record import EfficiencyCell
from kvbench.engine.audit import Auditor
from kvbench.engine.path import choose
from kvbench.engine.requests import Request, Sampling
from kvbench.engine.rows import Rows
from kvbench.engine.run import contact, prefill

_PROMPT = 16
_LOOK_EVERY = 16
"""Steps between two looks at which rows have ended, as in `Engine.generate`."""


def generate_whole(subject: Subject, cell: EfficiencyCell, batch: int) -> tuple[float, float]:
    """Seconds of generating up to the cell's length from a short prompt, and how many of them went into capturing.

    A policy without a hard budget starts from whatever its gates drop of so short a prompt.

    Raises:
        torch.OutOfMemoryError: there is no room.
    """
    device, setting = subject.loaded.device, subject.setting(cell)
    size = min(_PROMPT, cell.gen_length - 1, setting.capacity)
    count = cell.gen_length - size
    with one_error(), torch.inference_mode(), contact(subject.loaded):
        clear(device)
        chosen = choose(setting, batch, cell.decode_path)
        rows = Rows(chosen.setting, batch, count + 1, Sampling())
        prompts = torch.zeros(batch, size, dtype=torch.int64, device=device)
        logits = prefill(setting, rows.layers, prompts)
        request = Request((0,) * size, count + 1)
        rows.seat([(row, row, request) for row in range(batch)], None, logits, torch.arange(batch, device=device))
        step = chosen.step(rows, Auditor(setting, rows) if cell.audited else None)
        setup = 0.0
        synchronize(device)
        start = time.perf_counter()
        for index in range(count):
            before = time.perf_counter()
            if not step():
                synchronize(device)
                setup += time.perf_counter() - before
            rows.advance()
            if index % _LOOK_EVERY == 0:
                rows.finished()
        synchronize(device)
        return time.perf_counter() - start, setup
