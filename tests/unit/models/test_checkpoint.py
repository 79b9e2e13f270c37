from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kvbench.core.errors import KvbenchError
from kvbench.core.policy import Geometry
from kvbench.models import checkpoint as module
from kvbench.models.checkpoint import (
    ADAPTED_LM,
    MANIFEST,
    SCORER,
    Checkpoint,
    build_policy,
    find_checkpoint,
    make_scorers,
    shipped,
)
from kvbench.models.source import LoadedModel
from kvbench.plugins import load_registry

GEOMETRY = Geometry(layers=2, query_heads=4, kv_heads=2, head_dim=8)


class TinyLm(nn.Module):
    """Two parameters, one of them used twice, as tied embeddings are."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(4, 6, bias=False)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.LayerNorm(4)


def _loaded(model: nn.Module, **changes: Any) -> LoadedModel:
    loaded = LoadedModel(
        name="tiny",
        model=model,
        tokenizer=None,
        geometry=GEOMETRY,
        weights_hash="a" * 64,
        random=True,
        eos=frozenset(),
        max_positions=64,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    return replace(loaded, **changes)


def _checkpoint(name: str = "kvpop_mlp", model: nn.Module | None = None) -> Checkpoint:
    policy = build_policy(load_registry().policy(name), {"window": 8, "sinks": 2})
    scorers = make_scorers(policy, GEOMETRY)
    lm = {} if model is None else {key: torch.randn_like(value).bfloat16() for key, value in model.named_parameters()}
    return Checkpoint(
        policy_name=name,
        parameters={"window": 8, "sinks": 2},
        base_model="tiny",
        weights_hash="a" * 64,
        geometry=GEOMETRY,
        trained_budgets={"crs": ["7/8"], "reference_lengths": {"512": 540}},
        recipe={"steps": 3},
        training={"kl": 0.1, "recall": None},
        scorer_weights=None if scorers is None else dict(scorers.state_dict()),
        lm_weights=lm or None,
    )


@pytest.mark.parametrize("name", ["kvpop", "kvpop_mlp", "streaming_llm_plus"])
def test_round_trip(tmp_path: Path, name: str) -> None:
    made = _checkpoint(name, TinyLm())
    saved = made.save(tmp_path / "new" / "folder")
    loaded = Checkpoint.load(tmp_path / "new" / "folder")
    assert loaded.hash == saved.hash
    assert len(loaded.hash) == 64
    kept = {"scorer_weights": None, "lm_weights": None, "hash": ""}
    assert replace(loaded, **kept) == replace(made, **kept)  # type: ignore[arg-type]  # a mixed dictionary
    for mine, stored in ((made.scorer_weights, loaded.scorer_weights), (made.lm_weights, loaded.lm_weights)):
        assert (mine is None) == (stored is None)
        assert all(torch.equal(mine[key], stored[key]) for key in mine or {} if mine and stored)
    policy = loaded.policy()
    assert (policy.name, getattr(policy, "window"), getattr(policy, "sinks")) == (name, 8, 2)  # noqa: B009 - its own field
    scorers = loaded.scorers(GEOMETRY)
    assert (scorers is None) == (name == "streaming_llm_plus")
    if scorers is not None:
        assert len(scorers) == 2
        assert made.scorer_weights is not None
        assert all(torch.equal(made.scorer_weights[key], value) for key, value in scorers.state_dict().items())
        assert not any(parameter.requires_grad for parameter in scorers.parameters())


def test_the_hash_is_of_the_content(tmp_path: Path) -> None:
    made = _checkpoint()
    assert made.save(tmp_path / "one").hash == made.save(tmp_path / "two").hash
    other = replace(made, recipe={"steps": 4}).save(tmp_path / "three")
    assert other.hash != made.save(tmp_path / "one").hash


def test_nothing_is_left_over_of_an_earlier_checkpoint(tmp_path: Path) -> None:
    _checkpoint("kvpop", TinyLm()).save(tmp_path)
    _checkpoint("streaming_llm_plus").save(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {MANIFEST}


def test_adapted_weights_are_swapped_in_place_and_back(tmp_path: Path) -> None:
    model = TinyLm()
    made = _checkpoint(model=model).save(tmp_path)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    address = model.embedding.weight.data_ptr()
    assert made.lm_weights is not None
    with made.adapted(model):
        assert torch.equal(model.norm.weight, made.lm_weights["norm.weight"].float())
        assert model.embedding.weight is model.head.weight
        assert model.embedding.weight.data_ptr() == address
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_model_is_restored_after_an_exception(tmp_path: Path, error: type[BaseException]) -> None:
    model = TinyLm()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    made = _checkpoint(model=model).save(tmp_path)
    with pytest.raises(error), made.adapted(model):
        raise error
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_without_adapted_weights_nothing_happens() -> None:
    model = TinyLm()
    before = model.norm.weight.clone()
    with _checkpoint().adapted(model):
        assert torch.equal(before, model.norm.weight)


def test_adapted_weights_of_another_model_change_nothing() -> None:
    model, wider = TinyLm(), TinyLm()
    wider.norm = nn.LayerNorm(5)
    made = _checkpoint(model=wider)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with (
        pytest.raises(KvbenchError, match=r"'norm.weight' has shape \(5,\), not \(4,\)"),
        made.adapted(model),
    ):
        pass
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def _delete(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _write(name: str, data: bytes) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).write_bytes(data)

    return damage


def _edit(**changes: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        manifest = json.loads((folder / MANIFEST).read_text())
        (folder / MANIFEST).write_text(json.dumps({**manifest, **changes}))

    return damage


def _flip(folder: Path) -> None:
    data = bytearray((folder / SCORER).read_bytes())
    data[-1] ^= 1
    (folder / SCORER).write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (_delete(MANIFEST), f"is not a checkpoint: it has no {MANIFEST}."),
        (_delete(SCORER), "The checkpoint is incomplete: "),
        (_write(MANIFEST, b"{"), "is damaged: it is not JSON."),
        (_write(MANIFEST, b"\xff\xfe"), "is damaged: it is not JSON."),
        (_write(MANIFEST, b"[]"), "is damaged: it is not a JSON object."),
        (_edit(format_version=2), "has format version 2; this kvbench reads version 1."),
        (_edit(surprise=1), "is damaged: its fields are not those of a checkpoint"),
        (_edit(geometry=3), "is damaged: its fields are not those of a checkpoint"),
        (_edit(files=3), "is damaged: its fields are not those of a checkpoint"),
        (_write(SCORER, b"junk"), f"is damaged: its content is not what {MANIFEST} says it is."),
        (_flip, f"is damaged: its content is not what {MANIFEST} says it is."),
    ],
)
def test_a_damaged_folder_is_one_sentence(tmp_path: Path, damage: Callable[[Path], None], sentence: str) -> None:
    _checkpoint(model=TinyLm()).save(tmp_path)
    damage(tmp_path)
    with pytest.raises(KvbenchError) as error:
        Checkpoint.load(tmp_path)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(KvbenchError, match=r"There is no checkpoint folder .*nowhere; train one with 'kvbench train'"):
        Checkpoint.load(tmp_path / "nowhere")


def test_another_model_is_refused() -> None:
    made = _checkpoint()
    made.require(_loaded(TinyLm()), "kvpop-mlp")
    with pytest.raises(KvbenchError, match="for policy 'kvpop_mlp', not for 'kvpop'"):
        made.require(_loaded(TinyLm()), "kvpop")
    with pytest.raises(KvbenchError, match="for model 'tiny' with weights aaaaaaaaaaaa, but 'tiny' has weights bbbb"):
        made.require(_loaded(TinyLm(), weights_hash="b" * 64))
    with pytest.raises(KvbenchError, match="2 layers, 4/2 heads of 8, but 'tiny' has 3 layers, 4/2 heads of 8"):
        made.require(_loaded(TinyLm(), geometry=replace(GEOMETRY, layers=3)))


def test_weights_that_do_not_fit_the_policy() -> None:
    made = _checkpoint()
    assert made.scorer_weights is not None
    with pytest.raises(KvbenchError, match=r"do not fit: '0.inner' has shape \(2, 16, 64\), not \(2, 32, 64\)"):
        made.scorers(replace(GEOMETRY, head_dim=16))
    with pytest.raises(KvbenchError, match=r"do not fit: there is no tensor '2.bias'"):
        made.scorers(replace(GEOMETRY, layers=3))
    extra = {**made.scorer_weights, "9.bias": torch.zeros(1)}
    with pytest.raises(KvbenchError, match=r"do not fit: there is an unexpected tensor '9.bias'"):
        replace(made, scorer_weights=extra).scorers(GEOMETRY)
    with pytest.raises(KvbenchError, match="has no scorer weights, but policy 'kvpop_mlp' needs them"):
        replace(made, scorer_weights=None).scorers(GEOMETRY)
    with pytest.raises(KvbenchError, match="has scorer weights, but policy 'streaming_llm_plus' needs none"):
        replace(made, policy_name="streaming_llm_plus").scorers(GEOMETRY)


def test_wrong_hyper_parameters() -> None:
    with pytest.raises(KvbenchError, match="Policy 'kvpop_mlp' has no parameter 'widnow'; it has "):
        build_policy(load_registry().policy("kvpop_mlp"), {"widnow": 3})
    with pytest.raises(KvbenchError, match="'random' is not a learned policy"):
        build_policy(load_registry().policy("random"), {})


def test_shipped_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "files", lambda package: tmp_path / package)
    assert shipped("kvpop-mlp", "tiny") is None
    with pytest.raises(KvbenchError) as error:
        find_checkpoint("kvpop_mlp", "tiny")
    assert "no checkpoint for model 'tiny'; train one (kvbench train --policy kvpop_mlp --model tiny" in str(
        error.value
    )
    assert "(--checkpoint DIR)" in str(error.value)
    assert find_checkpoint("kvpop_mlp", "tiny", tmp_path / "mine") == tmp_path / "mine"
    folder = tmp_path / "kvbench_policies" / "checkpoints" / "tiny" / "kvpop_mlp"
    _checkpoint().save(folder)
    assert shipped("kvpop-mlp", "tiny") == find_checkpoint("kvpop_mlp", "tiny") == folder
    assert {path.name for path in folder.iterdir()} == {MANIFEST, SCORER}
    assert ADAPTED_LM not in json.loads((folder / MANIFEST).read_text())["files"]
