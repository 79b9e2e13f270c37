"""One optimizer step of the real trainer, three ways: a dense student by SDPA, by causal FlexAttention, and KVpop's student."""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.training.clock import Clock, median_ms, peak_memory
from benchmarks.training.shapes import configuration, random_model
from kvbench.core.budget import Budget
from kvbench.core.policy import LearnedPolicy, Policy
from kvbench.kernels.attention import computed_in, has_kernel
from kvbench.models.checkpoint import build_policy
from kvbench.models.source import geometry_of
from kvbench.plugins import load_registry
from kvbench.train import student
from kvbench.train.attached import is_scorer
from kvbench.train.data import Batch, RowSource
from kvbench.train.loop import Loop
from kvbench.train.portion import Portion
from kvbench.train.recipe import Recipe
from kvbench.train.student import Dense
from kvbench.train.trainer import Trainer

Row = dict[str, Any]

PAPER = "qwen3-4b"
"""The recipe whose settings are used for every shape but `ref`."""


class RandomRows(RowSource):
    """Rows of random tokens, all of them full."""

    def __init__(self, recipe: Recipe, vocabulary: int) -> None:
        super().__init__(recipe, 0)
        self._vocabulary = vocabulary

    def reference_length(self, level: int) -> int:
        return level

    def described(self) -> list[str]:
        return ["random tokens"]

    def _rows(self, level: int, cr: Fraction, rows: int, step: int | None, rng: random.Random) -> Batch:
        generator = torch.Generator().manual_seed(rng.getrandbits(32))
        ids = torch.randint(self._vocabulary, (rows, level), generator=generator)
        lengths = torch.full((rows,), level, dtype=torch.int64)
        return Batch(ids, lengths, level, Budget.from_cr(cr, level), torch.arange(rows))


@dataclass
class Causal:
    """A forward pass of a dense student by FlexAttention."""

    documents: None = None

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        from kvbench.kernels import flex
        from kvbench.kernels.visible import Visible

        query, key, value = computed_in(query, key, value)
        visible = Visible.causal(query.shape[0], query.shape[2], query.device)
        return flex.attend(query, key, value, visible, scale)[0]


def recipe_for(shape: str, length: int, rows: int) -> Recipe:
    """The settings of a training of this shape, cut down to one length, one ratio and random rows."""
    settings: dict[str, Any] = {"levels": {length: 1.0}, "tokens": rows * length, "crs": ["0.75"], "steps": 1000}
    settings |= {"trainer": {}, "data": {}, "accumulation": 1, "tasks": []}
    made = Recipe.load("ref" if shape == "ref" else PAPER).replace(settings)
    if shape == "small":
        small = {"sinks": 2, "window": 8, "features": 8, "values": 8, "hidden": 8, "horizon": length}
        made = made.replace({"policy": small, "boundary_queries": 16, "boundary_future": 16})
    return made


def untrained(name: str) -> Policy:
    """A policy with its default hyper-parameters."""
    made = load_registry().policy(name).load()
    assert isinstance(made, type)
    policy = made()
    assert isinstance(policy, Policy)
    return policy


def policy_for(recipe: Recipe, name: str = "kvpop") -> LearnedPolicy:
    """A learned policy with the recipe's hyper-parameters."""
    entry = load_registry().policy(name)
    known = vars(build_policy(entry, {}))
    made = build_policy(entry, {key: value for key, value in recipe.policy.items() if key in known})
    assert isinstance(made, LearnedPolicy)
    return made


