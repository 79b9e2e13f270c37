"""The process that compares mathematical expressions: reads pairs, says whether they are equal, may be killed any time.

Only this process hands a model's text to a parser. math-verify reads it with latex2sympy2, a grammar that builds
expressions and evaluates no code; its other reader, sympy's parse_expr, does evaluate and is not used.
"""

from __future__ import annotations

import json
import logging
import resource
import signal
import sys

_MEMORY = 2 << 30


def main(seconds: int) -> None:
    """Answer requests, one JSON line each, until the input ends.

    Args:
        seconds: after which one comparison ends this process, should the parent be gone.
    """
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable(logging.CRITICAL)
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    # Units are gone by now; to take them off again would make `2m` a number.
    normal = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all", equations=False
    )
    extraction = [LatexExtractionConfig(boxed_match_priority=0, normalization_config=normal)]
    print("ready", flush=True)
    for line in sys.stdin:
        signal.alarm(seconds)
        try:
            gold, given = (parse(f"\\boxed{{{text}}}", extraction, parsing_timeout=None) for text in json.loads(line))
            same = verify(gold, given, timeout_seconds=None, allow_set_relation_comp=True)
        except Exception:  # noqa: BLE001 - what cannot be compared is not equal
            same = False
        signal.alarm(0)
        print("same" if same else "different", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
