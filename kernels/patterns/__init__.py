"""Patterns: which earlier positions each position attends to.

To add one: a file with a frozen dataclass that satisfies ``Pattern``, and a line in ``PATTERNS``. In another package,
the dataclass is an entry point of the group ``longstride.patterns``, or has the `type` "package.module:Class".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from longstride.kernels.errors import ConfigError, Problem, nearest
from longstride.kernels.patterns.base import Pattern, PatternPart, divisors
from longstride.kernels.patterns.bigbird import BigBird
from longstride.kernels.patterns.block import Block
from longstride.kernels.patterns.column import Column
from longstride.kernels.patterns.dense import Dense
from longstride.kernels.patterns.fixed import Fixed
from longstride.kernels.patterns.local import Local
from longstride.kernels.patterns.longformer import Longformer
from longstride.kernels.patterns.longnet import LongNet
from longstride.kernels.patterns.strided import Strided
from longstride.kernels.patterns.summary import Summary
from longstride.kernels.registry import class_named, import_path, registered_names

PATTERNS: dict[str, type] = {
    "dense": Dense,
    "local": Local,
    "column": Column,
    "strided": Strided,
    "block": Block,
    "summary": Summary,
    "fixed": Fixed,
    "longformer": Longformer,
    "longnet": LongNet,
    "bigbird": BigBird,
}
GROUP = "longstride.patterns"  # of entry points


def pattern_from_json(value: object, *, beside: Sequence[str] = (), others: Sequence[str] = ()) -> Pattern:
    """The pattern that a JSON object names, e.g. ``{"type": "fixed", "stride": 128, "summary": 32}``.

    Args:
        value: the object.
        beside: keys that the caller has read and taken out, so that a misspelt one of them is named too.
        others: what the caller takes in place of a pattern: types, and keys that stand for one.

    Raises:
        ConfigError: a type or a key is unknown or missing, or a value breaks the pattern's rule.
    """
    if not isinstance(value, dict):
        raise ConfigError(Problem("type", f"a pattern is an object with a type: {', '.join(PATTERNS)}"))
    if "type" not in value:
        wanted = {key: nearest(key, ["type", *others]) for key in map(str, value)}
        problems = [Problem(key, f"unknown key; {near}") for key, near in wanted.items() if near.startswith("nearest")]
        raise ConfigError(*(problems or [Problem("type", f"missing; one of {', '.join(PATTERNS)}")]))
    kind = value["type"]
    cls = class_named(kind, PATTERNS, GROUP) if isinstance(kind, str) else None
    if cls is None:
        near = nearest(str(kind), [*PATTERNS, *others, *registered_names(GROUP)])
        raise ConfigError.at("type", kind, f"must be a pattern's name; {near}")
    if not dataclasses.is_dataclass(cls):
        raise ConfigError.at("type", kind, f"must name a pattern, a frozen dataclass, and {import_path(cls)} is none")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    given = {key: entry for key, entry in value.items() if key != "type"}
    known = [*fields, "type", *beside]
    problems = [
        Problem(str(key), f"unknown key for {kind}; {nearest(str(key), known)}") for key in given if key not in fields
    ]
    problems += [
        Problem(name, f"missing; {kind} needs it")
        for name, field in fields.items()
        if field.default is dataclasses.MISSING and name not in given
    ]
    if problems:
        raise ConfigError(*problems)
    pattern = cls(**given)
    if not isinstance(pattern, Pattern):
        lacks = [name for name in dir(Pattern) if not name.startswith("_") and not hasattr(pattern, name)]
        raise ConfigError.at("type", kind, f"is no pattern: {import_path(cls)} has no {', '.join(lacks)}")
    return pattern


def pattern_to_json(pattern: Pattern) -> dict[str, object]:
    """The JSON object that ``pattern_from_json`` turns back into an equal pattern.

    All fields are given, except those that a pattern leaves out at their default (``PatternDefaults``). A class from
    another package has its import path as its type.

    Raises:
        ConfigError: the pattern's class is defined inside of a function, where nothing can import it.
    """
    # torch.compile traces this, also for patterns made while it traces: hence a name at a time, and no defaults.
    kinds = [name for name, cls in PATTERNS.items() if type(pattern) is cls] or [import_path(type(pattern))]
    if "<locals>" in kinds[0]:
        raise ConfigError.at("pattern", kinds[0], "cannot be imported; define the class at the top of a module")
    value: dict[str, object] = {"type": kinds[0]}
    for field in dataclasses.fields(pattern):  # type: ignore[arg-type]
        entry = getattr(pattern, field.name)
        if field.name not in getattr(pattern, "left_out_at_default", ()) or entry != field.default:
            value[field.name] = list(entry) if isinstance(entry, tuple) else entry
    return value
