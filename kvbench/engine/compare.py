"""The decode step by kernels held to the plain one: where it first runs, in tests, and before it is timed.

Kernels are compiled on the machine that runs them, from what its versions of torch and Triton make of them. A wrong one would
evaluate quietly.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvbench.core.errors import KvbenchError
from kvbench.core.policy import Split
from kvbench.engine.layer import Layer, Step
from kvbench.engine.run import Setting, decode, prefill

_STEPS = 2

_LONG = 45
"""Long-range slots of what is compared: no power of two."""

_OFF = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Root mean square of a difference over that of what is compared, at most, by the number type of the model."""

_DEEP = 4
"""Through a whole model, rounding grows by so much; what is wrong is off by about as much as it is large."""

_SAME_SETS = 0.95
"""Share of layers, rows, heads and steps that drop the same token, at least: the last bits of a score may decide otherwise."""


def compare(setting: Setting, rows: int) -> None:
    """Steps from the same state by kernels and plainly, layer by layer and through the model, on random tokens.

    Rows of two lengths stand side by side, one full and one that is not; a single row is full, and then, for the model, is not.
    The budget is a small one of the policy's.

    Args:
        setting: with kernels.
        rows: sequences side by side.

    Raises:
        KvbenchError: they differ.
    """
    policy, loaded = setting.policy, setting.loaded
    split = Split(slots=2 * _LONG, sinks=0, window=1)
    if policy.evicts:
        split = policy.split(policy.smallest_budget(loaded.geometry) + _LONG, loaded.geometry)
    sizes = [2 * split.slots if policy.evicts else _LONG, 2 + split.window // 2]
    small = replace(setting, split=split, longest=max(sizes) + _STEPS + 1, kernels=False)
    same = _compare_steps(setting, small, rows, sizes)
    share = float(torch.stack(same).double().mean())
    if share < _SAME_SETS:
        raise KvbenchError(f"The decode kernels drop other tokens than the plain path in {1 - share:.0%} of heads.")
    if rows == 1:
        # Layers are not compared again: of empty slots a state may say what it likes.
        _compare_steps(setting, small, rows, sizes[::-1], by_layer=False)


def _compare_steps(
    setting: Setting, small: Setting, rows: int, sizes: list[int], by_layer: bool = True
) -> list[Tensor]:
    """Of each layer and step, which rows and heads [R, H] drop the same token."""
    loaded = setting.loaded
    random = torch.Generator(loaded.device).manual_seed(0)
    plain, lengths = _read(small, rows, sizes, random)
    fast = replace(small, kernels=True).layers(rows, torch.arange(rows, device=loaded.device))
    same = []
    for _ in range(_STEPS):
        step = Step(lengths, int(lengths.min()) + 1, int(lengths.max()) + 1)
        before = [[tensor.clone() for tensor in layer.tensors()] for layer in plain]
        for mine, theirs, held in zip(fast, plain, before, strict=True):
            _restore(mine, held)
            if by_layer:
                same.append(_compare_layer(mine, theirs, step, loaded.geometry.query_heads, random))
                _restore(mine, held)
                _restore(theirs, held)
        ids = torch.randint(_vocabulary(small), (rows,), device=loaded.device, generator=random)
        segments = setting.segments
        found = decode(loaded, fast, ids, step) if segments is None else segments.decode(fast, ids, step)
        wanted = decode(loaded, plain, ids, step)
        # A token dropped otherwise changes all that follows; a row in which nothing can be dropped is always among them.
        at = torch.stack([_same_sets(*pair).all(-1) for pair in zip(fast, plain, strict=True)]).all(0)
        _hold("logits", found[at], wanted[at], _DEEP * _OFF[loaded.dtype])
        lengths = lengths + 1
    return same


def _read(setting: Setting, rows: int, sizes: list[int], random: torch.Generator) -> tuple[list[Layer], Tensor]:
    """Layers whose rows have read random prompts of these sizes in turn, and their lengths [R]."""
    device = setting.loaded.device
    layers = setting.layers(rows, torch.arange(rows, device=device))
    lengths = torch.zeros(rows, dtype=torch.int64, device=device)
    for turn, size in enumerate(sizes):
        one = setting.layers(1, torch.zeros(1, dtype=torch.int64, device=device))
        prefill(setting, one, torch.randint(_vocabulary(setting), (1, size), device=device, generator=random))
        lengths[turn :: len(sizes)] = size
        for layer, read in zip(layers, one, strict=True):
            for mine, theirs in zip(layer.tensors(), read.tensors(), strict=True):
                mine[turn :: len(sizes)] = theirs
    return layers, lengths


def _compare_layer(mine: Layer, theirs: Layer, step: Step, query_heads: int, random: torch.Generator) -> Tensor:
    """One step of two layers in the same state; which rows and heads [R, H] drop the same token."""
    slots = theirs.slots
    rows, heads, _, dim = slots.keys.shape

    def drawn(count: int) -> Tensor:
        return torch.randn(rows, count, 1, dim, device=slots.keys.device, generator=random).to(slots.keys.dtype)

    given = drawn(query_heads), drawn(heads), drawn(heads)
    found, wanted = (layer.decode(*given, dim**-0.5, step) for layer in (mine, theirs))
    same = _same_sets(mine, theirs)
    group = query_heads // heads
    at = same.repeat_interleave(group, 1)
    noise = _OFF[slots.keys.dtype]
    _hold("attention", found[at], wanted[at], noise)
    for name, one, other in zip(
        ("keys", "values", "positions", "priority", "recent"), mine.slots.tensors(), slots.tensors(), strict=True
    ):
        if name == "priority":
            _hold(name, one[same], other[same], noise)
        elif not torch.equal(one[same], other[same]):
            raise KvbenchError(f"The decode kernels write other {name} than the plain path.")
    for one, other in zip(mine.state.tensors(), theirs.state.tensors(), strict=True):
        _hold("state", one, other, noise)
    return same


def _same_sets(mine: Layer, theirs: Layer) -> Tensor:
    """Which rows and heads [R, H] hold the same tokens in the same slots."""
    return (mine.slots.positions == theirs.slots.positions).all(-1)


def _hold(what: str, found: Tensor, wanted: Tensor, noise: float) -> None:
    """Refuses what is off by more than rounding; infinities have to agree."""
    found, wanted = found.double(), wanted.double()
    finite = wanted.isfinite()
    size = wanted[finite].square().mean().sqrt().clamp(min=1e-9)
    off = (found[finite] - wanted[finite]).square().mean().sqrt() / size
    if not torch.equal(found[~finite], wanted[~finite]) or (bool(finite.any()) and not float(off) <= noise):
        raise KvbenchError(f"The decode kernels are wrong on {found.device}: {what} is off by {float(off):.2g}.")


def _vocabulary(setting: Setting) -> int:
    size: int = setting.loaded.model.config.vocab_size
    return size


def _restore(layer: Layer, held: list[Tensor]) -> None:
    for tensor, before in zip(layer.tensors(), held, strict=True):
        tensor.copy_(before)
