"""Announces the tasks of this package: strings only, nothing here imports torch."""

from __future__ import annotations

from kvbench.entries import TaskEntry
from kvbench.hookspecs import hookimpl


@hookimpl
def kvbench_tasks() -> list[TaskEntry]:
    """Return the tasks of this package."""
    return [
        TaskEntry(
            name="recurrence",
            target="kvbench_tasks.recurrence:Recurrence",
            summary="a ring of registers: each step adds the last result to the next register",
        ),
        TaskEntry(
            name="codebook",
            target="kvbench_tasks.codebook:Codebook",
            summary="a table in the prompt: the first digit of a running sum says which entry is added",
        ),
        TaskEntry(
            name="ledger",
            target="kvbench_tasks.ledger:Ledger",
            summary="accounts posted into each other: every balance is asked for at the end",
            held_out=True,
        ),
        TaskEntry(
            name="program",
            target="kvbench_tasks.program:Program",
            summary="a loop of additions is carried out line by line",
        ),
        TaskEntry(
            name="chain",
            target="kvbench_tasks.chain:Chain",
            summary="a walk along the pointers of a cycle of nodes adds up their weights",
        ),
        TaskEntry(
            name="stack",
            target="kvbench_tasks.stack:Stack",
            summary="values are pushed one after another, then added up from the top down",
        ),
        TaskEntry(
            name="aime24",
            target="kvbench_tasks.aime24:Aime24",
            summary="AIME 2024, whole numbers from 0 to 999",
            paper="American Invitational Mathematics Examination 2024",
            data="math-ai/aime24",
            default=False,
        ),
        TaskEntry(
            name="aime25",
            target="kvbench_tasks.aime25:Aime25",
            summary="AIME 2025, whole numbers from 0 to 999",
            paper="American Invitational Mathematics Examination 2025",
            data="math-ai/aime25",
            default=False,
        ),
        TaskEntry(
            name="hmmt_feb25",
            target="kvbench_tasks.hmmt_feb25:HmmtFeb25",
            summary="HMMT February 2025, expressions",
            paper="Harvard-MIT Mathematics Tournament, February 2025",
            data="MathArena/hmmt_feb_2025",
            default=False,
        ),
        TaskEntry(
            name="hmmt_nov25",
            target="kvbench_tasks.hmmt_nov25:HmmtNov25",
            summary="HMMT November 2025, expressions",
            paper="Harvard-MIT Mathematics Tournament, November 2025",
            data="MathArena/hmmt_nov_2025",
            default=False,
        ),
        TaskEntry(
            name="math500",
            target="kvbench_tasks.math500:Math500",
            summary="500 problems of MATH, expressions",
            paper="Lightman et al. 2023, arXiv:2305.20050; Hendrycks et al. 2021, arXiv:2103.03874",
            data="HuggingFaceH4/MATH-500",
            default=False,
        ),
        TaskEntry(
            name="gsm8k",
            target="kvbench_tasks.gsm8k:Gsm8k",
            summary="word problems of primary school, whole numbers",
            paper="Cobbe et al. 2021, arXiv:2110.14168",
            data="openai/gsm8k",
            default=False,
        ),
        TaskEntry(
            name="longtext",
            target="kvbench_tasks.longtext:LongText",
            summary="twenty documents, scored token by token: likelihood, and distance to the dense model",
            paper="works of Shakespeare and Milton, public domain",
            default=False,
        ),
        TaskEntry(
            name="needle_single",
            target="kvbench_tasks.needle_single:NeedleSingle",
            summary="one number hidden in a long text",
            paper="after RULER, Hsieh et al. 2024, arXiv:2404.06654",
            default=False,
        ),
        TaskEntry(
            name="needle_multikey",
            target="kvbench_tasks.needle_multikey:NeedleMultikey",
            summary="four numbers hidden under different names, one asked for",
            paper="after RULER, Hsieh et al. 2024, arXiv:2404.06654",
            default=False,
        ),
        TaskEntry(
            name="needle_multivalue",
            target="kvbench_tasks.needle_multivalue:NeedleMultivalue",
            summary="four numbers hidden under one name, all asked for",
            paper="after RULER, Hsieh et al. 2024, arXiv:2404.06654",
            default=False,
        ),
        TaskEntry(
            name="variable_tracking",
            target="kvbench_tasks.variable_tracking:VariableTracking",
            summary="a chain of assignments hidden in a long text, all its variables asked for",
            paper="after RULER, Hsieh et al. 2024, arXiv:2404.06654",
            default=False,
        ),
        TaskEntry(
            name="gpqa_diamond",
            target="kvbench_tasks.gpqa_diamond:GpqaDiamond",
            summary="questions of the sciences with four options each; the data set is gated",
            paper="Rein et al. 2023, arXiv:2311.12022",
            data="Idavidrein/gpqa",
            default=False,
        ),
        TaskEntry(
            name="livecodebench_v6",
            target="kvbench_tasks.livecodebench_v6:LivecodebenchV6",
            summary="programs for contests of early 2025, run in a sandbox",
            paper="Jain et al. 2024, arXiv:2403.07974",
            data="livecodebench/code_generation_lite",
            default=False,
        ),
        TaskEntry(
            name="humaneval",
            target="kvbench_tasks.humaneval:Humaneval",
            summary="functions to be completed, run in a sandbox",
            paper="Chen et al. 2021, arXiv:2107.03374",
            data="openai/openai_humaneval",
            default=False,
        ),
    ]
