"""Tile edges, warps and pipeline stages: one table per architecture.

An entry of a table is for all cases up to the width of its key. Entries are sorted by width and have one or more
candidates for each kernel. A plan takes the candidate with the fewest computed pairs divided by its rate: large tiles
for long runs, small tiles if large ones would be mostly masked. fp32 has no tensor cores at full precision, so its
tiles are small enough for products to stay in registers. The 16-bit entries of sm_90 up to width 128 were the fastest
on an H200 (``benchmarks/attention/tune.py``). All others were chosen by reading generated code.
"""

from __future__ import annotations

import heapq
from collections import Counter
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from torch import Tensor

from longstride.kernels.backends.triton.packing import UNREACHED, Group, closed_part, row_edge
from longstride.kernels.patterns import Pattern
from longstride.kernels.plan import Side, View, edge_of, tiles, view

MOST_WAVES = 8  # a pass is not split into more programs than this many times those that run at once
WAVES = 2  # programs that each multiprocessor should get at least
SHORTEST_SLICE = 4  # tiles of queries; shorter slices do not pay for another program
# Cost of a program over keys besides its visits, in queries: reading keys and values, writing sums and reading them.
PROGRAM_QUERIES = 256
RESIDENT_WARPS = 8  # warps of such programs that the registers of a multiprocessor suffice for
LEAST_GAIN = 0.05  # share of the time of a pass that splitting must save, as another kernel may have to add up

Kernel = Literal["forward", "dkdv", "dq", "closed", "closed_forward"]


