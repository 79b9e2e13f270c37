"""A chain of assignments hidden in a long text; all variables that end with the same value are asked for."""

from __future__ import annotations

import random
import string
from itertools import pairwise
from typing import ClassVar

from kvbench_tasks.needles import Hidden, NeedleTask

VARIABLES = 5


class VariableTracking(NeedleTask):
    """RULER's `vt`, with one chain of four hops and no worked example."""

    name: ClassVar[str] = "variable_tracking"
    answer_tokens: ClassVar[int] = 48

    def hide(self, draw: random.Random) -> Hidden:
        value = draw.randrange(10_000, 100_000)
        variables: list[str] = []
        while len(variables) < VARIABLES:
            name = "".join(draw.choices(string.ascii_uppercase, k=5))
            if name not in variables:
                variables.append(name)
        assigned = [f"VAR {variables[0]} = {value}"]
        assigned += [f"VAR {later} = VAR {earlier}" for earlier, later in pairwise(variables)]
        opening = "Memorize and track the chain of variable assignments hidden in the following text."
        asked = (
            f"Find all variables that are assigned the value {value} in the text above. According to the chain of variable "
            f"assignments in the text above, {VARIABLES} variables are assigned the value {value}; they are:"
        )
        return Hidden(opening, assigned, asked, variables)
