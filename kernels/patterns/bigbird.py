"""BigBird's pattern in blocks: recent ones, first ones, and some drawn at random once and for all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor
from typing_extensions import Doc

from longstride.kernels.errors import ConfigError
from longstride.kernels.forms import Intervals, Order
from longstride.kernels.patterns.base import Pattern, PatternDefaults, PatternPart, require_divides, require_positive
from longstride.kernels.patterns.local import Window
from longstride.kernels.patterns.longformer import FirstKeys

BITS = 0xFFFFFFFF  # 32 of them
MOST_DRAWS = 1 << 10  # by each block of queries


@dataclass(frozen=True)
class BigBird(PatternDefaults):
    """Window, global and random blocks of ``block`` positions (Zaheer et al. 2020, section 2 and appendix D), causal.

    The queries of block b read the last ``window`` blocks (their own up to themselves), the first ``globals`` ones, and
    ``random`` of those between, or all where there are no more. Heads draw differently, by ``for_head``.

    Draw n of block b is number ``hash(seed, head, b, n) % (count - n)`` of the ``count`` blocks between that no earlier
    draw has taken, in ascending order. The hash begins with 0 and takes in one number after the other: it adds it and
    0x9E3779B9, then the finaliser of MurmurHash3 (Appleby 2016), all in 32 bits. A draw depends on nothing else, so it
    is the same at every context.

    Window and global blocks have closed forms. A draw has vectors, for each head: 40 bytes a position for a forward and
    backward pass, 8 more for generation. With 3 draws, 12,288 positions take 1.4 MiB a head and 1,048,576 take 120 MiB.
    """

    block: Annotated[int, Doc("positions")]
    window: Annotated[int, Doc("blocks, the query's own among them")]
    globals: Annotated[int, Doc("blocks at the beginning that all later ones read")]
    random: Annotated[int, Doc("blocks that are drawn, once, of those between")]
    seed: Annotated[int, Doc("of the draw")] = 0
    index: int | None = None  # the head; None: not chosen yet, or nothing is drawn

    def __post_init__(self) -> None:
        for name, least in (("block", 1), ("window", 1), ("globals", 0), ("random", 0), ("seed", 0)):
            require_positive(name, getattr(self, name), least)
        if self.random > MOST_DRAWS:
            raise ConfigError.at("random", self.random, f"must be at most {MOST_DRAWS}; such as 3")
        if self.seed > BITS:
            raise ConfigError.at("seed", self.seed, f"must be below 2**32; largest {BITS}")
        if self.index is not None:
            require_positive("index", self.index, least=0)

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        """Original positions q and k, broadcastable; True where q attends to k."""
        block_q, block_k = q // self.block, k // self.block
        allowed = (block_q - block_k < self.window) | (block_k < self.globals)
        for drawn in self.draws(block_q):
            allowed = allowed | (block_k == drawn)
        return (k <= q) & allowed

    def draws(self, block: Tensor) -> list[Tensor]:
        """The blocks that some query blocks draw, int64: ``random`` tensors like ``block``, -1 where there is none.

        Raises:
            ValueError: heads differ, and no head was chosen.
        """
        if self.random and self.index is None:
            raise ValueError(f"heads differ in {self}: resolve it first, for_head(head)")
        count = block - self.window + 1 - self.globals  # of the blocks between
        state = _taken_in(_taken_in(_taken_in(torch.zeros_like(block), self.seed), self.index or 0), block)
        found: list[Tensor] = []
        taken: list[Tensor] = []  # the draws so far, ascending
        for number in range(self.random):
            one = _taken_in(state, number) % (count - number).clamp_min(1)
            for other in taken:
                one = one + (one >= other).long()
            found.append((one + self.globals).where(count > number, -1))
            for place, other in enumerate(taken):
                taken[place], one = torch.minimum(one, other), torch.maximum(one, other)
            taken.append(one)
        return found

    def for_head(self, head: int) -> Pattern:
        """The pattern with this head's own draws."""
        return self if self.random == 0 or self.index is not None else replace(self, index=head)

    def parts(self) -> tuple[PatternPart, ...]:
        """The window, the first blocks before it, and every draw."""
        window = self.window * self.block
        first = (FirstKeys(self.globals * self.block, window, self.block),) if self.globals else ()
        return (Window(window, self.block), *first, *(Draw(self, number) for number in range(self.random)))

    def check(self, context: int) -> None:
        """Raise ConfigError unless the block divides the context, which has as many blocks as queries may read."""
        require_divides("block", self.block, context)
        blocks = context // self.block
        excess = self.window + self.globals + self.random - blocks
        if excess <= 0:
            return
        rule = f"window + globals + random must not exceed the {blocks} blocks of context {context}"
        for name, least in (("random", 0), ("globals", 0), ("window", 1)):
            if getattr(self, name) - excess >= least:
                raise ConfigError.at(name, getattr(self, name), f"{rule}; largest {getattr(self, name) - excess}")
        raise ConfigError.at("window", self.window, f"{rule}; with random 0 and globals 0 largest {blocks}")


@dataclass(frozen=True)
class Draw:
    """One block for each query block. In the order of the blocks that they drew, queries have intervals that rise."""

    pattern: BigBird  # of one head
    number: int  # of the draw

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        """Original positions q and k, broadcastable; True where q attends to k."""
        return self.pattern.draws(q // self.pattern.block)[self.number] == k // self.pattern.block

    def query_order(self, context: int) -> Order:
        """By what they drew, those that drew nothing first."""
        _, blocks = self._sorted(context)
        position = (blocks[:, None] * self.pattern.block + torch.arange(self.pattern.block)).flatten()
        return position[position < context]

    def key_order(self, context: int) -> Order:
        """Natural, all keys."""
        return None

    def by_query(self, context: int) -> Intervals:
        """Each query reads its block."""
        drawn, blocks = self._sorted(context)
        size = self.pattern.block
        num_queries = torch.where(blocks == len(blocks) - 1, context - (len(blocks) - 1) * size, size)
        low, high = (drawn.clamp_min(0) * size, (drawn + 1) * size)
        return Intervals(low.repeat_interleave(num_queries), high.repeat_interleave(num_queries))

    def by_key(self, context: int) -> None:
        """No closed form."""

    def _sorted(self, context: int) -> tuple[Tensor, Tensor]:
        """What each query block drew, ascending, and the numbers of these query blocks."""
        drawn = self.pattern.draws(torch.arange(-(-context // self.pattern.block)))[self.number]
        values, blocks = drawn.sort(stable=True)
        return values, blocks


def _taken_in(state: Tensor, value: int | Tensor) -> Tensor:
    """The state of the hash after another number; both below 2^32, in int64, whose products keep their lower bits."""
    state = (state + value + 0x9E3779B9) & BITS
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & BITS
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & BITS
    return state ^ (state >> 16)
