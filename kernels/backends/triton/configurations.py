"""Tile edges, warps and pipeline stages: one table an architecture.

A row serves every case that is no wider than its key; rows go from narrow to wide. The 16-bit rows are the largest
tiles that compile without spilling. fp32 has no tensor cores at full precision, so its tiles are as small as its
products, which are kept in registers, demand.
"""

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

    bytes_an_element: int  # 2 or 4; 8 in the interpreter
    width: int  # padded, the larger of q's and v's


class Row(NamedTuple):
    """The configurations of the three kernels."""

    forward: Configuration
    dkdv: Configuration
    dq: Configuration


Table = dict[Widest, Row]


def row(forward: tuple[int, ...], dkdv: tuple[int, ...], dq: tuple[int, ...]) -> Row:
    """A row, each configuration as (block_q, block_k, num_warps, num_stages)."""
    return Row(Configuration(*forward), Configuration(*dkdv), Configuration(*dq))


def same_for_all(block_q: int, block_k: int, num_warps: int, num_stages: int) -> Row:
    """One configuration for the three kernels."""
    one = (block_q, block_k, num_warps, num_stages)
    return row(one, one, one)


FP32: Table = {
    Widest(4, 64): row((32, 32, 4, 1), (32, 16, 4, 1), (32, 16, 4, 1)),
    Widest(4, 256): same_for_all(16, 16, 4, 1),
}
# Fits the 99 KiB of shared memory of the smallest cards at every width.
SAFE: Table = {
    Widest(2, 64): row((64, 64, 4, 2), (64, 64, 8, 2), (64, 64, 4, 2)),
    Widest(2, 128): row((64, 32, 4, 2), (32, 32, 4, 2), (64, 32, 4, 2)),
    Widest(2, 256): row((64, 32, 8, 2), (32, 32, 8, 2), (32, 32, 8, 1)),
    **FP32,
}
ARCHITECTURES: dict[str, Table] = {
    "interpreter": {Widest(8, 256): same_for_all(32, 32, 1, 1)},
    "sm_80": {
        Widest(2, 64): row((128, 64, 8, 3), (64, 64, 8, 2), (128, 64, 8, 2)),
        Widest(2, 128): row((64, 64, 8, 2), (64, 64, 8, 2), (64, 32, 4, 2)),
        Widest(2, 256): row((64, 64, 8, 2), (32, 32, 8, 2), (64, 32, 8, 2)),
        **FP32,
    },
    "sm_90": {
        Widest(2, 64): row((128, 64, 8, 3), (64, 128, 8, 2), (128, 64, 8, 2)),
        Widest(2, 128): row((128, 64, 8, 3), (64, 64, 8, 2), (128, 64, 8, 2)),
        Widest(2, 256): row((64, 64, 8, 2), (32, 32, 8, 2), (64, 32, 8, 2)),
        **FP32,
    },
    "gfx942": {
        Widest(2, 64): row((128, 64, 4, 1), (64, 64, 4, 1), (64, 64, 4, 1)),
        Widest(2, 128): row((64, 64, 4, 1), (32, 64, 4, 1), (64, 64, 4, 1)),
        Widest(2, 256): row((64, 32, 8, 1), (32, 32, 4, 1), (32, 32, 4, 1)),
        Widest(4, 256): same_for_all(16, 16, 4, 1),
    },
}


def configuration(kernel: Kernel, architecture: str, bytes_an_element: int, width: int) -> Configuration:
    """The first wide enough row; gfx942's for every AMD card, SAFE for every other without a table of its own."""
    table = ARCHITECTURES.get(architecture, ARCHITECTURES["gfx942"] if architecture.startswith("gfx") else SAFE)
    found = next(table[key] for key in table if bytes_an_element <= key.bytes_an_element and width <= key.width)
    return getattr(found, kernel)
