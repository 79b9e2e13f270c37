from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from torch import Tensor

from kvbench.core.errors import KvbenchError
from kvbench.core.policy import Geometry, StateRequest, Tokens
from kvbench_policies.kvpop import mlstm, naive
from kvbench_policies.kvpop.policy import Kvpop
from kvbench_policies.kvpop.scorer import KvpopScorer
from kvbench_policies.kvpop.state import DelayedState
from kvbench_policies.kvpop_mlp.policy import KvpopMlp

GEOMETRY = Geometry(layers=4, query_heads=4, kv_heads=2, head_dim=32)
SMALL = Geometry(layers=1, query_heads=2, kv_heads=2, head_dim=4)
SIZES = [1, 5, 63, 64, 65, 130]


def inputs(size: int, seed: int = 0, gate: float = 2.0, batch: tuple[int, ...] = (2, 3)) -> list[Tensor]:
    """q, k [2, 3, S, 6], v [2, 3, S, 4] without its 1, i, f [2, 3, S]."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(*batch, size, 6, generator=generator).mul(3).softmax(-1) for _ in range(2))
    v = torch.randn(*batch, size, 4, generator=generator)
    i, f = (torch.randn(*batch, size, generator=generator) * gate for _ in range(2))
    return [q, k, v, i, f + 1]


def with_one(v: Tensor) -> Tensor:
    return torch.cat([v, torch.ones_like(v[..., :1])], -1)


def slow(tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Naive reads [..., S, dv] and unscaled [C n]^T [..., dv + 1, dphi]."""
    flat = [tensor.double().flatten(0, 1) for tensor in tensors]
    found = [naive.mlstm(*(tensor[index] for tensor in flat)) for index in range(flat[0].shape[0])]
    reads = torch.stack([y for y, _ in found]).view(*tensors[2].shape)
    cells = torch.stack([torch.cat([end.matrix, end.normaliser[:, None]], 1).T for _, end in found])
    return reads, cells.view(*tensors[0].shape[:2], *cells.shape[1:])


def unscaled(memory: mlstm.Memory) -> Tensor:
    return memory.cells.double() * memory.m.double().exp()[..., None, None]


