"""The cases of benchmarks: patterns, sizes, and presets.

Letters: B batch, H heads, N positions, D head width; l stride and c summary of a pattern.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from longstride.kernels.patterns import Block, Column, Dense, Fixed, Local, Pattern, Strided, Summary

NAMES = ("dense", "local", "column", "block", "summary", "strided merged", "fixed merged")
SUMMARY = 8
CONTEXTS = {"cpu": (3_072, 12_288), "cuda": (3_072, 12_288, 65_536, 262_144, 1_048_576)}
HEAD_WIDTHS = {"cpu": (64,), "cuda": (64, 128)}
DTYPES = {"cpu": ("float32",), "cuda": ("bfloat16",)}
PRESETS = ("grid", "bars", "beside", "rehearsal")
MIXED = "mixed heads"  # a quarter of the heads each is local, column, summary and fixed
CPU_HEADS = 4
FEWEST_HEADS, MOST_HEADS, POSITIONS_ON_A_CARD = 8, 64, 2**20  # enough programs and bytes for every multiprocessor


@dataclass(frozen=True)
class Group:
    """Patterns that take turns at one size. Dense attention is measured once for all of them."""

    context: int  # N
    stride: int  # l; the window of local attention
    head_width: int  # D
    dtype: str
    heads: int
    batch: int = 1
    summary: int = SUMMARY  # c
    names: tuple[str, ...] = NAMES

    def patterns(self) -> dict[str, Pattern | list[Pattern]]:
        """Return the patterns by their names in tables; a list has one per head."""
        every = patterns_of(self.stride, self.summary)
        kinds = [every[name] for name in ("local", "column", "summary", "fixed merged")]
        mixed = {MIXED: [kinds[head % len(kinds)] for head in range(self.heads)]}
        return {name: mixed[name] if name == MIXED else every[name] for name in self.names}

    def sizes(self) -> dict[str, Any]:
        """Return the fields that identify the group in a result file."""
        return {name: value for name, value in asdict(self).items() if name != "names"}

    def title(self) -> str:
        """Return a line for tables."""
        return (
            f"n = {self.context:,}, l = {self.stride}, c = {self.summary}, B = {self.batch}, H = {self.heads}, "
            f"D = {self.head_width}, {self.dtype}"
        )


def patterns_of(stride: int, summary: int) -> dict[str, Pattern]:
    """Return the patterns by their names in tables."""
    factors = (Dense(), Local(stride), Column(stride), Block(stride), Summary(stride, summary))
    return dict(zip(NAMES, (*factors, Strided(stride), Fixed(stride, summary)), strict=True))


def stride_of(context: int) -> int:
    """Return the power of two nearest to the root of the context."""
    return 2 ** round(math.log2(context) / 2)


def heads_of(context: int, device_type: str) -> int:
    """Return how many heads fill the device: constant from 131,072 positions on, so that memory is comparable."""
    if device_type != "cuda":
        return CPU_HEADS
    return max(FEWEST_HEADS, min(MOST_HEADS, POSITIONS_ON_A_CARD // context))


def published_case() -> Group:
    """Return the sliding window of the published figures of other kernels."""
    return Group(32_768, 1_024, 128, "bfloat16", heads_of(32_768, "cuda"), names=("local",))


def bars(device_type: str) -> list[Group]:
    """Return the cases that ``benchmarks/attention/bars.py`` compares with its bars, and a few others."""
    if device_type != "cuda":
        names = ("dense", "local", "column", "block", "summary", "fixed merged")
        return [Group(12_288, 128, 64, "float32", CPU_HEADS, names=names)]

    def case(context: int, *names: str) -> Group:
        heads = heads_of(context, device_type)
        return Group(context, stride_of(context), 64, "bfloat16", heads, names=names or NAMES)

    return [
        published_case(),
        case(12_288),
        case(65_536, "local", "column", "block"),
        case(1_048_576, "strided merged", "fixed merged"),
        case(262_144, "strided merged", "fixed merged"),
    ]


def beside(device_type: str) -> list[Group]:
    """Return cases without bars that trainings use: other dtypes and widths, and heads that differ."""
    heads = heads_of(12_288, device_type)
    names = ("local", "column", "fixed merged", MIXED)
    kinds = ((64, "float16"), (128, "bfloat16"), (256, "bfloat16"), (64, "float32"))
    return [Group(12_288, 128, width, dtype, heads, names=names) for width, dtype in kinds]


def rehearsal(dtype: str) -> list[Group]:
    """Return cases that take the interpreter seconds: they show that everything runs, but not how fast."""
    return [Group(96, 16, 16, dtype, 4, summary=2, names=("local", MIXED)), Group(64, 8, 16, dtype, 1, summary=2)]
