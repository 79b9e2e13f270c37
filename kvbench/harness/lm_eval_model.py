"""The model `kvbench` of lm-eval: its requests go through the engine, under any policy. Importing this imports lm-eval.

Log-likelihoods are scored through the evicting cache, so that a policy can change them; a request that fits the budget
cannot tell policies apart, and is counted.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, simple_parse_args_string

from kvbench.core.budget import Budget
from kvbench.engine.generate import Engine
from kvbench.engine.requests import Audit, Request, Sampling, Timing
from kvbench.engine.score import Passage
from kvbench.harness.choices import Choice, choose
from kvbench.harness.options import Requested, RunOptions, check
from kvbench.harness.session import load_model
from kvbench.models.source import LoadedModel
from kvbench.plugins import load_registry

_log = logging.getLogger(__name__)

_CAPS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""What a task may call the generation cap; the first one counts."""


@dataclass(frozen=True)
class Arrangement:
    """A model under a policy.

    Attributes:
        loaded: the model.
        choice: the policy.
        budget: slots, or a ratio of the reference length; None for `full`.
        reference_length: tokens that the dense cache is taken to hold; None: the longest request of a call.
        rows: sequences side by side.
        seed: of sampling and random policies.
    """

    loaded: LoadedModel
    choice: Choice
    budget: Requested | None
    reference_length: int | None
    rows: int
    seed: int


@dataclass(frozen=True)
class Call:
    """What came of all requests of one kind.

    Attributes:
        kind: lm-eval's name of it.
        requests: how many.
        without_eviction: those that fit the budget.
        slots: the budget; None for `full`.
        feeding: how tokens were fed.
        lengths, ended: new tokens of each request, and whether it ended before its cap; of requests to generate.
        audit, timing, peak_memory: of the engine.
    """

    kind: str
    requests: int
    without_eviction: int
    slots: int | None
    feeding: str
    lengths: tuple[int, ...]
    ended: tuple[bool, ...]
    audit: Audit
    timing: Timing
    peak_memory: int | None