@pytest.mark.parametrize("chunk", [7, 16, 64])
@pytest.mark.parametrize("size", SIZES)
def test_chunkwise_equals_step_equals_naive(size: int, chunk: int) -> None:
    q, k, v, i, f = inputs(size)
    wanted, cells = slow([q, k, v, i, f])
    y, memory = mlstm.chunkwise(q, k, with_one(v), i, f, chunk)
    torch.testing.assert_close(y.double(), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(unscaled(memory), cells, rtol=1e-4, atol=1e-4)

    walked = mlstm.Memory.empty((2, 3), 6, 5, torch.device("cpu"))
    reads = [
        mlstm.step(walked, *(tensor.select(2, token) for tensor in (q, k, with_one(v), i, f))) for token in range(size)
    ]
    torch.testing.assert_close(torch.stack(reads, 2), y, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(walked.cells, memory.cells, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(walked.m, memory.m, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("size", "chunk"), [(1, 7), (5, 7), (65, 16), (65, 64), (130, 64)])
def test_gradients_equal_naive(size: int, chunk: int) -> None:
    weight = torch.randn(2, 1, size, 4, generator=torch.Generator().manual_seed(9))
    fast = [tensor.requires_grad_() for tensor in inputs(size, batch=(2, 1))]
    # In two parts, so that gradients also flow through the memory that is handed on.
    half = size // 2
    first, memory = mlstm.chunkwise(*parts(fast, slice(half)), chunk)
    second, _ = mlstm.chunkwise(*parts(fast, slice(half, size)), chunk, memory)
    torch.autograd.backward((torch.cat([first, second], 2) * weight).sum())
    truth = [tensor.double().requires_grad_() for tensor in inputs(size, batch=(2, 1))]
    torch.autograd.backward((slow(truth)[0] * weight).sum())
    for mine, theirs in zip(fast, truth, strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-3, atol=1e-4)


def parts(tensors: list[Tensor], tokens: slice) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, k, v, i, f = (tensor[:, :, tokens] for tensor in tensors)
    return q, k, with_one(v), i, f


def test_memory_is_handed_on_between_calls() -> None:
    tensors = inputs(130)
    whole, end = mlstm.chunkwise(*parts(tensors, slice(130)), 64)
    first, memory = mlstm.chunkwise(*parts(tensors, slice(37)), 16)
    second, last = mlstm.chunkwise(*parts(tensors, slice(37, 130)), 7, memory)
    torch.testing.assert_close(torch.cat([first, second], 2), whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last.cells, end.cells, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunk", [7, 64])
def test_large_gates_do_not_overflow(chunk: int) -> None:
    generator = torch.Generator().manual_seed(3)
    q, k, v, i, f = inputs(130)
    i, f = (70 * torch.randn(i.shape, generator=generator).sign() for _ in range(2))
    leaves = [tensor.requires_grad_() for tensor in (q, k, v, i, f)]
    y, memory = mlstm.chunkwise(q, k, with_one(v), i, f, chunk)
    torch.testing.assert_close(
        y.detach().double(), slow([tensor.detach() for tensor in leaves])[0], rtol=1e-3, atol=1e-4
    )
    torch.autograd.backward(y.sum())
    assert all(tensor.grad is not None and bool(tensor.grad.isfinite().all()) for tensor in leaves)
    assert bool(
        memory.cells.detach().abs().max() <= v.detach().abs().max() + 1
    )  # a weighted mean never exceeds its terms
    extreme, _ = mlstm.chunkwise(q, k, with_one(v), i, f * 1e4, chunk)
    assert bool(extreme.isfinite().all())


def trained(policy: Kvpop, geometry: Geometry = GEOMETRY, seed: int = 0) -> KvpopScorer:
    """A scorer whose weights are all random, gates and final projection included."""
    generator = torch.Generator().manual_seed(seed)
    scorer = policy.scorer(geometry)
    for parameter in scorer.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return scorer


def tokens(rows: int, size: int, geometry: Geometry = GEOMETRY, seed: int = 0) -> Tokens:
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, geometry.kv_heads, size, geometry.head_dim)
    keys, values = (torch.randn(shape, generator=generator) for _ in range(2))
    return Tokens(keys, values, torch.arange(size).expand(rows, size))


def part(all_tokens: Tokens, which: slice) -> Tokens:
    return Tokens(all_tokens.keys[:, :, which], all_tokens.values[:, :, which], all_tokens.positions[:, which])


def fresh(policy: Kvpop, scorer: KvpopScorer, rows: int, geometry: Geometry = GEOMETRY) -> DelayedState:
    split = policy.checked_split(64, geometry)
    return policy.state(StateRequest(0, rows, geometry, split, torch.zeros(rows).long(), torch.device("cpu"), scorer))


def walk(state: DelayedState, given: Tokens, window: int, start: int = 0) -> list[Tensor]:
    """Priorities that the state returns for each step from `start` on; arbitrary content before a token can leave."""
    out = []
    for now in range(start, given.keys.shape[2]):
        leaving = part(given, slice(now - window, now - window + 1))
        if now < window:
            leaving = Tokens(*(torch.full_like(tensor, 7) for tensor in dataclasses.astuple(part(given, slice(1)))))
        out.append(state.step(part(given, slice(now, now + 1)), leaving))
    return out


@pytest.mark.parametrize(
    "policy",
    [
        Kvpop(window=4),
        Kvpop(window=1, decay="fixed"),
        Kvpop(window=3, skip=False, head_norm=False),
        Kvpop(window=4, scoring="immediate"),
        Kvpop(window=4, feature_map="softmax", gate_cap=0.0),
        Kvpop(window=4, value_projection=False),
    ],
    ids=["default", "window 1", "plain", "immediate", "softmax without cap", "values as they are"],
)
@pytest.mark.parametrize("size", [1, 5, 40])
def test_scorer_equals_naive_with_gradients(policy: Kvpop, size: int) -> None:
    policy = dataclasses.replace(policy, features=4, values=3, hidden=5)
    scorer, given = trained(policy, SMALL), tokens(2, size, SMALL)
    weight = torch.randn(2, 2, size, generator=torch.Generator().manual_seed(5))
    scores = scorer(given.keys, given.values)
    torch.autograd.backward((scores * weight).sum())
    weights = {name: parameter.detach().double().requires_grad_() for name, parameter in scorer.named_parameters()}
    hedgehog = policy.feature_map == "hedgehog"
    truth = naive.scores(weights, given.keys, given.values, policy.delay, policy.gate_cap, policy.head_norm, hedgehog)
    torch.testing.assert_close(scores.detach().double(), truth.detach(), rtol=1e-4, atol=1e-5)
    torch.autograd.backward((truth * weight).sum())
    for name, parameter in scorer.named_parameters():
        found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        wanted = weights[name].grad
        wanted = torch.zeros_like(weights[name]) if wanted is None else wanted
        assert torch.allclose(found.double(), wanted, rtol=2e-3, atol=2e-4), name


@pytest.mark.parametrize("window", [1, 4, 16])
def test_delayed_score_sees_exactly_up_to_window_exit(window: int) -> None:
    scorer, given = trained(Kvpop(window=window)), tokens(1, 60)
    scores = scorer(given.keys, given.values)
    changed = tokens(1, 60, seed=1)
    token = 20
    for last, same in ((token + window, True), (token + window - 1, False)):
        keys, values = given.keys.clone(), given.values.clone()
        keys[:, :, last + 1 :], values[:, :, last + 1 :] = (
            changed.keys[:, :, last + 1 :],
            changed.values[:, :, last + 1 :],
        )
        after = scorer(keys, values)[..., token]
        assert torch.allclose(after, scores[..., token], atol=1e-6) is same


def test_immediate_score_does_not_see_later_tokens() -> None:
    scorer, given = trained(Kvpop(window=4, scoring="immediate")), tokens(1, 60)
    short = scorer(given.keys[:, :, :21], given.values[:, :, :21])
    torch.testing.assert_close(scorer(given.keys, given.values)[..., :21], short, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("decay", ["none", "learned"])
@pytest.mark.parametrize("scoring", ["delayed", "immediate"])
@pytest.mark.parametrize("window", [1, 4, 16])
@pytest.mark.parametrize("size", [1, 5, 16, 17, 70])
def test_step_prefill_and_forward_agree(size: int, window: int, scoring: str, decay: str) -> None:
    policy = Kvpop(window=window, scoring=scoring, decay=decay)  # type: ignore[arg-type] # literals from parametrize
    scorer, given, rows = trained(policy), tokens(3, size), 3
    gone = max(0, size - window)
    with torch.no_grad():
        wanted = scorer.priority(scorer(given.keys, given.values), given.positions)
    by_prefill, by_step = fresh(policy, scorer, rows), fresh(policy, scorer, rows)
    at_once = by_prefill.prefill(given)
    torch.testing.assert_close(at_once[..., :gone], wanted[..., :gone], rtol=1e-5, atol=1e-6)
    stepped = walk(by_step, given, window)[window:]
    if gone:
        torch.testing.assert_close(torch.stack(stepped, -1), wanted[..., :gone], rtol=1e-4, atol=1e-4)
    for one, other in zip(by_prefill.tensors(), by_step.tensors(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scoring", ["delayed", "immediate"])
@pytest.mark.parametrize("prompt", [3, 20, 33])
def test_steps_continue_after_prefill(prompt: int, scoring: str) -> None:
    policy = Kvpop(window=4, scoring=scoring)  # type: ignore[arg-type] # literals from parametrize
    scorer, given = trained(policy), tokens(2, 60)
    wanted = torch.stack(walk(fresh(policy, scorer, 2), given, 4), -1)
    state = fresh(policy, scorer, 2)
    before = [tensor.data_ptr() for tensor in state.tensors()]
    state.prefill(part(given, slice(prompt)))
    found = torch.stack(walk(state, given, 4, prompt), -1)
    first = max(prompt, 4)
    torch.testing.assert_close(found[..., first - prompt :], wanted[..., first:], rtol=1e-4, atol=1e-4)
    assert before == [tensor.data_ptr() for tensor in state.tensors()]  # written in place


def test_rows_are_independent_and_a_missing_leaving_token_leaves_no_trace() -> None:
    policy = Kvpop(window=4)
    scorer, given = trained(policy), tokens(3, 30)
    together, alone = fresh(policy, scorer, 3), fresh(policy, scorer, 1)
    hole = Tokens(torch.full_like(given.keys[:, :, :1], math.nan), given.values[:, :, :1], given.positions[:, :1])
    for now in range(10):
        new = part(given, slice(now, now + 1))
        together.step(new, hole)
        alone.step(Tokens(new.keys[1:2], new.values[1:2], new.positions[1:2]), part(tokens(1, 1), slice(1)))
    for many, one in zip(together.tensors(), alone.tensors(), strict=True):
        torch.testing.assert_close(many[1:2], one)


def test_bf16_cache_is_scored_in_fp32() -> None:
    policy = Kvpop(window=4)
    scorer, given = trained(policy), tokens(2, 30)
    half = Tokens(given.keys.bfloat16(), given.values.bfloat16(), given.positions)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = scorer(half.keys, half.values)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, scorer(half.keys.float(), half.values.float()))
    stepped = torch.stack(walk(fresh(policy, scorer, 2), half, 4)[4:], -1)
    torch.testing.assert_close(stepped, scores[..., :26].detach(), rtol=1e-4, atol=1e-4)


def test_bf16_memory_follows_the_fp32_one() -> None:
    policy = Kvpop(window=4)
    scorer, given = trained(policy), tokens(2, 60)
    half = Tokens(given.keys.bfloat16(), given.values.bfloat16(), given.positions)
    split = policy.split(40, GEOMETRY)
    request = StateRequest(0, 2, GEOMETRY, split, torch.zeros(2).long(), torch.device("cpu"), scorer, torch.bfloat16)
    state = policy.state(request)
    stepped = torch.stack(walk(state, half, 4)[4:], -1)
    exact = scorer(half.keys.float(), half.values.float())[..., :56].detach()
    assert {tensor.dtype for tensor in state.charged()} == {torch.bfloat16}
    # Rounding the memory each step costs a few thousandths; a memory that was lost would cost as much as the scores vary.
    assert (stepped - exact).abs().mean() < 0.05 * exact.std()


def test_untrained_scores_are_all_equal() -> None:
    given = tokens(2, 40)
    scores = Kvpop().scorer(GEOMETRY)(given.keys, given.values)
    assert not bool(scores.any())
    torch.autograd.backward(scores.sum())


def test_untrained_scorer_learns() -> None:
    torch.manual_seed(0)
    scorer, given = Kvpop().scorer(GEOMETRY), tokens(4, 64)
    # Whether the eighth token later resembles this one: only a scorer that reads on can tell.
    target = torch.nn.functional.cosine_similarity(given.keys[:, :, :48], given.keys[:, :, 8:56], dim=-1).sign()
    optimiser = torch.optim.Adam(scorer.parameters(), 0.02)
    losses = []
    for _ in range(60):
        loss = torch.nn.functional.softplus(-target * scorer(given.keys, given.values)[..., :48]).mean()
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
    assert all(parameter.grad is not None for parameter in scorer.parameters())


@pytest.mark.parametrize(("head_dim", "charged"), [(32, 3), (64, 2), (128, 1), (16, 5)])
def test_state_is_charged_in_whole_slots(head_dim: int, charged: int) -> None:
    geometry = dataclasses.replace(GEOMETRY, head_dim=head_dim)
    policy = Kvpop()
    split = policy.checked_split(64, geometry)
    assert (split.charged, split.slots, split.long) == (charged, 64 - charged, 64 - charged - 20)
    state = fresh(policy, policy.scorer(geometry), 5, geometry)
    stored = state.tensors()[0]
    assert stored.shape[0] == 5
    per_head = stored[0, 0].numel()
    assert (split.charged - 1) * 2 * head_dim < per_head <= split.charged * 2 * head_dim


def test_paper_sized_state_costs_what_the_paper_says() -> None:
    policy = Kvpop(window=256, features=128, values=128)
    assert policy.split(4096, dataclasses.replace(GEOMETRY, head_dim=128)).charged == 65  # C alone: 64


def test_budget_below_the_smallest_is_refused_with_the_number() -> None:
    assert Kvpop().smallest_budget(GEOMETRY) == 24
    assert Kvpop().checked_split(24, GEOMETRY).long == 1
    with pytest.raises(KvbenchError, match="at least 24 slots; this one has 23"):
        Kvpop().checked_split(23, GEOMETRY)


def test_policy_is_hashable_and_json() -> None:
    assert len({Kvpop(), Kvpop(), Kvpop(window=8)}) == 2
    assert Kvpop(**json.loads(json.dumps(dataclasses.asdict(Kvpop(window=8))))) == Kvpop(window=8)


@pytest.mark.parametrize(
    "wrong",
    [
        {"window": 0},
        {"sinks": -1},
        {"features": 3},
        {"gate_cap": -1.0},
        {"feature_map": "relu"},
        {"scoring": "late"},
        {"decay": "fast"},
        {"hidden": 0},
    ],
)
def test_wrong_hyper_parameters_are_named(wrong: dict[str, object]) -> None:
    with pytest.raises(KvbenchError, match=next(iter(wrong))):
        Kvpop(**wrong)  # type: ignore[arg-type] # wrong on purpose


@pytest.mark.parametrize(
    ("options", "difference", "charged"),
    [
        # Per head of 2 x 32 inputs: 16 features, 8 values, 32 hidden.
        ({"feature_map": "softmax"}, 2 * 64 * 8, 3),
        ({"value_projection": False}, -64 * 8 + (32 - 8) * 32, 9),
        ({"skip": False}, -64 * 32, 3),
        ({"head_norm": False}, 0, 3),
        ({"gate_cap": 0.0}, 0, 3),
        ({"scoring": "immediate"}, 0, 3),
        ({"decay": "learned"}, 1, 3),
        ({"decay": "fixed"}, 0, 3),
    ],
)
def test_an_option_changes_what_it_says(options: dict[str, object], difference: int, charged: int) -> None:
    plain, other = Kvpop(), Kvpop(**options)  # type: ignore[arg-type] # by name
    counts = [sum(p.numel() for p in policy.scorer(GEOMETRY).parameters()) for policy in (plain, other)]
    assert counts[1] - counts[0] == GEOMETRY.kv_heads * difference
    assert other.split(100, GEOMETRY).charged == charged
    assert Kvpop(**json.loads(json.dumps(dataclasses.asdict(other)))) == other
    given = tokens(1, 40)
    torch.manual_seed(3)
    one = trained(plain, GEOMETRY)
    two = trained(other, GEOMETRY)
    shared = {name: value for name, value in one.state_dict().items() if name in two.state_dict()}
    if difference in (0, 1, -64 * 32):
        two.load_state_dict(shared, strict=False)
    scores = [scorer.priority(scorer(given.keys, given.values), given.positions)[..., :20] for scorer in (one, two)]
    assert not torch.allclose(scores[0], scores[1])


def test_extreme_gates_without_a_cap_stay_finite() -> None:
    policy = Kvpop(window=4, gate_cap=0.0, head_norm=False)
    scorer, given = trained(policy, GEOMETRY), tokens(1, 60)
    with torch.no_grad():
        scorer.gates.mul_(1e4)
    scores = scorer(given.keys, given.values)
    assert bool(scores.isfinite().all())
    torch.autograd.backward(scores.sum())
    assert all(bool(p.grad.isfinite().all()) for p in scorer.parameters() if p.grad is not None)


def test_state_without_scorer_is_refused() -> None:
    request = StateRequest(
        2, 1, GEOMETRY, Kvpop().split(64, GEOMETRY), torch.zeros(1).long(), torch.device("cpu"), torch.nn.Identity()
    )
    with pytest.raises(KvbenchError, match="layer 2"):
        Kvpop().state(request)


def test_parameters_are_as_many_as_those_of_the_stateless_scorer() -> None:
    mine, theirs = (
        sum(parameter.numel() for parameter in policy.scorer(GEOMETRY).parameters()) for policy in (Kvpop(), KvpopMlp())
    )
    assert abs(mine / theirs - 1) < 0.15


def test_learned_decay_stays_within_its_bounds() -> None:
    scorer = Kvpop(decay="learned", horizon=1000).scorer(GEOMETRY)
    for value in (-100.0, 0.0, 100.0):
        scorer.decay.floating.data.fill_(value)  # type: ignore[union-attr] # a learned decay has it
        log_gamma = scorer.log_decay()
        assert bool((log_gamma >= -math.log(100) / 1000 - 1e-9).all())
        assert bool((log_gamma <= -math.log(2) / 8000 + 1e-9).all())
    assert Kvpop(decay="fixed").scorer(GEOMETRY).log_decay().tolist() == pytest.approx([-1e-5] * 2, rel=1e-3)
    assert not bool(Kvpop().scorer(GEOMETRY).log_decay().any())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("scoring", ["delayed", "immediate"])
def test_step_survives_cuda_graph_capture(scoring: str) -> None:
    policy = Kvpop(window=4, scoring=scoring)  # type: ignore[arg-type] # literals from parametrize
    scorer, given = trained(policy), tokens(2, 40)
    wanted = torch.stack(walk(fresh(policy, scorer, 2), given, 4)[4:], -1)
    device = torch.device("cuda")
    scorer.to(device)
    split = policy.checked_split(64, GEOMETRY)
    state = policy.state(StateRequest(0, 2, GEOMETRY, split, torch.zeros(2).long(), device, scorer))
    on_device = [tensor.to(device) for tensor in dataclasses.astuple(given)]
    pair = [
        Tokens(*(tensor.clone() for tensor in dataclasses.astuple(part(Tokens(*on_device), slice(1))))) for _ in "ab"
    ]
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call] # untyped in PyTorch
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        state.step(*pair)
    torch.cuda.current_stream().wait_stream(side)
    for tensor in state.tensors():
        tensor.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = state.step(*pair)
    for tensor in state.tensors():
        tensor.zero_()
    found = []
    for now in range(40):
        for target, place in zip(pair, (now, max(0, now - 4)), strict=True):
            source = part(Tokens(*on_device), slice(place, place + 1))
            for mine, theirs in zip(dataclasses.astuple(target), dataclasses.astuple(source), strict=True):
                mine.copy_(theirs)
        graph.replay()
        found.append(out.cpu().clone())
    torch.testing.assert_close(torch.stack(found[4:], -1), wanted, rtol=1e-3, atol=1e-3)
