"""`kvbench.evict`: transformers' own generate under a policy answers like kvbench's engine, and leaves no trace."""

from __future__ import annotations

import copy
import inspect
import runpy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, Qwen3ForCausalLM, StaticCache, T5Config, T5ForConditionalGeneration

import kvbench
from kvbench.core.errors import KvbenchError
from kvbench.core.policy import Policy
from kvbench.engine import attention, evicted
from kvbench.engine.evict import Eviction, evicting, loaded_from
from kvbench.engine.generate import Engine
from kvbench.engine.requests import Request
from kvbench.engine.run import Setting
from kvbench.models.checkpoint import Checkpoint, build_policy, find_checkpoint, make_scorers, shipped
from kvbench.models.huggingface import hash_files
from kvbench.models.reference import Reference
from kvbench.models.source import LoadedModel
from kvbench.plugins import load_registry
from kvbench_tasks.chain import Chain
from tests.engine.tiny import VOCABULARY, config, feed, kept, load, random_scorers, text

CACHE = "cache" if "cache" in inspect.signature(load().model.forward).parameters else "past_key_values"
"""What transformers calls a cache, in arguments and outputs."""

NAMES = sorted(load_registry().policies)
NEW = 16
REFERENCE = 120
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}


@cache
def _make(name: str) -> tuple[Policy, nn.ModuleList | None, int]:
    """A policy, scorers for the tiny model, and a budget that some of its prompts are above."""
    made = load_registry().policy(name).load()
    assert isinstance(made, type)
    policy = made()
    assert isinstance(policy, Policy)
    return policy, random_scorers(policy, load().geometry), policy.smallest_budget(load().geometry) + 6


def _under(name: str, loaded: LoadedModel | None = None, seed: int = 0) -> AbstractContextManager[Eviction]:
    policy, scorers, budget = _make(name)
    loaded = loaded_from((loaded or load()).model)
    return evicting(Setting(loaded, policy, policy.split(budget, loaded.geometry), scorers, 0, REFERENCE), seed, None)


def _batch(*lengths: int) -> tuple[Tensor, Tensor]:
    """Random tokens padded on the left to the longest, and their mask."""
    width = max(lengths)
    mask = torch.stack([(torch.arange(width) >= width - length).long() for length in lengths])
    return text(len(lengths), width).clamp(min=1) * mask, mask


def _rows(ids: Tensor, mask: Tensor) -> list[list[int]]:
    return [row[keep.bool()].tolist() for row, keep in zip(ids, mask, strict=True)]


def _held(eviction: Eviction, row: int) -> list[list[frozenset[int]]]:
    """By layer and head."""
    return [kept(layer)[row] for layer in eviction.positions]


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "qwen3") for name in NAMES), ("tova", "gemma3"), ("kvpop", "gemma3"), ("dms", "gemma3")]
)
def test_padded_rows_answer_like_the_engine_and_hold_what_they_hold_alone(name: str, kind: str) -> None:
    loaded = load(kind)
    policy, scorers, budget = _make(name)
    ids, mask = _batch(budget + 30, 5, budget + 30, 1)
    prompts = _rows(ids, mask)
    with _under(name, loaded) as eviction:
        out = loaded.model.generate(ids, attention_mask=mask, **GREEDY)[:, -NEW:]
        assert eviction.tokens_seen == tuple(len(prompt) + NEW - 1 for prompt in prompts)
        together = [_held(eviction, row) for row in range(len(ids))]
        for row, prompt in enumerate(prompts):
            alone = loaded.model.generate(torch.tensor([prompt]), **GREEDY)[:, -NEW:]
            assert torch.equal(alone[0], out[row])
            assert _held(eviction, 0) == together[row]
    engine = Engine(loaded, policy, budget if policy.evicts else None, scorers, rows=1)
    done = engine.generate([Request(tuple(prompt), NEW) for prompt in prompts], reference_length=REFERENCE)
    assert [list(completion.tokens) for completion in done.completions] == out.tolist()


