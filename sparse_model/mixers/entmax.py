"""Attention whose weights are exactly zero for low scores, to a degree that each head learns (Correia et al. 2019).

Letters: B batch, H heads of queries, K heads of keys and values, N positions, D head width of queries and keys, Dv of
values, P pairs of a context and a head, n rows of a piece, W keys of a row; of a part of a pattern T blocks of C rows,
each of which reads U columns.

The weights of a row with scores s are α-entmax of them (Peters et al. 2019):

    p = [(α - 1)s - τ]₊^(1 / (α - 1)), τ such that they sum to 1

which is softmax as α → 1, and sparsemax at α = 2. A head's α is 1 + σ(a), with a learned a.

With β = 1 / (α - 1) this is p = [1 + x/β]₊^β with x = s + t. As β grows this becomes the exponential function, with t
minus the logsumexp. Newton's method finds t as the root of the β-norm of 1 + x/β minus 1, which is convex in t, and
nearly linear at both ends. Beginning with the greatest possible t it never overshoots.

τ depends on all keys of a row, so a kernel cannot merge parts of a row. Rows are therefore computed whole, and must be
short: ``MOST_KEYS``. Their scores are products of blocks of rows that are adjacent in an order of the pattern, and of
all keys that these read.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from longstride.kernels import ConfigError, allowed_keys
from longstride.kernels.patterns import Pattern, pattern_from_json, pattern_to_json
from longstride.kernels.selections import pattern_parts
from longstride.sparse_model.mixers.attention import ALL_HEADS, Attention, AttentionConfig, KeyValueHeads
from longstride.sparse_model.mixers.cache import RowCache
from longstride.sparse_model.mixers.synthesizer import OnePattern, check_pattern
from longstride.sparse_model.network import NetworkConfig
from longstride.sparse_model.part import HeadWidths, MixerOutput
from longstride.sparse_model.rotary import Rotary
from longstride.sparse_model.strict import StrictModel
from longstride.sparse_model.tiles import wide_of

MOST_KEYS = 2048  # of a row; a backward pass holds about ten numbers for each
MOST_COUNTED = 1 << 26  # rows of all patterns whose keys ``check`` counts
SCORES_IN_WORK = 1 << 21  # of a piece: in fp32 8 MiB. Fewer rows have fewer columns that only some of them read
BLOCK_ROWS = (64, 32, 16, 8, 4, 1)  # to choose from
GATHERED = 16  # cost of gathering a key, in rows of products
STEPS = 16  # of Newton's method at most; 9 were enough in all tests
LEAST_EXCESS = 2.0**-20  # of α - 1: nearer to softmax than fp32 resolves


class EntmaxConfig(AttentionConfig, StrictModel):
    """Adaptively sparse attention over a pattern."""

    type: Literal["entmax"] = Field(description="adaptively sparse attention: α-entmax in the place of softmax")
    pattern: OnePattern = Field(description="what may be read: a pattern, its factors merged")
    key_value_heads: KeyValueHeads = None

    def check(self, network: NetworkConfig, context: int) -> None:
        super().check(network, context)
        check_pattern(self.pattern, context)
        patterns = dict.fromkeys(self.head_patterns(network))
        if len(patterns) * context > MOST_COUNTED:
            rule = f"{len(patterns)} patterns of {context} rows, whose keys are counted: at most {MOST_COUNTED:,} rows"
            raise ConfigError.at("type", self.type, f"{rule}; take softmax in longer contexts")
        longest = max(most_keys(pattern, context) for pattern in patterns)
        if longest > MOST_KEYS:
            rule = f"rows read up to {longest:,} keys and are not split; at most {MOST_KEYS:,} keys are allowed"
            near = f'such as {{"type": "local", "window": {MOST_KEYS}}}'
            raise ConfigError.at("pattern.type", pattern_to_json(self.pattern)["type"], f"{rule}; {near}")

    def head_patterns(self, network: NetworkConfig) -> tuple[Pattern, ...]:
        return tuple(self.pattern.for_head(head) for head in range(network.heads))

    def head_widths(self, network: NetworkConfig) -> HeadWidths:
        return super().head_widths(network)._replace(in_kernels=False)

    def make(self, network: NetworkConfig, rotary: Rotary | None) -> EntmaxAttention:
        return EntmaxAttention(network, self, rotary)


class EntmaxAttention(Attention):
    """Attention over a pattern, with α-entmax instead of softmax, by torch operations on every device."""

    part = "entmax"

    def __init__(self, network: NetworkConfig, config: EntmaxConfig, rotary: Rotary | None) -> None:
        super().__init__(network, config.head_patterns(network), rotary, key_value_heads=config.key_value_heads)
        self.excess_logits = nn.Parameter(torch.empty(network.heads))  # a

    def initialize(self) -> None:
        """Set linear layers, and every α to 1.5."""
        super().initialize()
        nn.init.zeros_(self.excess_logits)

    def excess(self) -> Tensor:
        """Return α - 1 of each head, (H,) fp32 (fp64 for fp64)."""
        return self.excess_logits.to(wide_of(self.excess_logits)).sigmoid().clamp_min(LEAST_EXCESS)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, heads: slice = ALL_HEADS, real: Tensor | None = None
    ) -> MixerOutput:
        return MixerOutput(entmax_attention(q, k, v, self.excess()[heads], self.patterns[heads]))

    def new_cache(self, batch: int, length: int, device: torch.device, dtype: torch.dtype) -> EntmaxKeyValues:
        keys, values = self.empty_rows(batch, length, device, dtype)
        return EntmaxKeyValues(keys, values, self.patterns, self.excess().detach())

    def weigh(self, scores: Tensor, queries: Tensor, head: int) -> Tensor:
        return entmax(scores, self.excess()[head].detach().to(scores.dtype))


class EntmaxKeyValues(RowCache):
    """A cache whose steps read the keys that the pattern allows."""

    def __init__(self, keys: Tensor, values: Tensor, patterns: tuple[Pattern, ...], excess: Tensor) -> None:
        """Make an empty cache in this memory, for heads with these patterns and α - 1, (H,)."""
        self.keys, self.values, self.patterns, self.excess = keys, values, patterns, excess

    def begin(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.write(slice(k.shape[2]), k, v)
        return entmax_attention(q, k, v, self.excess, self.patterns)

    def step(self, q: Tensor, k: Tensor, v: Tensor, position: int) -> Tensor:
        self.write(position, k, v)
        out, wide = q.new_zeros(*q.shape[:2], v.shape[2]), self.excess.dtype
        group = q.shape[1] // k.shape[1]
        shared = None if group == 1 else torch.arange(q.shape[1], device=q.device) // group
        for pattern, heads in alike(self.patterns):
            read = allowed_keys(pattern, position, self.keys.shape[2]).to(q.device)
            if len(read):  # otherwise the output is 0
                key_heads = heads if shared is None else shared[heads]
                keys, values = (x[:, :, read][:, key_heads].to(wide) for x in (self.keys, self.values))
                scores = (keys @ q[:, heads, :, None].to(wide)).squeeze(-1).mul_(q.shape[-1] ** -0.5)
                weights = entmax(scores, self.excess[heads])
                out[:, heads] = (weights[:, :, None] @ values).squeeze(2).to(q.dtype)
        return out


def alike(patterns: Sequence[Pattern]) -> Iterator[tuple[Pattern, Any]]:
    """Yield each pattern and the heads that have it: a slice if these are all."""
    for pattern in dict.fromkeys(patterns):
        heads = [head for head, candidate in enumerate(patterns) if candidate == pattern]
        yield pattern, slice(None) if len(heads) == len(patterns) else heads


def entmax(scores: Tensor, excess: Tensor) -> Tensor:
    """Apply α-entmax over the last axis.

    Args:
        scores: (…, W), fp32 or fp64; -inf for no key.
        excess: α - 1, above 0 and at most 1; broadcasts with all axes but the last.

    Returns:
        Weights (…, W), which sum to 1; 0 in a row without keys.
    """
    power = 1 / excess[..., None]
    return weights_of(scores, threshold(scores, power), power).weights


class Weights(NamedTuple):
    """Weights of rows of keys and their derivatives, with β = 1 / (α - 1)."""

    weights: Tensor  # p = [1 + x/β]₊^β, made to sum to 1 exactly
    slopes: Tensor  # dp/dx = [1 + x/β]₊^(β - 1), 0 if p is 0
    ratio: Tensor  # x/β, from -1 on
    sums: Tensor  # (…, 1) of p before normalisation


def weights_of(scores: Tensor, shift: Tensor, power: Tensor) -> Weights:
    """Compute weights of scores (…, W) from t (…, 1) and β, which broadcasts with them."""
    ratio = (scores + shift).div_(power).clamp_min_(-1)
    weights = ratio.log1p().mul_(power).exp_()
    slopes = weights / (1 + ratio).clamp_min_(torch.finfo(ratio.dtype).tiny)
    sums = weights.sum(-1, keepdim=True)
    # With many equal keys, 1 + x/β is a small difference whose rounding error is the same for all.
    return Weights(weights.div_(sums.clamp_min(torch.finfo(sums.dtype).tiny)), slopes, ratio, sums)


def threshold(scores: Tensor, power: Tensor) -> Tensor:
    """Find t of each row (…, W), (…, 1), with x = s + t; 0 for a row without keys."""
    greatest = scores.amax(-1, keepdim=True)
    sought = greatest > -math.inf
    shift = -greatest.masked_fill(~sought, 0.0)  # the greatest possible t: one key has all the weight
    rounding = 4 * torch.finfo(scores.dtype).eps
    for _ in range(STEPS):
        trial = weights_of(scores, shift, power)
        # The β-norm is sums^(1/β). This form of the step is exact as α → 1, where the norm is nearly 1.
        rise = trial.slopes.sum(-1, keepdim=True)
        step = -torch.expm1(-trial.sums.log() / power) * power * trial.sums / rise
        # A converged row stays, so that none of its bits depends on how long other rows take, which may be later ones.
        step = torch.where(sought, step, 0.0)
        shift = shift - step
        sought = step.abs() > rounding * (1 + shift.abs())
        if sought.device.type == "cpu" and not bool(sought.any()):  # on a device this would synchronise
            break
    return shift


def entmax_attention(q: Tensor, k: Tensor, v: Tensor, excess: Tensor, patterns: Sequence[Pattern]) -> Tensor:
    """Attend by α-entmax over the keys that a pattern allows; differentiable in q, k, v and α.

    Scores and sums are fp32 (fp64 for fp64), a number of rows at a time, and are computed again in the backward pass.

    Args:
        q: (B, H, N, D).
        k, v: (B, K, N, D) and (B, K, N, Dv); each head serves H / K heads of q.
        excess: α - 1 of each head, (H,), above 0 and at most 1, in the precision of sums.
        patterns: of each head.

    Returns:
        (B, H, N, Dv) in q's dtype; 0 for a query without keys.
    """
    written = repr([pattern_to_json(pattern) for pattern in patterns])  # a custom op takes no other form
    return _attention(q, k, v, excess, written)[0]


@torch.library.custom_op("longstride::entmax_attention", mutates_args=())
def _attention(q: Tensor, k: Tensor, v: Tensor, excess: Tensor, patterns: str) -> tuple[Tensor, Tensor]:
    out, shift = _empty_out(q, v), excess.new_empty(q.shape[:3])
    for some in _pieces(q, k, v, excess, patterns):
        scores = some.scores(q.shape[-1] ** -0.5)
        thresholds = threshold(scores, some.power)
        some.write(out, some.weigh(weights_of(scores, thresholds, some.power).weights))
        some.write(shift, thresholds.squeeze(-1))
    return out, shift


@_attention.register_fake
def _attention_fake(q: Tensor, k: Tensor, v: Tensor, excess: Tensor, patterns: str) -> tuple[Tensor, Tensor]:
    return _empty_out(q, v), excess.new_empty(q.shape[:3])


def _empty_out(q: Tensor, v: Tensor) -> Tensor:
    """Allocate (B, H, N, Dv): in v's memory order if K is H, otherwise with the heads of a position side by side."""
    if q.shape[1] == v.shape[1]:
        return torch.empty_like(v)
    return v.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)


