"""How far scored passages are from the dense model: KL(dense || policy), and whether both name the same next token.

Dense is the model's own attention over everything, in one pass that has nothing of kvbench's engine. Of each passage the
inputs of the model's head are kept, a hundredth of its logits, so that one dense pass serves every policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvbench.core.errors import KvbenchError
from kvbench.engine.score import Passage
from kvbench.models.source import LoadedModel

_BLOCK = 256
"""Predictions that are compared at once."""

_PREFIX = 8
"""Tokens of the check that the head is all that follows the kept states."""


class DenseReader:
    """The dense predictions of passages, by the weights that the model has when it is made.

    Raises:
        KvbenchError: the model does more to its logits than its head.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        # A copy: a policy may bring an LM whose head is another.
        self._head: Any = deepcopy(loaded.model.get_output_embeddings())
        self._states: dict[tuple[int, ...], Tensor] = {}
        self._check()

    def read(self, passages: Sequence[Passage]) -> None:
        """Makes their predictions; to be called while the model has its own weights."""
        for passage in passages:
            if passage.tokens not in self._states:
                self._states[passage.tokens] = self._last_hidden(passage.tokens[:-1])

    def logits(self, passage: Passage, first: int, count: int) -> Tensor:
        """Logits [count, V] in fp32 that predict the tokens from index `first` on."""
        states = self._states[passage.tokens][first - 1 : first - 1 + count]
        logits: Tensor = self._head(states).float()
        return logits

    @torch.inference_mode()
    def _last_hidden(self, tokens: Sequence[int]) -> Tensor:
        ids = torch.tensor([tokens], device=self._loaded.device)
        states: Tensor = self._loaded.model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
        return states

    @torch.inference_mode()
    def _check(self) -> None:
        tokens = range(_PREFIX)
        ids = torch.tensor([tokens], device=self._loaded.device)
        logits = self._loaded.model(input_ids=ids, use_cache=False).logits[0].float()
        if not torch.allclose(self._head(self._last_hidden(tokens)).float(), logits, rtol=1e-2, atol=1e-2):
            raise KvbenchError(
                f"Model '{self._loaded.name}' does more to its logits than its head, which kvbench cannot compare yet."
            )


@dataclass(frozen=True)
class Divergence:
    """Of one passage, one number a scored token.

    Attributes:
        dense_logprobs: natural logarithm of the dense model's probability of each token.
        kl: KL(dense || policy) in nats.
        agree: both have the same most likely token.
    """

    dense_logprobs: tuple[float, ...]
    kl: tuple[float, ...]
    agree: tuple[bool, ...]


class Comparison:
    """Reads the logits of a `score` call (its `reader`) beside the dense ones.

    Args:
        dense: has read the passages.
        passages: those of the call.
    """

    def __init__(self, dense: DenseReader, passages: Sequence[Passage]) -> None:
        self._dense = dense
        self._passages = passages
        self._found: list[list[Tensor]] = [[] for _ in passages]

    def __call__(self, index: int, first: int, logits: Tensor) -> None:
        passage = self._passages[index]
        for start in range(0, len(logits), _BLOCK):
            mine = logits[start : start + _BLOCK]
            theirs = self._dense.logits(passage, first + start, len(mine))
            targets = torch.tensor(passage.tokens[first + start : first + start + len(mine)], device=mine.device)
            agree = theirs.argmax(-1) == mine.argmax(-1)
            theirs = theirs.log_softmax(-1)
            kl = (theirs.exp() * (theirs - mine.log_softmax(-1))).sum(-1)
            dense = theirs.gather(-1, targets[:, None])[:, 0]
            self._found[index].append(torch.stack([dense, kl, agree.float()], -1))

    def divergence(self, index: int) -> Divergence:
        """Of one passage, once it is scored."""
        dense, kl, agree = torch.cat(self._found[index]).unbind(-1)
        return Divergence(tuple(dense.tolist()), tuple(kl.tolist()), tuple(agree.bool().tolist()))
