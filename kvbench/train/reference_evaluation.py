"""How good the dense reference model is, as stored: the share of solutions it would write without a single error.

Solutions are deterministic: a model whose most likely next token is right everywhere along the reference
solution is a model that writes exactly this solution when it decodes greedily.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import Qwen3ForCausalLM

from kvbench.train.reference_batches import IGNORED, Batch, ReferenceBatches
from kvbench.train.reference_recipe import ReferenceRecipe

_TOKENS_AT_ONCE = 131072

DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class DenseScore:
    """One task and level.

    Attributes:
        exact: share of problems whose solution is right to the last token.
        before_error: share of the tokens before the first wrong one, mean over problems.
        wrong_tokens: share of completion tokens whose argmax is wrong.
    """

    task: str
    level: int
    dtype: str
    n: int
    exact: float
    before_error: float
    wrong_tokens: float


@torch.inference_mode()
def right_tokens(model: Qwen3ForCausalLM, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, as bool [rows, width - 1], where the argmax is right and which tokens count."""
    labels = batch.labels()
    logits = model(input_ids=batch.ids[:, :-1].long(), use_cache=False).logits
    return logits.argmax(-1) == labels, labels != IGNORED


def score(model: Qwen3ForCausalLM, batches: Iterable[Batch], task: str) -> DenseScore:
    """Score the batches of one task and level."""
    exact, before_error, wrong, counted, n, level = 0, 0.0, 0, 0, 0, 0
    for batch in batches:
        right, counts = right_tokens(model, batch.to(model.device))
        ok = right | ~counts
        until_error = (ok.cumprod(-1).bool() & counts).sum(-1)
        total = counts.sum(-1)
        exact += int((until_error == total).sum())
        before_error += float((until_error / total).sum())
        wrong += int((~ok).sum())
        counted += int(total.sum())
        n += len(batch.ids)
        level = batch.level
    dtype = str(model.dtype).removeprefix("torch.")
    return DenseScore(task, level, dtype, n, exact / n, before_error / n, wrong / counted)


def stored_model(folder: Path, device: torch.device, dtype: torch.dtype) -> Qwen3ForCausalLM:
    """Return the model of a folder, its weights converted to `dtype`."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=dtype)
    model.to(device)  # type: ignore[arg-type]  # transformers wraps and thereby mistypes it
    model.train(mode=False)
    return model


def evaluate(
    recipe: ReferenceRecipe, folder: Path, device: torch.device, problems: int, levels: Iterable[int], seed: int = 0
) -> list[DenseScore]:
    """Score the stored model on evaluation problems, its bf16 weights computed with in fp32 and in bf16.

    Writes `eval.json` into the folder and prints a table.
    """
    source = ReferenceBatches(recipe)
    models = [stored_model(folder, device, dtype) for dtype in DTYPES]
    scores: list[DenseScore] = []
    print(f"{'task':12s} {'level':>5s} {'n':>4s}  {'fp32 exact':>10s} {'wrong':>8s}  {'bf16 exact':>10s} {'wrong':>8s}")
    for task in source.tasks:
        for level in levels:
            chosen = [(task, problem) for problem in task.problems(level, problems, seed, "eval")]
            at_once = max(1, _TOKENS_AT_ONCE // source.widths[level])
            batches = [source.pack(chosen[i : i + at_once], level) for i in range(0, len(chosen), at_once)]
            both = [score(model, batches, task.name) for model in models]
            scores += both
            cells = "  ".join(f"{s.exact:10.4f} {s.wrong_tokens:8.1e}" for s in both)
            print(f"{task.name:12s} {level:5d} {problems:4d}  {cells}", flush=True)
    rows = [asdict(s) for s in scores]
    (folder / "eval.json").write_text(json.dumps({"seed": seed, "scores": rows}, indent=1) + "\n", encoding="utf-8")
    return scores