@pytest.mark.parametrize("name", [name for name in NAMES if load_registry().policies[name].hard_budget])
def test_it_holds_what_the_engine_holds(name: str) -> None:
    policy, scorers, budget = _make(name)
    ids, mask = _batch(budget + 30, 7)
    with _under(name) as eviction:
        out = load().model.generate(ids, attention_mask=mask, **GREEDY)
    for row, prompt in enumerate(_rows(ids, mask)):
        read = torch.tensor([prompt + out[row, -NEW:-1].tolist()])
        trace = feed(load(), policy, budget if policy.evicts else read.shape[1], read, len(prompt), scorers)
        assert _held(eviction, row) == [layer[0] for layer in trace.kept[-1]]


@pytest.mark.parametrize("name", [name for name in NAMES if load_registry().policies[name].hard_budget])
def test_memory_does_not_grow(name: str) -> None:
    ids, mask = _batch(60, 9)
    held = []
    with _under(name) as eviction:
        for count in (2, 70):
            load().model.generate(
                ids, attention_mask=mask, **{**GREEDY, "max_new_tokens": count, "min_new_tokens": count}
            )
            held.append(eviction.bytes_held)
    assert held[0] == held[1] > 0
    if name != "full":
        slots = {layer.shape[2] for layer in eviction.positions}
        assert slots == {_make(name)[0].split(_make(name)[2], load().geometry).slots}


def test_a_cache_that_keeps_everything_grows_and_answers_like_plain_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evicted, "_ROOM", 8)
    ids, mask = _batch(20, 5)
    long = {**GREEDY, "max_new_tokens": 40, "min_new_tokens": 40}
    plain = load().model.generate(ids, attention_mask=mask, **long)
    with _under("full") as eviction:
        assert torch.equal(load().model.generate(ids, attention_mask=mask, **long), plain)
        assert _held(eviction, 1) == [[frozenset(range(44))] * 2] * 2


def test_a_hole_in_the_mask_is_no_token() -> None:
    ids, mask = _batch(60, 40)
    mask[:, 45] = 0
    with _under("streaming_llm") as eviction:
        holed = load().model.generate(ids, attention_mask=mask, **GREEDY)
        held = _held(eviction, 1)
        without = load().model.generate(torch.tensor(_rows(ids, mask)[1:]), **GREEDY)
        assert torch.equal(holed[1, -NEW:], without[0, -NEW:])
        assert _held(eviction, 0) == held


def test_sampling_is_that_of_generate() -> None:
    ids, mask = _batch(20, 5)
    sampled = {**GREEDY, "do_sample": True, "temperature": 1.3, "top_k": 20, "num_return_sequences": 3}
    torch.manual_seed(3)
    plain = load().model.generate(ids, attention_mask=mask, **sampled)
    torch.manual_seed(3)
    with _under("full"):
        assert torch.equal(load().model.generate(ids, attention_mask=mask, **sampled), plain)
    assert len({tuple(row) for row in plain.tolist()}) == 6


def test_sequences_of_one_prompt_are_a_batch() -> None:
    ids, mask = _batch(60, 9)
    with _under("tova") as eviction:
        once = load().model.generate(ids, attention_mask=mask, **GREEDY)
        sampled = {**GREEDY, "do_sample": True, "top_k": 1, "num_return_sequences": 2}
        assert torch.equal(load().model.generate(ids, attention_mask=mask, **sampled), once.repeat_interleave(2, 0))
        assert len(eviction.tokens_seen) == 4


def test_the_seed_is_the_policys() -> None:
    ids, _ = _batch(60)
    sets = []
    for seed in (0, 0, 1):
        with _under("random", seed=seed) as eviction:
            load().model.generate(ids, **GREEDY)
        sets.append(_held(eviction, 0))
    assert sets[0] == sets[1] != sets[2]


def test_without_a_cache_every_call_reads_the_whole_sequence_under_the_policy() -> None:
    ids, mask = _batch(60, 9)
    with _under("knorm"):
        cached = load().model.generate(ids, attention_mask=mask, **GREEDY)
        assert torch.equal(load().model.generate(ids, attention_mask=mask, use_cache=False, **GREEDY), cached)


