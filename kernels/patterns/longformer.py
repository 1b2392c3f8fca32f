"""Longformer's pattern: a dilated window joined with a few positions that all others read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor
from typing_extensions import Doc

from longstride.kernels.errors import ConfigError
from longstride.kernels.forms import Bound, Bounds, Fold, Order, constant, whole
from longstride.kernels.patterns.base import Align, Causal, PatternDefaults, PatternPart, require_divides
from longstride.kernels.patterns.column import Entries, column_order
from longstride.kernels.patterns.local import Local, Window


@dataclass(frozen=True, repr=False)
class Longformer(PatternDefaults):
    """A dilated window joined with the first ``globals`` positions (Beltagy et al. 2020, section 3.1).

    Every position reads the global ones up to itself. In the paper a global position also reads everything. A causal
    one cannot read the future, so it reads its window and the global positions before it. ``align`` is that of the
    window (``Local``). With ``causal`` False it is the paper's pattern: windows on both sides, and global positions
    that read everything and are read by all.

    A plan is in closed form if ``dilation`` or ``globals`` is 1. Otherwise the window's bounds by key are vectors of 16
    bytes per position. If the dilation does not divide ``globals`` (or ``globals - 1`` with ``align`` "target"), so are
    its bounds by query. A plan that is not causal has vectors of 56 bytes per position.
    """

    window: Annotated[int, Doc("keys, the query included")]
    dilation: Annotated[int, Doc("distance between keys")] = 1
    globals: Annotated[int, Doc("first positions, which all later ones read")] = 1
    align: Align = "row"
    causal: Causal = True

    left_out_at_default = ("align", "causal")

    def __post_init__(self) -> None:
        self.require_fields("window", "dilation", "globals")

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        window = Local(self.window, self.dilation, self.align, self.causal).mask(q, k)
        is_global = (k <= q) & (k < self.globals) if self.causal else (q < self.globals) | (k < self.globals)
        return window | is_global

    def parts(self) -> tuple[PatternPart, ...]:
        """Return the window and the global positions, without the overlap in one of them."""
        if not self.causal:
            if self.dilation == 1:
                return Window(self.window, start=self.globals, causal=False), FirstWithAll(self.globals)
            return Entries(self.dilation, 1 - self.window, self.window, self.globals), FirstWithAll(self.globals)
        if self.dilation == 1:
            return Window(self.window), FirstKeys(self.globals, self.window)
        if self.globals == 1 and self.align == "row":
            return Entries(self.dilation, end=self.window), FirstKeys(1, self.window, stride=self.dilation)
        # Globals of the query's column lie between those of other columns: no order of all of them ends at the window.
        first = int(self.align == "target")
        window = Entries(self.dilation, first, first + self.window, self.globals, self.align)
        return window, FirstKeys(self.globals)

    def check(self, context: int) -> None:
        require_divides("dilation", self.dilation, context)
        if self.globals > context:
            raise ConfigError.at("globals", self.globals, f"must not exceed context {context}; largest {context}")


@dataclass(frozen=True)
class FirstKeys:
    """The first ``count`` positions, except those in a window of ``window`` keys with that grain or stride."""

    count: int  # positions; 1 if the stride is above 1
    window: int = 0  # keys; 0: no window, so all positions up to the query
    grain: int = 1  # of the window: see ``Window``
    stride: int = 1  # positions from one key of the window to the next

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        back = q - q % self.grain + (self.grain - 1) - k
        return (k < self.count) & (k <= q) & ((back % self.stride != 0) | (back // self.stride >= self.window))

    def query_order(self, context: int) -> Order:
        """Return column after column. The first begins with the queries with the first position in their window."""
        return column_order(context, self.stride)

    def key_order(self, context: int) -> Order:
        num_keys = min(self.count, context)
        return Fold(num_keys, num_keys, whole(context), 1)

    def by_query(self, context: int) -> Bounds:
        """Let query i read the first positions up to its window."""
        high = Bound(0, self.grain - self._window(context), 0, min(self.count, context), self.grain)
        return Bounds(context, whole(context), constant(0), high)

    def by_key(self, context: int) -> Bounds:
        """Let each key be read by all queries after those with the key in their window."""
        num_keys = min(self.count, context)
        low = Bound(0, self._window(context), 0, context, self.grain)
        return Bounds(num_keys, num_keys, low, constant(context))

    def _window(self, context: int) -> int:
        """Return the window, limited to the length of the first column, as rows continue in the next one."""
        return min(self.window, -(-context // self.stride) + self.grain - 1)


@dataclass(frozen=True)
class FirstWithAll:
    """The first ``count`` positions with all positions: they read everything, and everything reads them."""

    count: int  # positions

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        return (q < self.count) | (k < self.count)

    def query_order(self, context: int) -> Order:
        """Return the first positions last, as they read more than the others."""
        return torch.arange(context).roll(-self.count) if self.count < context else None

    def key_order(self, context: int) -> Order:
        return None

    def by_query(self, context: int) -> Bounds:
        """Let each query read the first positions, and the last rows everything."""
        count = min(self.count, context)
        high = Bound(0, count, 0, context, context - count) if count < context else constant(context)
        return Bounds(context, whole(context), constant(0), high)

    def by_key(self, context: int) -> Bounds | None:
        """Let every key be read by all, or return None: there is no closed form."""
        if self.count < context:
            return None
        return Bounds(context, whole(context), constant(0), constant(context))