@torch.library.custom_op("longstride::entmax_attention_backward", mutates_args=())
def _attention_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, excess: Tensor, shift: Tensor, patterns: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide, scale = excess.dtype, q.shape[-1] ** -0.5
    is_shared = q.shape[1] != k.shape[1]  # several heads of q share keys and values; gradients are by head of q first
    grad_q, grad_k, grad_v = (
        q.new_zeros(*q.shape[:3], x.shape[3], dtype=wide) if is_shared else torch.zeros_like(x, dtype=wide)
        for x in (q, k, v)
    )
    grad_power = excess.new_zeros(q.shape[:2])
    for some in _pieces(q, k, v, excess, patterns):
        scores, grad = some.scores(scale), some.read(grad_out)
        weights, slopes, ratio, _ = weights_of(scores, some.read(shift)[..., None], some.power)
        # The gradient of the scores is that of the weights times the slopes, minus the mean that keeps the sum at 1
        # (Peters et al. 2019, proposition 2). That of β uses log p / β - x/β · slope at the same x.
        grad_weights = some.gradients_of_weights(grad)
        rise = slopes.sum(-1, keepdim=True).clamp_min_(torch.finfo(wide).tiny)
        grad_weights -= (grad_weights * slopes).sum(-1, keepdim=True) / rise
        by_power = (weights * ratio.log1p().clamp_min_(torch.finfo(wide).min)).sub_(slopes * ratio)
        some.add_sums(grad_power, by_power.mul_(grad_weights))
        some.add_gradients(grad_weights.mul_(slopes), weights, grad, scale, (grad_q, grad_k, grad_v))
    dk, dv = (
        torch.empty_like(x).copy_(total.unflatten(1, (x.shape[1], -1)).sum(2)) if is_shared else total.to(x.dtype)
        for total, x in ((grad_k, k), (grad_v, v))
    )
    # β = 1 / (α - 1).
    return grad_q.to(q.dtype), dk, dv, -grad_power.sum(0) / excess.square()


