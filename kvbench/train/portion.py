"""One micro-batch of one process: its share of a step's rows, and everything random about them.

Rows, budget and sampled queries of a step follow from the seed and the step; a portion is every n-th row. Counts are
those of the whole step, so that sums over portions are its means, whatever the number of processes.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Dataset

from kvbench.core.policy import Geometry, LearnedPolicy, Split
from kvbench.train.data import Batch, RowSource
from kvbench.train.documents import Documents
from kvbench.train.losses import Sample, sample_queries


@dataclass(frozen=True)
class Portion:
    """What a forward pass is given.

    Attributes:
        batch: the rows.
        split: of the step's budget.
        sample: of their sequences, for the measurements.
        pairs: of their sequences, for the boundary loss.
        pairs_long: long-range slots that the boundary loss imagines.
        documents: where attention is reset; None for one document a row.
        names: of their sequences in the step [U].
        positions: that the LM's loss is a mean over, in the whole step.
        leaving: tokens that leave the window, in the whole step.
        rows, tokens: of the whole step.
    """

    batch: Batch
    split: Split
    sample: Sample
    pairs: Sample
    pairs_long: int
    documents: Documents | None
    names: Tensor
    positions: int
    leaving: int
    rows: int
    tokens: int


@dataclass(frozen=True)
class Draw:
    """How a step's rows are cut and sampled.

    Attributes:
        policy, geometry: decide the split of a budget.
        queries: sampled queries of a sequence.
        future: later queries that a sampled newcomer has at least.
        least_slots: the boundary loss draws its long-range slots from this number up to the step's; 0 for the step's.
    """

    policy: LearnedPolicy
    geometry: Geometry
    queries: int
    future: int
    least_slots: int = 0

    def portions(self, batch: Batch, stream: str, count: int, mine: range) -> list[Portion]:
        """The portions of these numbers when a step's rows are cut into `count`.

        Args:
            batch: the whole step.
            stream: names the random numbers.
            count: portions.
            mine: which of them.
        """
        split = self.policy.checked_split(batch.budget.slots, self.geometry)
        lengths = batch.sequences()
        pairs_long = self._pairs_long(stream, split.long)
        draws = generator(stream)
        sample, pairs = (self._sample(lengths, split, long, draws) for long in (split.long, pairs_long))
        positions = int(batch.real().sum())
        leaving = int((lengths - split.window - split.sinks).clamp(min=0).sum())
        portions = []
        for index in mine:
            part, chosen = batch.part(index, count)
            documents = None if part.borders is None else Documents.of(part.borders, *part.ids.shape)
            taken, taken_pairs = sample.take(chosen), pairs.take(chosen)
            if index >= len(batch.ids):
                # There is no such row: what stands in for it trains nothing.
                taken, taken_pairs = taken.nothing(), taken_pairs.nothing()
            portions.append(
                Portion(
                    batch=part,
                    split=split,
                    sample=taken,
                    pairs=taken_pairs,
                    pairs_long=pairs_long,
                    documents=documents,
                    names=part.names(),
                    positions=positions,
                    leaving=leaving,
                    rows=len(batch.ids),
                    tokens=int(batch.lengths.sum()),
                )
            )
        return portions

    def _sample(self, lengths: Tensor, split: Split, long: int, draws: torch.Generator) -> Sample:
        # The first query at which a layer with so many long-range slots holds more than it may keep.
        first = split.sinks + split.window + max(0, long)
        return sample_queries(lengths, first, self.future, self.queries, draws)

    def _pairs_long(self, stream: str, long: int) -> int:
        """Long-range slots of the boundary loss: the step's, or fewer, drawn log-uniformly."""
        least = self.least_slots
        if not 0 < least < long:
            return long
        share: float = random.Random(f"{stream}/slots").random()
        return round(least * math.pow(long / least, share))


class Steps(Dataset[list[Portion]]):
    """Step -> the portions of one process. Sent to worker processes.

    Args:
        source: of the rows.
        draw: how they are cut and sampled.
        rank, processes: this one, and how many there are.
    """

    def __init__(self, source: RowSource, draw: Draw, rank: int, processes: int) -> None:
        self.source = source
        self.draw = draw
        accumulation = source.recipe.accumulation
        self.count = accumulation * processes
        self.mine = range(rank * accumulation, (rank + 1) * accumulation)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, step: int) -> list[Portion]:
        return self.draw.portions(self.source[step], f"{self.source.seed}/{step}", self.count, self.mine)


def generator(name: str) -> torch.Generator:
    """A stream of random numbers that follows from its name."""
    return torch.Generator().manual_seed(number(name))


def number(name: str) -> int:
    """A whole number below 2**63 that follows from a name."""
    return random.Random(name).getrandbits(63)
