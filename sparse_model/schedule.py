"""Which pattern each head of each layer gets (Child et al. 2019, section 4.2)."""

from __future__ import annotations

from typing import Any

from longstride.kernels.errors import ConfigError, Problem
from longstride.kernels.patterns import pattern_from_json
from longstride.kernels.patterns.base import Pattern

COMBINATIONS = ("merged", "interleaved", "multihead")
RESOLVED_BY_HEAD = ("index",)  # fields of a pattern that the schedule sets: given, they would hold for all heads alike


def layer_patterns(attention: Any, layers: int, heads: int, context: int) -> tuple[tuple[Pattern, ...], ...]:
    """One pattern for each head of each layer, ``[layer][head]``, from a pattern object or a list taken in turn.

    Raises:
        ConfigError: paths are relative to the model, as ``attention.stride`` or ``attention[1].stride``.
    """
    if not isinstance(attention, list):
        try:
            cycle = _cycle(attention, heads, context)
        except ConfigError as error:
            raise error.under("attention") from None
    else:
        cycle = _listed(attention, heads, context)
    return tuple(cycle[layer % len(cycle)] for layer in range(layers))


def _listed(entries: list[Any], heads: int, context: int) -> list[tuple[Pattern, ...]]:
    """The explicit cycle: one entry a layer."""
    if not entries:
        raise ConfigError(Problem("attention", "the list needs at least one pattern"))
    cycle, errors = [], []
    for number, entry in enumerate(entries):
        try:
            (patterns,) = _cycle(entry, heads, context, listed=True)
            cycle.append(patterns)
        except ConfigError as error:
            errors.append(error.under(f"attention[{number}]"))
    if errors:
        raise ConfigError.joined(errors)
    return cycle


def _cycle(entry: Any, heads: int, context: int, listed: bool = False) -> list[tuple[Pattern, ...]]:
    """The layers that one pattern object makes before it repeats: several only where it is interleaved."""
    if not isinstance(entry, dict):
        raise ConfigError(Problem("", "must be a pattern object, or a list of them"))
    combine = entry.get("combine", "merged")
    if combine not in COMBINATIONS:
        raise ConfigError.at("combine", combine, f"must be one of {', '.join(COMBINATIONS)}")
    pattern = pattern_from_json({key: value for key, value in entry.items() if key != "combine"}, beside=["combine"])
    for key in RESOLVED_BY_HEAD:
        if key in entry:
            raise ConfigError.at(key, entry[key], "must be left out: heads take the sub-blocks in turn")
    pattern.check(context)
    factors = pattern.factors()
    if combine == "merged":
        return [_per_head([pattern], heads)]
    if combine == "multihead":
        if heads % len(factors):
            rule = f"{entry['type']} splits over {len(factors)} factors: heads={heads} must be a multiple of that"
            raise ConfigError.at("combine", combine, rule)
        return [_per_head(list(factors), heads)]
    if listed and len(factors) > 1:
        raise ConfigError.at("combine", combine, "a list is a cycle already: make each factor an entry of the list")
    return [_per_head([factor], heads) for factor in factors]


def _per_head(patterns: list[Pattern], heads: int) -> tuple[Pattern, ...]:
    """Heads split evenly over the patterns, each resolved for its head."""
    return tuple(patterns[head * len(patterns) // heads].for_head(head) for head in range(heads))