@_attention_backward.register_fake
def _attention_backward_fake(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, excess: Tensor, shift: Tensor, patterns: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), torch.empty_like(excess)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.patterns = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_out: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if grad_out is None:
        return None, None, None, None, None
    return *_attention_backward(grad_out, *ctx.saved_tensors, ctx.patterns), None


_attention.register_autograd(_differentiate, setup_context=_save)


class Blocks(NamedTuple):
    """One part of a pattern for some rows: T blocks of C of them, each with the U columns that they read."""

    rows: Tensor  # (n,) int64, in the part's order, counted from the first of these rows; the last block may be short
    back: Tensor  # (n,) int64, the place of each row in that order
    columns: Tensor  # (T, U) int64, positions of keys
    allowed: Tensor  # (T, C, U) bool

    def split(self, x: Tensor) -> Tensor:
        """Split rows (P, n, ·) into blocks (P, T, C, ·), the last padded with zeros."""
        blocks, size = self.allowed.shape[:2]
        return nn.functional.pad(x[:, self.rows], (0, 0, 0, blocks * size - len(self.rows))).unflatten(1, (-1, size))

    def joined(self, x: Tensor) -> Tensor:
        """Join blocks (P, T, C, ·) to rows (P, n, ·)."""
        return x.flatten(1, 2)[:, self.back]

    def add_columns(self, total: Tensor, x: Tensor) -> None:
        """Add values for the keys of blocks, (P, T, U, ·), to all keys, (P, N, ·)."""
        columns, x = self.columns.flatten(), x.flatten(1, 2)
        if x.device.type == "cpu":
            total.index_add_(1, columns, x)
        else:  # index_add_ is not deterministic there
            total.transpose(0, 1).index_put_((columns,), x.transpose(0, 1), accumulate=True)


