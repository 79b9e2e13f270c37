"""`score`: how likely a model under a policy finds given tokens, fed through the same slots as in generation.

Three ways of feeding exist, and they give different numbers:

- `exact`: one parallel pass under the running mask, which is what feeding token by token gives; only where priorities are
  final when a token leaves the window (static policies) and where nothing is evicted.
- `token`: one token at a time.
- `chunks of c`: a chunk's tokens see each other and what was kept, and all victims are chosen before the chunk attends. Of
  B slots, B - c hold older tokens, so that a chunk's first token sees fewer than it would alone, and its own tokens cannot
  push each other out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import torch
from torch import Tensor

from kvbench.core.errors import KvbenchError
from kvbench.engine.audit import PassageAuditor
from kvbench.engine.requests import Audit, Progress, Timing
from kvbench.engine.run import Setting, feed
from kvbench.models.source import sliding_windows

_CHUNK = 16
"""Tokens that enter together where nobody says otherwise and exact feeding is impossible."""

_LOGITS = 2**28
"""Logits of one model call, at most; a single longer passage is read whole."""

_TOKENS = 2**15
"""Tokens of one model call, at most; as before."""


@dataclass(frozen=True)
class Passage:
    """Tokens to score.

    Attributes:
        tokens: token ids of the whole sequence.
        start: index of the first token that is scored, at least 1: nothing predicts the first token.
        seed: of its own random stream.
    """

    tokens: tuple[int, ...]
    start: int = 1
    seed: int = 0

    @property
    def fed(self) -> int:
        """Tokens that the model reads: all but the last."""
        return len(self.tokens) - 1


@dataclass(frozen=True)
class Score:
    """Of one passage, in the order of the passages.

    Attributes:
        logprobs: natural logarithm of the probability of each scored token.
        greedy: whether it was the likeliest one.
    """

    logprobs: tuple[float, ...]
    greedy: tuple[bool, ...]


@dataclass(frozen=True)
class Scoring:
    """Everything one `score` call learned.

    Attributes:
        scores: one for each passage, in order.
        audit: of the whole call.
        timing: of the whole call; its tokens are those that were fed.
        feeding: `exact`, `token`, or `chunks of c`.
        peak_memory: bytes allocated on the device, None on CPU.
    """

    scores: tuple[Score, ...]
    audit: Audit
    timing: Timing
    feeding: str
    peak_memory: int | None


Reader = Callable[[int, int, Tensor], None]
"""Called with (index of the passage, index of the first predicted token in it, logits [n, V])."""

_Member = tuple[int, Passage]


def chunk_for(setting: Setting, wanted: int | None, longest: int) -> int | None:
    """Tokens that enter together when the longest passage feeds `longest` tokens; None for exact feeding.

    Raises:
        KvbenchError: the budget has no room for a chunk of the size that was asked for.
    """
    # Sliding-window layers evict by position, one token at a time.
    sliding = any(window is not None for window in sliding_windows(setting.loaded.model.config))
    bounded = setting.policy.hard_budget
    largest = 1 if sliding else max(1, setting.split.long + 1 if bounded else setting.split.window)
    if wanted is None:
        return None if setting.policy.static or longest <= setting.capacity else min(_CHUNK, largest)
    if not 1 <= wanted <= largest:
        raise KvbenchError(
            f"Policy '{setting.policy.name}' with {setting.split.slots} slots can take between 1 and {largest} tokens "
            f"at once on model '{setting.loaded.name}', not {wanted}."
        )
    return wanted


def score(
    setting: Setting,
    passages: Sequence[Passage],
    rows: int,
    chunk: int | None,
    progress: Progress | None,
    reader: Reader | None,
) -> Scoring:
    """`Engine.score` with everything settled: inside `contact`, chunk as `chunk_for` says."""
    device = setting.loaded.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    auditor = PassageAuditor(setting)
    done: dict[int, Score] = {}
    begin, steps = time.perf_counter(), 0
    for batch in _batches(passages, rows, chunk, setting.loaded.model.config.vocab_size):
        collector = _Collector(batch, reader)
        steps += _feed(setting, batch, chunk, auditor, collector)
        done.update(collector.scores())
        if progress is not None:
            progress(sum(passage.fed for _, passage in batch))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elapsed = time.perf_counter() - begin
    return Scoring(
        scores=tuple(done[index] for index in range(len(passages))),
        audit=auditor.result(),
        timing=Timing(0.0, elapsed, steps, sum(passage.fed for passage in passages)),
        feeding="exact" if chunk is None else "token" if chunk == 1 else f"chunks of {chunk}",
        peak_memory=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
    )


def _batches(passages: Sequence[Passage], rows: int, chunk: int | None, vocabulary: int) -> Iterator[Sequence[_Member]]:
    """Passages that are fed side by side.

    In an exact pass shorter rows are filled up at their end, which no earlier token sees. What enters in chunks has to be of
    one length: filling up the last chunk would push out more than the row's own tokens do.
    """
    ordered = sorted(enumerate(passages), key=lambda member: -member[1].fed)
    for _, members in groupby(ordered, key=lambda member: member[1].fed if chunk is not None else 0):
        batch: list[_Member] = []
        for member in members:
            count, longest = len(batch) + 1, (batch or [member])[0][1].fed
            first = min(passage.start for _, passage in [*batch, member])
            logits = (longest - first + 1 if chunk is None else chunk) * vocabulary
            if batch and (count > rows or count * longest > _TOKENS or count * logits > _LOGITS):
                yield batch
                batch = []
            batch.append(member)
        yield batch


def _feed(
    setting: Setting, batch: Sequence[_Member], chunk: int | None, auditor: PassageAuditor, collector: _Collector
) -> int:
    """Feeds a batch into fresh layers; returns the number of model calls."""
    loaded, device = setting.loaded, setting.loaded.device
    lengths = [passage.fed for _, passage in batch]
    ids = torch.zeros(len(batch), lengths[0], dtype=torch.int64, device=device)
    for row, (_, passage) in enumerate(batch):
        ids[row, : passage.fed] = torch.tensor(passage.tokens[:-1], device=device)
    layers = setting.layers(len(batch), torch.tensor([passage.seed for _, passage in batch], device=device))
    first = min(passage.start for _, passage in batch) - 1
    if chunk is None:
        heads = loaded.geometry.kv_heads
        seen = [ids.new_zeros(len(batch), heads, lengths[0]) for _ in layers]
        collector.take(first, feed(loaded, layers, ids, 0, lengths[0] - first, seen))
        auditor.batch(layers, lengths, torch.stack(auditor.managed(seen)), torch.arange(lengths[0], device=device) + 1)
        return 1
    held, edges = [], [*range(0, lengths[0], chunk), lengths[0]]
    for start, stop in pairwise(edges):
        wanted = stop - max(start, first)
        logits = feed(loaded, layers, ids[:, start:stop], start, max(1, wanted))
        if wanted > 0:
            collector.take(stop - wanted, logits)
        held.append(auditor.held(layers))
    auditor.batch(layers, lengths, torch.stack(held, -1), torch.tensor(edges[1:], device=device))
    return len(held)


class _Collector:
    """Turns the logits of a batch into scores."""

    def __init__(self, batch: Sequence[_Member], reader: Reader | None) -> None:
        self._batch = batch
        self._reader = reader
        self._logprobs: list[list[Tensor]] = [[] for _ in batch]
        self._greedy: list[list[Tensor]] = [[] for _ in batch]

    def take(self, position: int, logits: Tensor) -> None:
        """Logits [R, n, V] of the tokens at `position` and after."""
        for row, (index, passage) in enumerate(self._batch):
            start, stop = max(position, passage.start - 1), min(position + logits.shape[1], passage.fed)
            if start >= stop:
                continue
            mine = logits[row, start - position : stop - position].float()
            targets = torch.tensor(passage.tokens[start + 1 : stop + 1], device=logits.device)
            self._logprobs[row].append(mine.gather(-1, targets[:, None])[:, 0] - mine.logsumexp(-1))
            self._greedy[row].append(mine.argmax(-1) == targets)
            if self._reader is not None:
                self._reader(index, start + 1, mine)

    def scores(self) -> Iterator[tuple[int, Score]]:
        """(index of the passage, its score)."""
        for row, (index, _) in enumerate(self._batch):
            yield (
                index,
                Score(tuple(torch.cat(self._logprobs[row]).tolist()), tuple(torch.cat(self._greedy[row]).tolist())),
            )
