"""The student is trained on exactly what the engine runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kvbench.engine.generate import Engine
from kvbench.engine.requests import Request
from kvbench.models.checkpoint import build_policy, make_scorers
from kvbench.models.source import LoadedModel
from kvbench.plugins import load_registry
from kvbench.train import student
from kvbench.train.losses import sample_queries

BUDGET = 24


@pytest.mark.parametrize("prompt_length", [10, 50])
@pytest.mark.parametrize("name", ["kvpop", "kvpop_mlp", "streaming_llm_plus"])
def test_the_students_next_tokens_are_the_engines(tiny: LoadedModel, name: str, prompt_length: int) -> None:
    policy = build_policy(load_registry().policy(name), {"sinks": 2, "window": 6})
    scorers = make_scorers(policy, tiny.geometry)
    if scorers is not None:
        for parameter in scorers.parameters():
            nn.init.normal_(parameter)
        scorers.requires_grad_(False).eval()
    prompt = tuple(torch.randint(4, 40, (prompt_length,)).tolist())
    generation = Engine(tiny, policy, BUDGET, scorers, rows=1).generate([Request(prompt, max_new=40)])
    tokens = generation.completions[0].tokens
    assert generation.audit.evictions > 0 or prompt_length > BUDGET

    split = policy.checked_split(BUDGET, tiny.geometry)
    ids = torch.tensor([[*prompt, *tokens]])
    lengths = torch.tensor([ids.shape[1]])
    sample = sample_queries(lengths, BUDGET, 4, 8, torch.Generator().manual_seed(0))
    step = student.Step(
        split=split, lengths=lengths, sample=sample, pairs=sample, pairs_long=split.long, scorers=scorers
    )
    implementation = tiny.model.config._attn_implementation
    tiny.model.set_attn_implementation(student.NAME)
    with torch.no_grad():
        logits = tiny.model(input_ids=ids, use_cache=False, kvbench_step=step).logits[0]
    tiny.model.set_attn_implementation(implementation)
    predicted = logits[prompt_length - 1 : -1].argmax(-1).tolist()
    assert predicted == list(tokens)
    # The mask matters: the dense model goes another way.
    with torch.no_grad():
        dense = tiny.model(input_ids=ids, use_cache=False).logits[0]
    assert (dense[prompt_length - 1 :] - logits[prompt_length - 1 :]).abs().max() > 0.01
