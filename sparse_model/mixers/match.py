"""Attention to where the last tokens came before: a window, and the places after earlier copies of the last n tokens.

As the n-gram heads of Akyürek et al. (2024), but with a softmax over the places that match, and like the match models
of PAQ's compressors (Mahoney 2005). What is read follows from the tokens alone, so it needs no training, and its cost
does not depend on the distance.

Letters: B batch, H heads of queries, N positions, n new positions, D head width, M matches of a query.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from longstride.kernels import ConfigError, attend_listed, num_pairs, selected_attention
from longstride.kernels.patterns import Local, Pattern
from longstride.kernels.selections import Part, Selection, recent_matches
from longstride.sparse_model.mixers.attention import ALL_HEADS, NOT_FLEX, Attention, AttentionConfig, KeyValueHeads
from longstride.sparse_model.mixers.cache import RowCache
from longstride.sparse_model.network import POSITIVE, NetworkConfig
from longstride.sparse_model.ngrams import NO_TOKEN, NgramHash
from longstride.sparse_model.part import PLAIN, BlockContext, MixerOutput, Work
from longstride.sparse_model.rotary import Rotary
from longstride.sparse_model.strict import StrictModel

CODES = 1 << 31  # of n-grams: that two share one is rare, and costs no more than a key in vain
LONGEST = 64  # tokens of an n-gram
NO_TOKENS = "matches follow from tokens: call with a context of SparseTransformer.block_contexts"


class MatchConfig(AttentionConfig, StrictModel):
    """Attention to a window, and to where the last tokens came before."""

    supports: ClassVar = AttentionConfig.supports | {"documents"}

    type: Literal["match"] = Field(description="attention to a window, and to what followed the last tokens before")
    window: Annotated[int, POSITIVE] = Field(description="positions, the query's own counted")
    order: int = Field(default=5, ge=2, le=LONGEST, description="tokens that must be equal")
    matches: Annotated[int, POSITIVE] = Field(
        default=16, description="places that a query reads before its window: the most recent that match"
    )
    key_value_heads: KeyValueHeads = None

    def check(self, network: NetworkConfig, context: int) -> None:
        super().check(network, context)
        Local(self.window).check(context)
        if network.backend == "flex":
            raise ConfigError.at("type", self.type, NOT_FLEX)

    def head_patterns(self, network: NetworkConfig) -> tuple[Pattern, ...]:
        return ()

    def make(self, network: NetworkConfig, rotary: Rotary | None) -> MatchAttention:
        return MatchAttention(network, self, rotary)


class MatchAttention(Attention):
    """Attention of each query to a window, and before it to the places that follow copies of the last tokens.

    Row i holds token i - 1 and predicts token i. Its last tokens are i - order to i - 1. If they also stand before
    token j, then row j + 1 holds the token that followed them, and row i reads it: the most recent ``matches`` such
    rows before its window.
    """

    def __init__(self, network: NetworkConfig, config: MatchConfig, rotary: Rotary | None) -> None:
        super().__init__(network, (), rotary, key_value_heads=config.key_value_heads)
        self.config, self.choice, self.reach = config, config, config.order
        self.codes = NgramHash((config.order,), CODES, network.vocabulary)

    def forward(self, h: Tensor, context: BlockContext = PLAIN) -> MixerOutput:
        if context.state is not None:
            state: Any = context.state
            state.codes[:, context.first : context.first + h.shape[1]] = self._codes_of_rows(context, h.shape[1])
        return super().forward(h, context)

    def _codes_of_rows(self, context: BlockContext, count: int) -> Tensor:
        """Return the code of the tokens before each of the rows, (B, count) int64."""
        assert context.tokens is not None
        length = count + self.config.order - 1
        return self.codes(context.tokens.narrow(1, context.tokens.shape[1] - length, length))[..., 0]

    def _by_heads(self, q: Tensor, k: Tensor, v: Tensor, context: BlockContext) -> MixerOutput:
        if context.tokens is None or context.selection is not None:
            return super()._by_heads(q, k, v, context)
        # Traced for any length, by operations that ONNX has: all pairs are computed.
        codes = self._codes_of_rows(context, q.shape[2])
        position = torch.arange(q.shape[2], device=q.device)
        distance = position[:, None] - position
        keys = F.pad(codes[:, :-1], (1, 0), value=-1)
        far = (codes[:, :, None] == keys[:, None]) & (distance >= self.config.window)
        recent = far.int().flip(2).cumsum(2).flip(2) <= self.config.matches
        allowed = far & recent | (distance >= 0) & (distance < self.config.window)
        of_group = torch.arange(self.heads, device=q.device) // self.group
        scores = (q @ k.index_select(1, of_group).mT * q.shape[3] ** -0.5).masked_fill(~allowed[:, None], -math.inf)
        return MixerOutput(scores.softmax(-1) @ v.index_select(1, of_group))

    def selection_of(self, tokens: Tensor, places: Tensor | None = None) -> Selection:
        before = F.pad(tokens[:, :-1].long(), (self.config.order, 0), value=NO_TOKEN)
        return self.matching(self.codes(before, places)[..., 0], places)

    def matching(self, codes: Tensor, places: Tensor | None = None) -> Selection:
        """Return what each head reads, from the code of the tokens before each row and its place, (B, N) int64."""
        position, window = torch.arange(codes.shape[1], device=codes.device), self.config.window
        starts = torch.zeros_like(codes) if places is None else position - places
        keys = F.pad(codes[:, :-1], (1, 0)).masked_fill(starts == position, -1)  # of the row before, in its document
        codes, keys, starts = (x[:, None] for x in (codes, keys, starts))
        first = torch.maximum(starts, position - window + 1)
        near = Part(None, None, first.int(), (position + 1).int().expand(first.shape))
        far = recent_matches(codes, keys, starts, behind=window, count=self.config.matches)
        both = Selection((near, far), max(min(window, len(position)), self.config.matches))
        return both.mapped(lambda x: x.expand(-1, self.heads, -1))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, heads: slice = ALL_HEADS, real: Tensor | None = None
    ) -> MixerOutput:
        raise ValueError(NO_TOKENS)

    def allowed(self, q: Tensor, k: Tensor, head: int) -> Callable[[Tensor], Tensor]:
        raise ValueError(NO_TOKENS)

    def new_cache(self, batch: int, length: int, device: torch.device, dtype: torch.dtype) -> MatchCache:
        keys, values = self.empty_rows(batch, length, device, dtype)
        return MatchCache(self, keys, values)

    def num_pairs(self, positions: int) -> int:
        """Bound the pairs in all heads: as if every earlier place matched."""
        window, most = self.config.window, self.config.matches
        rows = max(0, positions - 1 - window)  # that have places before their window
        far = most * rows - most * (most - 1) // 2 if rows > most else rows * (rows + 1) // 2
        return self.heads * (num_pairs(Local(window), positions) + far)

    def work(self, positions: int, batch: int) -> Work:
        bound = f"at most as if each position had {self.config.matches} matches"
        return super().work(positions, batch) + Work(bound=bound)


class MatchCache(RowCache):
    """A cache of keys and values, and of the code of the tokens before each row, which the mixer writes."""

    def __init__(self, owner: MatchAttention, keys: Tensor, values: Tensor) -> None:
        super().__init__(keys, values)
        self.owner = owner
        self.codes = torch.zeros(len(keys), keys.shape[2], dtype=torch.int64, device=keys.device)

    def begin(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = q.shape[2]
        self.write(slice(rows), k, v)
        return selected_attention(q, k, v, self.owner.matching(self.codes[:, :rows]), backend=self.owner.backend)

    def step(self, q: Tensor, k: Tensor, v: Tensor, position: int) -> Tensor:
        self.write(position, k, v)
        config, batch = self.owner.config, len(q)
        first = max(0, position + 1 - config.window)
        reads = torch.arange(first, position + 1, device=q.device).expand(batch, -1)
        if first > 1:
            place = torch.arange(1, first, device=q.device)
            same = self.codes[:, : first - 1] == self.codes[:, position, None]  # of the rows before these places
            matches = place.where(same, -1).topk(min(config.matches, first - 1)).values
            reads = torch.cat([matches, reads], 1)
        return attend_listed(q, self.keys, self.values, reads[:, None].expand(-1, q.shape[1], -1))

    def take(self, source: Any, order: Tensor, length: int, into: slice) -> None:
        super().take(source, order, length, into)
        self.codes[into, :length] = source.codes[order, :length]
