"""Attention whose heads learn how far back they read (Sukhbaatar et al. 2019, adaptive attention span).

Letters: B batch, H heads of queries, K heads of keys and values, N positions, D head width of queries and keys, Dv of
values, R positions of the ramp, z span, x distance of a key before its query, C rows of a block.

A head weighs a key at distance x by m(x)·exp(score), divided by the sum of these over all keys, with

    m(x) = clip((R + z - x) / R, 0, 1)

So it reads the last ⌊z⌋ + 1 positions fully, and R before them with decreasing weight. Its span z is learned: m has a
slope in z on the ramp. The training loss grows by ``penalty`` times the mean span of a layer's heads, in nats for each
position.

The fully read keys of each query are an interval, which attention over a selection computes. On the ramp a head's keys
are R diagonals: blocks of C queries and the 2C keys that contain theirs. Both are merged by their logsumexps. So the
cost falls with the spans.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from longstride.kernels import ConfigError, Problem, num_pairs, selected_attention
from longstride.kernels.patterns import Dense, Local, Pattern
from longstride.kernels.selections import Part, Selection
from longstride.sparse_model.mixers.attention import ALL_HEADS, Attention, AttentionConfig, KeyValueHeads
from longstride.sparse_model.mixers.cache import RowCache
from longstride.sparse_model.network import POSITIVE, NetworkConfig
from longstride.sparse_model.part import MixerOutput, Work
from longstride.sparse_model.rotary import Rotary
from longstride.sparse_model.strict import StrictModel
from longstride.sparse_model.tiles import wide_of

MOST_RAMP = 1 << 14  # positions
LEAST_BLOCK = 16  # rows of a block if the ramp is shorter: products of fewer rows are no faster
SCORES_IN_WORK = 1 << 22  # scores of the ramp at a time: in fp32 16 MiB


class AdaptiveSpanConfig(AttentionConfig, StrictModel):
    """Attention with adaptive spans."""

    type: Literal["adaptive_span"] = Field(description="each head learns how far it reads")
    ramp: int = Field(  # of 1, a whole span would have no slope
        default=32,
        ge=2,
        le=MOST_RAMP,
        description="positions after the span where attention fades; the paper's R",
    )
    penalty: float = Field(ge=0, description="nats that a position of the mean span costs; the paper's λ")
    initial: float = Field(default=0.0, ge=0, description="span of every head before training, in positions")
    limit: Annotated[int, POSITIVE] | None = Field(
        default=None, description="the most that a span becomes, in positions; null: the context"
    )
    key_value_heads: KeyValueHeads = None

    def check(self, network: NetworkConfig, context: int) -> None:
        super().check(network, context)
        problems, most = [], self.most(network)
        if most > context:
            problems.append(Problem("limit", f"must be at most context {context}; nearest {context}", most))
        if self.initial > most:
            what = "limit" if self.limit else "context"
            problems.append(Problem("initial", f"must be at most {what} {most}; nearest {most}", self.initial))
        if problems:
            raise ConfigError(*problems)

    def most(self, network: NetworkConfig) -> int:
        """Return the longest span, in positions."""
        return self.limit or network.context

    def head_patterns(self, network: NetworkConfig) -> tuple[Pattern, ...]:
        """Return which positions each head may read with the longest span."""
        reach = self.most(network) + self.ramp
        return (Local(reach) if reach < network.context else Dense(),) * network.heads

    def make(self, network: NetworkConfig, rotary: Rotary | None) -> AdaptiveSpan:
        return AdaptiveSpan(network, self, rotary)


class AdaptiveSpan(Attention):
    """Attention over the span that each head has learned."""

    part = "adaptive_span"

    def __init__(self, network: NetworkConfig, config: AdaptiveSpanConfig, rotary: Rotary | None) -> None:
        super().__init__(network, config.head_patterns(network), rotary, key_value_heads=config.key_value_heads)
        self.config, self.limit = config, config.most(network)
        # Shares of the limit, so that the optimiser's step size suits any limit.
        self.spans = nn.Parameter(torch.empty(network.heads))

    def initialize(self) -> None:
        """Set linear layers, and all spans to the initial one."""
        super().initialize()
        nn.init.constant_(self.spans, self.config.initial / self.limit)

    def positions_read(self) -> Tensor:
        """Return the span z of each head, (H,) in positions, fp32 (fp64 for fp64)."""
        return Bounded.apply(self.spans.to(wide_of(self.spans))) * self.limit

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, heads: slice = ALL_HEADS, real: Tensor | None = None
    ) -> MixerOutput:
        spans = self.division.alike(self.positions_read())  # every process needs the gradient of whole contexts
        out = span_attention(q, k, v, spans[heads], self.config.ramp, self.limit, self.backend)
        if not (self.training and self.config.penalty):
            return MixerOutput(out)
        return MixerOutput(out, self.config.penalty * spans.mean())

    def new_cache(self, batch: int, length: int, device: torch.device, dtype: torch.dtype) -> RecentKeyValues:
        keys, values = self.empty_rows(batch, length, device, dtype)
        spans = self.positions_read().detach()
        return RecentKeyValues(keys, values, spans, self.config.ramp, self.limit, self.backend)

    def num_pairs(self, positions: int) -> int:
        """Count pairs of a query and a key with the present spans; on the meta device, with the longest."""
        if self.spans.is_meta:
            return super().num_pairs(positions)
        return sum(num_pairs(Local(reach), positions) for reach in reaches(self.positions_read(), self.config.ramp))

    def work(self, positions: int, batch: int) -> Work:
        bound = f"spans of at most {self.limit:,} positions" if self.spans.is_meta else ""
        return replace(super().work(positions, batch), bound=bound)

    def allowed(self, q: Tensor, k: Tensor, head: int) -> Callable[[Tensor], Tensor]:
        positions, ramp = torch.arange(k.shape[2], device=k.device), self.config.ramp
        span = self.positions_read()[head].detach()

        def of_queries(queries: Tensor) -> Tensor:
            distance = queries[:, None] - positions
            return (distance >= 0) & (distance < span + ramp)

        return of_queries

    def weigh(self, scores: Tensor, queries: Tensor, head: int) -> Tensor:
        span = self.positions_read()[head].detach()
        distance = queries[:, None] - torch.arange(scores.shape[1], device=scores.device)
        return torch.softmax(scores + ramp_of(distance, span, self.config.ramp).log(), -1)


class Bounded(torch.autograd.Function):
    """Clamp shares to 0 … 1. A share at or beyond an end has a gradient only if a step along it leads back.

    The gradient of a plain clamp is 0 there: a span that an optimiser once moved beyond an end would stay forever.
    """

    @staticmethod
    def forward(ctx: Any, shares: Tensor) -> Tensor:
        ctx.save_for_backward(shares)
        return shares.clamp(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (shares,) = ctx.saved_tensors
        outwards = ((shares <= 0) & (grad > 0)) | ((shares >= 1) & (grad < 0))  # a step is against the gradient
        return grad.masked_fill(outwards, 0.0)


def ramp_of(distance: Tensor, span: Tensor, ramp: int) -> Tensor:
    """Compute m of distances x ≥ 0 and spans z, which broadcast, in the spans' precision."""
    return ((ramp + span - distance) / ramp).clamp(0, 1)


