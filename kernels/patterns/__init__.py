"""Patterns: which earlier positions each position attends to.

To add one: a file with a frozen dataclass that satisfies ``Pattern``, and a line in ``PATTERNS``.
"""

from __future__ import annotations

import dataclasses
import difflib

from kernels.errors import ConfigError, Problem
from kernels.patterns.base import Intervals, Part, Pattern
from kernels.patterns.block import Block
from kernels.patterns.column import Column
from kernels.patterns.dense import Dense
from kernels.patterns.fixed import Fixed
from kernels.patterns.local import Local
from kernels.patterns.strided import Strided
from kernels.patterns.summary import Summary

PATTERNS: dict[str, type] = {
    "dense": Dense,
    "local": Local,
    "column": Column,
    "strided": Strided,
    "block": Block,
    "summary": Summary,
    "fixed": Fixed,
}


def pattern_from_json(value: object) -> Pattern:
    """The pattern that a JSON object names, e.g. ``{"type": "fixed", "stride": 128, "summary": 32}``.

    Raises:
        ConfigError: a type or a key is unknown or missing, or a value breaks the pattern's rule.
    """
    if not isinstance(value, dict):
        raise ConfigError(Problem("type", f"a pattern is an object with a type: {', '.join(PATTERNS)}"))
    kind = value.get("type")
    if kind not in PATTERNS:
        near = difflib.get_close_matches(str(kind), PATTERNS, 1)
        raise ConfigError.at("type", kind, f"must be one of {', '.join(PATTERNS)}" + _nearest(near))
    fields = {field.name: field for field in dataclasses.fields(PATTERNS[kind])}
    given = {key: entry for key, entry in value.items() if key != "type"}
    problems = [
        Problem(key, f"unknown key for {kind}" + _nearest(difflib.get_close_matches(key, fields, 1)))
        for key in given
        if key not in fields
    ]
    problems += [
        Problem(name, f"missing; {kind} needs it")
        for name, field in fields.items()
        if field.default is dataclasses.MISSING and name not in given
    ]
    if problems:
        raise ConfigError(*problems)
    return PATTERNS[kind](**given)


def pattern_to_json(pattern: Pattern) -> dict[str, object]:
    """The JSON object that ``pattern_from_json`` turns back into an equal pattern; defaults are left out."""
    kind = next(name for name, cls in PATTERNS.items() if type(pattern) is cls)
    given = {
        field.name: getattr(pattern, field.name)
        for field in dataclasses.fields(pattern)  # type: ignore[arg-type]
        if getattr(pattern, field.name) != field.default
    }
    return {"type": kind, **given}


def _nearest(matches: list[str]) -> str:
    return f"; nearest {matches[0]}" if matches else ""


__all__ = [
    "PATTERNS",
    "Block",
    "Column",
    "Dense",
    "Fixed",
    "Intervals",
    "Local",
    "Part",
    "Pattern",
    "Strided",
    "Summary",
    "pattern_from_json",
    "pattern_to_json",
]