@register_model("kvbench")
class KvbenchLM(TemplateLM):  # type: ignore[misc]  # lm-eval is not typed
    """A model under a policy, as lm-eval sees it.

    Attributes:
        calls: what has been computed so far.
    """

    def __init__(self, arrangement: Arrangement, max_gen_toks: int = 256) -> None:
        super().__init__()
        self._at = arrangement
        self._device = arrangement.loaded.device
        self.tokenizer = arrangement.loaded.tokenizer
        self.max_length = arrangement.loaded.max_positions
        self.max_gen_toks = max_gen_toks
        self.calls: list[Call] = []

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> Self:
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> Self:
        """From `--model_args`.

        They are pretrained, policy, cr or budget, reference_length, checkpoint, adapted_lm, dtype, rows, seed, max_gen_toks;
        whatever else there is are arguments of the policy.

        Raises:
            KvbenchError: one of them is wrong.
        """
        given, lm_eval = dict(arg_dict), additional_config or {}
        # lm-eval asks for a GPU unless it is told otherwise.
        device = given.pop("device", "cpu" if lm_eval.get("device") == "cpu" else "auto")
        rows = str(given.pop("rows", lm_eval.get("batch_size") or "auto"))
        max_gen_toks = int(given.pop("max_gen_toks", 256))
        seed = int(given.pop("seed", 0))
        checkpoint, adapted_lm = given.pop("checkpoint", None), given.pop("adapted_lm", None)
        cr, budget, reference = given.pop("cr", None), given.pop("budget", None), given.pop("reference_length", None)
        options = RunOptions(
            model=str(given.pop("pretrained", "ref")),
            policies=(str(given.pop("policy", "full")),),
            crs=() if cr is None else (str(cr),),
            budgets=() if budget is None else (int(budget),),
            reference_length=None if reference is None else int(reference),
            checkpoints=() if checkpoint is None else (Path(checkpoint),),
            adapted_lm=None if adapted_lm is None else Path(adapted_lm),
            dtype=str(given.pop("dtype", "auto")),
            device=str(device).partition(":")[0],
            rows="auto" if rows.startswith("auto") else rows,
            policy_args=tuple(f"{name}={value}" for name, value in given.items()),
        )
        registry = load_registry()
        checked = check(options, registry)
        loaded = load_model(checked, registry)
        (choice,) = choose(checked, loaded, registry).policies
        requested = checked.budgets[0] if choice.policy.evicts else None
        return cls(
            Arrangement(loaded, choice, requested, checked.reference_length, checked.rows or 32, seed), max_gen_toks
        )

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def tokenizer_name(self) -> str:
        return self._at.loaded.name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        bos = self.tokenizer.bos_token
        if add_special_tokens is None and bos and string.startswith(bos):
            add_special_tokens = False
        special = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer(string, **special)["input_ids"])

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval puts into its results file."""
        at = self._at
        return {
            "kvbench": {
                "model": at.loaded.name,
                "weights_hash": at.loaded.weights_hash,
                "dtype": str(at.loaded.dtype).removeprefix("torch."),
                "policy": at.choice.policy.name,
                "policy_args": dict(at.choice.args),
                "cr": at.budget.text if at.budget is not None else None,
                "calls": [
                    {
                        "kind": call.kind,
                        "requests": call.requests,
                        "without_eviction": call.without_eviction,
                        "slots": call.slots,
                        "feeding": call.feeding,
                        "peak": call.audit.peak,
                        "violations": call.audit.violations,
                    }
                    for call in self.calls
                ],
            }
        }

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        pieces: list[tuple[None, list[int], list[int]]] = []
        counts = []
        for request in requests:
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            disjoint = [(None, *make_disjoint_window(window)) for window in windows]
            pieces += disjoint
            counts.append(len(disjoint))
        scores = iter(self._scored("loglikelihood_rolling", pieces))
        return [sum(next(scores)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        arguments = [request.args for request in requests]
        groups: dict[str, list[int]] = {}
        for index, (_, settings) in enumerate(arguments):
            groups.setdefault(json.dumps(settings, sort_keys=True, default=str), []).append(index)
        texts: dict[int, str] = {}
        for members in groups.values():
            prompts = [arguments[index][0] for index in members]
            texts.update(zip(members, self._generated(prompts, arguments[members[0]][1]), strict=True))
        return [texts[index] for index in range(len(requests))]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        return self._scored("loglikelihood", requests)

    def _scored(self, kind: str, requests: Sequence[tuple[Any, list[int], list[int]]]) -> list[tuple[float, bool]]:
        passages = []
        for _, context, continuation in requests:
            tokens = tuple((context + continuation)[-(self.max_length + 1) :])
            # What continues one context is judged on one and the same cache.
            passages.append(Passage(tokens, max(1, len(tokens) - len(continuation)), self._stream(context)))
        reference = self._at.reference_length or max(passage.fed for passage in passages)
        engine, slots = self._engine(reference)
        with self._adapted():
            scoring = engine.score(passages, None, reference)
        self._note(
            Call(
                kind=kind,
                requests=len(passages),
                without_eviction=sum(slots is None or passage.fed <= slots for passage in passages),
                slots=slots,
                feeding=scoring.feeding,
                lengths=(),
                ended=(),
                audit=scoring.audit,
                timing=scoring.timing,
                peak_memory=scoring.peak_memory,
            )
        )
        return [(sum(score.logprobs), all(score.greedy)) for score in scoring.scores]

    def _generated(self, prompts: Sequence[str], settings: dict[str, Any]) -> list[str]:
        until = settings.get("until") or []
        stops = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
        cap = generation_cap(settings, self.max_gen_toks)
        requests = []
        asked: Counter[str] = Counter()
        for prompt in prompts:
            tokens = self.tok_encode(prompt)[-(self.max_length - cap) :] or [self.prefix_token_id]
            requests.append(Request(tuple(tokens), cap, self._stream(tokens, asked[prompt])))
            asked[prompt] += 1
        reference = self._at.reference_length or max(len(request.prompt) for request in requests) + cap
        engine, slots = self._engine(reference)
        with self._adapted():
            generation = engine.generate(requests, _sampling(settings), reference, stop=self._stop(stops))
        fed = [
            len(request.prompt) + len(answer.tokens) - 1
            for request, answer in zip(requests, generation.completions, strict=True)
        ]
        self._note(
            Call(
                kind="generate_until",
                requests=len(requests),
                without_eviction=sum(slots is None or count <= slots for count in fed),
                slots=slots,
                feeding=generation.prefill,
                lengths=tuple(len(answer.tokens) for answer in generation.completions),
                ended=tuple(answer.finish != "length" for answer in generation.completions),
                audit=generation.audit,
                timing=generation.timing,
                peak_memory=generation.peak_memory,
            )
        )
        return [_before(self._text(answer.tokens), stops) for answer in generation.completions]

    def _engine(self, reference: int) -> tuple[Engine, int | None]:
        at, slots = self._at, None
        if at.budget is not None:
            slots = at.budget.slots if at.budget.cr is None else Budget.from_cr(at.budget.cr, reference).slots
        scorers = at.choice.checkpoint.scorers(at.loaded.geometry) if at.choice.checkpoint is not None else None
        if scorers is not None:
            scorers.to(at.loaded.device)
        return Engine(at.loaded, at.choice.policy, slots, scorers, at.rows), slots

    def _adapted(self) -> AbstractContextManager[Any]:
        adapted = self._at.choice.adapted
        return adapted.adapted(self._at.loaded.model) if adapted is not None else nullcontext()

    def _stop(self, stops: Sequence[str]) -> Callable[[int, tuple[int, ...]], bool] | None:
        if not stops:
            return None
        # The stop that a new token completes lies within its last characters; a token has at least one, but for rarities.
        reach = max(map(len, stops)) + 8

        def found(_: int, tokens: tuple[int, ...]) -> bool:
            tail = self._text(tokens[-reach:])
            return any(stop in tail for stop in stops)

        return found

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def _stream(self, tokens: Sequence[int], repeat: int = 0) -> int:
        text = json.dumps([self._at.seed, repeat, *tokens])
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1

    def _note(self, call: Call) -> None:
        self.calls.append(call)
        if call.slots is not None and call.without_eviction:
            _log.warning(
                "%d of %d %s requests fit the budget of %d slots: nothing could be evicted from them.",
                call.without_eviction,
                call.requests,
                call.kind,
                call.slots,
            )


def generation_cap(settings: dict[str, Any], default: int) -> int:
    """Most new tokens that a task asks for."""
    return int(next((settings[name] for name in _CAPS if settings.get(name) is not None), default))


def _sampling(settings: dict[str, Any]) -> Sampling:
    """Greedy unless the task samples; `do_sample` decides where a temperature contradicts it."""
    temperature = settings.get("temperature")
    wanted = settings.get("do_sample", bool(temperature))
    if not wanted:
        return Sampling()
    return Sampling(
        float(1.0 if temperature is None else temperature),
        float(settings.get("top_p", 1.0)),
        int(settings.get("top_k", 0)),
    )


def _before(text: str, stops: Sequence[str]) -> str:
    for stop in stops:
        text = text.partition(stop)[0]
    return text