def reaches(spans: Tensor, ramp: int) -> list[int]:
    """Return how many keys each head reads at most, ⌈z + R⌉: those at smaller distances have a weight."""
    return [math.ceil(span + ramp) for span in spans.tolist()]


def span_attention(
    q: Tensor, k: Tensor, v: Tensor, spans: Tensor, ramp: int, limit: int, backend: str = "auto"
) -> Tensor:
    """Attend over the span of each head; differentiable in q, k, v and the spans.

    At a whole span, m has a corner at both ends of its ramp. The gradient there is that of growing, except for the key
    whose weight is still 0.

    Args:
        q: (B, H, N, D).
        k, v: (B, K, N, D) and (B, K, N, Dv); each head serves H / K heads of q.
        spans: (H,) z, from 0 to ``limit``; fp32 (fp64 for fp64).
        ramp: R.
        limit: the longest span.
        backend: of attention.

    Returns:
        (B, H, N, Dv).
    """
    batch, heads, context, _ = q.shape
    with torch.no_grad():
        last = torch.arange(context, dtype=torch.int32, device=q.device)
        low = (last - spans.detach().int()[:, None]).clamp_min(0).expand(batch, heads, context)
        high = (last + 1).expand(batch, heads, context)
    selection = Selection((Part(None, None, low, high),), min(limit + 1, context))
    out, lse = selected_attention(q, k, v, selection, backend=backend, return_lse=True)
    return WithRamp.apply(q, k, v, spans, out, lse, ramp)


