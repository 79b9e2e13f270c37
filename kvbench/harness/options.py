"""What somebody asked for, checked as far as that needs neither torch nor a model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Final, Self, TypeVar

from kvbench.core.budget import parse_cr
from kvbench.core.errors import KvbenchError, canonical
from kvbench.harness.suite import Suite, load_suite
from kvbench.plugins import Registry

ALL: Final = "all"
LM_EVAL: Final = "lm_eval:"
"""Before the name of a task of lm-eval."""

DEFAULT_GEN_LEN: Final = 1024
DEFAULT_LIMIT: Final = 32
DTYPES: Final = ("auto", "float32", "bfloat16")
DEVICES: Final = ("auto", "cpu", "cuda")
DECODE_PATHS: Final = ("auto", "plain", "graph", "kernels")

T = TypeVar("T", int, float)
V = TypeVar("V", int, str)

_DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Shard:
    """The `index`-th of `count` parts of a grid, counted from 1; cells are dealt by their keys."""

    index: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `i/n`.

        Raises:
            KvbenchError: it is not that.
        """
        match = re.fullmatch(r"(\d+)/(\d+)", text.strip())
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise KvbenchError(f"The shard '{text}' is not i/n with 1 <= i <= n; the first of four is 1/4.")
        return cls(int(match[1]), int(match[2]))

    def holds(self, key: str) -> bool:
        """Whether the cell with this key belongs to the shard."""
        return int(key, 16) % self.count == self.index - 1


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The command line of `kvbench run`, or the arguments of `kvbench.run`; None and () stand for the default.

    Attributes:
        policies: names; `all` for every registered one.
        crs: compression ratios as written; or `budgets`: slots per layer and KV head.
        tasks: names; by default the registered ones that say so.
        data: `TASK=PATH`: a local copy of the data set of a task.
        gen_lens: generation caps in tokens.
        model: a registered name, a local folder, or a hub name.
        limit: problems a task.
        samples: completions a problem.
        seeds: one row each.
        suite: name or path of a TOML file whose values hold where nothing else is given.
        reference_length: tokens that the dense cache is taken to hold.
        policy_args: `name=value`.
        checkpoints: folders of learned policies; the shipped ones otherwise.
        adapted_lm: folder of a checkpoint whose LM every policy runs on.
        dense: run the dense twin of every cell.
        dense_adapted: also run the dense model on each LM that a policy brings.
        out: folder of the rows.
        shard: which part of the grid.
        device, dtype, rows, decode_path: `auto` or a value.
        threads: CPU threads; torch's choice by default.
        processes: that measure cells side by side; `auto` is one a core for small models on a CPU, else one.
        temperature, top_p, top_k: of sampling.
    """

    policies: tuple[str, ...] = ()
    crs: tuple[str, ...] = ()
    budgets: tuple[int, ...] = ()
    tasks: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    gen_lens: tuple[int, ...] = ()
    model: str | None = None
    limit: int | None = None
    samples: int | None = None
    seeds: tuple[int, ...] = ()
    suite: str | None = None
    reference_length: int | None = None
    policy_args: tuple[str, ...] = ()
    checkpoints: tuple[Path, ...] = ()
    adapted_lm: Path | None = None
    dense: bool = True
    dense_adapted: bool | None = None
    out: Path = Path("kvbench-runs")
    shard: str = "1/1"
    device: str = "auto"
    dtype: str = "auto"
    rows: str = "auto"
    decode_path: str = "auto"
    threads: int | None = None
    processes: str = "1"
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


@dataclass(frozen=True)
class Requested:
    """A compression ratio, or a number of slots."""

    cr: Fraction | None = None
    text: str | None = None
    slots: int | None = None


@dataclass(frozen=True, kw_only=True)
class Checked:
    """`RunOptions` with every name known, every number in range and every default filled in.

    Attributes:
        policies, tasks: registered names.
        everything: learned policies without a checkpoint are left out, not an error: `all`, or the suite, says so.
        budgets: what to run the policies at, in the order given.
        data: (task, local copy of its data set).
        lengths: (task, generation cap) of tasks that `gen_lens` does not hold for.
        policy_args: (name, value) sorted by name.
        rows, processes: None for automatic.
    """

    policies: tuple[str, ...]
    everything: bool
    budgets: tuple[Requested, ...]
    tasks: tuple[str, ...]
    data: tuple[tuple[str, str], ...]
    gen_lens: tuple[int, ...]
    lengths: tuple[tuple[str, int], ...]
    model: str
    limit: int
    samples: int
    seeds: tuple[int, ...]
    reference_length: int | None
    policy_args: tuple[tuple[str, str], ...]
    checkpoints: tuple[Path, ...]
    adapted_lm: Path | None
    dense: bool
    dense_adapted: bool
    out: Path
    shard: Shard
    device: str
    dtype: str
    rows: int | None
    decode_path: str
    threads: int | None
    processes: int | None
    temperature: float
    top_p: float
    top_k: int


def check(options: RunOptions, registry: Registry) -> Checked:
    """Refuse what cannot be meant, fill in the suite's values and the defaults.

    Raises:
        KvbenchError: one sentence about the first thing that is wrong.
    """
    if options.crs and options.budgets:
        raise KvbenchError(
            "Both --cr and --budget were given; a ratio and a number of slots are two ways to say one thing."
        )
    suite = load_suite(options.suite) if options.suite is not None else Suite()
    policies, everything = _policies(options.policies or suite.policies, registry)
    budgets = _budgets(options, suite)
    if not budgets and policies != ("full",):
        raise KvbenchError("There is no budget; give --cr (0.88 removes 88 % of the cache) or --budget (slots).")
    tasks = _tasks(options.tasks or suite.tasks, registry)
    return Checked(
        policies=policies,
        everything=everything or (not options.policies and bool(suite.leave_out_untrained)),
        budgets=budgets,
        tasks=tasks,
        data=_data(options.data, suite, tasks, registry),
        gen_lens=_all_at_least("--gen-len", options.gen_lens or suite.gen_lens or (DEFAULT_GEN_LEN,), 1),
        lengths=() if options.gen_lens else _lengths(suite, tasks, registry),
        model=options.model or suite.model or "ref",
        limit=_at_least("--limit", _first(options.limit, suite.limit, DEFAULT_LIMIT), 1),
        samples=_at_least("--samples", _first(options.samples, suite.samples, 1), 1),
        seeds=_all_at_least("--seed", options.seeds or suite.seeds or (0,), 0),
        reference_length=_optional(
            "--reference-length",
            suite.reference_length if options.reference_length is None else options.reference_length,
        ),
        policy_args=tuple(sorted(_pairs("policy argument", options.policy_args).items())),
        checkpoints=options.checkpoints or tuple(map(Path, suite.checkpoints)),
        adapted_lm=options.adapted_lm,
        dense=options.dense,
        dense_adapted=bool(suite.dense_adapted if options.dense_adapted is None else options.dense_adapted),
        out=options.out,
        shard=Shard.parse(options.shard),
        device=_one_of("--device", options.device, DEVICES),
        dtype=_one_of("--dtype", _DTYPE_NAMES.get(options.dtype, options.dtype), DTYPES),
        rows=_auto("--rows", options.rows),
        decode_path=_one_of("--decode-path", options.decode_path, DECODE_PATHS),
        threads=_optional("--threads", options.threads),
        processes=_auto("--processes", options.processes),
        temperature=_between("--temperature", _first(options.temperature, suite.temperature, 0.0), 0, 100),
        top_p=_between("--top-p", _first(options.top_p, suite.top_p, 1.0), 0, 1),
        top_k=_at_least("--top-k", _first(options.top_k, suite.top_k, 0), 0),
    )


def _policies(names: Sequence[str], registry: Registry) -> tuple[tuple[str, ...], bool]:
    if not names:
        raise KvbenchError("There is no policy; give --policy NAME ('kvbench list policies' shows them) or --suite.")
    if ALL in names:
        # Every registered policy except those that cannot work without knowing the future.
        known = [name for name, entry in registry.policies.items() if "future" not in entry.needs]
        return tuple(known), True
    return _unique(registry.policy(name).name for name in names), False


def _tasks(names: Sequence[str], registry: Registry) -> tuple[str, ...]:
    if not names or ALL in names:
        return tuple(name for name, entry in registry.tasks.items() if entry.default)
    return _unique(_task(name, registry) for name in names)


def _task(name: str, registry: Registry) -> str:
    prefix, sign, inner = name.strip().partition(":")
    if sign and inner and canonical(prefix) + sign == LM_EVAL:
        return LM_EVAL + inner
    return registry.task(name).name


def _budgets(options: RunOptions, suite: Suite) -> tuple[Requested, ...]:
    if options.budgets or (suite.budgets and not options.crs):
        slots = _all_at_least("--budget", options.budgets or suite.budgets, 1)
        return tuple(Requested(slots=count) for count in slots)
    return tuple(Requested(cr=parse_cr(text), text=text.strip()) for text in options.crs or suite.crs)


def _data(texts: Sequence[str], suite: Suite, tasks: Sequence[str], registry: Registry) -> tuple[tuple[str, str], ...]:
    running = {canonical(name): name for name in tasks}
    copies = _pairs("value of --data", texts)
    given = {running.get(name) or _task(name, registry): path for name, path in copies.items()}
    idle = next((name for name in given if name not in tasks), None)
    if idle is not None:
        raise KvbenchError(f"--data names a copy of '{idle}', but that task does not run; add --task {idle}.")
    known = {_task(name, registry): path for name, path in suite.data}
    return tuple((name, path) for name, path in (known | given).items() if name in tasks)


def _lengths(suite: Suite, tasks: Sequence[str], registry: Registry) -> tuple[tuple[str, int], ...]:
    known = {
        _task(name, registry): _at_least(f"The length of task '{name}'", length, 1) for name, length in suite.lengths
    }
    return tuple((name, length) for name, length in known.items() if name in tasks)


def _pairs(what: str, texts: Sequence[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign or not name.strip() or not value.strip():
            raise KvbenchError(f"The {what} '{text}' is not name=value.")
        pairs[canonical(name)] = value.strip()
    return pairs


def _auto(option: str, text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise KvbenchError(f"{option} is '{text}'; give 'auto' or a number, at least 1.")
    return int(text)


def _one_of(option: str, value: str, known: Sequence[str]) -> str:
    if value not in known:
        raise KvbenchError(f"{option} is '{value}'; it can be {', '.join(known)}.")
    return value


def _optional(option: str, value: int | None) -> int | None:
    return None if value is None else _at_least(option, value, 1)


def _all_at_least(option: str, values: Sequence[int], least: int) -> tuple[int, ...]:
    return _unique(_at_least(option, value, least) for value in values)


def _at_least(option: str, value: int, least: int) -> int:
    if value < least:
        raise KvbenchError(f"{option} is {value}; it has to be at least {least}.")
    return value


def _between(option: str, value: float, least: float, most: float) -> float:
    if not least <= value <= most:
        raise KvbenchError(f"{option} is {value}; it has to lie between {least} and {most}.")
    return value


def _first(given: T | None, suite: T | None, default: T) -> T:
    if given is not None:
        return given
    return default if suite is None else suite


def _unique(values: Iterable[V]) -> tuple[V, ...]:
    return tuple(dict.fromkeys(values))