@pytest.mark.parametrize("own", [False, True], ids=["returned cache", "DynamicCache of one's own"])
@torch.no_grad()
def test_a_loop_of_ones_own(own: bool) -> None:
    model, (ids, mask) = load().model, _batch(60, 9)
    with _under("tova"):
        expected = model.generate(ids, attention_mask=mask, **GREEDY)[:, -NEW:]
        carried: Any = DynamicCache() if own else None
        fed, tokens = ids, []
        for _ in range(NEW):
            output = model(fed, attention_mask=mask, **{CACHE: carried}, use_cache=True)
            if not own:
                carried = output[CACHE]
            fed = output.logits[:, -1:].argmax(-1)
            mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
            tokens.append(fed)
    assert torch.equal(torch.cat(tokens, 1), expected)


def test_positional_arguments_and_embeddings_do() -> None:
    model, (ids, mask) = load().model, _batch(60, 9)
    with _under("tova"), torch.no_grad():
        named = model(input_ids=ids, attention_mask=mask).logits
        assert torch.equal(model(ids, mask).logits, named)
        embedded = model(inputs_embeds=model.get_input_embeddings()(ids), attention_mask=mask).logits
        assert torch.equal(embedded, named)


@pytest.mark.parametrize("name", ["streaming_llm", "tova", "kvpop", "dms"])
def test_a_second_turn_goes_on_token_by_token_with_padding_of_its_own(name: str) -> None:
    model, (ids, mask), (more, more_mask) = load().model, _batch(60, 9, 20), _batch(3, 12, 1)
    returned = {**GREEDY, "return_dict_in_generate": True}
    with _under(name) as eviction:
        first = model.generate(ids, attention_mask=mask, **returned)
        whole = torch.cat([first.sequences, more], 1)
        seen = torch.cat([mask, mask.new_ones(3, NEW), more_mask], 1)
        model.generate(whole, attention_mask=seen, **{CACHE: first[CACHE]}, **GREEDY)
        after = [_held(eviction, row) for row in range(2)]
        assert eviction.tokens_seen[:2] == (60 + NEW + 3 + NEW - 1, 9 + NEW + 12 + NEW - 1)
        for row in range(2):
            alone = model.generate(ids[row : row + 1, -int(mask[row].sum()) :], **returned)
            cached = alone[CACHE]
            turn = torch.cat([alone.sequences[:, -1:], more[row : row + 1, -int(more_mask[row].sum()) :]], 1)
            with torch.no_grad():
                for token in turn[0]:
                    output = model(token[None, None], **{CACHE: cached})
                for _ in range(NEW - 1):
                    output = model(output.logits[:, -1:].argmax(-1), **{CACHE: cached})
            assert _held(eviction, 0) == after[row]


def test_chunked_prefill_keeps_what_token_by_token_keeps() -> None:
    ids, _ = _batch(60, 60)
    with _under("kvpop") as eviction:
        whole = load().model.generate(ids, **GREEDY)
        held = [_held(eviction, row) for row in range(2)]
        assert torch.equal(load().model.generate(ids, prefill_chunk_size=25, **GREEDY), whole)
        assert [_held(eviction, row) for row in range(2)] == held


def test_a_batch_that_starts_in_inference_mode_goes_on_outside_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evicted, "_ROOM", 1)
    model = load().model
    for name in ("full", "kvpop"):
        with _under(name):
            with torch.inference_mode():
                cached = model(_batch(60, 9)[0])[CACHE]
                model(text(2, 2), **{CACHE: cached})
            logits = model(text(2, 2), **{CACHE: cached}).logits
            assert logits.isfinite().all()
            assert not logits.requires_grad


def test_bf16() -> None:
    loaded = load("llama", dtype=torch.bfloat16)
    with _under("tova", loaded) as eviction:
        loaded.model.generate(_batch(60)[0], **GREEDY)
    in_bf16 = eviction.bytes_held
    with _under("tova", load("llama")) as eviction:
        load("llama").model.generate(_batch(60)[0], **GREEDY)
    assert in_bf16 < 0.7 * eviction.bytes_held


def test_before_the_first_batch_nothing_is_held() -> None:
    with _under("tova") as eviction:
        assert (eviction.positions, eviction.tokens_seen, eviction.bytes_held) == ((), (), 0)


# Through the public name, on the model and the checkpoints that ship.


@cache
def _reference() -> LoadedModel:
    return Reference().load(torch.device("cpu"), torch.float32)


