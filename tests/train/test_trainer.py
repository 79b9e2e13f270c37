from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvbench.core.errors import KvbenchError
from kvbench.core.policy import LearnedPolicy
from kvbench.data.lock import Lock
from kvbench.models.checkpoint import ADAPTED_LM, MANIFEST, Checkpoint, build_policy
from kvbench.models.checkpoint import SCORER as SCORER_FILE
from kvbench.models.source import LoadedModel
from kvbench.plugins import load_registry
from kvbench.train.attached import SCORER, is_scorer
from kvbench.train.recipe import Recipe
from kvbench.train.resume import CONFIGURATION, LOG, STATE
from kvbench.train.sources import row_source
from kvbench.train.teacher import Teacher
from kvbench.train.trainer import Trainer
from kvbench_policies.dms.policy import Dms

Make = Callable[[], LoadedModel]


def _policy(name: str, recipe: Recipe) -> LearnedPolicy:
    default = build_policy(load_registry().policy(name), {})
    return dataclasses.replace(default, **recipe.policy)


def _trainer(loaded: LoadedModel, recipe: Recipe, out: Path, name: str = "kvpop_mlp", **more: Any) -> Trainer:
    rows = row_source(recipe, loaded.tokenizer, Lock(out), more.pop("seed", 0))
    return Trainer(loaded, _policy(name, recipe), recipe, rows, out, **more)


def _log(out: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (out / LOG).read_text().splitlines()]
    # Speed is the one thing that may differ between equal runs.
    return [{name: value for name, value in record.items() if name != "tokens_per_s"} for record in records]


def _same_weights(one: Checkpoint, other: Checkpoint) -> bool:
    for mine, theirs in ((one.lm_weights, other.lm_weights), (one.scorer_weights, other.scorer_weights)):
        assert mine is not None
        assert theirs is not None
        if not all(torch.equal(mine[name], theirs[name]) for name in mine):
            return False
    return True


def test_same_seed_same_curve_another_seed_another(make_tiny: Make, short: Recipe, tmp_path: Path) -> None:
    runs = {}
    for name, seed in (("first", 0), ("second", 0), ("third", 1)):
        checkpoint = _trainer(make_tiny(), short, tmp_path / name, seed=seed).train()
        assert checkpoint is not None
        runs[name] = checkpoint
    assert _log(tmp_path / "first") == _log(tmp_path / "second")
    assert runs["first"].hash == runs["second"].hash
    assert not _same_weights(runs["first"], runs["third"])


