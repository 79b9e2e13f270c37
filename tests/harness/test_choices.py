from __future__ import annotations

from pathlib import Path

import pytest

from kvbench.core.errors import KvbenchError
from kvbench.harness.choices import choose, make_policy
from kvbench.harness.options import RunOptions, check
from kvbench.models.source import LoadedModel
from kvbench.plugins import load_registry

REGISTRY = load_registry()


def test_arguments_are_of_the_parameters_type() -> None:
    policy, args = make_policy(REGISTRY.policy("streaming_llm"), (("sinks", "8"), ("window", "2")))
    assert policy == type(policy)(sinks=8)  # type: ignore[call-arg]  # known to be StreamingLLM
    assert args == (("sinks", "8"),)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("sinks=many",), "sinks=many of policy 'streaming_llm' is not of type int"),
        (("sink=4",), "no policy argument named 'sink'; did you mean 'sinks'"),
    ],
)
def test_wrong_arguments(loaded: LoadedModel, arguments: tuple[str, ...], sentence: str) -> None:
    options = RunOptions(policies=("streaming_llm",), crs=("0.5",), policy_args=arguments)
    with pytest.raises(KvbenchError, match=sentence):
        choose(check(options, REGISTRY), loaded, REGISTRY)


def test_a_learned_policy_without_checkpoint_says_how_to_get_one(loaded: LoadedModel) -> None:
    options = RunOptions(policies=("kvpop",), crs=("0.5",))
    with pytest.raises(KvbenchError, match=r"no checkpoint for model 'tiny'; train one .*kvbench train.*--checkpoint"):
        choose(check(options, REGISTRY), loaded, REGISTRY)


def test_all_leaves_it_out_and_says_so(loaded: LoadedModel) -> None:
    choices = choose(check(RunOptions(policies=("all",), crs=("0.5",)), REGISTRY), loaded, REGISTRY)
    assert not any(choice.policy.learned for choice in choices.policies)
    assert any("'kvpop' has no checkpoint" in sentence for sentence in choices.left_out)


def test_a_missing_checkpoint_folder(loaded: LoadedModel, tmp_path: Path) -> None:
    for options in (
        RunOptions(policies=("kvpop",), crs=("0.5",), checkpoints=(tmp_path / "nix",)),
        RunOptions(policies=("tova",), crs=("0.5",), adapted_lm=tmp_path / "nix"),
    ):
        with pytest.raises(KvbenchError, match="no checkpoint folder"):
            choose(check(options, REGISTRY), loaded, REGISTRY)