@contextmanager
def fastest_attention(device: torch.device, heads: int, kv_heads: int, length: int, dim: int) -> Iterator[str]:
    """Inside the block SDPA uses the backend that is fastest here, forward and backward; gives its name."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if device.type != "cuda":
        yield "default"
        return
    query = torch.randn(1, heads, length, dim, device=device, dtype=torch.bfloat16, requires_grad=True)
    key, value = (
        torch.randn(1, kv_heads, length, dim, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)
    )

    def call() -> None:
        attend = nn.functional.scaled_dot_product_attention
        attend(query, key, value, is_causal=True, enable_gqa=True).sum().backward()  # type: ignore[no-untyped-call]  # torch's own

    taken: dict[SDPBackend, float] = {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        try:
            with sdpa_kernel(backend), torch.enable_grad():
                taken[backend] = median_ms(call, device, 5)
        except RuntimeError as error:
            print(f"  {backend.name} does not run here: {str(error).splitlines()[0][:120]}", flush=True)
    best = min(taken, key=taken.__getitem__)
    with sdpa_kernel([best, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], set_priority=True):
        yield best.name


class Steps:
    """A training that is set up once, and whose steps are run by hand."""

    def __init__(self, shape: str, length: int, rows: int, device: torch.device, folder: Path, **settings: Any) -> None:
        loaded = random_model(shape, device, torch.float32)
        self.recipe = recipe_for(shape, length, rows).replace(settings)
        source = RandomRows(self.recipe, loaded.model.config.vocab_size)
        self.training = Trainer(loaded, policy_for(self.recipe), self.recipe, source, folder / "run", device=device)
        self.loop: Any = Loop(self.training, None, 0, None)
        self.loop.create_optimizer()
        self.loop.current_gradient_accumulation_steps = 1
        self.device = device
        self.training.student.train()
        # A scorer that has learned nothing ranks by age, which leaves most blocks of keys out. Scattered scores leave none out.
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, weight in self.training.student.named_parameters():
                if is_scorer(name) and name.endswith(".final"):
                    weight.copy_(torch.randn(weight.shape, generator=generator))

    def run(self, kind: str, clock: Clock, number: int) -> float:
        """One step of this kind; the loss."""
        portion = self.training.steps()[number][0]
        # No step whose number is a multiple of ten: those also measure.
        self.loop.state.global_step = 10 * number + 1
        with ExitStack() as stack:
            for part in self._parts(clock):
                stack.enter_context(part)
            with clock.part("step"):
                with clock.part("forward", phase=True):
                    loss = self._loss(kind, portion)
                with clock.part("backward", phase=True):
                    loss.backward()  # type: ignore[no-untyped-call]  # torch's own
                with clock.part("clipping"):
                    if kind == "kvpop":
                        self.loop._clip_grad_norm(self.training.student)
                    else:
                        for group in self.loop.optimizer.param_groups:
                            nn.utils.clip_grad_norm_(group["params"], self.recipe.clip)
                with clock.part("optimizer"):
                    self.loop.optimizer.step()
                    self.loop.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    def _loss(self, kind: str, portion: Portion) -> Tensor:
        if kind == "kvpop":
            loss: Tensor = self.loop.compute_loss(self.training.student, {"portion": portion})
            return loss
        attending: Any = Dense() if kind == "dense" else Causal()
        return self.training.forward(portion, attending)[0]

    def _parts(self, clock: Clock) -> list[Any]:
        parts: list[Any] = [
            mock.patch.object(student, name, clock.timed(label, getattr(student, name)))
            for name, label in (
                ("attention_over", "attention"),
                ("future_target", "target"),
                ("boundary_loss", "boundary loss"),
                ("student_priority", "scorer"),
                ("keep", "cut-off"),
            )
        ]
        parts.append(mock.patch.object(self.training, "teacher", clock.timed("teacher", self.training.teacher)))
        return parts


def measure(
    shape: str,
    length: int,
    rows: int,
    device: torch.device,
    repeats: int,
    kinds: list[str],
    emit: Callable[[Row], None],
) -> None:
    """Emits a row for each kind of step: medians of seconds by part, peak memory, and the ratio to the dense step."""
    sizes = geometry_of(configuration(shape))
    with tempfile.TemporaryDirectory() as folder:
        steps = Steps(shape, length, rows, device, Path(folder))
        with fastest_attention(device, sizes.query_heads, sizes.kv_heads, length, sizes.head_dim) as backend:
            whole: dict[str, float] = {}
            for kind in kinds:
                if kind == "flex" and not has_kernel(torch.empty(0, sizes.head_dim, device=device)):
                    continue
                clock, found, losses = Clock(device), [], []
                for number in range(repeats + 1):
                    if number == 1 and device.type == "cuda":
                        torch.cuda.reset_peak_memory_stats()
                    losses.append(steps.run(kind, clock, number))
                    found.append(clock.seconds())
                kept = found[1:]
                parts = {name: statistics.median(one.get(name, 0.0) for one in kept) for name in kept[0]}
                whole[kind] = parts["step"]
                emit(
                    {
                        "part": "step",
                        "kind": kind,
                        "shape": shape,
                        "length": length,
                        "rows": rows,
                        "sdpa": backend,
                        "first_s": found[0]["step"],
                        "peak_gib": peak_memory(device),
                        "loss": losses[-1],
                        **{f"{name} s": value for name, value in parts.items()},
                        **{f"to {other}": parts["step"] / whole[other] for other in whole if other != kind},
                    }
                )
