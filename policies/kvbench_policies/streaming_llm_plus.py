"""StreamingLLM's retention on a language model that was trained under it: KVpop's control without a scorer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvbench.core.errors import KvbenchError
from kvbench.core.policy import Geometry, LearnedPolicy, Split, StateRequest
from kvbench.core.recency import RecencyState


@dataclass(frozen=True)
class StreamingLlmPlus(LearnedPolicy):
    """Keeps the first `sinks` tokens and the newest ones; only the language model is trained, there is no scorer.

    The retained set is StreamingLLM's (Xiao et al. 2023, arXiv:2309.17453) with original positions: the priority
    is the position, so the long-range slots are a longer window. KVpop trains the model under this mask by
    distillation alone (StreamingLLM+ in its Table 1): what that gains over StreamingLLM is due to the model, not
    to the choice of tokens.
    """

    name: ClassVar[str] = "streaming_llm_plus"

    sinks: int = 4
    window: int = 1

    def __post_init__(self) -> None:
        if self.sinks < 0 or self.window < 1:
            raise KvbenchError(
                f"Policy '{self.name}' needs sinks >= 0 and window >= 1, "
                f"not sinks={self.sinks} and window={self.window}."
            )

    def split(self, budget: int, geometry: Geometry) -> Split:
        """All slots hold tokens; nothing is charged."""
        return Split(slots=budget, sinks=self.sinks, window=self.window)

    def state(self, request: StateRequest) -> RecencyState:
        """Priorities without tensors."""
        return RecencyState()
