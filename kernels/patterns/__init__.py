"""Patterns: which positions each position attends to.

To add a pattern, write a file with a frozen dataclass that satisfies ``Pattern``, and add a line to ``PATTERNS``. The
dataclass of another package is an entry point of the group ``longstride.patterns``, or has the `type`
"package.module:Class".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from longstride.kernels.errors import ConfigError, Problem, nearest
from longstride.kernels.patterns.base import Pattern, PatternPart, declares_causal, divisors
from longstride.kernels.patterns.bigbird import BigBird
from longstride.kernels.patterns.column import Column
from longstride.kernels.patterns.fixed import Block, Fixed, Summary
from longstride.kernels.patterns.local import Dense, Local
from longstride.kernels.patterns.longformer import Longformer
from longstride.kernels.patterns.longnet import LongNet
from longstride.kernels.patterns.strided import Strided
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


def pattern_from_json(
    value: object, *, sibling_keys: Sequence[str] = (), alternatives: Callable[[], list[str]] = list
) -> Pattern:
    """Create the pattern that a JSON object describes, e.g. ``{"type": "fixed", "stride": 128, "summary": 32}``.

    Args:
        value: the object.
        sibling_keys: keys that the caller has already removed, suggested for misspelt ones.
        alternatives: lists types and keys that the caller accepts in place of a pattern, suggested likewise.

    Raises:
        ConfigError: a type or a key is unknown or missing, or a value breaks the pattern's rule.
    """
    if not isinstance(value, dict):
        raise ConfigError(Problem("type", f"a pattern is an object with a type: {', '.join(PATTERNS)}"))
    if "type" not in value:
        advice = {key: nearest(key, ["type", *alternatives()]) for key in map(str, value)}
        problems = [Problem(key, f"unknown key; {near}") for key, near in advice.items() if near.startswith("nearest")]
        raise ConfigError(*(problems or [Problem("type", f"missing; one of {', '.join(PATTERNS)}")]))
    kind = value["type"]
    cls = class_named(kind, PATTERNS, GROUP) if isinstance(kind, str) else None
    if cls is None:
        near = nearest(str(kind), [*PATTERNS, *alternatives(), *registered_names(GROUP)])
        raise ConfigError.at("type", kind, f"must be a pattern's name; {near}")
    if not dataclasses.is_dataclass(cls):
        raise ConfigError.at("type", kind, f"must name a pattern, a frozen dataclass, and {import_path(cls)} is none")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    arguments = {key: entry for key, entry in value.items() if key != "type"}
    keys = [*fields, "type", *sibling_keys]
    problems = [
        Problem(str(key), f"unknown key for {kind}; {nearest(str(key), keys)}")
        for key in arguments
        if key not in fields
    ]
    problems += [
        Problem(name, f"missing; {kind} needs it")
        for name, field in fields.items()
        if field.default is dataclasses.MISSING and name not in arguments
    ]
    if problems:
        raise ConfigError(*problems)
    pattern = cls(**arguments)
    if not isinstance(pattern, Pattern):
        lacks = [name for name in dir(Pattern) if not name.startswith("_") and not hasattr(pattern, name)]
        raise ConfigError.at("type", kind, f"is no pattern: {import_path(cls)} has no {', '.join(lacks)}")
    return pattern


def pattern_to_json(pattern: Pattern) -> dict[str, object]:
    """Return the JSON object that ``pattern_from_json`` turns back into an equal pattern.

    It has all fields, except those that a pattern omits at their default (``PatternDefaults``). The type of a class
    from another package is its import path.

    Raises:
        ConfigError: the pattern's class is defined inside a function, so it cannot be imported.
    """
    # torch.compile traces this, hence no dictionary of defaults.
    kinds = [name for name, cls in PATTERNS.items() if type(pattern) is cls] or [import_path(type(pattern))]
    if "<locals>" in kinds[0]:
        raise ConfigError.at("pattern", kinds[0], "cannot be imported; define the class at the top of a module")
    value: dict[str, object] = {"type": kinds[0]}
    for field in dataclasses.fields(pattern):  # type: ignore[arg-type]
        entry = getattr(pattern, field.name)
        if field.name not in getattr(pattern, "left_out_at_default", ()) or entry != field.default:
            value[field.name] = list(entry) if isinstance(entry, tuple) else entry
    return value