@pytest.mark.parametrize("name", ["kvpop", "kvpop_mlp", "streaming_llm_plus", "dms"])
def test_a_killed_run_goes_on_as_if_it_had_not_been(make_tiny: Make, short: Recipe, tmp_path: Path, name: str) -> None:
    whole = _trainer(make_tiny(), short, tmp_path / "whole", name).train()
    # Step 3 is done but not saved when the run ends: it is done again.
    assert _trainer(make_tiny(), short, tmp_path / "killed", name).train(stop_after=3) is None
    with (tmp_path / "killed" / LOG).open("a") as log:
        log.write('{"step": 3, "kl": 0.')
    # The kill came while the next state was written: that file has another name until it is whole.
    state = (tmp_path / "killed" / STATE).read_bytes()
    (tmp_path / "killed" / f".{STATE}.tmp").write_bytes(state[: len(state) // 2])
    resumed = _trainer(make_tiny(), short, tmp_path / "killed", name)
    assert (tmp_path / "killed" / STATE).exists()
    again = resumed.train()
    assert whole is not None
    assert again is not None
    assert _log(tmp_path / "whole") == _log(tmp_path / "killed")
    assert whole.hash == again.hash
    left = {path.name for path in (tmp_path / "killed").iterdir()}
    assert left <= {LOG, CONFIGURATION, MANIFEST, SCORER_FILE, ADAPTED_LM}


def test_distillation_brings_the_lm_back_to_the_teacher(make_tiny: Make, short: Recipe, tmp_path: Path) -> None:
    recipe = replace(short, steps=40, lm_lr=2e-4, tokens=600)
    trainer = _trainer(make_tiny(), recipe, tmp_path / "out", "streaming_llm_plus")
    before = trainer.evaluate()
    checkpoint = trainer.train()
    after = trainer.evaluate()
    assert checkpoint is not None
    assert after["kl"] < 0.7 * before["kl"]
    # The control has no scorer; its recency is compared with the teacher's sets all the same.
    assert after["boundary"] is None
    assert 0 < after["recall"] < 1
    assert checkpoint.scorer_weights is None
    assert {name: checkpoint.training[name] for name in after} == after


@pytest.mark.parametrize("name", ["kvpop", "kvpop_linear", "kvpop_mlp"])
def test_the_boundary_loss_brings_the_scorer_to_the_teachers_sets(
    make_tiny: Make, short: Recipe, tmp_path: Path, name: str
) -> None:
    recipe = replace(short, steps=40, lm_lr=0.0, weight_decay=0.0, scorer_lr=1e-2, tokens=600)
    trainer = _trainer(make_tiny(), recipe, tmp_path / "out", name)
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["boundary"] < 0.8 * before["boundary"]
    assert after["recall"] > before["recall"] + 0.05
    assert after["mass"] > before["mass"]


def test_gates_come_to_keep_the_budgets_share(make_tiny: Make, short: Recipe, tmp_path: Path) -> None:
    recipe = replace(short, steps=40, scorer_lr=1e-2, tokens=600, ramp=0.5)
    trainer = _trainer(make_tiny(), recipe, tmp_path / "out", "dms")
    checkpoint = trainer.train()
    assert checkpoint is not None
    log = [record for record in _log(tmp_path / "out") if "evaluation" not in record]
    # The share of closed gates follows the ramp, which ends at the budget's.
    wanted = [1 - (round(150 * (1 - cr)) - 10) / (150 - 10) for cr in (0.5, 0.6)]
    assert log[0]["closed"] < 0.2
    late = [record["closed"] for record in log[-8:]]
    assert min(wanted) - 0.1 < sum(late) / len(late) < max(wanted) + 0.1
    # After calibration so does that of the decisions themselves, on rows that were not trained on.
    assert isinstance(trainer.policy, Dms)
    assert len(trainer.policy.shifts) == 2
    for cr, share in zip(("1/2", "3/5"), wanted, strict=True):
        assert trainer.evaluate()["by_cr"][cr]["closed"] == pytest.approx(share, abs=0.02)
    assert checkpoint.policy() == trainer.policy
    assert "boundary" not in log[0]


@pytest.mark.parametrize("name", ["kvpop", "kvpop_linear", "streaming_llm_plus", "dms"])
def test_bf16_trains_and_measures(make_tiny: Make, short: Recipe, tmp_path: Path, name: str) -> None:
    recipe = replace(short, precision="bf16", steps=3, eval_every=2)
    assert _trainer(make_tiny(), recipe, tmp_path / "out", name).train() is not None
    assert all(math.isfinite(line["kl"]) for line in _log(tmp_path / "out") if "kl" in line)


def test_a_frozen_lm_stays_and_only_scorers_are_stored(make_tiny: Make, short: Recipe, tmp_path: Path) -> None:
    recipe = replace(short, freeze_lm=True, scorer_lr=1e-2)
    trainer = _trainer(make_tiny(), recipe, tmp_path / "out", "kvpop_mlp")
    before = {name: value.clone() for name, value in trainer.student.named_parameters()}
    checkpoint = trainer.train()
    assert checkpoint is not None
    assert checkpoint.lm_weights is None
    assert checkpoint.scorer_weights is not None
    for name, value in trainer.student.named_parameters():
        assert torch.equal(value, before[name]) != is_scorer(name) or "bias" in name
    assert "lm_norm" not in _log(tmp_path / "out")[0]
    with pytest.raises(KvbenchError, match="with a frozen LM there is nothing to train"):
        _trainer(make_tiny(), recipe, tmp_path / "other", "streaming_llm_plus")


def test_layers_computed_twice_train_the_same(make_tiny: Make, short: Recipe, tmp_path: Path) -> None:
    for name, checkpointing in (("once", False), ("twice", True)):
        _trainer(make_tiny(), replace(short, checkpointing=checkpointing), tmp_path / name, "kvpop").train()
    for one, two in zip(_log(tmp_path / "once"), _log(tmp_path / "twice"), strict=True):
        for key, value in one.items():
            assert two[key] == (pytest.approx(value, abs=1e-4) if isinstance(value, float) else two[key])


def test_a_training_from_what_the_teacher_said_is_the_same(
    make_tiny: Make, short: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _trainer(make_tiny(), short, tmp_path / "asked").train()
    first = _trainer(make_tiny(), short, tmp_path / "read", teacher_cache=tmp_path / "cache")
    assert first.precompute() == short.steps
    monkeypatch.setattr(Teacher, "_ask", None)
    again = _trainer(make_tiny(), short, tmp_path / "read", teacher_cache=tmp_path / "cache").train()
    assert again is not None
    assert again.hash == Checkpoint.load(tmp_path / "asked").hash
    assert _log(tmp_path / "asked") == _log(tmp_path / "read")


def test_transformers_own_arguments(make_tiny: Make, short: Recipe, tmp_path: Path) -> None:
    _trainer(make_tiny(), replace(short, trainer={"report_to": "none"}), tmp_path / "out")
    for arguments, sentence in (
        ({"max_steps": 3}, "'trainer.max_steps' is kvbench's own"),
        ({"colour": "red"}, "'trainer' does not fit transformers: .*colour"),
        ({"fsdp": True}, "which takes several processes: launch it with 'torchrun"),
    ):
        with pytest.raises(KvbenchError, match=sentence):
            _trainer(make_tiny(), replace(short, trainer=arguments), tmp_path / "other")


def test_the_model_that_was_given_is_left_alone(make_tiny: Make, short: Recipe, tmp_path: Path) -> None:
    loaded, untouched = make_tiny(), make_tiny()
    _trainer(loaded, short, tmp_path / "out").train()
    pairs = zip(loaded.model.parameters(), untouched.model.parameters(), strict=True)
    assert all(torch.equal(mine, fresh) for mine, fresh in pairs)
    assert loaded.model.config._attn_implementation == untouched.model.config._attn_implementation


def test_the_checkpoint_runs_as_it_was_trained(make_tiny: Make, short: Recipe, tmp_path: Path) -> None:
    loaded = make_tiny()
    trainer = _trainer(loaded, short, tmp_path / "out", "kvpop")
    checkpoint = trainer.train()
    assert checkpoint is not None
    checkpoint.require(loaded, "kvpop")
    assert checkpoint.policy() == _policy("kvpop", short)
    assert checkpoint.trained_budgets == {"crs": ["0.5", "0.6"], "reference_lengths": {"128": 150}}
    scorers = checkpoint.scorers(loaded.geometry)
    assert scorers is not None
    student = dict(trainer.student.named_parameters())
    for name, stored in scorers.named_parameters():
        layer, _, rest = name.partition(".")
        assert torch.equal(student.pop(f"model.layers.{layer}.self_attn.{SCORER}.{rest}"), stored)
    with checkpoint.adapted(loaded.model):
        used = dict(loaded.model.named_parameters())
        assert used.keys() == student.keys()
        for name, mine in student.items():
            assert torch.equal(mine.bfloat16(), used[name].bfloat16())


def test_a_finished_folder_is_read_not_trained(make_tiny: Make, short: Recipe, tmp_path: Path) -> None:
    first = _trainer(make_tiny(), short, tmp_path / "out").train()
    log = (tmp_path / "out" / LOG).read_bytes()
    trainer = _trainer(make_tiny(), short, tmp_path / "out")
    assert trainer.finished
    again = trainer.train()
    assert first is not None
    assert again is not None
    assert first.hash == again.hash
    assert (tmp_path / "out" / LOG).read_bytes() == log


def test_a_folder_is_never_mixed(make_tiny: Make, short: Recipe, tmp_path: Path) -> None:
    _trainer(make_tiny(), short, tmp_path / "out").train(stop_after=3)
    with pytest.raises(KvbenchError, match=r"another configuration \(recipe.lm_lr: 0.001 there, 0.002 here\)"):
        _trainer(make_tiny(), replace(short, lm_lr=2e-3), tmp_path / "out")
    with pytest.raises(KvbenchError, match=r"seed: 0 there, 5 here"):
        _trainer(make_tiny(), short, tmp_path / "out", seed=5)
    other = _trainer(make_tiny(), short, tmp_path / "out", seed=5, resume=False)
    assert not (tmp_path / "out" / STATE).exists()
    assert other.train() is not None


def test_a_folder_with_something_else_is_refused(make_tiny: Make, short: Recipe, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("do not lose me")
    for resume in (True, False):
        with pytest.raises(KvbenchError, match="is not empty and holds no training"):
            _trainer(make_tiny(), short, tmp_path / "out", resume=resume)
    assert (tmp_path / "out" / "thesis.tex").exists()


def test_a_folder_that_cannot_be_written(make_tiny: Make, short: Recipe, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KvbenchError, match=r"Cannot write to the folder .*file/out"):
        _trainer(make_tiny(), short, tmp_path / "file" / "out")


def test_a_damaged_state_is_named(make_tiny: Make, short: Recipe, tmp_path: Path) -> None:
    _trainer(make_tiny(), short, tmp_path / "out").train(stop_after=3)
    (tmp_path / "out" / STATE).write_bytes(b"not tensors")
    with pytest.raises(KvbenchError, match=r"resume.safetensors is damaged .*start afresh with --no-resume"):
        _trainer(make_tiny(), short, tmp_path / "out").train()


def test_rows_too_short_for_the_ratio(make_tiny: Make, short: Recipe, tmp_path: Path) -> None:
    recipe = replace(short, crs=("0.5", "31/32"))
    with pytest.raises(KvbenchError, match=r"Rows of level 128 are too short to train ratio 31/32: they leave 5 slots"):
        _trainer(make_tiny(), recipe, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_rows_too_short_for_anything_to_be_taught(make_tiny: Make, short: Recipe, tmp_path: Path) -> None:
    for recipe in (replace(short, boundary_future=80), replace(short, boundary_future=140, boundary_slots=8)):
        with pytest.raises(
            KvbenchError, match=r"at most 150 tokens are too short to train ratio 0.5: the first decision"
        ):
            _trainer(make_tiny(), recipe, tmp_path / "out")
    _trainer(make_tiny(), recipe, tmp_path / "out", "streaming_llm_plus")


def test_rows_longer_than_the_model(make_tiny: Make, short: Recipe, tmp_path: Path) -> None:
    with pytest.raises(KvbenchError, match=r"Rows of level 128 have up to 150 tokens, but model 'tiny' supports 100"):
        _trainer(replace(make_tiny(), max_positions=100), short, tmp_path / "out")


def test_a_loss_that_is_not_finite_ends_the_training(make_tiny: Make, short: Recipe, tmp_path: Path) -> None:
    loaded = make_tiny()
    with torch.no_grad():
        loaded.model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(KvbenchError, match="The loss at step 0 is not a finite number"):
        _trainer(loaded, short, tmp_path / "out").train()
