"""Names and colours of the parts of patterns in pictures, and descriptions of patterns and heads."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from longstride.kernels.patterns import Pattern, pattern_to_json


class Kind(NamedTuple):
    """A kind of keys in a legend."""

    word: str
    colour: str


# From the widest to the narrowest: a cell of a matrix has the colour of the last kind in it. Adjacent colours of a
# pattern can be distinguished by people with colour blindness.
KINDS = (
    Kind("all", "#77aadd"),
    Kind("all before it", "#77aadd"),
    Kind("chosen by content", "#77aadd"),
    Kind("read", "#77aadd"),  # by any other part
    Kind("block", "#5fbf9f"),
    Kind("window", "#77aadd"),
    Kind("dilated window", "#b9d877"),
    Kind("outer segments", "#e8b23a"),
    Kind("first positions", "#cc79a7"),
    Kind("random blocks", "#e8b23a"),
    Kind("summary", "#d1609a"),
    Kind("column", "#ee8866"),
)
MOST_RANGES = 4
_NUMBERS = {kind.word: number for number, kind in enumerate(KINDS)}
_WORDS = {  # by the name of a part's class
    "Dense": "all before it",
    "ContentChoice": "chosen by content",
    "Block": "block",
    "Window": "window",
    "EarlierSegments": "outer segments",
    "FirstKeys": "first positions",
    "FirstWithAll": "first positions",
    "Draw": "random blocks",
    "SummaryKeys": "summary",
}


def kind_of(part: Any) -> int:
    """Return the number in KINDS of a part of a pattern."""
    if type(part).__name__ == "Entries":  # all entries of the query's column, or a few
        return _NUMBERS["column" if part.end is None or part.first is None else "dilated window"]
    if type(part).__name__ == "Dense" and not part.causal:
        return _NUMBERS["all"]
    return _NUMBERS[_WORDS.get(type(part).__name__, "read")]


def words_of(pattern: Any) -> str:
    """Describe a pattern by its name and numbers in a configuration, such as "fixed: stride 128, summary 8"."""
    if not isinstance(pattern, Pattern):
        return str(pattern)
    settings = pattern_to_json(pattern)
    name = str(settings.pop("type"))
    defaults = {field.name: field.default for field in dataclasses.fields(pattern)}  # type: ignore[arg-type]
    texts = [  # with non-breaking spaces
        f"{key} {_number(value)}".replace("_", " ").replace(" ", "\N{NO-BREAK SPACE}")
        for key, value in settings.items()
        if value is not None and value != defaults.get(key)
    ]
    return f"{name}: {', '.join(texts)}" if texts else name


def _number(value: Any) -> str:
    if isinstance(value, list):
        return " / ".join(map(_number, value))
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def places_of(users: Sequence[tuple[int, int]], heads: int) -> str:
    """Describe (layer, head) pairs: "layers 0–3, all heads", or pair by pair if the heads differ between layers."""
    by_layer = {layer: [head for _, head in pairs] for layer, pairs in groupby(users, key=lambda user: user[0])}
    sets = list(by_layer.values())
    if any(numbers != sets[0] for numbers in sets):
        shown = [f"{layer}.{head}" for layer, head in users]
        return f"layer.head {', '.join(shown) if len(shown) <= 6 else f'{shown[0]} … {shown[-1]} ({len(shown)})'}"
    which = "" if heads == 1 else ", all heads" if len(sets[0]) == heads else f", {_many('head', sets[0])}"
    return _many("layer", list(by_layer)) + which


def _many(what: str, numbers: Sequence[int]) -> str:
    return f"{what}{'s' if len(numbers) > 1 else ''} {ranges(numbers)}"


def ranges(numbers: Iterable[int]) -> str:
    """Format ascending numbers briefly: "0–3, 8", or "1, 3 … 31" for equal distances, or the first, last and count."""
    numbers = list(numbers)
    remaining, texts = numbers, []
    while remaining:
        step = remaining[1] - remaining[0] if len(remaining) > 1 else 0
        length = next((n for n in range(1, len(remaining)) if remaining[n] - remaining[n - 1] != step), len(remaining))
        if length < 3:
            length = 1
            texts.append(f"{remaining[0]}")
        elif step == 1:
            texts.append(f"{remaining[0]}–{remaining[length - 1]}")
        else:
            texts.append(f"{remaining[0]}, {remaining[1]} … {remaining[length - 1]}")
        remaining = remaining[length:]
    return ", ".join(texts) if len(texts) <= MOST_RANGES else f"{numbers[0]} … {numbers[-1]} ({len(numbers)})"
