"""Collectives: what each moves, and how many bytes each rank sends for it.

Letters: W ranks, S bytes.

In a ring, each rank sends S·(W - 1)/W bytes for each time that every rank's share has to go round: once to gather
shares (all_gather), once to scatter sums (reduce_scatter, reduce), twice for both (all_reduce). An all_to_all keeps one
share of W and sends the others. In a broadcast all ranks but the last pass everything on. Other algorithms (trees,
switches that add) send less for some collectives; no ring sends less.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

# How often S·(W - 1)/W is sent, with S the whole tensor: what is reduced, or gathered, or exchanged.
RING = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1, "reduce": 1, "broadcast": 1}
DEEPSPEED, OURS = "deepspeed", "longstride"


@dataclass(frozen=True, slots=True)
class Collective:
    """Equal collectives of one step, over all ranks."""

    operation: str
    num_bytes: int  # S: of all_gather what is gathered, of reduce_scatter and all_to_all what each rank brings
    times: int = 1
    calls: int = 1  # that each is made in, where it is too large for one
    owner: str = DEEPSPEED  # whose code calls it
    what: str = ""


def sent_bytes(operation: str, num_bytes: int, ranks: int) -> float:
    """Return what each rank sends for one collective over S bytes; the mean over ranks if they differ."""
    return RING[operation] * num_bytes * (ranks - 1) / ranks


def total_sent(collectives: Iterable[Collective], ranks: int, owner: str | None = None) -> dict[str, float]:
    """Sum the bytes that each rank sends, by operation."""
    totals: defaultdict[str, float] = defaultdict(float)
    for collective in collectives:
        if owner in (None, collective.owner):
            sent = sent_bytes(collective.operation, collective.num_bytes, ranks)
            totals[collective.operation] += collective.times * sent
    return dict(totals)


def message_bytes(collectives: Iterable[Collective], owner: str | None = None) -> dict[str, int]:
    """Sum S by operation, for comparison with counted calls."""
    totals: Counter[str] = Counter()
    for collective in collectives:
        if owner in (None, collective.owner):
            totals[collective.operation] += collective.times * collective.num_bytes
    return {operation: count for operation, count in totals.items() if count}


def num_calls(collectives: Iterable[Collective], owner: str | None = None) -> dict[str, int]:
    """Count calls of collectives, by operation."""
    totals: Counter[str] = Counter()
    for collective in collectives:
        if collective.times and owner in (None, collective.owner):
            totals[collective.operation] += collective.times * collective.calls
    return dict(totals)
