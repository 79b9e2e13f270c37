"""One number hidden in a long text, and asked for."""

from __future__ import annotations

import random
from typing import ClassVar

from kvbench_tasks.needles import OPENING, Hidden, NeedleTask, names, needle, numbers, question


class NeedleSingle(NeedleTask):
    """RULER's `niah_single`."""

    name: ClassVar[str] = "needle_single"

    def hide(self, draw: random.Random) -> Hidden:
        (name,), (number,) = names(draw, 1), numbers(draw, 1)
        return Hidden(OPENING, [needle(name, number)], question(name, several=False), [number])
