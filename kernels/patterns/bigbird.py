"""BigBird's pattern of blocks: recent blocks, first blocks, and blocks drawn at random once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor
from typing_extensions import Doc

from longstride.kernels.errors import ConfigError, Problem
from longstride.kernels.forms import Intervals, Order
from longstride.kernels.patterns.base import (
    Causal,
    Pattern,
    PatternDefaults,
    PatternPart,
    require_divides,
    require_positive,
)
from longstride.kernels.patterns.local import Window
from longstride.kernels.patterns.longformer import FirstKeys, FirstWithAll

BITS = 0xFFFFFFFF  # mask of 32 bits
MOST_DRAWS = 1 << 10  # per block of queries


@dataclass(frozen=True, repr=False)
class BigBird(PatternDefaults):
    """Window, global and random blocks of ``block`` positions (Zaheer et al. 2020, section 2 and appendix D).

    The queries of block b read the last ``window`` blocks (their own up to themselves), the first ``globals`` blocks,
    and ``random`` blocks between these, or all of them if there are no more. Heads draw differently, by ``for_head``.

    With ``causal`` False the window has as many blocks on the other side. Global blocks read everything and are read by
    all. The other blocks draw from all that are neither global nor in their window. As a mask does not know where the
    context ends, ``context`` says so; at another context, draws beyond its end read nothing.

    There are ``count`` blocks to draw from. Draw n of block b takes number ``hash(seed, head, b, n) % (count - n)`` of
    those that no earlier draw has taken, in ascending order. The hash starts at 0 and absorbs one number after another:
    it adds the number and 0x9E3779B9, then applies the finaliser of MurmurHash3 (Appleby 2016), all in 32 bits. A draw
    depends on nothing else, so causal ones are the same at every context.

    Window and global blocks have closed forms; if not causal, 56 bytes per position. A draw takes vectors for each
    head: 40 bytes per position for a forward and backward pass, 8 more for generation. With 3 draws, 12,288 positions
    take 1.4 MiB per head and 1,048,576 take 120 MiB.
    """

    block: Annotated[int, Doc("positions")]
    window: Annotated[int, Doc("blocks, the query's own included")]
    globals: Annotated[int, Doc("first blocks, which all later ones read")]
    random: Annotated[int, Doc("blocks drawn once from those between")]
    seed: Annotated[int, Doc("seed of the draw")] = 0
    index: int | None = None  # the head; None: unresolved, or nothing is drawn
    context: Annotated[int | None, Doc("the model's, for draws that are not causal")] = None
    causal: Causal = True

    left_out_at_default = ("context", "causal")

    def __post_init__(self) -> None:
        for name, least in (("block", 1), ("window", 1), ("globals", 0), ("random", 0), ("seed", 0)):
            require_positive(name, getattr(self, name), least)
        self.require_fields()
        if self.random > MOST_DRAWS:
            raise ConfigError.at("random", self.random, f"must be at most {MOST_DRAWS}; such as 3")
        if self.seed > BITS:
            raise ConfigError.at("seed", self.seed, f"must be below 2**32; largest {BITS}")
        if self.index is not None:
            require_positive("index", self.index, least=0)
        draws_from_all = self.random > 0 and not self.causal
        if draws_from_all and self.context is None:
            rule = 'missing; "causal": false draws from all blocks: give the model\'s context'
            raise ConfigError(Problem("context", rule))
        if self.context is not None:
            require_positive("context", self.context)
            if not draws_from_all:
                rule = 'only applies to random blocks of "causal": false; remove it'
                raise ConfigError.at("context", self.context, rule)

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        block_q, block_k = q // self.block, k // self.block
        is_near, is_first = block_q - block_k < self.window, block_k < self.globals
        if self.causal:
            allowed = (k <= q) & (is_near | is_first)
        else:
            allowed = (is_near & (block_k - block_q < self.window)) | is_first | (block_q < self.globals)
        for drawn in self.draws(block_q):
            allowed = allowed | (block_k == drawn)
        return allowed

    def draws(self, block: Tensor) -> list[Tensor]:
        """Return the blocks that query blocks draw, int64: ``random`` tensors like ``block``, -1 for no block.

        Raises:
            ValueError: heads differ and none was chosen.
        """
        if self.random and self.index is None:
            raise ValueError(f"heads differ in {self}: resolve it first, for_head(head)")
        end = block - self.window + 1  # of the blocks before the window
        after: Tensor | int = 0  # number of blocks after the window
        if self.context is not None:
            blocks = -(-self.context // self.block)
            end = end.clamp_max(blocks)
            after = (blocks - block - self.window).clamp_min(0) * (block >= self.globals)
        before = (end - self.globals).clamp_min(0)
        count = before + after
        state = _absorb(_absorb(_absorb(torch.zeros_like(block), self.seed), self.index or 0), block)
        draws: list[Tensor] = []
        ascending: list[Tensor] = []  # the draws so far
        for number in range(self.random):
            draw = _absorb(state, number) % (count - number).clamp_min(1)
            for earlier in ascending:
                draw = draw + (draw >= earlier).long()
            drawn = (draw + self.globals).where(draw < before, draw - before + block + self.window)
            draws.append(drawn.where(count > number, -1))
            for place, earlier in enumerate(ascending):
                ascending[place], draw = torch.minimum(draw, earlier), torch.maximum(draw, earlier)
            ascending.append(draw)
        return draws

    def for_head(self, head: int) -> Pattern:
        return self if self.random == 0 or self.index is not None else replace(self, index=head)

    def parts(self) -> tuple[PatternPart, ...]:
        """Return the window, the first blocks beyond it, and every draw."""
        window, count = self.window * self.block, self.globals * self.block
        parts: list[PatternPart] = [Window(window, self.block, 0 if self.causal else count, self.causal)]
        if count:
            parts.append(FirstKeys(count, window, self.block) if self.causal else FirstWithAll(count))
        return (*parts, *(Draw(self, number) for number in range(self.random)))

    def check(self, context: int) -> None:
        require_divides("block", self.block, context)
        if self.context not in (None, context):
            raise ConfigError.at("context", self.context, f"must be the model's context; nearest {context}")
        blocks = context // self.block
        window, name_of_window, sides = self.window, "window", 1
        if not self.causal:
            window, name_of_window, sides = 2 * self.window - 1, "2 x window - 1", 2
        excess = window + self.globals + self.random - blocks
        if excess <= 0:
            return
        rule = f"{name_of_window} + globals + random must not exceed the {blocks} blocks of context {context}"
        for name, least, share in (("random", 0, 1), ("globals", 0, 1), ("window", 1, sides)):
            largest = getattr(self, name) - -(-excess // share)
            if largest >= least:
                raise ConfigError.at(name, getattr(self, name), f"{rule}; largest {largest}")
        largest = blocks if self.causal else (blocks + 1) // 2
        raise ConfigError.at("window", self.window, f"{rule}; with random 0 and globals 0 largest {largest}")


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
        """Let each query read its drawn block, as far as it lies within the context."""
        drawn, blocks = self._sorted(context)
        size = self.pattern.block
        num_queries = torch.where(blocks == len(blocks) - 1, context - (len(blocks) - 1) * size, size)
        bounds = ((first * size).clamp_max(context) for first in (drawn.clamp_min(0), drawn + 1))
        return Intervals(*(bound.repeat_interleave(num_queries) for bound in bounds))

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
