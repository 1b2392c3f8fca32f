"""Tile edges, warps and pipeline stages: one table an architecture. ``benchmarks/tune.py`` measures them.

A row serves every case that is no wider than its key; rows go from narrow to wide. Of each kernel it has one or more
candidates, and a plan takes the one for which the pairs that it computes, divided by the candidate's rate, are fewest:
large tiles where runs are long, small ones where they would be mostly masked. fp32 has no tensor cores at full
precision, so its tiles are as small as its products, which are kept in registers, demand.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import Literal, NamedTuple

from longstride.kernels.backends.triton.packing import Parts, closed_part, groups, row_edge
from longstride.kernels.patterns import Pattern
from longstride.kernels.plan import Side, View, edge_of, tiles, view

WAVES = 2  # programs that a card's multiprocessors should have each, at least
SHORTEST_SLICE = 4  # tiles of queries: less would not pay for another program

Kernel = Literal["forward", "dkdv", "dq", "closed"]


class Configuration(NamedTuple):
    """How one kernel is launched."""

    block_q: int  # queries a tile
    block_k: int  # keys a tile
    num_warps: int
    num_stages: int
    rate: float = 1.0  # pairs a second, relative to the other candidates
    described: bool = False  # let the tensor memory accelerator copy tiles where their order allows it


class Widest(NamedTuple):
    """The widest case that a row of a table serves."""

    bytes_an_element: int  # 2 or 4; 8 in the interpreter
    width: int  # padded, the larger of q's and v's


class Row(NamedTuple):
    """The candidates of each kernel."""

    forward: tuple[Configuration, ...]
    dkdv: tuple[Configuration, ...]
    dq: tuple[Configuration, ...]
    closed: tuple[Configuration, ...] = ()  # square tiles; none: closed runs are served by the other kernels


Table = dict[Widest, Row]
Large = tuple[int, int, int, int]  # block_q, block_k, num_warps, num_stages
Closed = tuple[Configuration, ...]


def row(forward: Large, dkdv: Large, dq: Large, *small: Configuration, closed: Closed = ()) -> Row:
    """One large configuration a kernel, small ones for all, and those of closed runs."""
    return Row((Configuration(*forward), *small), (Configuration(*dkdv), *small), (Configuration(*dq), *small), closed)


def same_for_all(
    block_q: int, block_k: int, num_warps: int, num_stages: int, *small: Configuration, closed: Closed = ()
) -> Row:
    """One large configuration for the three kernels."""
    one = (block_q, block_k, num_warps, num_stages)
    return row(one, one, one, *small, closed=closed)


def described(row: Row) -> Row:
    """The same, with descriptors."""
    forward, dkdv, dq = (tuple(one._replace(described=True) for one in kernel) for kernel in row[:3])
    return Row(forward, dkdv, dq, row.closed)


def squares(*edge_warps_rate: tuple[int, int, float]) -> Closed:
    """Configurations of closed runs, as (edge, num_warps, rate)."""
    return tuple(Configuration(edge, edge, num_warps, 1, rate) for edge, num_warps, rate in edge_warps_rate)


# For runs shorter than a large tile. Rates are estimates until a card has been measured.
SMALL = (Configuration(32, 32, 4, 2, 0.3), Configuration(16, 16, 1, 2, 0.1))
# For runs of a few tiles, which wait for memory: several programs fit a multiprocessor.
MIDDLE = Configuration(64, 64, 4, 2, 0.85)
FP32: Table = {
    Widest(4, 64): row((32, 32, 4, 1), (16, 32, 4, 1), (32, 16, 4, 1)),
    Widest(4, 256): row((16, 32, 8, 1), (16, 16, 8, 1), (16, 16, 4, 1)),
}
# Fits the 99 KiB of shared memory of the smallest cards at every width.
SAFE: Table = {
    Widest(2, 64): row((64, 64, 4, 2), (32, 64, 4, 2), (64, 64, 4, 2), *SMALL, closed=squares((64, 8, 1.0))),
    Widest(2, 128): row((64, 32, 4, 2), (32, 32, 4, 2), (64, 32, 4, 2)),
    Widest(2, 256): row((64, 32, 8, 2), (32, 32, 8, 2), (32, 32, 4, 1)),
    **FP32,
}
SM_80: Table = {
    Widest(2, 64): row(
        (128, 64, 8, 3), (64, 64, 8, 2), (128, 64, 8, 2), *SMALL, closed=squares((64, 8, 1.0), (32, 4, 0.6))
    ),
    Widest(2, 128): row((64, 64, 8, 2), (64, 64, 8, 2), (64, 32, 4, 2), closed=squares((32, 4, 1.0))),
    Widest(2, 256): row((64, 32, 8, 2), (32, 32, 8, 2), (64, 32, 8, 2)),
    **FP32,
}
SM_90: Table = {
    Widest(2, 64): row(
        (128, 64, 8, 3),
        (64, 128, 8, 2),
        (128, 64, 8, 2),
        MIDDLE,
        *SMALL,
        closed=squares((128, 8, 1.0), (64, 4, 1.0), (32, 2, 0.6)),
    ),
    Widest(2, 128): row((128, 64, 8, 3), (64, 64, 8, 2), (128, 64, 8, 2), closed=squares((64, 8, 1.0), (32, 4, 0.6))),
    Widest(2, 256): row((64, 64, 8, 2), (32, 32, 8, 2), (64, 32, 8, 2)),
    **FP32,
}
GFX942: Table = {
    Widest(2, 64): row((128, 64, 4, 1), (64, 64, 4, 1), (64, 64, 4, 1), closed=squares((64, 4, 1.0))),
    Widest(2, 128): row((64, 64, 4, 1), (32, 64, 4, 1), (64, 64, 4, 1)),
    Widest(2, 256): row((64, 32, 8, 1), (16, 32, 4, 1), (32, 32, 4, 1)),
    Widest(4, 256): same_for_all(16, 16, 4, 1),
}
INTERPRETER: Table = {
    Widest(8, 256): same_for_all(32, 32, 1, 1, Configuration(16, 16, 1, 1, 0.5), closed=squares((32, 1, 1.0)))
}
ARCHITECTURES = {"interpreter": INTERPRETER, "sm_80": SM_80, "sm_90": SM_90, "gfx942": GFX942}


def candidates(kernel: Kernel, architecture: str, bytes_an_element: int, width: int) -> tuple[Configuration, ...]:
    """Of the first wide enough row; gfx942's for every AMD card, SAFE for every other without a table of its own."""
    table = ARCHITECTURES.get(architecture, GFX942 if architecture.startswith("gfx") else SAFE)
    found = next(table[key] for key in table if bytes_an_element <= key.bytes_an_element and width <= key.width)
    return getattr(found, kernel)


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
