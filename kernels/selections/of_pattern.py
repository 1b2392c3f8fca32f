"""A pattern as a selection has it: orders and intervals as tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from longstride.kernels.forms import Order, intervals_of, positions_of
from longstride.kernels.patterns import Pattern
from longstride.kernels.selections.base import Part


def pattern_parts(pattern: Pattern, context: int) -> tuple[Part, ...]:
    """The parts of a pattern at N = ``context`` positions, each tensor (1, 1, ·) on the CPU.

    ``pattern`` is that of one head (``for_head``). For mixers that go through a pattern's keys in their own way.
    """

    def of_all(vector: Tensor) -> Tensor:
        return vector.to(torch.int32)[None, None]

    def ordered(order: Order) -> Tensor | None:
        positions = positions_of(order)
        return None if positions is None else of_all(positions)

    return tuple(
        Part(
            ordered(part.query_order(context)),
            ordered(part.key_order(context)),
            *map(of_all, intervals_of(part.by_query(context))),
        )
        for part in pattern.parts()
    )
