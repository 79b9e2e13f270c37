"""The rows of one `generate` call: who sits where, and the step that all rows take together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.engine.layer import Layer, Step
from kvbench.engine.requests import Completion, Observer, Request, Sampling, Stop
from kvbench.engine.run import Setting, decode
from kvbench.engine.sampling import choose


class Rows:
    """Device tensors with one entry a row, and the host's knowledge of each row's length.

    Attributes:
        layers: of the model, each with R rows.
        ids: token that each row feeds next [R].
        lengths: tokens that each row has fed so far [R]; the position of `ids`.
        produced: new tokens so far [R].
        done: the row ended or is vacant [R]; it goes on computing in place, its results unused.
        fed: the row took part in the last step [R].
    """

    def __init__(self, setting: Setting, count: int, longest_output: int, sampling: Sampling) -> None:
        device = setting.loaded.device
        self.setting = setting
        self.sampling = sampling
        self._seeds = torch.zeros(count, dtype=torch.int64, device=device)
        self.layers: list[Layer] = setting.layers(count, self._seeds)
        self.ids = torch.zeros(count, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(count, dtype=torch.int64, device=device)
        self.produced = torch.zeros(count, dtype=torch.int64, device=device)
        self.done = torch.ones(count, dtype=torch.bool, device=device)
        self.fed = torch.zeros(count, dtype=torch.bool, device=device)
        self._caps = torch.zeros(count, dtype=torch.int64, device=device)
        self._near_ties = torch.zeros(count, dtype=torch.int64, device=device)
        self._output = torch.zeros(count, longest_output, dtype=torch.int64, device=device)
        self._eos = torch.tensor(sorted(setting.loaded.eos), dtype=torch.int64, device=device)
        self._seated: dict[int, tuple[int, Request]] = {}
        self._stopped: set[int] = set()
        self._host_lengths = [0] * count

    def seat(
        self, who: Sequence[tuple[int, int, Request]], layers: Sequence[Layer] | None, logits: Tensor, seeds: Tensor
    ) -> None:
        """Puts requests with freshly read prompts into rows: (row, index of the request, request), same order as `layers`.

        Without `layers`, the rows' own hold the prompts already.
        """
        device = self.ids.device
        index = torch.tensor([row for row, _, _ in who], device=device)
        for mine, fresh in zip(self.layers, layers, strict=True) if layers is not None else ():
            mine.adopt(index, fresh)
        size = len(who[0][2].prompt)
        self._seeds.index_copy_(0, index, seeds)
        self.lengths.index_fill_(0, index, size)
        self.produced.index_fill_(0, index, 0)
        self._near_ties.index_fill_(0, index, 0)
        self.done.index_fill_(0, index, False)
        self._caps.index_copy_(0, index, torch.tensor([request.max_new for _, _, request in who], device=device))
        for row, number, request in who:
            self._seated[row] = (number, request)
            self._host_lengths[row] = size
        everywhere = logits.new_zeros(len(self.ids), logits.shape[1]).index_copy_(0, index, logits)
        active = torch.zeros_like(self.done).index_fill_(0, index, True)
        self._accept(everywhere, active)

    def step(self, observer: Observer | None = None, index: int = 0, extent: tuple[int, int] | None = None) -> None:
        """Feeds every row's token and accepts the next one. Free of host synchronisation.

        `extent` replaces `self.extent()` by looser bounds.
        """
        step = Step(self.lengths, *(extent or self.extent()))
        if self.setting.segments is not None and observer is None:
            logits = self.setting.segments.decode(self.layers, self.ids, step)
        else:
            logits = decode(self.setting.loaded, self.layers, self.ids, step, observer, index)
        torch.logical_not(self.done, out=self.fed)
        self.lengths.add_(self.fed)
        self._accept(logits, self.fed)

    def extent(self) -> tuple[int, int]:
        """(shortest, longest) number of tokens seen after the next step; see `Step`."""
        # Vacant rows repeat their last token in place: whatever they attend to, nobody reads it.
        return min(self._host_lengths[row] for row in self._seated) + 1, max(self._host_lengths) + 1

    def advance(self) -> None:
        """The host's side of `step`: no row can be longer than this."""
        for row, (_, request) in self._seated.items():
            self._host_lengths[row] = min(self._host_lengths[row] + 1, len(request.prompt) + request.max_new - 1)

    def finished(self, stop: Stop | None = None) -> list[int]:
        """Rows whose request has ended, or ends now by `stop`; synchronises with the device."""
        done = self.done.tolist()
        if stop is not None:
            for row, (index, _) in self._seated.items():
                if not done[row] and stop(index, self._tokens(row)):
                    self.done[row] = done[row] = True
                    self._stopped.add(row)
        return [row for row in self._seated if done[row]]

    def running(self) -> int:
        """Requests that have not been harvested."""
        return len(self._seated)

    def harvest(self, row: int) -> tuple[int, Completion]:
        """Takes a finished request out of its row: its index and completion."""
        index, _ = self._seated.pop(row)
        tokens = self._tokens(row)
        finish = "eos" if tokens and tokens[-1] in self.setting.loaded.eos else "length"
        if row in self._stopped:
            self._stopped.remove(row)
            finish = "stop"
        return index, Completion(tokens, finish, int(self._near_ties[row]))

    def _tokens(self, row: int) -> tuple[int, ...]:
        return tuple(self._output[row, : int(self.produced[row])].tolist())

    def _accept(self, logits: Tensor, active: Tensor) -> None:
        """Draws the next token of the active rows [R] (bool) and notes which of them end with it."""
        token, near = choose(logits, self.sampling, self._seeds, self.produced, self.setting.kernels)
        token = torch.where(active, token, self.ids)
        column = self.produced.clamp(max=self._output.shape[1] - 1)[:, None]
        self._output.scatter_(1, column, torch.where(active[:, None], token[:, None], self._output.gather(1, column)))
        self.ids.copy_(token)
        self.produced.add_(active)
        self._near_ties.add_(near & active)
        ended = (token[:, None] == self._eos).any(-1) | (self.produced >= self._caps)
        self.done.logical_or_(ended & active)
