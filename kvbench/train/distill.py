"""Distillation without a matrix of logits: both models' output heads are read in chunks of positions.

While a block is active, the head of a model is another function: of the teacher it gives the top logits of each
position, of the student the loss of each position. What stands between (R x S x V numbers) never exists at once.

Shapes: R rows, S tokens, V vocabulary, K compared tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

_CHUNK = 2**28
"""Logits that exist at once, at most."""


@dataclass(frozen=True)
class Top:
    """The teacher's most likely tokens.

    Attributes:
        logits: of each position [R, S, K], in the number type of the teacher's head.
        tokens: their ids [R, S, K], int64; None where K is the whole vocabulary in its own order.
    """

    logits: Tensor
    tokens: Tensor | None

    def best(self) -> Tensor:
        """The most likely token [R, S]."""
        place = self.logits.argmax(-1)
        return place if self.tokens is None else self.tokens.gather(-1, place[..., None])[..., 0]


Head = Callable[[Tensor], Tensor]
"""Hidden states [..., E] -> logits [..., V]."""


@contextmanager
def head_as(model: nn.Module, function: Callable[[Head, Tensor], Any]) -> Iterator[None]:
    """Inside the block the output head of a transformers model is `function(head, hidden [R, S, E])`.

    Its parameters stay where they are, so that whatever shards the model finds them.
    """
    head = output_head(model)
    plain = type(head).forward
    head.forward = lambda hidden: function(partial(plain, head), hidden)
    try:
        yield
    finally:
        del head.forward


def output_head(model: Any) -> nn.Module:
    """The module that makes logits of a transformers causal LM."""
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Module)
    return head


def teacher_top(model: Any, top: int, **inputs: Any) -> Top:
    """The `top` largest logits of each position; all of them, unsorted, if the vocabulary is not larger.

    Args:
        model: the teacher.
        top: K.
        inputs: of the model call.
    """
    found: list[Top] = []

    def keep_top(head: Head, hidden: Tensor) -> Tensor:
        logits, tokens = [], []
        for part in _chunks(hidden.flatten(0, 1), _vocabulary(model)):
            whole = head(part)
            if top < whole.shape[-1]:
                whole, index = whole.topk(top, -1)
                tokens.append(index)
            logits.append(whole)
        shape = (*hidden.shape[:2], -1)
        found.append(Top(torch.cat(logits).view(shape), torch.cat(tokens).view(shape) if tokens else None))
        return hidden

    with torch.no_grad(), head_as(model, keep_top):
        model(use_cache=False, **inputs)
    return found[0]


def student_loss(model: nn.Module, head_of: Any, wanted: Top, real: Tensor, **inputs: Any) -> tuple[Tensor, Tensor]:
    """Sums over the positions that count: forward KL from the teacher over its top tokens, and agreements on the best.

    The teacher is renormalised over these tokens; the student's log-probabilities are over the whole vocabulary, so that
    mass it puts elsewhere is penalised.

    Args:
        model: the student, wrapped or not.
        head_of: the transformers model inside `model`.
        wanted: of the teacher.
        real: positions that count [R, S], bool.
        inputs: of the model call.
    """

    def compare(head: Head, hidden: Tensor) -> Tensor:
        flat = hidden.flatten(0, 1)
        parts = list(_chunks(flat, _vocabulary(head_of)))
        best = wanted.best().flatten()
        logits, tokens, mask = wanted.logits.flatten(0, 1), wanted.tokens, real.flatten()
        sums, start = hidden.new_zeros(2, dtype=torch.float32), 0
        for part in parts:
            stop = start + len(part)
            index = None if tokens is None else tokens.flatten(0, 1)[start:stop]
            given = (part, logits[start:stop], index, best[start:stop], mask[start:stop])
            # A chunk's logits are made again in the backward pass; with a single chunk nothing would be saved.
            if len(parts) > 1:
                sums = sums + checkpoint(_compare, head, *given, use_reentrant=False)
            else:
                sums = sums + _compare(head, *given)
            start = stop
        return sums

    with head_as(head_of, compare):
        sums: Tensor = model(use_cache=False, **inputs).logits
    return sums[0], sums[1].detach()


def _compare(
    head: Head,
    hidden: Tensor,
    wanted: Tensor,
    tokens: Tensor | None,
    best: Tensor,
    mask: Tensor,
) -> Tensor:
    """KL and agreements of some positions [n], summed over those of `mask` [2]."""
    logits = head(hidden)
    kl = divergence(logits, wanted, tokens)
    same = logits.detach().argmax(-1) == best
    return torch.stack(((kl * mask).sum(), (same & mask).sum().float()))


def divergence(student: Tensor, teacher: Tensor, tokens: Tensor | None = None) -> Tensor:
    """Forward KL of each position [...] from logits of the student [..., V] and of the teacher [..., K] at `tokens`."""
    log_student = student.float().log_softmax(-1)
    if tokens is not None:
        log_student = log_student.gather(-1, tokens)
    log_teacher = teacher.detach().float().log_softmax(-1)
    return (log_teacher.exp() * (log_teacher - log_student)).sum(-1)


def _vocabulary(model: Any) -> int:
    return int(model.config.get_text_config().vocab_size)


def _chunks(flat: Tensor, vocabulary: int) -> tuple[Tensor, ...]:
    """Positions [n, E] in pieces whose logits may exist at once."""
    return torch.split(flat, max(1, _CHUNK // vocabulary))
