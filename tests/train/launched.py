"""What the processes that test_processes.py launches do: `launched.py MODEL FOLDER PORT`.

Imports take longer than the trainings, so one process does them and then becomes two, each told by its environment
what torchrun would tell it.
"""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor

from kvbench.cli.main import main
from kvbench.data.lock import Lock
from kvbench.models.checkpoint import build_policy
from kvbench.models.open import open_model
from kvbench.plugins import load_registry
from kvbench.train.loop import Loop
from kvbench.train.recipe import Recipe
from kvbench.train.sources import row_source
from kvbench.train.trainer import Trainer

# The last of three rows a step has no partner: one process stands still for it.
RECIPE = Recipe(
    steps=4,
    tokens=520,
    levels={128: 1.0},
    crs=("0.5",),
    tasks=("codebook", "recurrence"),
    policy={"window": 8, "sinks": 2},
    warmup=2,
    boundary_queries=16,
    boundary_future=16,
    eval_every=2,
    eval_rows=3,
    save_every=2,
)

TOML = """
steps = 4
tokens = 520
crs = ["0.5"]
tasks = ["codebook", "recurrence"]
warmup = 2
boundary_queries = 16
boundary_future = 16
eval_every = 2
eval_rows = 3
save_every = 2
[levels]
128 = 1
[policy]
window = 8
sinks = 2
"""


def trainer(model: str, name: str, recipe: Recipe, out: Path) -> Trainer:
    """A training of a policy by name."""
    loaded = open_model(model, load_registry(), torch.device("cpu"), torch.float32)
    policy = build_policy(load_registry().policy(name), recipe.policy)
    return Trainer(loaded, policy, recipe, row_source(recipe, loaded.tokenizer, Lock(out), 0), out)


def sharded() -> Recipe:
    """The same training, sharded, with layers computed twice and two micro-batches a process."""
    return replace(RECIPE, checkpointing=True, accumulation=2, trainer={"fsdp": True})


def shard_on_cpus() -> None:
    """accelerate shards models on accelerators only; here it is told that these processes have some."""
    plain = Loop.create_accelerator_and_postprocess

    def patched(self: Loop) -> None:
        plain(self)
        if self.args.fsdp:
            state = self.accelerator.state
            state.distributed_type = DistributedType.FSDP
            state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
            self.is_fsdp_enabled = True

    setattr(Loop, "create_accelerator_and_postprocess", patched)  # noqa: B010 - in these processes only


def run(model: str, folder: Path) -> None:
    """One training of each kind."""
    recipe = folder / "recipe.toml"
    line = ["train", "--policy", "kvpop_mlp", "--model", model, "--recipe", str(recipe)]
    assert main([*line, "--out", str(folder / "replicated"), "--device", "cpu"]) == 0
    shard_on_cpus()
    killed = trainer(model, "dms", sharded(), folder / "sharded")
    assert killed.train(stop_after=3) is None
    assert all(isinstance(parameter, DTensor) for parameter in killed.wrapped.parameters())
    assert trainer(model, "dms", sharded(), folder / "sharded").train() is not None


def become(rank: int, model: str, folder: Path, port: str) -> None:
    """The life of one process."""
    os.environ.update(
        WORLD_SIZE="2",
        LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=port,
        RANK=str(rank),
        LOCAL_RANK=str(rank),
    )
    told = os.open(folder / f"told-{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(told, 1)
    os.dup2(told, 2)
    try:
        run(model, folder)
    except BaseException:  # noqa: BLE001 - whatever it is, the other process must not be left waiting in silence
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    children = []
    for rank in range(2):
        if not (child := os.fork()):
            become(rank, sys.argv[1], Path(sys.argv[2]), sys.argv[3])
        children.append(child)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