PROMPT = "<bos> chain 0 6 : a -> b 2 3 9 ; b -> c 4 2 0 ; c -> a 9 9 1 ; sum 1 8 9 ; start b ; do "
SHIPPED = [
    name
    for name, entry in sorted(load_registry().policies.items())
    if entry.hard_budget and (not entry.learned or shipped(name, "ref") is not None)
]


@pytest.mark.parametrize("name", SHIPPED)
def test_the_reference_model_answers_like_the_engine(name: str) -> None:
    loaded, budget = _reference(), 64
    begun = PROMPT + " ".join(Chain().solve(PROMPT).completion.split()[:60])
    prompts = [loaded.tokenizer(text, add_special_tokens=False)["input_ids"] for text in (begun, PROMPT)]
    assert len(prompts[0]) > budget > len(prompts[1])
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    long = {**GREEDY, "max_new_tokens": 40, "eos_token_id": None}
    del long["min_new_tokens"]
    with kvbench.evict(loaded.model, name, budget=None if name == "full" else budget):
        out = loaded.model.generate(ids, attention_mask=mask, **long)[:, -40:]
    entry = load_registry().policy(name)
    made = entry.load()
    assert isinstance(made, type)
    checkpoint = Checkpoint.load(find_checkpoint(name, "ref")) if entry.learned else None
    policy = made() if checkpoint is None else checkpoint.policy(name)
    scorers = None if checkpoint is None else checkpoint.scorers(loaded.geometry)
    with _adapted(checkpoint, loaded.model):
        engine = Engine(replace(loaded, eos=frozenset()), policy, budget if policy.evicts else None, scorers)
        done = engine.generate([Request(tuple(prompt), 40) for prompt in prompts]).completions
    for row, completion in enumerate(done):
        assert completion.near_ties or list(completion.tokens) == out[row].tolist()
    assert len(set(out.flatten().tolist())) > 8, "the model says nothing"


def test_the_example_of_the_document_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(Path(__file__).with_name("evict_example.py")))
    assert "chain 0 6" in (told := capsys.readouterr().out)
    assert "torch.Size([2, 2, 61])" in told


@contextmanager
def _adapted(checkpoint: Checkpoint | None, model: nn.Module) -> Iterator[None]:
    if checkpoint is None:
        yield
    else:
        with checkpoint.adapted(model):
            yield


def _everything(model: Any) -> tuple[Any, ...]:
    hooks = {name: dict(value) for name, value in vars(model).items() if "hook" in name and isinstance(value, dict)}
    return (
        copy.deepcopy(model.config.to_dict()),
        model.config._attn_implementation,
        copy.deepcopy(model.generation_config.to_dict()),
        hooks,
        sorted(vars(model)),
        [(name, module.training) for name, module in model.named_modules()],
        [(name, p.requires_grad, p.dtype, p.data_ptr()) for name, p in model.named_parameters()],
    )


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_model_is_exactly_as_before(error: type[BaseException] | None, implementation: str) -> None:
    model = copy.deepcopy(_reference().model).train()
    model.set_attn_implementation(implementation)
    model.get_input_embeddings().weight.requires_grad_(True)
    ids = _batch(70, 70)[0]
    before, weights = _everything(model), {name: value.clone() for name, value in model.state_dict().items()}
    answer = model.generate(ids, **GREEDY)

    def work() -> None:
        with kvbench.evict(model, "kvpop", budget=64):
            assert model.config._attn_implementation == attention.NAME
            assert not torch.equal(model.state_dict()["model.norm.weight"], weights["model.norm.weight"])
            model.generate(ids, **GREEDY)
            if error is not None:
                raise error

    if error is None:
        work()
    else:
        with pytest.raises(error):
            work()
    assert _everything(model) == before
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert torch.equal(model.generate(ids, **GREEDY), answer)


def test_a_failure_inside_the_model_leaves_it_as_before() -> None:
    model = copy.deepcopy(load().model)
    before = _everything(model)
    handle = model.model.layers[1].mlp.register_forward_pre_hook(_fail)
    with pytest.raises(RuntimeError, match="planted"), kvbench.evict(model, "tova", budget=16):
        model.generate(text(1, 30), **GREEDY)
    handle.remove()
    assert _everything(model) == before


def _fail(module: nn.Module, args: object) -> None:
    raise RuntimeError("planted")


