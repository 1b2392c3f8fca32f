"""Which configuration each pass of a kernel is launched with, and how often it is split: pure functions of the plan."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import NamedTuple

from kernels.backends.triton.configurations import Configuration
from kernels.backends.triton.packing import groups, row_edge
from kernels.patterns.base import Pattern
from kernels.plan import Side, View, tiles

WAVES = 2  # programs that a card's multiprocessors should have each, at least
SHORTEST_SLICE = 4  # tiles of queries: less would not pay for another program


class Choice(NamedTuple):
    """What a pass is launched with."""

    configuration: Configuration
    longest: int  # column tiles of the row tile that visits most


@lru_cache(maxsize=256)
def chosen(
    candidates: tuple[Configuration, ...], patterns: tuple[Pattern, ...], context: int, rows: Side
) -> tuple[Choice, ...]:
    """Of each pass, the candidate with the fewest computed pairs for its rate; the first of equals."""
    found = []
    for group in groups(patterns, context, rows):
        heads = Counter(group)
        found.append(min((_priced(one, heads, rows) for one in candidates), key=lambda pair: pair[0])[1])
    return tuple(found)


def _priced(one: Configuration, heads: Counter[tuple[View, ...]], rows: Side) -> tuple[float, Choice]:
    """Pairs over rate, and the choice that costs it."""
    tile_rows, tile_columns = (one.block_q, one.block_k) if rows == "queries" else (one.block_k, one.block_q)
    pairs, longest = 0, 0
    for segments, count in heads.items():
        edge = row_edge(segments, tile_rows)
        for segment in segments:
            found = tiles(segment, tile_rows, tile_columns, edge)
            pairs += count * found.num_pairs()
            longest = max(longest, int(found.count.max(initial=0)))
    return pairs / one.rate, Choice(one, longest)


def num_slices(num_programs: int, longest: int, num_processors: int) -> int:
    """Into how many slices of queries to split a pass over keys: some, where its programs would leave a card idle."""
    wanted = WAVES * num_processors // max(num_programs, 1)
    return max(1, min(wanted, longest // SHORTEST_SLICE))
