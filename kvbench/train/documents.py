"""Packed rows whose attention is reset at the borders of documents: inside attention, each document is a row of its own.

Unpacked there and packed again, a document has its own positions, sinks, window, budget, target and scorer state, as if
it stood alone: nothing else in the training has to know about borders (docs/decisions/021).

Shapes: R packed rows, S tokens, U documents, L longest document, H heads, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

ALIGNMENT = 64
"""Sequence lengths are rounded up to this: attention kernels want aligned masks, the allocator few sizes."""


def aligned(size: int) -> int:
    """A length rounded up."""
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Documents:
    """Where the documents of packed rows lie.

    Attributes:
        lengths: of each document [U].
        places: of the tokens of each document in the packed rows, laid end to end [U, L]; arbitrary in the padding.
        back: of each packed token among the unpacked ones, laid end to end [R, S]; arbitrary in the padding.
        positions: of each packed token in its document [R, S].
    """

    lengths: Tensor
    places: Tensor
    back: Tensor
    positions: Tensor

    @classmethod
    def of(cls, borders: Tensor, rows: int, size: int) -> Documents:
        """From (row, start, stop) of each document [U, 3]."""
        lengths = borders[:, 2] - borders[:, 1]
        longest = aligned(int(lengths.max()))
        token = torch.arange(longest)
        inside = token < lengths[:, None]
        places = torch.where(inside, borders[:, :1] * size + borders[:, 1:2] + token, 0)
        back = torch.zeros(rows * size, dtype=torch.int64)
        positions = torch.zeros(rows * size, dtype=torch.int64)
        back[places[inside]] = (torch.arange(len(borders))[:, None] * longest + token)[inside]
        positions[places[inside]] = token.expand_as(inside)[inside]
        return cls(lengths, places, back.view(rows, size), positions.view(rows, size))

    def unpack(self, packed: Tensor) -> Tensor:
        """[R, H, S, D] -> [U, H, L, D]."""
        return packed.transpose(1, 2).flatten(0, 1)[self.places].transpose(1, 2)

    def pack(self, unpacked: Tensor) -> Tensor:
        """[U, H, L, D] -> [R, H, S, D]."""
        return unpacked.transpose(1, 2).flatten(0, 1)[self.back].transpose(1, 2)

    def to(self, device: torch.device) -> Documents:
        """The same on another device."""
        moved = {f.name: getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)}
        return Documents(**moved)