def test_two_models_at_once_and_neither_twice() -> None:
    one, two = load("qwen3").model, load("llama").model
    ids, _ = _batch(40)
    with kvbench.evict(one, "tova", budget=16):
        expected = one.generate(ids, **GREEDY)
    with kvbench.evict(one, "tova", budget=16) as first, kvbench.evict(two, "streaming_llm", budget=20) as second:
        assert torch.equal(one.generate(ids, **GREEDY), expected)
        two.generate(ids, **GREEDY)
        assert [positions.shape[2] for positions in (first.positions[0], second.positions[0])] == [16, 20]
        with pytest.raises(KvbenchError, match="runs under kvbench already"), kvbench.evict(one, "tova", budget=16):
            pass
        assert torch.equal(one.generate(ids, **GREEDY), expected)


# What is refused, each with one sentence.


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"num_beams": 2}, "Beam search is not supported"),
        ({"prompt_lookup_num_tokens": 2}, "Assisted generation is not supported"),
        ({"cache_implementation": "static"}, r"cache of its own \(StaticCache\)"),
        ({"cache_implementation": "offloaded"}, r"cache of its own \(DynamicCache\)"),
        ({CACHE: DynamicCache()}, "generate takes no DynamicCache"),
    ],
)
def test_kinds_of_generation_that_cannot_work(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(KvbenchError, match=sentence), kvbench.evict(load().model, "tova", budget=16):
        load().model.generate(text(1, 30), **{**GREEDY, **arguments})


def test_padding_on_the_right() -> None:
    ids, mask = _batch(30, 20)
    with pytest.raises(KvbenchError, match="Sequence 1 ends with padding"), _under("tova"):
        load().model.generate(ids, attention_mask=mask.flip(1), **GREEDY)


def test_masks_of_other_shapes() -> None:
    with pytest.raises(KvbenchError, match=r"mask of shape \(2, 1, 30, 30\)"), _under("tova"):
        load().model(text(2, 30), attention_mask=torch.zeros(2, 1, 30, 30))


def test_caches_that_do_not_fit_the_call() -> None:
    model = load().model
    with _under("tova"), torch.no_grad():
        first = model(text(2, 30))[CACHE]
        with pytest.raises(KvbenchError, match="holds 2 sequences; a call with 1"):
            model(text(1, 1), **{CACHE: first})
        filled = StaticCache(model.config, max_cache_len=40)
        with pytest.raises(KvbenchError, match="cache of its own"):
            model(text(2, 30), **{CACHE: filled})
    with pytest.raises(KvbenchError, match="only inside the context that made it"), torch.no_grad():
        model(text(2, 1), **{CACHE: first})
    with pytest.raises(KvbenchError, match="belongs to another"), _under("tova"):
        model(text(2, 1), **{CACHE: first})


def test_a_cache_whose_call_failed_is_not_gone_on_with() -> None:
    model = load().model
    with _under("tova"), torch.no_grad():
        first = model(text(1, 30))[CACHE]
        handle = model.model.layers[1].register_forward_pre_hook(_fail)
        with pytest.raises(RuntimeError, match="planted"):
            model(text(1, 1), **{CACHE: first})
        handle.remove()
        with pytest.raises(KvbenchError, match="failed half-way"):
            model(text(1, 1), **{CACHE: first})


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"policy": "tova"}, "needs either budget=SLOTS or cr=RATIO"),
        ({"policy": "tova", "budget": 8, "cr": 0.5}, "needs either budget=SLOTS or cr=RATIO"),
        ({"policy": "tova", "cr": 0.5}, "needs reference_length"),
        ({"policy": "tova", "cr": 1.5, "reference_length": 64}, "outside 0 <= cr < 1"),
        ({"policy": "streaming_llm", "budget": 2}, "at least"),
        ({"policy": "tovo", "budget": 8}, "did you mean 'tova'"),
        ({"policy": "h2o", "budget": 8, "policy_args": {"recant": 1}}, "did you mean 'recent'"),
        ({"policy": "h2o", "budget": 8, "policy_args": {"recent": "half"}}, "not of type float"),
        ({"policy": "kvpop", "budget": 64}, "no checkpoint for model"),
        ({"policy": "tova", "budget": 8, "checkpoint": "x"}, "'tova' is not trained"),
        ({"policy": "kvpop", "budget": 64, "policy_args": {"window": 3}}, "fixed by its checkpoint"),
        ({"policy": "kvpop", "budget": 64, "checkpoint": "nowhere"}, "no checkpoint folder nowhere"),
        (
            {"policy": "kvpop", "budget": 64, "checkpoint": find_checkpoint("kvpop", "ref")},
            r"model with \d+ layers.*but 'Qwen3ForCausalLM' has 2 layers",
        ),
    ],
)
def test_settings_that_do_not_fit(arguments: dict[str, Any], sentence: str) -> None:
    before = _everything(load().model)
    with pytest.raises(KvbenchError, match=sentence), kvbench.evict(load().model, **arguments):
        pass
    assert _everything(load().model) == before