@lru_cache(maxsize=64)
def most_keys(pattern: Pattern, context: int) -> int:
    """Return the most keys that a query of a head's pattern reads in all parts together."""
    with torch.device("cpu"):  # models are made without memory too
        lengths = torch.zeros(context, dtype=torch.int64)
        for query_order, _, low, high in pattern_parts(pattern, context):
            rows = torch.arange(context) if query_order is None else query_order.flatten().long()
            lengths[rows] += (high - low).flatten()
    return int(lengths.max())


@lru_cache(maxsize=64)  # one for each distinct head, as for plans of patterns
def _layout(pattern: Pattern, context: int, device: torch.device) -> tuple[tuple[slice, tuple[Blocks, ...]], ...]:
    """Split all rows into consecutive pieces, each with its part of every part of the pattern."""
    count = max(BLOCK_ROWS[0], SCORES_IN_WORK // max(1, most_keys(pattern, context)))
    pieces = []
    for start in range(0, context, count):
        rows = slice(start, min(start + count, context))
        parts = []
        for query_order, key_order, low, high in pattern_parts(pattern, context):
            order = torch.arange(context) if query_order is None else query_order.flatten().long()
            some = ((order >= rows.start) & (order < rows.stop)).nonzero().flatten()
            keys = torch.arange(context) if key_order is None else key_order.flatten().long()
            parts.append(_blocks(order[some] - start, keys, *(bound.flatten().long()[some] for bound in (low, high))))
        pieces.append((rows, tuple(Blocks(*(x.to(device) for x in part)) for part in parts)))
    return tuple(pieces)


def _blocks(rows: Tensor, keys: Tensor, low: Tensor, high: Tensor) -> Blocks:
    """Choose the cheapest blocks for rows in an order in which neither bound of their columns decreases."""

    def columns_of(size: int) -> int:
        last = torch.arange(0, len(rows), size).add(size - 1).clamp_max(len(rows) - 1)
        return max(1, int((high[last] - low[::size]).max()))

    def cost(size: int) -> int:
        return -(-len(rows) // size) * columns_of(size) * (size + GATHERED)

    keys = keys if len(keys) else rows[:1]  # unused: summaries in a context of one block
    size = min(BLOCK_ROWS, key=cost)
    first = low[::size, None]
    column = first + torch.arange(columns_of(size))
    missing = (0, -len(rows) % size)  # padding rows of the last block read nothing
    low, high = (nn.functional.pad(bound, missing).view(-1, size, 1) for bound in (low, high))
    allowed = (low <= column[:, None]) & (column[:, None] < high)
    return Blocks(rows, rows.argsort(), keys[column.clamp_max(len(keys) - 1)], allowed)


def _pieces(q: Tensor, k: Tensor, v: Tensor, excess: Tensor, patterns: str) -> Iterator[Piece]:
    """Yield all rows of all contexts and heads, as many at a time as have their scores fit in work memory."""
    for pattern, heads in alike([pattern_from_json(pattern) for pattern in ast.literal_eval(patterns)]):
        numbers = torch.arange(q.shape[1])[heads].repeat(len(q))
        contexts = torch.arange(len(q)).repeat_interleave(len(numbers) // len(q))
        for rows, parts in _layout(pattern, q.shape[2], q.device):
            scores = (rows.stop - rows.start) * sum(part.columns.shape[1] for part in parts)
            count = max(1, SCORES_IN_WORK // scores)
            for context, head in zip(contexts.split(count), numbers.split(count), strict=True):
                b, h = context.to(q.device), head.to(q.device)
                shared = h // (q.shape[1] // k.shape[1])
                yield Piece(b, h, rows, parts, q[b, h], k[b, shared], v[b, shared], 1 / excess[h, None, None])


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of P pairs of a context and a head."""

    contexts: Tensor  # (P,) int64, of each pair
    heads: Tensor  # (P,) int64
    rows: slice
    parts: tuple[Blocks, ...]
    q: Tensor  # (P, N, D), of all rows; likewise k and v
    k: Tensor
    v: Tensor
    power: Tensor  # (P, 1, 1), β

    def read(self, x: Tensor) -> Tensor:
        """Return these rows of (B, H, N, …): (P, n, …)."""
        return x[self.contexts, self.heads, self.rows].to(self.power.dtype)

    def write(self, x: Tensor, rows: Tensor) -> None:
        """Set these rows of (B, H, N, …) to (P, n, …)."""
        x[self.contexts, self.heads, self.rows] = rows.to(x.dtype)

    def add_sums(self, total: Tensor, x: Tensor) -> None:
        """Add the sum of each pair's (P, n, W) to (B, H)."""
        total[self.contexts, self.heads] += x.sum((1, 2))

    def scores(self, scale: float) -> Tensor:
        """Compute scores (P, n, W) of all parts side by side, -inf where a row does not read a column."""
        q, scores = self.q[:, self.rows].to(self.power.dtype), []
        for part in self.parts:
            products = (part.split(q) @ self._columns(self.k, part).mT).mul_(scale)
            scores.append(part.joined(products.masked_fill_(~part.allowed, -math.inf)))
        return torch.cat(scores, -1)

    def weigh(self, weights: Tensor) -> Tensor:
        """Multiply weights (P, n, W) by their values: (P, n, Dv)."""
        outs = [
            part.joined(part.split(some) @ self._columns(self.v, part))
            for part, some in zip(self.parts, self._by_part(weights), strict=True)
        ]
        return sum(outs[1:], outs[0])

    def gradients_of_weights(self, grad: Tensor) -> Tensor:
        """Compute the gradients of weights (P, n, W) from those of the output, (P, n, Dv)."""
        return torch.cat([part.joined(part.split(grad) @ self._columns(self.v, part).mT) for part in self.parts], -1)

    def add_gradients(
        self, grad_scores: Tensor, weights: Tensor, grad: Tensor, scale: float, totals: tuple[Tensor, ...]
    ) -> None:
        """Add gradients of q, k and v to (B, H, N, ·), from those of scores (P, n, W) and of the output (P, n, Dv)."""
        q = self.q[:, self.rows].to(grad.dtype)
        grad_q, grad_k, grad_v = (torch.zeros_like(x, dtype=grad.dtype) for x in (q, self.k, self.v))
        of_scores, of_weights = self._by_part(grad_scores), self._by_part(weights)
        for part, some, weight in zip(self.parts, of_scores, of_weights, strict=True):
            blocks = part.split(some) * scale
            grad_q += part.joined(blocks @ self._columns(self.k, part))
            part.add_columns(grad_k, blocks.mT @ part.split(q))
            part.add_columns(grad_v, part.split(weight).mT @ part.split(grad))
        for total, rows, first in zip(totals, (grad_q, grad_k, grad_v), (self.rows.start, 0, 0), strict=True):
            total[self.contexts, self.heads, first : first + rows.shape[1]] += rows

    def _columns(self, x: Tensor, part: Blocks) -> Tensor:
        """Gather the rows of x (P, N, ·) that the blocks of a part read, (P, T, U, ·)."""
        return x[:, part.columns].to(self.power.dtype)

    def _by_part(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.split([part.columns.shape[1] for part in self.parts], -1)
