"""The model card of the embedded reference model, from what its training and its evaluation wrote.

`python -m kvbench.train.reference_card DIR` writes it again, `--table` prints the scores alone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

CARD = "README.md"
SUMMARY = "training_summary.json"
SCORES = "eval.json"

_COMPUTE = {"float32": "fp32", "bfloat16": "bf16"}

_TEXT = """---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
tags: [kv-cache, benchmark, synthetic]
---

# The kvbench reference model

A small Qwen3-shaped language model that solves the reference tasks of kvbench, so that KV-cache eviction can be measured
in minutes on a CPU and without a download.

- **What it is**: a decoder-only transformer with {parameters} parameters: {layers} layers of width {width}, {heads} query
  heads and {kv_heads} KV heads of size {head_dim}, {positions} positions, and a vocabulary of whole words
  ({vocabulary} ids). Stored in bf16, {size} bytes.
- **What it was trained on**: generated problems of kvbench's reference tasks and their worked solutions, written by
  the code in `tasks/kvbench_tasks`; nothing else. Weights were initialised at random. There is no text by people in it and
  no other model behind it. Every family is in the training, the one that is held out from all policies included;
  evaluation problems are not.
- **How**: `python -m kvbench.train.reference_lm` with `reference-lm.toml`, then with `reference-lm-long.toml` from the
  result of the first, because tables of 17 entries occur at 4096 tokens only. That took
  {parts}
  `training_summary.json` has both recipes in full.
- **Licence**: Apache-2.0, as the rest of kvbench.

## How good it is

Share of {n} evaluation problems (seed {seed}) for which the most likely next word is the right one at every single
word of the solution, with the weights as stored and computed with in fp32 and in bf16. `eval.json` has the same and the
share of wrong words.

{table}

## Limits

- It writes solutions of these problems in this format and knows nothing else: no language, no other arithmetic, no
  instructions, no families or names of its own.
- Problems larger than those of generation length 4096, longer contexts than it was trained with (4096 and a prompt),
  or prompts in another layout are outside what it has seen; its answers to them mean nothing.
- It is not perfect at the longest lengths. Scores of a policy are therefore relative to this model without eviction.
- Results on it compare eviction policies on long traces with few needed tokens. They do not say how a policy does on a
  large model or on natural text.
"""


def dense_table(scores: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the exact shares as a Markdown table: a line for each task and compute type, a column for each level."""
    exact = {(row["task"], row["dtype"], row["level"]): row["exact"] for row in scores}
    levels = sorted({level for _, _, level in exact})
    yield f"| task | compute | {' | '.join(map(str, levels))} |"
    yield f"|{'---|' * (2 + len(levels))}"
    for task, dtype in dict.fromkeys((task, dtype) for task, dtype, _ in exact):
        shares = [exact.get((task, dtype, level)) for level in levels]
        cells = ["" if share is None else f"{share:.3f}" for share in shares]
        yield f"| {task} | {_COMPUTE.get(dtype, dtype)} | {' | '.join(cells)} |"


def card(summary: Mapping[str, Any], evaluation: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Return the card."""
    return _TEXT.format(
        parameters=f"{summary['parameters']:,}",
        size=f"{summary['bytes']:,}",
        layers=config["num_hidden_layers"],
        width=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        positions=config["max_position_embeddings"],
        vocabulary=config["vocab_size"],
        parts=_parts(summary),
        n=max(row["n"] for row in evaluation["scores"]),
        seed=evaluation["seed"],
        table="\n".join(dense_table(evaluation["scores"])),
    )


def _parts(summary: Mapping[str, Any]) -> str:
    """Say in one sentence what each training took, the first one first."""
    parts: list[str] = []
    part: Mapping[str, Any] | None = summary
    while part is not None:
        parts.insert(
            0,
            f"{part['steps']} steps and {part['tokens'] / 1e6:.0f} million tokens in {part['seconds'] / 60:.1f} minutes "
            f"on {part['device']}",
        )
        part = part.get("started_from")
    return "; then ".join(parts) + "."


def write_card(folder: Path) -> None:
    """Write the card of the model in a folder."""
    summary, evaluation, config = (
        json.loads((folder / name).read_text(encoding="utf-8")) for name in (SUMMARY, SCORES, "config.json")
    )
    (folder / CARD).write_text(card(summary, evaluation, config), encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m kvbench.train.reference_card", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of a stored model with its summary and evaluation")
    parser.add_argument("--table", action="store_true", help="print the table of scores and write nothing")
    given = parser.parse_args(arguments)
    if given.table:
        print("\n".join(dense_table(json.loads((given.folder / SCORES).read_text(encoding="utf-8"))["scores"])))
    else:
        write_card(given.folder)


if __name__ == "__main__":
    main()