class Configuration(NamedTuple):
    """Tiles, warps, stages and registers of a kernel."""

    block_q: int  # queries per tile
    block_k: int  # keys per tile
    num_warps: int
    num_stages: int
    rate: float = 1.0  # pairs per second, relative to the other candidates
    maxnreg: int | None = None  # limit of registers per thread, so that more programs fit; NVIDIA only

    def tile_sizes(self, rows: Side) -> tuple[int, int]:
        """Return rows and columns of a tile."""
        return (self.block_q, self.block_k) if rows == "queries" else (self.block_k, self.block_q)

    def pair_doublings(self) -> int:
        """Return how often ``tile.load_pairs`` doubles its block of queries, to get an element per thread."""
        return max(0, (32 * self.num_warps // (2 * self.block_q)).bit_length() - 1)

    def options(self) -> dict[str, int]:
        """Return Triton's compile options."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options if self.maxnreg is None else options | {"maxnreg": self.maxnreg}


Configurations = tuple[Configuration, ...]


class Widest(NamedTuple):
    """The widest case that an entry of a table is for."""

    bytes_an_element: int  # 2 or 4; 8 in the interpreter
    width: int  # padded head width, the larger of q's and v's


class Candidates(NamedTuple):
    """The configurations that a plan chooses from, for each kernel."""

    forward: Configurations
    dkdv: Configurations
    dq: Configurations
    closed: Configurations = ()  # square tiles; if empty, closed runs use the other kernels
    closed_forward: Configurations = ()  # likewise


Table = dict[Widest, Candidates]
Large = tuple[int, int, int, int]  # block_q, block_k, num_warps, num_stages


def one_each(
    forward: Large,
    dkdv: Large,
    dq: Large,
    *small: Configuration,
    closed: Configurations = (),
    runs: Configurations = (),
) -> Candidates:
    """Combine one large configuration per kernel, small ones for all, and closed runs backward and forward."""
    large = (Configuration(*forward), Configuration(*dkdv), Configuration(*dq))
    return Candidates((large[0], *small), (large[1], *small), (large[2], *small), closed, runs)


def squares(*edge_warps_rate: tuple[int, int, float], maxnreg: int | None = None) -> Configurations:
    """Return configurations of closed runs, from (edge, num_warps, rate)."""
    return tuple(Configuration(edge, edge, warps, 1, rate, maxnreg=maxnreg) for edge, warps, rate in edge_warps_rate)


RUNS = squares((128, 8, 1.0), (64, 4, 1.0), (32, 2, 0.6))  # forward, for cards without wgmma
WIDE_RUNS = RUNS[1:]
# For runs shorter than a large tile. The rates are estimates, as no such card has been measured.
SMALL = (Configuration(32, 32, 4, 2, 0.3), Configuration(16, 16, 1, 2, 0.1))
FP32: Table = {
    Widest(4, 64): one_each((32, 32, 4, 1), (16, 32, 8, 1), (32, 16, 4, 1)),
    Widest(4, 256): one_each((16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 4, 1)),
}
# For unknown cards: fits in 99 KiB of shared memory at every width.
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
SM_90: Table = {  # a product takes 64 rows per group of four warps; with fewer rows, groups would repeat work
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
# For passes that also test the pairs of earlier parts, which takes registers for two vectors per part.
OVERLAPPING: Table = {
    Widest(2, 64): one_each((64, 32, 4, 3), (64, 32, 4, 3), (64, 32, 4, 3)),
    Widest(2, 128): one_each((64, 32, 8, 3), (64, 32, 8, 3), (64, 32, 8, 3)),
    Widest(2, 256): one_each((32, 32, 8, 3), (32, 32, 8, 3), (32, 32, 4, 3)),
    **FP32,
}
OVERLAPPING_SM_90: Table = {  # 16-bit products take 64 rows at a time
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
) -> Configurations:
    """Return the candidates of the first entry that is wide enough. Unknown AMD cards use GFX942, all others SAFE."""
    tables, amd_table, default_table = ARCHITECTURES, GFX942, SAFE
    if overlapping and architecture != "interpreter":
        tables, amd_table, default_table = {"sm_90": OVERLAPPING_SM_90}, OVERLAPPING_GFX942, OVERLAPPING
    table = tables.get(architecture, amd_table if architecture.startswith("gfx") else default_table)
    fitting = (row for most, row in table.items() if bytes_an_element <= most.bytes_an_element and width <= most.width)
    return getattr(next(fitting), kernel)


class Choice(NamedTuple):
    """The configuration of a pass, and its work."""

    configuration: Configuration
    longest: int  # column tiles of the row tile that visits the most
    pairs: int  # computed by all heads, masked ones included
    aligned: bool  # tiles end where closed runs of rows end: see ``plan.edge_of``
    closed: bool = False  # uses the kernel of closed runs


def choose(
    candidates: Configurations, passes: tuple[Group, ...], rows: Side, of_runs: Configurations = ()
) -> tuple[Choice, ...]:
    """Choose for each pass the candidate with the fewest computed pairs for its rate, the first of equals.

    A pass with only closed runs in every head takes one of ``of_runs``, if a run fits in its tile.
    """
    choices = []
    for group in passes:
        closed = None if any(len(head) > 1 for head in group) else choose_closed(of_runs, [head[0] for head in group])
        if closed is not None:
            choices.append(closed)
            continue
        options = [_open_choice(candidate, group, rows, a) for candidate in candidates for a in (True, False)]
        choice = min(options, key=lambda choice: choice.pairs / choice.configuration.rate)
        if any(isinstance(segment.column_order, Tensor) for segments in group for segment in segments):
            choice = choice._replace(configuration=pipelined(choice.configuration))
        choices.append(choice)
    return tuple(choices)


def choose_closed(candidates: Configurations, heads: list[View]) -> Choice | None:
    """Choose the candidate with the fewest pairs for its rate, among those with tiles that hold the runs of all heads.

    Return None if there is no such candidate, or a head has no closed runs.
    """
    periods = [head.closed_period() or UNREACHED for head in heads]
    choices = []
    for candidate in candidates:
        if candidate.block_k >= max(periods):
            num_tiles = sum(-(-head.num_rows // edge_of(head, candidate.block_k)) for head in heads)
            choices.append(Choice(candidate, 1, num_tiles * candidate.block_k**2, aligned=True, closed=True))
    return min(choices, key=lambda choice: choice.pairs / choice.configuration.rate, default=None)


def _open_choice(candidate: Configuration, group: Group, rows: Side, aligned: bool) -> Choice:
    """Return the choice of a candidate for a pass, with its pairs."""
    tile_rows, tile_columns = candidate.tile_sizes(rows)
    pairs, longest = 0, 0
    for segments, count in Counter(group).items():
        edge = row_edge(segments, tile_rows, aligned)
        for segment in segments:
            visited = tiles(segment, tile_rows, tile_columns, edge)
            pairs += count * visited.num_pairs()
            longest = max(longest, int(visited.count.max(initial=0)))
    return Choice(candidate, longest, pairs, aligned)


@lru_cache(maxsize=4096)
def choose_by_span(candidates: Configurations, span: int, context: int, rows: Side) -> Choice:
    """Choose a candidate for rows that read at most ``span`` columns each.

    Nothing else is known about a selection. As bounds never decrease, all row tiles together visit each column once,
    plus ``span`` columns per tile. At the end of a tile's columns, half a column tile is wasted on average.
    """
    choices = []
    for candidate in candidates:
        tile_rows, tile_columns = candidate.tile_sizes(rows)
        visited = min(span + tile_rows, context) + tile_columns // 2
        choices.append(Choice(candidate, -(-visited // tile_columns), context * visited, False))
    return min(choices, key=lambda choice: choice.pairs / choice.configuration.rate)


def pipelined(configuration: Configuration) -> Configuration:
    """Return the configuration with a stage for listed columns: positions are loaded before rows, both in advance."""
    stages = configuration.num_stages
    return configuration._replace(num_stages=max(3, stages)) if stages > 1 else configuration


def closed_choice(candidates: Configurations, patterns: tuple[Pattern, ...], context: int) -> Choice | None:
    """Choose for the closed parts of all heads, seen from their keys; None if a head has none or none fits."""
    parts = [closed_part(pattern, context) for pattern in patterns]
    views = [view(part, context, "keys") for part in parts if part is not None]
    return choose_closed(candidates, views) if len(views) == len(patterns) else None


def num_slices(num_programs: int, longest: int, num_processors: int) -> int:
    """Return into how many slices of queries to split a pass over keys, so that its programs fill the card.

    For passes with only the visits of the ``longest`` program known.
    """
    slices = WAVES * num_processors // max(num_programs, 1)
    return max(1, min(slices, longest // SHORTEST_SLICE))


def slices_of(choice: Choice, group: Group, batch: int, processors: int) -> int:
    """Return the number of slices for a pass over keys with known visits: see ``balanced_slices``."""
    configuration = choice.configuration
    edges = {head: row_edge(head, configuration.block_k, choice.aligned) for head in group}  # equal heads share one
    block_k, block_q = configuration.block_k, configuration.block_q
    counts = {head: tiles(head[0], block_k, block_q, edge).count for head, edge in edges.items()}
    visits = np.zeros((max(map(len, counts.values())), batch, len(group)), dtype=np.int64)  # heads start together
    for number, head in enumerate(group):
        visits[: len(counts[head]), :, number] = counts[head][:, None]
    programs = max(1, RESIDENT_WARPS // configuration.num_warps)
    return balanced_slices(visits.reshape(-1), programs * processors, PROGRAM_QUERIES / block_q)


def balanced_slices(visits: np.ndarray, places: int, extra: float) -> int:
    """Return the number of slices per program with the least total time, if programs start in this order.

    Args:
        visits: (P,), visits of each program; may be 0.
        places: how many programs run at the same time.
        extra: cost of a program besides its visits, in visits.
    """
    visits = visits[visits > 0]
    longest = int(visits.max(initial=0))
    ideal = float((visits + extra).sum()) / places
    if longest + extra <= LEAST_GAIN * ideal:  # the last program ends at most this much after the ideal time
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
    """Return when the last program ends, if each starts, in this order, at the first free place."""
    free = [0.0] * places
    for cost in costs.tolist():
        heapq.heapreplace(free, free[0] + cost)
    return max(free)
