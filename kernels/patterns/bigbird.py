"""BigBird's pattern of blocks: recent blocks, first blocks, and blocks drawn at random once."""

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

BITS = 0xFFFFFFFF  # mask of 32 bits
MOST_DRAWS = 1 << 10  # per block of queries


@dataclass(frozen=True)
class BigBird(PatternDefaults):
    """Window, global and random blocks of ``block`` positions (Zaheer et al. 2020, section 2 and appendix D), causal.

    The queries of block b read the last ``window`` blocks (their own up to themselves), the first ``globals`` blocks,
    and ``random`` blocks between these, or all of them if there are no more. Heads draw differently, by ``for_head``.

    There are ``count`` blocks between. Draw n of block b takes number ``hash(seed, head, b, n) % (count - n)`` of those
    that no earlier draw has taken, in ascending order. The hash starts at 0 and absorbs one number after another: it
    adds the number and 0x9E3779B9, then applies the finaliser of MurmurHash3 (Appleby 2016), all in 32 bits. A draw
    depends on nothing else, so it is the same at every context.

    Window and global blocks have closed forms. A draw takes vectors for each head: 40 bytes per position for a forward
    and backward pass, 8 more for generation. With 3 draws, 12,288 positions take 1.4 MiB per head and 1,048,576 take
    120 MiB.
    """

    block: Annotated[int, Doc("positions")]
    window: Annotated[int, Doc("blocks, the query's own included")]
    globals: Annotated[int, Doc("first blocks, which all later ones read")]
    random: Annotated[int, Doc("blocks drawn once from those between")]
    seed: Annotated[int, Doc("seed of the draw")] = 0
    index: int | None = None  # the head; None: unresolved, or nothing is drawn

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
        block_q, block_k = q // self.block, k // self.block
        allowed = (block_q - block_k < self.window) | (block_k < self.globals)
        for drawn in self.draws(block_q):
            allowed = allowed | (block_k == drawn)
        return (k <= q) & allowed

    def draws(self, block: Tensor) -> list[Tensor]:
        """Return the blocks that query blocks draw, int64: ``random`` tensors like ``block``, -1 for no block.

        Raises:
            ValueError: heads differ and none was chosen.
        """
        if self.random and self.index is None:
            raise ValueError(f"heads differ in {self}: resolve it first, for_head(head)")
        count = block - self.window + 1 - self.globals  # of the blocks between
        state = _absorb(_absorb(_absorb(torch.zeros_like(block), self.seed), self.index or 0), block)
        draws: list[Tensor] = []
        ascending: list[Tensor] = []  # the draws so far
        for number in range(self.random):
            draw = _absorb(state, number) % (count - number).clamp_min(1)
            for earlier in ascending:
                draw = draw + (draw >= earlier).long()
            draws.append((draw + self.globals).where(count > number, -1))
            for place, earlier in enumerate(ascending):
                ascending[place], draw = torch.minimum(draw, earlier), torch.maximum(draw, earlier)
            ascending.append(draw)
        return draws

    def for_head(self, head: int) -> Pattern:
        return self if self.random == 0 or self.index is not None else replace(self, index=head)

    def parts(self) -> tuple[PatternPart, ...]:
        """Return the window, the first blocks before it, and every draw."""
        window = self.window * self.block
        first = (FirstKeys(self.globals * self.block, window, self.block),) if self.globals else ()
        return (Window(window, self.block), *first, *(Draw(self, number) for number in range(self.random)))

    def check(self, context: int) -> None:
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
    """One drawn block for each query block. Queries sorted by the block that they drew have rising intervals."""

    pattern: BigBird  # of one head
    number: int  # of the draw

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        return self.pattern.draws(q // self.pattern.block)[self.number] == k // self.pattern.block

    def query_order(self, context: int) -> Order:
        """Return the queries sorted by the block that they drew, those without a draw first."""
        _, blocks = self._sorted(context)
        position = (blocks[:, None] * self.pattern.block + torch.arange(self.pattern.block)).flatten()
        return position[position < context]

    def key_order(self, context: int) -> Order:
        return None

    def by_query(self, context: int) -> Intervals:
        """Let each query read its drawn block."""
        drawn, blocks = self._sorted(context)
        size = self.pattern.block
        num_queries = torch.where(blocks == len(blocks) - 1, context - (len(blocks) - 1) * size, size)
        low, high = (drawn.clamp_min(0) * size, (drawn + 1) * size)
        return Intervals(low.repeat_interleave(num_queries), high.repeat_interleave(num_queries))

    def by_key(self, context: int) -> None:
        """Return None: there is no closed form."""

    def _sorted(self, context: int) -> tuple[Tensor, Tensor]:
        """Return what each query block drew, ascending, and the numbers of these query blocks."""
        drawn = self.pattern.draws(torch.arange(-(-context // self.pattern.block)))[self.number]
        values, blocks = drawn.sort(stable=True)
        return values, blocks


def _absorb(state: Tensor, value: int | Tensor) -> Tensor:
    """Return the state of the hash after another number. Both are below 2^32, as int64."""
    state = (state + value + 0x9E3779B9) & BITS
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & BITS
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & BITS
    return state ^ (state >> 16)
