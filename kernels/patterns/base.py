"""What a pattern is, and the parts that a plan is built from.

Letters: N positions, M keys a part reads (M <= N). All positions are 0-indexed.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor


class Intervals(NamedTuple):
    """The keys of each query as a half-open interval ``low <= key < high``, counted in a part's own orders.

    Both are (N,) int64 and neither ever decreases, so that the queries of each *key* are an interval too.
    A query without keys has ``low == high``.
    """

    low: Tensor
    high: Tensor


@runtime_checkable
class Part(Protocol):
    """Pairs that become one interval a query once queries and keys are put in the right orders. Frozen, hashable."""

    def __hash__(self) -> int:
        """Plans are cached by part."""
        ...

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        """Original positions q and k, int64 and broadcastable, to bool: True where q attends to k."""
        ...

    def query_order(self, context: int) -> Tensor | None:
        """Original position of each reordered query, a permutation, (N,) int64; None is the natural order."""
        ...

    def key_order(self, context: int) -> Tensor | None:
        """Original position of each reordered key, (M,) int64 without repeats; None is all keys, naturally."""
        ...

    def intervals(self, context: int) -> Intervals:
        """The keys of each reordered query, counted in the key order."""
        ...


@runtime_checkable
class Pattern(Protocol):
    """Which earlier positions each position attends to. A frozen, hashable value."""

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        """The definition: original positions q and k, int64 and broadcastable, to bool."""
        ...

    def for_head(self, head: int) -> Pattern:
        """The pattern of this head, where heads differ; itself where they do not."""
        ...

    def factors(self) -> tuple[Pattern, ...]:
        """The factors that blocks or heads take in turn (Child et al. 2019, section 4.2): patterns of their own."""
        ...

    def parts(self) -> tuple[Part, ...]:
        """Disjoint parts whose union is the pattern: a softmax over it is their merge by logsumexp."""
        ...

    def check(self, context: int) -> None:
        """Raise ConfigError where a model of this context cannot use the pattern evenly."""
        ...
