"""Several numbers hidden in a long text under different names; one is asked for, the others distract."""

from __future__ import annotations

import random
from typing import ClassVar

from kvbench_tasks.needles import OPENING, Hidden, NeedleTask, names, needle, numbers, question

KEYS = 4


class NeedleMultikey(NeedleTask):
    """RULER's `niah_multikey`, with four keys."""

    name: ClassVar[str] = "needle_multikey"

    def hide(self, draw: random.Random) -> Hidden:
        keys, values = names(draw, KEYS), numbers(draw, KEYS)
        asked = draw.randrange(KEYS)
        needles = [needle(key, value) for key, value in zip(keys, values, strict=True)]
        return Hidden(OPENING, needles, question(keys[asked], several=False), [values[asked]])
