"""The student is trained on exactly what the engine runs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from kvbench.core.policy import GatedPolicy, Scorer, kept_share
from kvbench.engine.generate import Engine
from kvbench.engine.requests import Request
from kvbench.models.checkpoint import build_policy, make_scorers
from kvbench.models.source import LoadedModel
from kvbench.plugins import load_registry
from kvbench.train import relaxed, student
from kvbench.train.attached import NAME, attach
from kvbench.train.losses import sample_queries

BUDGET = 24


class _Ranking(Scorer):
    def __init__(self, gate: nn.Module) -> None:
        super().__init__()
        self.gate = gate

    def forward(self, keys: Tensor, values: Tensor) -> Tensor:
        scores: Tensor = self.gate(keys, values)
        return scores

    def log_decay(self) -> Tensor:
        return torch.zeros(2)


@pytest.mark.parametrize("prompt_length", [10, 50])
@pytest.mark.parametrize("name", ["kvpop", "kvpop_linear", "kvpop_mlp", "streaming_llm_plus", "dms", "dms_topk"])
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
    gate = None
    if isinstance(policy, GatedPolicy) and not policy.hard_budget:
        offset = policy.offset(kept_share(split, ids.shape[1]))
        gate = relaxed.GateStep(offset, False, 0, torch.zeros(1, dtype=torch.int64), 1)
    step = student.Step(split=split, lengths=lengths, sample=sample, pairs=sample, pairs_long=split.long, gate=gate)
    trained = copy.deepcopy(tiny.model)
    if name == "dms_topk":
        # Trained as gates, run as a ranking.
        scorers = nn.ModuleList(_Ranking(scorer) for scorer in scorers or ())
    attach(tiny, trained, scorers)
    trained.set_attn_implementation(NAME)
    with torch.no_grad():
        logits = trained(input_ids=ids, use_cache=False, kvbench_step=step).logits[0]
    predicted = logits[prompt_length - 1 : -1].argmax(-1).tolist()
    assert predicted == list(tokens)
    # The mask matters: the dense model goes another way.
    with torch.no_grad():
        dense = tiny.model(input_ids=ids, use_cache=False).logits[0]
    assert (dense[prompt_length - 1 :] - logits[prompt_length - 1 :]).abs().max() > 0.01
