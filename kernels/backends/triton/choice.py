"""Which configuration each pass of a kernel is launched with, and how often it is split: pure functions of the plan."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import NamedTuple

from longstride.kernels.backends.triton.configurations import Configuration
from longstride.kernels.backends.triton.packing import Parts, closed_part, groups, row_edge
from longstride.kernels.patterns.base import Pattern
from longstride.kernels.plan import Side, View, edge_of, tiles, view

WAVES = 2  # programs that a card's multiprocessors should have each, at least
SHORTEST_SLICE = 4  # tiles of queries: less would not pay for another program


class Choice(NamedTuple):
    """What a pass is launched with."""

    configuration: Configuration
    longest: int  # column tiles of the row tile that visits most
    pairs: int  # that all heads compute, masked ones included
    apart: bool  # tiles keep closed runs of rows apart: see ``longstride.kernels.plan.edge_of``


@lru_cache(maxsize=256)
def chosen(
    candidates: tuple[Configuration, ...], patterns: tuple[Pattern, ...], context: int, rows: Side, parts: Parts
) -> tuple[Choice, ...]:
    """Of each pass, the candidate with the fewest computed pairs for its rate; the first of equals."""
    found = []
    for group in groups(patterns, context, rows, parts):
        heads = Counter(group)
        priced = (_priced(one, heads, rows, apart) for one in candidates for apart in (True, False))
        found.append(min(priced, key=lambda pair: pair[0])[1])
    return tuple(found)


def _priced(one: Configuration, heads: Counter[tuple[View, ...]], rows: Side, apart: bool) -> tuple[float, Choice]:
    """Pairs over rate, and the choice that costs it."""
    tile_rows, tile_columns = (one.block_q, one.block_k) if rows == "queries" else (one.block_k, one.block_q)
    pairs, longest = 0, 0
    for segments, count in heads.items():
        edge = row_edge(segments, tile_rows, apart)
        for segment in segments:
            found = tiles(segment, tile_rows, tile_columns, edge)
            pairs += count * found.num_pairs()
            longest = max(longest, int(found.count.max(initial=0)))
    return pairs / one.rate, Choice(one, longest, pairs, apart)


@lru_cache(maxsize=256)
def closed_choice(candidates: tuple[Configuration, ...], patterns: tuple[Pattern, ...], context: int) -> Choice | None:
    """The candidate that computes the fewest pairs for its rate, of those in which the closed runs of all heads fit."""
    parts = [closed_part(pattern, context) for pattern in patterns]
    views = [view(part, context, "keys") for part in parts if part is not None]
    periods = [one.closed_period() for one in views]
    longest = max((period for period in periods if period is not None), default=0)
    if len(views) < len(patterns):
        return None
    found = []
    for one in candidates:
        if one.block_k >= longest:
            num_tiles = sum(-(-context // edge_of(v, one.block_k)) for v in views)
            found.append(Choice(one, 1, num_tiles * one.block_k**2, True))
    return min(found, key=lambda choice: choice.pairs / choice.configuration.rate, default=None)


def num_slices(num_programs: int, longest: int, num_processors: int) -> int:
    """Into how many slices of queries to split a pass over keys: some, where its programs would leave a card idle."""
    wanted = WAVES * num_processors // max(num_programs, 1)
    return max(1, min(wanted, longest // SHORTEST_SLICE))
