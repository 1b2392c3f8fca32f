"""A pattern as a selection has it: orders and intervals as tensors."""

from __future__ import annotations

import torch

from longstride.kernels.forms import intervals_of, positions_of
from longstride.kernels.patterns import Pattern
from longstride.kernels.selections.base import Part


def pattern_parts(pattern: Pattern, context: int) -> tuple[Part, ...]:
    """The parts of a pattern at N = ``context`` positions, each tensor (1, 1, ·) on the CPU.

    ``pattern`` is that of one head (``for_head``). For mixers that go through a pattern's keys in their own way.
    """

    parts = []
    for part in pattern.parts():
        low, high = intervals_of(part.by_query(context))
        orders = [positions_of(order) for order in (part.query_order(context), part.key_order(context))]
        given = (x if x is None else x.to(torch.int32)[None, None] for x in (*orders, low, high))
        parts.append(Part(*given))  # type: ignore[arg-type]
    return tuple(parts)