def test_a_policy_without_a_bound_needs_the_length_that_its_share_is_of(tmp_path: Path) -> None:
    geometry = load().geometry
    policy = build_policy(load_registry().policy("dms"), {"window": 4})
    scorers = make_scorers(policy, geometry)
    assert scorers is not None
    Checkpoint(
        "dms", {"window": 4}, "tiny", "a" * 64, geometry, {}, {}, {}, scorer_weights=dict(scorers.state_dict())
    ).save(tmp_path)
    with (
        pytest.raises(KvbenchError, match="keeps a share"),
        kvbench.evict(load().model, "dms", budget=32, checkpoint=tmp_path),
    ):
        pass
    with kvbench.evict(load().model, "dms", budget=32, reference_length=64, checkpoint=tmp_path) as eviction:
        load().model.generate(text(1, 50), **GREEDY)
    assert max(len(head) for layer in _held(eviction, 0) for head in layer) < 50 + NEW - 1


def test_a_scorer_alone_needs_the_weights_that_it_was_trained_for(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    load().model.save_pretrained(folder)
    model = Qwen3ForCausalLM.from_pretrained(folder)
    policy = build_policy(load_registry().policy("kvpop_mlp"), {})
    scorers = make_scorers(policy, load().geometry)
    assert scorers is not None
    for weights_hash, fits in ((hash_files(folder), True), ("a" * 64, False)):
        made = Checkpoint("kvpop_mlp", {}, "model", weights_hash, load().geometry, {}, {}, {}, "float32", "float32")
        replace(made, scorer_weights=dict(scorers.state_dict())).save(tmp_path / "scorer")
        context = kvbench.evict(model, "kvpop_mlp", budget=64, checkpoint=tmp_path / "scorer")
        if fits:
            with context:
                model.generate(_batch(70)[0], **GREEDY)
        else:
            with pytest.raises(KvbenchError, match="but 'model' has weights"), context:
                pass


def test_models_that_cannot_work() -> None:
    small: dict[str, Any] = {
        "d_model": 8,
        "d_ff": 8,
        "d_kv": 4,
        "num_heads": 2,
        "num_layers": 1,
        "vocab_size": VOCABULARY,
    }
    model, configuration = config("qwen3")
    spread = model(configuration)
    spread.model.norm.to("meta")
    compiled = model(configuration)
    compiled._compiled_call_impl = compiled.forward  # what model.compile() sets
    for unfit, sentence in (
        (T5ForConditionalGeneration(T5Config(**small)), "is more than a decoder"),
        (nn.Linear(2, 2), "takes a transformers model, not Linear"),
        (spread, "lies on cpu and meta"),
        (compiled, "is compiled"),
    ):
        with pytest.raises(KvbenchError, match=sentence), kvbench.evict(unfit, "tova", budget=8):
            pass


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_of_a_device_does_not_grow() -> None:
    model = copy.deepcopy(load("llama", positions=4096).model)
    model.to("cuda")
    ids, mask = (tensor.to("cuda") for tensor in _batch(300, 40))
    held = []
    with kvbench.evict(model, "tova", budget=64):
        for count in (10, 600):
            model.generate(ids, attention_mask=mask, **{**GREEDY, "max_new_tokens": count, "min_new_tokens": count})
            torch.cuda.synchronize()
            held.append(torch.cuda.memory_allocated())
    assert held[0] == held[1]
