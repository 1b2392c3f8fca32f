"""Selections and their parts. Letters: B batch, H heads, N positions, M keys of a part (M <= N)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


class Part(NamedTuple):
    """One interval of keys for each query, ``low <= column < high``, once queries and keys are ordered.

    As in a pattern's part, but each context and head has its own orders and bounds. All are int32 on the device of the
    queries. The axes of batch and heads may be expanded (stride 0) if entries are alike.
    """

    query_order: Tensor | None  # (B, H, N): the position of each row, a permutation; None: natural
    key_order: Tensor | None  # (B, H, M): the position of each column, without repeats; None: natural, all N
    low: Tensor  # (B, H, N), of each row; neither bound ever decreases along the rows
    high: Tensor  # (B, H, N); a row without keys has low == high

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Part:
        """Apply a function to each tensor."""
        return Part(*(None if tensor is None else function(tensor) for tensor in self))  # type: ignore[arg-type]

    def of_head(self, device: torch.device) -> Part:
        """Return the part of one context and head, (1, 1, ·) int32 on a device, from vectors."""
        return self.mapped(lambda vector: vector.to(torch.int32)[None, None].to(device))


@dataclass(frozen=True, eq=False)
class Selection:
    """The union of the pairs of all parts; a pair in several parts counts once.

    Nothing is cached by the values of a selection, and the host does not read them. So kernels are chosen by ``span``
    and ``disjoint`` alone.
    """

    parts: tuple[Part, ...] = field(repr=False)
    span: int  # maximum number of keys that a query reads in one part
    disjoint: bool = True  # no pair is in several parts; if False, each part excludes pairs of earlier ones

    def of_heads(self, heads: slice) -> Selection:
        """Return the selection of some heads."""
        return self.mapped(lambda tensor: tensor[:, heads])

    def of_batch(self, batch: int) -> Selection:
        """Expand the selection of a single context to a batch."""
        return self.mapped(lambda tensor: tensor.expand(batch, -1, -1))

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Selection:
        """Apply a function to the tensors of all parts."""
        return Selection(tuple(part.mapped(function) for part in self.parts), self.span, self.disjoint)

    def check(self, context: int) -> None:
        """Check all values, which waits for the device. For tests, and for authors of a way to select.

        Raises:
            ValueError: one line about the first rule of ``Part`` that is broken.
        """
        for number, (query_order, key_order, low, high) in enumerate(self.parts):
            where = f"part {number}"
            keys = context if key_order is None else key_order.shape[-1]
            natural = torch.arange(context, device=low.device)
            if query_order is not None and not (query_order.sort(-1).values == natural).all():
                raise ValueError(f"{where}: query_order must be a permutation of 0 to {context - 1}")
            if key_order is not None:
                placed = key_order.sort(-1).values
                if (placed < 0).any() or (placed >= context).any() or (placed.diff(dim=-1) <= 0).any():
                    raise ValueError(f"{where}: key_order must hold positions below {context}, each once")
            if (low < 0).any() or (low > high).any() or (high > keys).any():
                raise ValueError(f"{where}: must have 0 <= low <= high <= {keys}")
            if (low.diff(dim=-1) < 0).any() or (high.diff(dim=-1) < 0).any():
                raise ValueError(f"{where}: low and high must never decrease along the rows")
            if (high - low).max() > self.span:
                raise ValueError(f"{where}: a row reads {int((high - low).max())} keys, more than span={self.span}")
        if self.disjoint:
            pairs = sum(part_mask(part, context).int() for part in self.parts)
            if torch.as_tensor(pairs).max() > 1:
                raise ValueError("a pair is in several parts: give disjoint=False")


def inverse_order(order: Tensor, context: int) -> Tensor:
    """Return the index of each position in an order (…, M): (…, N) int32, -1 for positions not in it."""
    rows = torch.arange(order.shape[-1], dtype=torch.int32, device=order.device).expand(order.shape)
    return rows.new_full((*order.shape[:-1], context), -1).scatter_(-1, order.long(), rows)


def columns_read(low: Tensor, high: Tensor, count: int) -> Tensor:
    """Return which of ``count`` columns are in any interval ``low <= column < high``: (count,) bool."""
    num_open = torch.zeros(count + 1, dtype=torch.int32)  # change in the number of intervals at each column
    num_open.index_add_(0, low, torch.ones_like(low, dtype=torch.int32))
    num_open.index_add_(0, high, torch.full_like(high, -1, dtype=torch.int32))
    return num_open.cumsum(0)[:-1] > 0


def followed_by_others(positions: Tensor, length: int) -> Tensor:
    """Return distinct positions below ``length`` followed by all others, (length,) int64 on the CPU."""
    others = torch.ones(length, dtype=torch.bool)
    others[positions] = False
    return torch.cat([positions, others.nonzero().squeeze(1)])


def part_mask(part: Part, context: int, queries: Tensor | None = None) -> Tensor:
    """Return (B, H, N, N) bool, True where query i reads key j; for some ``queries`` (P,): (B, H, P, N)."""
    query_order, key_order, low, high = part
    natural = torch.arange(context, dtype=torch.int32, device=low.device)
    column = natural if key_order is None else inverse_order(key_order, context)[:, :, None, :]
    if query_order is not None:
        row = inverse_order(query_order, context).long()
        low, high = (bound.expand(row.shape).gather(-1, row) for bound in (low, high))
    if queries is not None:
        low, high = low[..., queries], high[..., queries]
    return (low[..., None] <= column) & (column < high[..., None])


def selection_mask(selection: Selection, context: int, queries: Tensor | None = None) -> Tensor:
    """Return the definition of a selection: (B, H, N, N) bool, True where query i reads key j in any part.

    For large N, pass some ``queries`` (P,) to get (B, H, P, N).
    """
    masks = [part_mask(part, context, queries) for part in selection.parts]
    return torch.stack(torch.broadcast_tensors(*masks)).any(0)


def stacked(parts: Sequence[Part | None], batch: int, context: int, device: torch.device) -> Part:
    """Join the parts of all heads, None for an empty one. If heads are alike, their axis is expanded."""
    natural = torch.arange(context, dtype=torch.int32, device=device).expand(batch, 1, context)
    empty = Part(None, None, torch.zeros_like(natural), torch.zeros_like(natural))
    by_head = [part or empty for part in parts]
    is_alike = all(part is by_head[0] for part in by_head)

    def of_heads(tensors: Sequence[Tensor | None]) -> Tensor | None:
        if all(tensor is None for tensor in tensors):
            return None
        filled = [natural if tensor is None else tensor for tensor in tensors]
        return filled[0].expand(-1, len(parts), -1) if is_alike else torch.cat(filled, 1)

    query_order, key_order, low, high = (of_heads(tensors) for tensors in zip(*by_head, strict=True))
    assert low is not None and high is not None
    return Part(query_order, key_order, low, high)
