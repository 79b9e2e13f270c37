"""`Engine.generate`: requests in; completions, audit and timing out. `Engine.score` is in `score.py`.

Rows are never padded: each has its own length and positions. A row that finishes is refilled from the queue, since every
row's memory is the same fixed size.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import nn

from kvbench.core.errors import KvbenchError
from kvbench.core.policy import Policy, Split
from kvbench.engine.audit import Auditor
from kvbench.engine.graph import GraphedStep
from kvbench.engine.path import choose
from kvbench.engine.requests import Completion, Generation, Observer, Progress, Request, Sampling, Stop, Timing
from kvbench.engine.rows import Rows
from kvbench.engine.run import Setting, contact, prefill
from kvbench.engine.score import Passage, Reader, Scoring, chunk_for, score
from kvbench.models.source import LoadedModel

_CHECK_EVERY_ON_GPU = 16

_PREFILL_TOKENS = 2**15
"""Tokens of prompts that one model call reads, at most; a single longer prompt is read whole."""

_PREFILL_WEIGHTS = 2**28
"""Attention weights of one layer that a prompt's first chunk leaves to an observing policy, at most."""

_Seat = tuple[int, int, Request]
"""Row, index of the request, request."""


class Engine:
    """One model under one policy with one budget, for any number of requests.

    Args:
        loaded: the model; left as it was afterwards.
        policy: hyper-parameters.
        budget: slots per layer and KV head; None only for `full`, which gets as many as the longest request needs.
        scorers: trained modules, one a layer, for learned policies; in the model's layer order.
        rows: sequences side by side (R).
        path: how decode steps run; see `kvbench.engine.path`.

    Raises:
        KvbenchError: the budget is below the policy's smallest.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        policy: Policy,
        budget: int | None,
        scorers: nn.ModuleList | None = None,
        rows: int = 32,
        path: str = "auto",
    ) -> None:
        if budget is None and policy.evicts:
            raise KvbenchError(f"Policy '{policy.name}' needs a budget.")
        self._loaded = loaded
        self._policy = policy
        self._scorers = scorers
        self._rows = rows
        self._path = path
        self._split = policy.checked_split(budget, loaded.geometry) if budget is not None and policy.evicts else None

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling | None = None,
        reference_length: int | None = None,
        progress: Progress | None = None,
        observer: Observer | None = None,
        stop: Stop | None = None,
    ) -> Generation:
        """Completes every request.

        Args:
            requests: any number; order and company do not change an answer.
            sampling: greedy when None.
            reference_length: tokens that a dense cache is taken to hold; the longest request's prompt and cap when None.
            progress: told the number of kept new tokens now and then.
            observer: for tests; called after each layer's decode step, which is then never captured.
            stop: ends a completion early; asked after every step on a CPU, now and then on a GPU.

        Raises:
            KvbenchError: a prompt with its cap is longer than the model's positions, or the model is unsupported.
        """
        if not requests:
            raise KvbenchError("There is nothing to generate: the list of requests is empty.")
        if not all(request.prompt and request.max_new >= 1 for request in requests):
            raise KvbenchError("A request needs at least one token of prompt and one to generate.")
        longest = max(len(request.prompt) + request.max_new for request in requests)
        setting = self._setting(longest, reference_length, "A prompt with its generation cap")
        with torch.inference_mode(), contact(self._loaded):
            return self._generate(setting, requests, sampling or Sampling(), progress, observer, stop)

    def score(
        self,
        passages: Sequence[Passage],
        chunk: int | None = None,
        reference_length: int | None = None,
        progress: Progress | None = None,
        reader: Reader | None = None,
    ) -> Scoring:
        """Scores given tokens under the policy.

        Args:
            passages: any number; order and company do not change a score beyond rounding.
            chunk: tokens that enter together, 1 for token by token; None for exact feeding where it is possible, else 16
                or as many as the budget allows.
            reference_length: tokens that a dense cache is taken to hold; the longest passage when None.
            progress: told the number of tokens fed now and then.
            reader: gets the logits of all scored tokens, in fp32 [n, V], in pieces.

        Raises:
            KvbenchError: a passage has nothing to score or is longer than the model's positions, the budget has no room for
                the chunk, or the model is unsupported.
        """
        if not passages:
            raise KvbenchError("There is nothing to score: the list of passages is empty.")
        if not all(1 <= passage.start < len(passage.tokens) for passage in passages):
            raise KvbenchError("A passage needs at least one token to score, and one before it.")
        longest = max(passage.fed for passage in passages)
        setting = self._setting(longest, reference_length, "A passage")
        size = chunk_for(setting, chunk, longest)
        with torch.inference_mode(), contact(self._loaded):
            return score(setting, passages, self._rows, size, progress, reader)

    def _setting(self, longest: int, reference_length: int | None, what: str) -> Setting:
        if longest > self._loaded.max_positions:
            raise KvbenchError(
                f"{what} needs {longest} positions; model '{self._loaded.name}' has {self._loaded.max_positions}."
            )
        split = self._split or Split(slots=longest, sinks=0, window=1)
        return Setting(self._loaded, self._policy, split, self._scorers, longest, reference_length or longest)

    def _generate(
        self,
        setting: Setting,
        requests: Sequence[Request],
        sampling: Sampling,
        progress: Progress | None,
        observer: Observer | None,
        stop: Stop | None,
    ) -> Generation:
        device = self._loaded.device
        count = min(self._rows, len(requests))
        chosen = choose(setting, count, self._path if observer is None else "plain")
        setting = chosen.setting
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        rows = Rows(setting, count, max(request.max_new for request in requests), sampling)
        auditor = Auditor(setting, rows)
        step = GraphedStep(rows, auditor) if chosen.captured else None
        queue = deque(sorted(enumerate(requests), key=lambda item: -item[1].max_new))
        done: dict[int, Completion] = {}
        every = _CHECK_EVERY_ON_GPU if device.type == "cuda" else 1
        steps, prefill_seconds, start = 0, 0.0, time.perf_counter()
        free = list(range(count))
        while True:
            before = time.perf_counter()
            self._refill(setting, rows, auditor, free, queue, sampling)
            _synchronize(device)
            prefill_seconds += time.perf_counter() - before
            free = rows.finished(stop)
            while not free:
                for _ in range(every):
                    if step is not None:
                        step()
                    else:
                        rows.step(observer, steps)
                        auditor.count()
                    rows.advance()
                    steps += 1
                free = rows.finished(stop)
                if progress is not None:
                    progress(every * (rows.running() - len(free)) + len(free))
            auditor.close(free)
            done.update(rows.harvest(row) for row in free)
            if not queue and not rows.running():
                break
        _synchronize(device)
        elapsed = time.perf_counter() - start
        completions = tuple(done[index] for index in range(len(requests)))
        return Generation(
            completions=completions,
            audit=auditor.result(),
            timing=Timing(prefill_seconds, elapsed - prefill_seconds, steps, sum(len(c.tokens) for c in completions)),
            prefill="exact" if self._policy.static or auditor.longest_prompt <= setting.capacity else "chunked",
            path=chosen.name,
            peak_memory=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        )

    def _refill(
        self,
        setting: Setting,
        rows: Rows,
        auditor: Auditor,
        free: list[int],
        queue: deque[tuple[int, Request]],
        sampling: Sampling,
    ) -> None:
        """Gives queued requests to free rows; prompts of equal length are read together, as many as memory allows."""
        taken = [(row, *queue.popleft()) for row in free[: len(queue)]]
        taken.sort(key=lambda item: len(item[2].prompt))
        device = self._loaded.device
        for size, members in groupby(taken, key=lambda item: len(item[2].prompt)):
            for group in _batched(list(members), self._prompts_at_once(size, setting.capacity)):
                prompts = torch.tensor([request.prompt for _, _, request in group], device=device)
                seeds = torch.tensor([request.seed for _, _, request in group], device=device)
                layers = setting.layers(len(group), seeds)
                logits = prefill(setting, layers, prompts)
                rows.seat([(row, index, request) for row, index, request in group], layers, logits, seeds)
                auditor.seat([row for row, _, _ in group], prompts.shape[1])

    def _prompts_at_once(self, size: int, slots: int) -> int:
        """How many prompts of `size` tokens are read in one model call."""
        count = _PREFILL_TOKENS // size
        if self._policy.needs_attention:
            heads, first = self._loaded.geometry.query_heads, min(size, slots)
            count = min(count, _PREFILL_WEIGHTS // (heads * first * first))
        return max(1, count)


def _batched(items: list[_Seat], size: int) -> Iterator[list[_Seat]]:
    """Consecutive pieces of at most `size` items."""
    return (items[start : start + size] for start in range(0, len(items), size))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
