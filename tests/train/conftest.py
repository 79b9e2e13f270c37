from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from kvbench.models.source import LoadedModel, geometry_of
from kvbench.train.recipe import Recipe
from kvbench_tasks.vocabulary import VOCABULARY, build_tokenizer


@pytest.fixture(scope="session", autouse=True)
def imported() -> None:
    """transformers collects garbage at every start of a training: what is imported need not be looked at again."""
    gc.freeze()


@pytest.fixture
def make_tiny() -> Callable[[], LoadedModel]:
    def make() -> LoadedModel:
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=len(VOCABULARY),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            # Random weights of the usual size attend to everything alike; larger ones make masks matter.
            initializer_range=0.3,
        )
        return LoadedModel(
            name="tiny",
            model=Qwen3ForCausalLM(config).train(False),
            tokenizer=build_tokenizer(),
            geometry=geometry_of(config),
            weights_hash="0" * 64,
            random=True,
            eos=frozenset({2}),
            max_positions=4096,
            device=torch.device("cpu"),
            dtype=torch.float32,
        )

    return make


@pytest.fixture
def tiny(make_tiny: Callable[[], LoadedModel]) -> LoadedModel:
    return make_tiny()


@pytest.fixture
def short() -> Recipe:
    """Six steps on the shortest problems."""
    return Recipe(
        steps=6,
        tokens=400,
        levels={128: 1.0},
        crs=("0.5", "0.6"),
        tasks=("codebook", "recurrence"),
        policy={"window": 8, "sinks": 2},
        warmup=2,
        boundary_queries=16,
        boundary_future=16,
        boundary_slots=0,
        target_power=1.0,
        eval_every=4,
        eval_rows=2,
        save_every=2,
    )
