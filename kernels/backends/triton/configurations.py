"""Tile edges, warps and pipeline stages: one table an architecture."""

from __future__ import annotations

from typing import Literal, NamedTuple

Kernel = Literal["forward", "dkdv", "dq"]


class Configuration(NamedTuple):
    """How one kernel is launched."""

    block_q: int  # queries a tile
    block_k: int  # keys a tile
    num_warps: int
    num_stages: int


class Widest(NamedTuple):
    """The widest case that a row of a table serves."""

    bytes_an_element: int  # 2 or 4
    width: int  # padded, of q, k and v


Table = dict[Widest, dict[Kernel, Configuration]]


def _all(block_q: int, block_k: int, num_warps: int, num_stages: int) -> dict[Kernel, Configuration]:
    one = Configuration(block_q, block_k, num_warps, num_stages)
    return {"forward": one, "dkdv": one, "dq": one}


INTERPRETER: Table = {Widest(8, 256): _all(32, 32, 1, 1)}  # small, so that small contexts have tiles of every kind

SAFE: Table = {
    Widest(2, 64): _all(64, 64, 4, 2),
    Widest(2, 128): _all(64, 32, 4, 2),
    Widest(2, 256): _all(32, 32, 4, 1),
    Widest(4, 64): _all(32, 32, 4, 1),
    Widest(4, 256): _all(16, 16, 4, 1),
}
ARCHITECTURES: dict[str, Table] = {"interpreter": INTERPRETER}


def configuration(kernel: Kernel, architecture: str, bytes_an_element: int, width: int) -> Configuration:
    """The table's first row that is wide enough; SAFE for an architecture without a table of its own."""
    table = ARCHITECTURES.get(architecture, SAFE)
    row = next(row for row in table if bytes_an_element <= row.bytes_an_element and width <= row.width)
    return table[row][kernel]
