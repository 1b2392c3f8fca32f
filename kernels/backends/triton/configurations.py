"""Tile edges, warps and pipeline stages: one table an architecture.

An entry of a table serves every case that is no wider than its key; entries go from narrow to wide. It has one or more
candidates for each kernel. A plan takes the candidate with the fewest computed pairs divided by its rate: large tiles
where runs are long, small ones where large tiles would be mostly masked. fp32 has no tensor cores at full precision, so
its tiles are small enough for its products to stay in registers. Of 16 bits up to width 128, sm_90 has what
``benchmarks/attention/tune.py`` found fastest on an H200; all else was chosen by reading generated code.
"""

from __future__ import annotations

import heapq
from collections import Counter
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from torch import Tensor

from longstride.kernels.backends.triton.packing import UNREACHED, Parts, closed_part, groups, row_edge
from longstride.kernels.patterns import Pattern
from longstride.kernels.plan import Side, View, edge_of, tiles, view

MOST_WAVES = 8  # programs that a place for them ever has, at most, for the sake of being even
WAVES = 2  # programs that a card's multiprocessors should have each, at least
SHORTEST_SLICE = 4  # tiles of queries: less would not pay for another program
# What a program over keys costs besides its visits, in queries: keys and values read, sums written, and read again.
PROGRAM_QUERIES = 256
RESIDENT_WARPS = 8  # that a multiprocessor has registers for, as such programs use them
LEAST_GAIN = 0.05  # of the time of a pass, for which it is split: another kernel may have to add up then

Kernel = Literal["forward", "dkdv", "dq", "closed", "closed_forward"]


