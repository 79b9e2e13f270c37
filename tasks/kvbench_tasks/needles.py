"""What the needle tasks share: sentences with facts hidden in a long text, and questions about them.

After RULER (Hsieh et al. 2024, arXiv:2404.06654), rewritten: prompts are filled up to a length in the tokens of whatever
tokenizer, and end in the beginning of the answer, so that a model needs no chat template. As there, a value counts as found
if the completion contains it.
"""

from __future__ import annotations

import random
import re
from abc import abstractmethod
from collections.abc import Sequence
from functools import cache
from typing import ClassVar, NamedTuple

from kvbench.core.errors import KvbenchError
from kvbench.core.task import Count, Grade, LongPromptTask, Problem, Split
from kvbench_tasks.longtext import documents

_SEPARATOR = "|"

ADJECTIVES = (  # noqa: SIM905 - one word a line would be a page
    "amber ancient blue brave bright calm clever cold curious dark distant early eager empty famous fancy gentle golden "
    "grand green happy hidden honest huge humble icy jolly kind large light little lively lonely loud lucky mellow narrow "
    "noble odd old pale plain polite proud quick quiet rapid rare red rough royal rusty scarlet sharp shiny silent silver "
    "simple slow small smooth soft solid steady strange strong sunny sweet tall tiny warm white wild wise yellow young"
).split()

NOUNS = (  # noqa: SIM905 - as above
    "anchor apple arrow barrel basket beacon bell boat bottle bridge bucket button cabin candle carpet castle chain chair "
    "circle clock cloud coin compass corner cottage crown curtain desert drum engine falcon feather fence field flag flute "
    "forest fountain garden gate glove hammer harbor hill horse island jacket kettle key ladder lake lamp lantern lemon "
    "letter lion marble meadow mirror mountain needle ocean orchard palace pencil piano pillow planet pocket river road "
    "rocket saddle sailor shadow ship shoe spoon stone table temple tiger tower train tunnel valley village violin wagon"
).split()


class Hidden(NamedTuple):
    """What one problem hides and asks.

    Attributes:
        opening: what stands before the text.
        needles: sentences to hide; kept in this order.
        question: what stands after the text; the answer goes on from its last word.
        answers: values that the completion has to contain.
    """

    opening: str
    needles: Sequence[str]
    question: str
    answers: Sequence[str]


class NeedleTask(LongPromptTask):
    """Facts are hidden in a text; a completion is as right as the share of the values that it contains."""

    answer_tokens: ClassVar[int] = 32

    @abstractmethod
    def hide(self, draw: random.Random) -> Hidden:
        """Make up one problem."""

    def fitted(self, length: int, n: int, seed: int, count: Count, split: Split = "eval") -> list[Problem]:
        return [self._problem(length, index, seed, count, split) for index in range(n)]

    def grade(self, problem: Problem, completion: str) -> Grade:
        answers = problem.answer.split(_SEPARATOR)
        found = [answer for answer in answers if answer.lower() in completion.lower()]
        return Grade(
            exact=len(found) / len(answers),
            steps_correct=None,
            finished=bool(found),
            extracted=_SEPARATOR.join(sorted(found)) or None,
        )

    def _problem(self, length: int, index: int, seed: int, count: Count, split: Split) -> Problem:
        # A longer prompt hides the same things at the same depths.
        draw = random.Random(f"{self.name}@{self.version}/{split}/seed{seed}/{index}")
        hidden = self.hide(draw)
        lines = filling()
        start = draw.randrange(len(lines))
        depths = sorted(draw.random() for _ in hidden.needles)

        def prompt(size: int) -> str:
            text = [lines[(start + line) % len(lines)] for line in range(size)]
            for needle, depth in reversed(list(zip(hidden.needles, depths, strict=True))):
                text.insert(round(depth * size), needle)
            return "\n".join([hidden.opening, *text, hidden.question])

        smallest = count(prompt(0))
        if smallest > length:
            raise KvbenchError(
                f"Task '{self.name}' has prompts of at least {smallest} tokens with this tokenizer; "
                f"--gen-len {length} is below that."
            )
        few, many = 0, length  # no line is without a token
        while few < many:
            middle = (few + many + 1) // 2
            few, many = (middle, many) if count(prompt(middle)) <= length else (few, middle - 1)
        name = f"{self.name}@{self.version}/{length}/{split}/seed{seed}/{index}"
        return Problem(name, prompt(few), _SEPARATOR.join(hidden.answers))


@cache
def filling() -> tuple[str, ...]:
    """Return lines of the documents of task `longtext`, without numbers and stage directions."""
    lines = [line.strip() for document in documents() for line in document.text.splitlines()]
    return tuple(line for line in lines if len(line) > 20 and not re.search(r"[\d\[\]]", line))


def names(draw: random.Random, count: int) -> list[str]:
    """Draw different names of two words."""
    pairs = draw.sample(range(len(ADJECTIVES) * len(NOUNS)), count)
    return [f"{ADJECTIVES[pair % len(ADJECTIVES)]} {NOUNS[pair // len(ADJECTIVES)]}" for pair in pairs]


def numbers(draw: random.Random, count: int) -> list[str]:
    """Draw different numbers of seven digits, of which none can be part of another."""
    return [str(number) for number in draw.sample(range(1_000_000, 10_000_000), count)]


def needle(name: str, number: str) -> str:
    """Return the sentence that hides a number."""
    return f"One of the special magic numbers for {name} is: {number}."


OPENING = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize them. "
    "I will quiz you about the numbers afterwards."
)


def question(name: str, *, several: bool) -> str:
    """Return the question about a name, with the beginning of the answer."""
    if several:
        asked = f"all the special magic numbers for {name} mentioned in the provided text"
        return f"What are {asked}? The special magic numbers for {name} mentioned in the provided text are:"
    asked = f"the special magic number for {name} mentioned in the provided text"
    return f"What is {asked}? The special magic number for {name} mentioned in the provided text is:"
