"""What a completion gives as its final answer, and how answers are written so that equal ones look equal: text only."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

_THINK, _END_OF_THINK = "<think>", "</think>"
# Two backslashes before `boxed` are what a model writes that quotes itself.
_BRACES = re.compile(r"(\\+(?:boxed|fbox)\s*\{)|(\\.)|([{}])", re.DOTALL)

_SEPARATOR = r"(?:\{,\}|,\\!|,|\\[,!;: ]|~| )"
_THOUSANDS = re.compile(rf"[+-]?\d{{1,3}}(?:{_SEPARATOR}\d{{3}})+(?:\.\d+)?")
_NUMBER = re.compile(r"([+-]?)(\d*)(?:\.(\d*))?")
_FRACTION = re.compile(r"([+-]?)(?:\\frac\{([+-]?\d+)\}\{(\d+)\}|(\d+)/(\d+))")

_STYLE = r"(?:text|textbf|textrm|textit|mathrm|mathbf|mathit|mathsf|mbox|operatorname)"
_WRAPPED = re.compile(rf"\\{_STYLE}\s*\{{([^{{}}]*)\}}")
_UNIT = re.compile(rf"(?<=[\d}})])\s*\\{_STYLE}\s*\{{([^{{}}]*)\}}(?:\^(?:\d|\{{\d\}}))?$")
_BARE_UNIT = re.compile(
    r"(?<=\d) ?(?:(?:square|cubic|sq|cu)\.? )?(?:mm|cm|km|kg|ft|hrs?|mins?|secs?|mph|inch(?:es)?|feet|foot|"
    r"(?:dollar|cent|degree|unit|met(?:er|re)|centimet(?:er|re)|kilomet(?:er|re)|mile|yard|gram|kilogram|pound|ounce|"
    r"lit(?:er|re)|gallon|second|minute|hour|day|week|month|year)s?)(?:\^(?:\d|\{\d\}))?$"
)
# Not units: they change the number.
_SCALES = re.compile(r"hundred|thousand|million|billion|trillion|dozen|score|percent|half|halves|third|quarter|fourth")
_DEGREES = re.compile(r"\s*(?:\^\s*(?:\\circ|\{\s*\\circ\s*\})|°)$")
_DROPPED = re.compile(
    r"\\(?:left|right|displaystyle|textstyle|Bigl|Bigr|bigl|bigr)(?![A-Za-z])|\\?\$|(?<!\\)\\[()\[\]]"
)
_SPACES = re.compile(r"\s+|~|(?<!\\)\\[,!;: ]|\\q?quad(?![A-Za-z])")
_AND = re.compile(rf"\\{_STYLE}\s*\{{\s*,?\s*(?:and|or)\s*\}}|(?<=[\s\d)}}])\b(?:and|or)\b")
_REPEATED = re.compile(r"\s*,(?:\s*,)+")
_WORDS = re.compile(r"[A-Za-z]{2,}(?:[ -][A-Za-z]+)*")

_OPENING = {"(": ")", "[": "]", r"\{": r"\}"}
_BRACKETS = re.compile(r"\\[{}]|[()\[\]{},]")


@dataclass(frozen=True)
class Answer:
    """An answer taken apart.

    Attributes:
        kind: the brackets round its parts: `()`, `[)`, `{}` and so on, `,` for a list without any; empty for one part.
        parts: one, or the members of the list.
    """

    kind: str
    parts: tuple[str, ...]

    @property
    def key(self) -> str:
        """The same text for the same answer, as far as spelling and rational numbers go; lists and sets sorted."""
        parts = [_canonical(spelled(part)) for part in self.parts]
        if self.kind in {",", "{}"}:
            parts.sort()
        opening, closing = (self.kind[0], self.kind[1]) if len(self.kind) == 2 else ("", "")
        return f"{opening}{', '.join(parts)}{closing}"


def final_text(completion: str) -> str:
    """Return what stands outside reasoning blocks; a block that never ends holds everything behind its beginning."""
    rest = completion.rpartition(_END_OF_THINK)[2]
    return rest.partition(_THINK)[0]


def last_box(text: str) -> str | None:
    r"""Return what is in the last complete `\boxed{}` or `\fbox{}`; of nested ones, in the one that begins last."""
    opened: list[int | None] = []
    found, begin = None, -1
    for match in _BRACES.finditer(text):
        box, _, brace = match.groups()
        if box is not None:
            opened.append(match.end())
        elif brace == "{":
            opened.append(None)
        elif brace == "}" and opened:
            start = opened.pop()
            if start is not None and start > begin:
                found, begin = text[start : match.start()], start
    return found


def take_apart(text: str, *, thousands: bool = True) -> Answer:
    """Return an answer by its members.

    Args:
        text: what was in the box.
        thousands: `1,234` is one number; otherwise a list of two.
    """
    text = _tidied(text)
    if thousands and _THOUSANDS.fullmatch(text):
        return Answer("", (text,))
    if (whole := _bracketed(text)) is not None:
        kind, inner = whole
        parts = _split(inner)
        # One number in round brackets is the number.
        return Answer("", (inner,)) if kind == "()" and len(parts) == 1 else Answer(kind, parts)
    parts = _split(_REPEATED.sub(",", _AND.sub(",", text)))
    return Answer("," if len(parts) > 1 else "", parts)


def spelled(text: str) -> str:
    """Return one member of an answer in its plainest spelling: no unit, no leading zeros, no spaces but between digits."""
    text = _tidied(text)
    if _THOUSANDS.fullmatch(text):
        text = re.sub(_SEPARATOR, "", text)
    whole = _WRAPPED.fullmatch(text)
    if whole is not None:
        text = whole[1].strip()
    number = _NUMBER.fullmatch(text)
    if number is not None and (number[2] or number[3]):
        integer = number[2].lstrip("0") or "0"
        decimals = (number[3] or "").rstrip("0")
        sign = "-" if number[1] == "-" and (integer != "0" or decimals) else ""
        return f"{sign}{integer}{'.' if decimals else ''}{decimals}"
    if _WORDS.fullmatch(text):
        return text.lower()
    return re.sub(r"(?<!\d) | (?!\d)", "", _SPACES.sub(" ", text))


def value(text: str) -> Fraction | None:
    """Return the value of a number or a fraction of whole numbers in its plainest spelling; None for anything else."""
    fraction = _FRACTION.fullmatch(text)
    if fraction is not None:
        sign, above, below, upper, lower = fraction.groups()
        bottom = int(below or lower)
        return Fraction(int(above or upper), bottom) * (-1 if sign == "-" else 1) if bottom else None
    number = _NUMBER.fullmatch(text)
    return Fraction(text) if number is not None and number[2] else None


def is_decimal(text: str) -> bool:
    """Whether a text is a whole number or a decimal."""
    number = _NUMBER.fullmatch(text)
    return number is not None and bool(number[2])


def _canonical(text: str) -> str:
    number = value(text)
    return text if number is None else str(number)


def _tidied(text: str) -> str:
    """Without what only changes how an answer looks."""
    text = _DROPPED.sub("", text).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").strip()
    text = text.replace("\\lbrace", "\\{").replace("\\rbrace", "\\}").replace("\u2212", "-")
    text = re.sub(r"\s+", " ", text).rstrip(" .,;")
    unit = _UNIT.search(text)
    if unit is not None and not _SCALES.search(unit[1]):
        text = text[: unit.start()]
    return _DEGREES.sub("", _BARE_UNIT.sub("", text)).strip()


def _bracketed(text: str) -> tuple[str, str] | None:
    """The kind of the brackets round the whole text, and what they hold."""
    depth = 0
    marks = [match for match in _BRACKETS.finditer(text) if match[0] != ","]
    if len(marks) < 2 or marks[0].start() != 0 or marks[-1].end() != len(text):
        return None
    opening, closing = marks[0][0], marks[-1][0]
    if opening not in _OPENING or closing not in _OPENING.values():
        return None
    for mark in marks:
        depth += 1 if mark[0] in {"(", "[", "{", r"\{"} else -1
        if depth == 0 and mark is not marks[-1]:
            return None
    if depth != 0 or (opening == r"\{") != (closing == r"\}"):
        return None
    return opening[-1] + closing[-1], text[len(opening) : len(text) - len(closing)]


def _split(text: str) -> tuple[str, ...]:
    """The pieces between the commas that no bracket holds; unbalanced brackets hold everything."""
    depth, start, pieces = 0, 0, []
    for mark in _BRACKETS.finditer(text):
        if mark[0] == ",":
            if depth == 0:
                pieces.append(text[start : mark.start()].strip())
                start = mark.end()
        else:
            depth += 1 if mark[0] in {"(", "[", "{", r"\{"} else -1
    if depth != 0:
        return (text,)
    return (*pieces, text[start:].strip())
