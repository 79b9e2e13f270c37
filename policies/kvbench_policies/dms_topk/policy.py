"""Policy `dms_topk`: the gates of `dms` as a ranking, under KVpop's hard budget."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from kvbench.core.policy import PointwiseState, StateRequest
from kvbench.core.scored import trained
from kvbench_policies.dms.gate import DmsGate
from kvbench_policies.dms.policy import Dms
from kvbench_policies.dms.state import DmsState


@dataclass(frozen=True)
class DmsTopk(Dms):
    """Running top-k of the scores of DMS's gates: what its training taught, without its freedom to spend memory unevenly.

    It runs on a checkpoint of `dms`: the language model is the one that was trained with that policy's soft decisions. The
    offset and its corrections have no effect on a ranking.
    """

    name: ClassVar[str] = "dms_topk"
    hard_budget: ClassVar[bool] = True

    def state(self, request: StateRequest) -> PointwiseState:
        """Priorities from the layer's trained gate.

        Raises:
            KvbenchError: the request has no gate of this policy.
        """
        return DmsState(trained(self, request, DmsGate), -math.inf, request)
