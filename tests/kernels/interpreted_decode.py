"""The decode kernels by Triton's interpreter against the plain forms; a program of its own, since triton decides at import."""

from __future__ import annotations

import sys

import torch

from kvbench.engine.compare import compare
from kvbench.engine.path import with_kernels
from kvbench.engine.run import Setting, contact
from tests.engine.tiny import load, random_scorers
from kvbench_policies.streaming_llm import StreamingLlm
from kvbench_policies.tova import Tova
from kvbench_policies.tova_head import TovaHead
from kvbench_policies.h2o import H2o
from kvbench_policies.random import Random
from kvbench_policies.knorm import Knorm
from kvbench_policies.full import Full
from kvbench_policies.kvpop.policy import Kvpop
from kvbench_policies.dms.policy import Dms

POLICIES = [Full(), StreamingLlm(), Tova(), TovaHead(), H2o(), Random(), Knorm(), Kvpop(), Kvpop(decay="learned", feature_map="softmax", gate_cap=0.0, features=6, values=5,hidden=11, window=3), Kvpop(scoring="immediate", window=7), Dms()]

if __name__ == "__main__":
    import time
    for policy in POLICIES[::3]:
        for rows in (1, 3)[:int(sys.argv[1])]:
            torch.manual_seed(0)
            loaded = load("qwen3" if rows==1 else "llama", heads=8, kv_heads=4)
            t=time.time()
            scorers = random_scorers(policy, loaded.geometry)
            setting = Setting(loaded, policy, policy.split(20, loaded.geometry), scorers, reference_length=60)
            with torch.inference_mode(), contact(loaded):
                s = with_kernels(setting, rows)
                compare(s, rows)
            print(policy.name, rows, s.segments is not None, round(time.time()-t,1), flush=True)