class WithRamp(torch.autograd.Function):
    """Attention to the fully read keys, merged with attention to the keys on the ramp.

    Takes q, k, v, the spans, and output and logsumexp over the fully read keys, among which each query reads itself. It
    saves them with its own output and logsumexp. The backward pass computes scores again, a number of blocks at a time.
    Sums are fp32 (fp64 for fp64).
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, spans: Tensor, near: Tensor, near_lse: Tensor, ramp: int
    ) -> Tensor:
        band, wide = Band.of(q.shape[2], spans, ramp), near_lse.dtype
        out, lse = torch.empty_like(near), torch.empty_like(near_lse)
        keys, values = (rows_at(x, band.keys) for x in (k, v))
        for rows, columns in band.pieces(q):
            scores = band.scores(q, keys, rows, columns)
            both = torch.logaddexp(near_lse[:, :, rows], band.joined(scores.logsumexp(-1), rows))
            weights = scores.sub_(band.split(both)[..., None]).exp_()
            far = band.joined(weights @ windows(values[:, :, columns].to(wide), band.size), rows)
            share = (near_lse[:, :, rows] - both).exp_()[..., None]
            out[:, :, rows] = far.addcmul(near[:, :, rows].to(wide), share)
            lse[:, :, rows] = both
        ctx.save_for_backward(q, k, v, spans, near, near_lse, out, lse)
        ctx.ramp = ramp
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, spans, near, near_lse, out, lse = ctx.saved_tensors
        band, wide, scale = Band.of(q.shape[2], spans, ctx.ramp), lse.dtype, q.shape[-1] ** -0.5
        keys, values = (rows_at(x, band.keys) for x in (k, v))
        grad_keys, grad_values = (torch.zeros_like(x, dtype=wide) for x in (keys, values))
        grad_q, grad_near, grad_lse = torch.empty_like(q), torch.empty_like(near), torch.empty_like(near_lse)
        sums = torch.zeros_like(band.bias)  # of the gradients of all scores with the same distance and place in a block
        for rows, columns in band.pieces(q):
            grad = grad_out[:, :, rows].to(wide)
            delta = (grad * out[:, :, rows]).sum(-1)
            share = (near_lse[:, :, rows] - lse[:, :, rows]).exp_()
            grad_near[:, :, rows] = grad * share[..., None]
            grad_lse[:, :, rows] = share * ((grad * near[:, :, rows]).sum(-1) - delta)
            grad = band.split(grad)
            weights = band.scores(q, keys, rows, columns).sub_(band.split(lse[:, :, rows])[..., None]).exp_()
            add_windows(grad_values[:, :, columns], weights.mT @ grad)
            products = grad @ windows(values[:, :, columns].to(wide), band.size).mT
            grad_scores = products.sub_(band.split(delta)[..., None]).mul_(weights)
            sums += grad_scores.sum((0, 2))
            grad_scores *= scale
            grad_q[:, :, rows] = band.joined(grad_scores @ windows(keys[:, :, columns].to(wide), band.size), rows)
            add_windows(grad_keys[:, :, columns], grad_scores.mT @ band.split(q[:, :, rows].to(wide)))
        grads = [rows_at(x, band.positions) for x in (grad_keys, grad_values)]  # by each head of q
        if q.shape[1] != k.shape[1]:
            grads = [x.unflatten(1, (k.shape[1], -1)).sum(2) for x in grads]
        return grad_q, *(x.to(q.dtype) for x in grads), (sums * band.slope).sum((1, 2)), grad_near, grad_lse, None


@dataclass(frozen=True, slots=True)
class Band:
    """The keys on every head's ramp, in blocks: T blocks of C queries each read two of T + 1 blocks of C keys.

    A head's keys are shifted by its span, so that these are the same blocks for all heads.
    """

    context: int  # N
    size: int  # C
    keys: Tensor  # (H, (T + 1)·C) int64, the position of each shifted key; outside the context: any other number
    positions: Tensor  # (H, N) int64, the index of each position's key among these
    bias: Tensor  # (H, C, 2C): log m of each query of a block and key of its two blocks; -inf outside the ramp
    slope: Tensor  # (H, C, 2C): the derivative of ``bias`` by the span; 0 outside the ramp

    @classmethod
    def of(cls, context: int, spans: Tensor, ramp: int) -> Band:
        """Arrange the keys of spans (H,)."""
        size = max(ramp, LEAST_BLOCK)
        full = spans.floor()
        first = full.long()[:, None] + size  # the index of position 0
        places = torch.arange((-(-context // size) + 1) * size, device=spans.device)
        row, column = places[:size, None], places[: 2 * size]
        step = size + row - column  # distance beyond the fully read keys, from 1 on
        weight = ((spans - full)[:, None, None] + (ramp - step)).div_(ramp)
        weight = torch.where((step >= 1) & (weight > 0), weight, 0.0)
        slope = torch.where(weight > 0, 1 / (weight * ramp), 0.0)
        return cls(context, size, places - first, places[:context] + first, weight.log(), slope)

    def pieces(self, q: Tensor) -> Iterator[tuple[slice, slice]]:
        """Yield slices of whole blocks of queries, and of their blocks of keys, whose scores fit in work memory."""
        count = max(1, SCORES_IN_WORK // (q.shape[0] * q.shape[1] * 2 * self.size**2)) * self.size
        for start in range(0, self.context, count):
            stop = min(start + count, self.context)
            yield slice(start, stop), slice(start, start + (-(-(stop - start) // self.size) + 1) * self.size)

    def split(self, x: Tensor) -> Tensor:
        """Split (B, H, n, …) into blocks (B, H, t, C, …); the last is padded with zeros."""
        missing = -x.shape[2] % self.size
        if missing:
            x = torch.cat([x, x.new_zeros(*x.shape[:2], missing, *x.shape[3:])], 2)
        return x.unflatten(2, (-1, self.size))

    def joined(self, x: Tensor, rows: slice) -> Tensor:
        """Join the blocks of some rows to (B, H, n, …)."""
        return x.flatten(2, 3)[:, :, : rows.stop - rows.start]

    def scores(self, q: Tensor, keys: Tensor, rows: slice, columns: slice) -> Tensor:
        """Compute scaled products plus log m of some queries and their shifted keys: (B, H, t, C, 2C)."""
        wide = self.bias.dtype
        scores = self.split(q[:, :, rows].to(wide)) @ windows(keys[:, :, columns].to(wide), self.size).mT
        missing = windows((self.keys[None, :, columns] < 0)[..., None], self.size).mT
        return scores.mul_(q.shape[-1] ** -0.5).add_(self.bias[:, None]).masked_fill_(missing, -math.inf)


def windows(x: Tensor, size: int) -> Tensor:
    """Concatenate each block and the next: (B, H, (t + 1)·C, D) to (B, H, t, 2C, D)."""
    blocks = x.unflatten(2, (-1, size))
    return torch.cat([blocks[:, :, :-1], blocks[:, :, 1:]], 3)


def add_windows(total: Tensor, x: Tensor) -> None:
    """Add (B, H, t, 2C, D), the gradient of ``windows``, to (B, H, (t + 1)·C, D)."""
    first, second = (half.flatten(2, 3) for half in x.chunk(2, 3))
    total[:, :, : first.shape[2]] += first
    total[:, :, -second.shape[2] :] += second


def rows_at(x: Tensor, places: Tensor) -> Tensor:
    """Gather rows of x (B, K, N, D) at places (H, M) of each head of queries: (B, H, M, D), 0 for places outside."""
    inside = (places >= 0) & (places < x.shape[2])
    index = places.clamp(0, x.shape[2] - 1)[None, :, :, None].unflatten(1, (x.shape[1], -1))
    return x[:, :, None].take_along_dim(index, 3).flatten(1, 2).masked_fill_(~inside[..., None], 0.0)


class RecentKeyValues(RowCache):
    """A cache whose steps read the keys within each head's span and ramp.

    Heads of queries with similar spans are read together, as far back as the longest. If each has its own keys, heads
    are stored in the order of their spans.
    """

    def __init__(self, keys: Tensor, values: Tensor, spans: Tensor, ramp: int, limit: int, backend: str) -> None:
        """Make an empty cache in this memory, for spans (H,) that no longer change."""
        self.keys, self.values, self.spans = keys, values, spans
        self.ramp, self.limit, self.backend = ramp, limit, backend
        self.order = spans.argsort()
        self.back = self.order.argsort()
        self.shared = None if keys.shape[1] == len(spans) else self.order // (len(spans) // keys.shape[1])
        far = reaches(spans[self.order], ramp)
        groups = itertools.groupby(range(len(far)), key=lambda head: far[head].bit_length())
        self.groups: list[tuple[slice, Tensor]] = []  # heads, and their log m by position; the last is the query's
        for _, members in groups:
            heads = list(members)
            distance = torch.arange(far[heads[-1]] - 1, -1, -1, device=spans.device)
            bias = ramp_of(distance, spans[self.order[heads], None], ramp).log()
            self.groups.append((slice(heads[0], heads[-1] + 1), bias))

    def begin(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.write(slice(k.shape[2]), k, v)
        return span_attention(q, k, v, self.spans, self.ramp, self.limit, self.backend)

    def step(self, q: Tensor, k: Tensor, v: Tensor, position: int) -> Tensor:
        self.write(position, k, v)
        ordered, wide = q[:, self.order, None].to(self.spans.dtype) * q.shape[-1] ** -0.5, self.spans.dtype
        out = []
        for heads, bias in self.groups:
            read = slice(max(0, position + 1 - bias.shape[1]), position + 1)
            key_heads = heads if self.shared is None else self.shared[heads]
            keys, values = (x[:, :, read][:, key_heads].to(wide) for x in (self.keys, self.values))
            weights = (ordered[:, heads] @ keys.mT + bias[:, None, read.start - read.stop :]).softmax(-1)
            out.append(weights @ values)
        return torch.cat(out, 1)[:, self.back].squeeze(2).to(q.dtype)

    def write(self, place: int | slice, k: Tensor, v: Tensor) -> None:
        order = self.order if self.shared is None else slice(None)
        super().write(place, k[:, order], v[:, order])
