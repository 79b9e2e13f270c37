"""Several numbers hidden in a long text under one name; all are asked for."""

from __future__ import annotations

import random
from typing import ClassVar

from kvbench_tasks.needles import OPENING, Hidden, NeedleTask, names, needle, numbers, question

VALUES = 4


class NeedleMultivalue(NeedleTask):
    """RULER's `niah_multivalue`, with four values."""

    name: ClassVar[str] = "needle_multivalue"
    answer_tokens: ClassVar[int] = 96

    def hide(self, draw: random.Random) -> Hidden:
        (name,), values = names(draw, 1), numbers(draw, VALUES)
        return Hidden(OPENING, [needle(name, value) for value in values], question(name, several=True), values)
