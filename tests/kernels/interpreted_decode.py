"""The decode kernels by Triton's interpreter against the plain forms; a program of its own, since triton decides at import."""

from __future__ import annotations

from unittest import mock

import torch

from benchmarks.decode.correctness import checks
from kvbench.core.policy import Policy
from kvbench.engine import segments
from kvbench.engine.compare import compare
from kvbench.engine.path import with_kernels
from kvbench.engine.run import Setting, contact
from kvbench_policies.dms.policy import Dms
from kvbench_policies.h2o import H2o
from kvbench_policies.kvpop.policy import Kvpop
from kvbench_policies.streaming_llm import StreamingLlm
from tests.engine.tiny import load, random_scorers


def steps(policy: Policy, kind: str, rows: int) -> None:
    """Whole steps of a model, its cache full in some rows and not in others."""
    loaded = load(kind, heads=8, kv_heads=4)
    scorers = random_scorers(policy, loaded.geometry)
    setting = Setting(loaded, policy, policy.split(20, loaded.geometry), scorers, reference_length=60)
    with torch.inference_mode(), contact(loaded):
        fast = with_kernels(setting)
        assert (fast.segments is None) == (kind == "gemma3")
        compare(fast, rows)


if __name__ == "__main__":
    torch.manual_seed(0)
    for check in checks("cpu").values():
        with torch.inference_mode():
            check()
    steps(Kvpop(window=5), "qwen3", 2)
    with mock.patch.object(segments, "few", return_value=False):
        steps(StreamingLlm(), "qwen3", 2)
    steps(H2o(), "llama", 1)
    steps(Dms(window=3), "gemma3", 1)