class Configuration(NamedTuple):
    """How one kernel is launched."""

    block_q: int  # queries a tile
    block_k: int  # keys a tile
    num_warps: int
    num_stages: int
    rate: float = 1.0  # pairs a second, relative to the other candidates
    maxnreg: int | None = None  # registers a thread at most, so that more programs fit; NVIDIA's alone

    def tile_sizes(self, rows: Side) -> tuple[int, int]:
        """Rows and columns of a tile."""
        return (self.block_q, self.block_k) if rows == "queries" else (self.block_k, self.block_q)

    def pair_doublings(self) -> int:
        """How often ``tile.load_pairs`` doubles its block of queries, until it has an element a thread."""
        return max(0, (32 * self.num_warps // (2 * self.block_q)).bit_length() - 1)

    def options(self) -> dict[str, int]:
        """What Triton compiles a kernel with, besides its constants."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options if self.maxnreg is None else options | {"maxnreg": self.maxnreg}


class Widest(NamedTuple):
    """The widest case that an entry of a table serves."""

    bytes_an_element: int  # 2 or 4; 8 in the interpreter
    width: int  # padded, the larger of q's and v's


class Candidates(NamedTuple):
    """The configurations among which a plan chooses, for each kernel."""

    forward: tuple[Configuration, ...]
    dkdv: tuple[Configuration, ...]
    dq: tuple[Configuration, ...]
    closed: tuple[Configuration, ...] = ()  # square tiles; where empty, the other kernels serve closed runs
    closed_forward: tuple[Configuration, ...] = ()  # likewise


Table = dict[Widest, Candidates]
Large = tuple[int, int, int, int]  # block_q, block_k, num_warps, num_stages
Closed = tuple[Configuration, ...]


def one_each(
    forward: Large, dkdv: Large, dq: Large, *small: Configuration, closed: Closed = (), runs: Closed = ()
) -> Candidates:
    """One large configuration for each kernel, small ones for all, and those of closed runs, backward and forward."""
    large = (Configuration(*forward), Configuration(*dkdv), Configuration(*dq))
    return Candidates((large[0], *small), (large[1], *small), (large[2], *small), closed, runs)


def squares(*edge_warps_rate: tuple[int, int, float], maxnreg: int | None = None) -> Closed:
    """Configurations of closed runs, as (edge, num_warps, rate)."""
    return tuple(Configuration(edge, edge, warps, 1, rate, maxnreg=maxnreg) for edge, warps, rate in edge_warps_rate)


RUNS = squares((128, 8, 1.0), (64, 4, 1.0), (32, 2, 0.6))  # forward, for cards without wgmma
WIDE_RUNS = RUNS[1:]
# For runs shorter than a large tile. The rates are estimates: no such card has been measured.
SMALL = (Configuration(32, 32, 4, 2, 0.3), Configuration(16, 16, 1, 2, 0.1))
FP32: Table = {
    Widest(4, 64): one_each((32, 32, 4, 1), (16, 32, 8, 1), (32, 16, 4, 1)),
    Widest(4, 256): one_each((16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 4, 1)),
}
# Fits the 99 KiB of shared memory of the smallest cards at every width.
SAFE: Table = {
    Widest(2, 64): one_each(
        (64, 64, 4, 2), (32, 64, 4, 2), (64, 64, 4, 2), *SMALL, closed=squares((64, 4, 1.0)), runs=RUNS
    ),
    Widest(2, 128): one_each((64, 32, 4, 2), (32, 32, 4, 2), (64, 32, 4, 2), runs=WIDE_RUNS),
    Widest(2, 256): one_each((32, 32, 4, 2), (32, 32, 4, 1), (32, 32, 4, 1)),
    **FP32,
}
SM_80: Table = {
    Widest(2, 64): one_each(
        (128, 64, 8, 3), (32, 64, 4, 2), (128, 64, 8, 2), *SMALL, closed=squares((64, 4, 1.0), (32, 4, 0.6)), runs=RUNS
    ),
    Widest(2, 128): one_each(
        (64, 64, 8, 2), (64, 64, 8, 2), (64, 32, 4, 2), closed=squares((32, 4, 1.0)), runs=WIDE_RUNS
    ),
    Widest(2, 256): one_each((64, 64, 8, 2), (64, 32, 8, 2), (64, 32, 4, 2)),
    **FP32,
}
SM_90: Table = {  # a product takes 64 rows a group of four warps: fewer, and groups would repeat each other's scores
    Widest(2, 64): Candidates(
        (
            Configuration(128, 64, 4, 3),
            Configuration(64, 64, 4, 2, 0.93, maxnreg=128),
            Configuration(16, 16, 1, 2, 0.45),
        ),
        (Configuration(64, 64, 4, 3), Configuration(32, 64, 4, 2, 0.93), Configuration(16, 16, 1, 2, 0.45)),
        (Configuration(64, 64, 4, 2), Configuration(16, 16, 1, 2, 0.4)),
        squares((64, 4, 1.0), (32, 4, 0.5)),
        squares((64, 4, 1.0)),
    ),
    Widest(2, 128): Candidates(
        (Configuration(64, 64, 4, 3), Configuration(16, 16, 1, 2, 0.35)),
        (Configuration(32, 64, 4, 2), Configuration(16, 16, 1, 2, 0.55)),
        (Configuration(64, 64, 4, 2), Configuration(16, 16, 1, 2, 0.5)),
        squares((128, 8, 1.0), (64, 4, 0.7), (32, 4, 0.4)),
        squares((128, 8, 1.0), (64, 4, 0.7), maxnreg=128),
    ),
    Widest(2, 256): one_each((128, 64, 8, 2), (64, 32, 8, 2), (128, 32, 8, 2)),
    **FP32,
}
GFX942: Table = {
    Widest(2, 64): one_each(
        (128, 64, 4, 1),
        (64, 64, 4, 1),
        (64, 64, 4, 1),
        closed=squares((64, 4, 1.0)),
        runs=squares((128, 8, 1.0), (64, 4, 1.0), (32, 2, 0.6)),
    ),
    Widest(2, 128): one_each((64, 64, 4, 1), (32, 64, 4, 1), (64, 64, 4, 1), runs=squares((64, 4, 1.0), (32, 4, 0.6))),
    Widest(2, 256): one_each((64, 32, 4, 1), (16, 32, 4, 1), (32, 32, 4, 1)),
    Widest(4, 256): one_each((16, 16, 4, 1), (16, 16, 4, 1), (32, 16, 4, 1)),
}
# For passes whose tiles also test the pairs of earlier parts, which takes registers: two vectors a part.
OVERLAPPING: Table = {
    Widest(2, 64): one_each((64, 32, 4, 3), (64, 32, 4, 3), (64, 32, 4, 3)),
    Widest(2, 128): one_each((64, 32, 8, 3), (64, 32, 8, 3), (64, 32, 8, 3)),
    Widest(2, 256): one_each((32, 32, 8, 3), (32, 32, 8, 3), (32, 32, 4, 3)),
    **FP32,
}
OVERLAPPING_SM_90: Table = {  # whose products of 16 bits take 64 rows at a time
    Widest(2, 64): one_each((64, 32, 4, 3), (32, 64, 4, 3), (64, 32, 4, 3)),
    Widest(2, 128): one_each((64, 32, 8, 3), (32, 64, 8, 3), (64, 32, 8, 3)),
    Widest(2, 256): one_each((64, 32, 8, 3), (32, 32, 8, 3), (64, 32, 8, 3)),
    **FP32,
}
OVERLAPPING_GFX942 = GFX942 | {
    Widest(2, 64): one_each((64, 64, 4, 1), (32, 64, 4, 1), (64, 64, 4, 1)),
    Widest(2, 256): one_each((64, 32, 4, 1), (16, 32, 4, 1), (32, 32, 4, 1)),
}
INTERPRETER: Table = {
    Widest(8, 256): one_each(
        *((32, 32, 1, 1),) * 3,
        Configuration(16, 16, 1, 1, 0.5),
        closed=squares((32, 1, 1.0)),
        runs=squares((32, 1, 1.0)),
    )
}
ARCHITECTURES = {"interpreter": INTERPRETER, "sm_80": SM_80, "sm_90": SM_90, "gfx942": GFX942}


def candidates(
    kernel: Kernel, architecture: str, bytes_an_element: int, width: int, overlapping: bool = False
) -> tuple[Configuration, ...]:
    """Those of the first entry that is wide enough; unknown AMD cards take gfx942's table, all others SAFE."""
    return getattr(entry(architecture, bytes_an_element, width, overlapping)[1], kernel)


def entry(architecture: str, bytes_an_element: int, width: int, overlapping: bool = False) -> tuple[Widest, Candidates]:
    """What serves a case, by its key in the architecture's table."""
    known, of_amd, other = ARCHITECTURES, GFX942, SAFE
    if overlapping and architecture != "interpreter":
        known, of_amd, other = {"sm_90": OVERLAPPING_SM_90}, OVERLAPPING_GFX942, OVERLAPPING
    table = known.get(architecture, of_amd if architecture.startswith("gfx") else other)
    return next(
        pair for pair in table.items() if bytes_an_element <= pair[0].bytes_an_element and width <= pair[0].width
    )


class Choice(NamedTuple):
    """What a pass is launched with."""

    configuration: Configuration
    longest: int  # column tiles of the row tile that visits most
    pairs: int  # computed by all heads, masked ones included
    aligned: bool  # tiles end where closed runs of rows end: see ``longstride.kernels.plan.edge_of``
    closed: bool = False  # by the kernel of closed runs


def chosen(
    candidates: tuple[Configuration, ...],
    patterns: tuple[Pattern, ...],
    context: int,
    rows: Side,
    parts: Parts,
    of_runs: tuple[Configuration, ...] = (),
) -> tuple[Choice, ...]:
    """For each pass, the candidate with the fewest computed pairs for its rate; the first of equals.

    A pass that has nothing but closed runs in every head takes one of those ``of_runs``, where a run fits its tile.
    """
    choices = []
    for group in groups(patterns, context, rows, parts):
        at_once = None if any(len(head) > 1 for head in group) else of_closed_runs(of_runs, [head[0] for head in group])
        if at_once is not None:
            choices.append(at_once)
            continue
        heads = Counter(group)
        priced = (_priced(candidate, heads, rows, aligned) for candidate in candidates for aligned in (True, False))
        choice = min(priced, key=lambda pair: pair[0])[1]
        if any(isinstance(segment.column_order, Tensor) for segments in heads for segment in segments):
            choice = choice._replace(configuration=pipelined(choice.configuration))
        choices.append(choice)
    return tuple(choices)


def of_closed_runs(candidates: tuple[Configuration, ...], heads: list[View]) -> Choice | None:
    """The candidate with the fewest computed pairs for its rate, among those whose tiles hold the runs of all heads.

    None where no candidate does, or a head has no closed runs.
    """
    periods = [head.closed_period() or UNREACHED for head in heads]
    choices = []
    for candidate in candidates:
        if candidate.block_k >= max(periods):
            num_tiles = sum(-(-head.num_rows // edge_of(head, candidate.block_k)) for head in heads)
            choices.append(Choice(candidate, 1, num_tiles * candidate.block_k**2, aligned=True, closed=True))
    return min(choices, key=lambda choice: choice.pairs / choice.configuration.rate, default=None)


def _priced(
    candidate: Configuration, heads: Counter[tuple[View, ...]], rows: Side, aligned: bool
) -> tuple[float, Choice]:
    """The candidate's pairs over its rate, and the choice that it would be."""
    tile_rows, tile_columns = candidate.tile_sizes(rows)
    pairs, longest = 0, 0
    for segments, count in heads.items():
        edge = row_edge(segments, tile_rows, aligned)
        for segment in segments:
            visited = tiles(segment, tile_rows, tile_columns, edge)
            pairs += count * visited.num_pairs()
            longest = max(longest, int(visited.count.max(initial=0)))
    return pairs / candidate.rate, Choice(candidate, longest, pairs, aligned)


@lru_cache(maxsize=4096)
def chosen_by_span(candidates: tuple[Configuration, ...], span: int, context: int, rows: Side) -> Choice:
    """The candidate for rows that read at most ``span`` columns each, as far as that tells.

    Nothing else is known of a selection. As bounds never fall, all tiles of rows together visit each column once and
    besides as many a tile as a row reads: on average that is a column more a row, and half a tile is lost at the end.
    """
    choices = []
    for candidate in candidates:
        tile_rows, tile_columns = candidate.tile_sizes(rows)
        visited = min(span + tile_rows, context) + tile_columns // 2
        choices.append(Choice(candidate, -(-visited // tile_columns), context * visited, False))
    return min(choices, key=lambda choice: choice.pairs / choice.configuration.rate)


def pipelined(one: Configuration) -> Configuration:
    """With a stage more where columns are listed: a tile's positions, then its rows, both before they are needed."""
    return one._replace(num_stages=max(3, one.num_stages)) if one.num_stages > 1 else one


def closed_choice(candidates: tuple[Configuration, ...], patterns: tuple[Pattern, ...], context: int) -> Choice | None:
    """The choice for the closed parts of all heads, seen from their keys; None where a head has none, or none fits."""
    parts = [closed_part(pattern, context) for pattern in patterns]
    views = [view(part, context, "keys") for part in parts if part is not None]
    return of_closed_runs(candidates, views) if len(views) == len(patterns) else None


def num_slices(num_programs: int, longest: int, num_processors: int) -> int:
    """Into how many slices of queries to split a pass over keys: several where its programs would not fill the card.

    For where no more is known than the ``longest`` of the programs.
    """
    wanted = WAVES * num_processors // max(num_programs, 1)
    return max(1, min(wanted, longest // SHORTEST_SLICE))


def slices_of(
    choice: Choice, patterns: tuple[Pattern, ...], context: int, parts: Parts, number: int, batch: int, processors: int
) -> int:
    """The same for a pass whose visits are known: see ``balanced_slices``."""
    one = choice.configuration
    group = groups(patterns, context, "keys", parts)[number]
    edges = {head: row_edge(head, one.block_k, choice.aligned) for head in group}  # heads that are alike share one
    counts = {head: tiles(head[0], one.block_k, one.block_q, edge).count for head, edge in edges.items()}
    visits = np.zeros((max(map(len, counts.values())), batch, len(group)), dtype=np.int64)  # heads begin side by side
    for number, head in enumerate(group):
        visits[: len(counts[head]), :, number] = counts[head][:, None]
    programs = max(1, RESIDENT_WARPS // one.num_warps)
    return balanced_slices(visits.reshape(-1), programs * processors, PROGRAM_QUERIES / one.block_q)


def balanced_slices(visits: np.ndarray, places: int, extra: float) -> int:
    """Into how many slices to split programs of so many visits, which begin in this order, to be done soonest.

    Args:
        visits: (P,), 0 of programs that have nothing to do.
        places: how many programs run at a time.
        extra: what a program costs besides its visits, in visits.
    """
    visits = visits[visits > 0]
    longest = int(visits.max(initial=0))
    ideal = float((visits + extra).sum()) / places
    if longest + extra <= LEAST_GAIN * ideal:  # at most so much later than the ideal are all done
        return 1
    best, soonest = 1, makespan(visits + extra, places) * (1 - LEAST_GAIN)
    slices = 2
    while slices * SHORTEST_SLICE <= longest and slices * len(visits) <= MOST_WAVES * places:
        part = np.arange(slices)
        shares = visits[:, None] // slices + (part < visits[:, None] % slices)
        time = makespan((shares + extra).reshape(-1), places)
        if time < soonest:
            best, soonest = slices, time
        slices += max(1, slices // 8)
    return best


def makespan(costs: np.ndarray, places: int) -> float:
    """When the last of some programs is done, if each begins, in this order, at the place that is free first."""
    free = [0.0] * places
    for cost in costs.tolist():
        heapq.heapreplace(free, free[0] + cost)
    return max(free)
