"""Attention to listed blocks on the CPU, the same ones for all heads of a query.

Large blocks are multiplied with the queries that list them (``_Blocks``). Small ones would make these products too
narrow. So tiles of queries either gather the keys that they list, for all heads that share them, or in short contexts,
where gathering takes longer, compute all scores and mask most of them (``_Tile``).

Letters: N positions, n queries of a piece, H heads that share keys, T numbers of a query, L positions of a block, D and
E widths of keys and values, G groups of R queries that list one block, W columns of a tile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from longstride.kernels.backends import Saved, empty_like_rows
from longstride.kernels.backends.cpu.slabs import Numbers, num_at_once
from longstride.kernels.selections import listed_positions

NARROW = 8  # keys for each head that shares them; smaller blocks are read key by key
ROWS = 64  # R
MOST_LISTED = 1 << 24  # keys of the queries of a piece, once for each head
GATHERED = 40  # keys that one head multiplies and masks in the time that gathering one takes
TILE = 1 << 19  # values of keys that a tile gathers, or scores that it computes


def indexed_forward(
    q: Tensor, k: Tensor, v: Tensor, numbers: Tensor, block: int, scale: float, weigh: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output, logsumexp and, if asked to, mean weights, as ``kernels.indexed`` describes them."""
    arithmetic = Numbers.of(q.dtype)
    out = empty_like_rows(v, q.dtype, heads=q.shape[1])
    lse = q.new_empty(q.shape[:3], dtype=arithmetic.wide)
    mean = lse.new_zeros(*numbers.shape[:2], numbers.shape[2] * block if weigh else 0)
    keys, values = (x.to(arithmetic.narrow).contiguous() for x in (k, v))
    group = q.shape[1] // k.shape[1]
    for entry, piece in pieces(numbers, block, k.shape[3], group, arithmetic, scale):
        rows = slice(piece.first, piece.first + len(piece.numbers))
        weights = lse.new_zeros(piece.shape) if weigh else None
        for number in range(k.shape[1]):
            place = entry, slice(number * group, (number + 1) * group), rows
            queries = q[place].transpose(0, 1).to(arithmetic.narrow).contiguous()
            result, out_lse = piece.forward(queries, keys[entry, number], values[entry, number], weights)
            out[place] = result.to(q.dtype).transpose(0, 1)
            lse[place] = out_lse.T * arithmetic.nats
        if weights is not None:
            mean[entry, rows] = piece.by_query(weights)
    return out, lse, mean.div_(q.shape[1]) if weigh else mean.flatten()


def indexed_backward(saved: Saved, numbers: Tensor, block: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    q, k, v, out, grad_out, lse, _ = saved
    arithmetic = Numbers.of(q.dtype)
    narrow, wide = arithmetic.narrow, arithmetic.wide
    grad_q = empty_like_rows(q)
    grad_k, grad_v = (torch.zeros_like(x, dtype=wide, memory_format=torch.contiguous_format) for x in (k, v))
    keys, values = (x.to(narrow).contiguous() for x in (k, v))
    delta = (grad_out.to(wide) * out.to(wide)).sum(-1)
    shifts = (lse / arithmetic.nats).masked_fill_(lse == -math.inf, math.inf)  # powers without keys are 0
    group = q.shape[1] // k.shape[1]
    for entry, piece in pieces(numbers, block, k.shape[3], group, arithmetic, scale):
        rows = slice(piece.first, piece.first + len(piece.numbers))
        for number in range(k.shape[1]):
            place = entry, slice(number * group, (number + 1) * group), rows
            queries, grads = (x[place].transpose(0, 1).to(narrow).contiguous() for x in (q, grad_out))
            inputs = queries, keys[entry, number], values[entry, number], grads
            into = grad_k[entry, number], grad_v[entry, number]
            result = piece.backward(inputs, shifts[place].T, delta[place].T, into)
            grad_q[place] = result.mul_(scale).to(q.dtype).transpose(0, 1)
    return grad_q, empty_like_rows(k).copy_(grad_k.mul_(scale)), empty_like_rows(v).copy_(grad_v)


def pieces(
    numbers: Tensor, block: int, width: int, group: int, arithmetic: Numbers, scale: float
) -> Iterator[tuple[int, _Blocks | _Tile]]:
    """Yield the queries of each context in pieces that take bounded memory, with the context's number."""
    context, count = numbers.shape[1:]
    gathers, by_block = context * group > GATHERED * count * block, block >= NARROW * group
    if by_block:
        size = MOST_LISTED // (count * block * group)
    else:
        size = TILE // (count * block * max(width, group) if gathers else context * group)
    for entry in range(len(numbers)):
        for first in range(0, context, max(1, size)):
            listed = numbers[entry, first : first + max(1, size)].long()
            if by_block:
                yield entry, _Blocks.of(arithmetic, scale, first, listed, block, context)
            else:
                query = torch.arange(first, first + len(listed))
                keys = listed_positions(listed, block, query)
                yield entry, _Tile.of(arithmetic, scale, first, keys, gathers=gathers)


class _Blocks(NamedTuple):
    """Queries of a piece in groups that list one block; the last group of a block is padded."""

    arithmetic: Numbers
    scale: float
    first: int  # position of the first query
    numbers: Tensor  # (n, T)
    size: int  # L
    query: Tensor  # (G · R,) of each row
    block: Tensor  # (G,)
    row: Tensor  # (n · T,) of each pair of a query and a number; G · R for none
    partial: Tensor  # (P,) rows that read fewer keys than L, ascending: those in their own block, and padding
    bias: Tensor  # (P, L) of their scores: 0 or -inf
    padding: int  # positions after the last one, to the end of its block

    @classmethod
    def of(cls, arithmetic: Numbers, scale: float, first: int, numbers: Tensor, size: int, context: int) -> _Blocks:
        """Group the pairs of a query and a block of L = ``size`` keys."""
        up_to = torch.arange(first + 1, first + len(numbers) + 1)[:, None] - numbers * size
        num_read = F.pad(up_to.clamp_max_(size).flatten(), (0, 1))  # the last is padding
        listed, pair = numbers.flatten().sort(stable=True)
        first_listed = int((listed < 0).sum())
        block, counts = torch.unique_consecutive(listed[first_listed:], return_counts=True)
        groups = (counts + ROWS - 1) // ROWS
        number = torch.arange(int(groups.sum())) - (groups.cumsum(0) - groups).repeat_interleave(groups)
        begin = (first_listed + counts.cumsum(0) - counts).repeat_interleave(groups)
        place = number[:, None] * ROWS + torch.arange(ROWS)  # among the queries that list the block
        is_pair = place < counts.repeat_interleave(groups)[:, None]
        pair = pair[(begin[:, None] + place).where(is_pair, 0)].where(is_pair, numbers.numel()).flatten()
        row = torch.full((numbers.numel() + 1,), len(pair))
        row[pair] = torch.arange(len(pair))
        query = (pair // numbers.shape[1]).clamp_max_(len(numbers) - 1)
        partial = (num_read[pair] < size).nonzero().squeeze(1)
        is_read = torch.arange(size) < num_read[pair[partial], None]
        bias = torch.zeros(is_read.shape).masked_fill_(~is_read, -math.inf)
        blocks = block.repeat_interleave(groups)
        groups_of = query, blocks, row[:-1], partial, bias
        return cls(arithmetic, scale, first, numbers, size, *groups_of, -context % size)

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape of the weights that ``forward`` adds to: (G · R, L)."""
        return len(self.query), self.size

    def by_query(self, weights: Tensor) -> Tensor:
        """Return weights in the order of a query's keys, (n, T · L)."""
        return F.pad(weights, (0, 0, 0, 1)).index_select(0, self.row).view(len(self.numbers), -1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        """Attend from queries (n, H, D) to keys (N, D).

        Adds the weights of all heads to ``weights``, of ``shape``.

        Returns:
            The output (n, H, E) and the logsumexp in exponents (n, H).
        """
        keys, values = (self._in_blocks(x) for x in (k, v))
        # One more row, of pairs that are no rows.
        total = q.new_zeros(len(self.query) + 1, q.shape[1], dtype=self.arithmetic.wide)
        peak, products = torch.zeros_like(total), v.new_empty(len(self.block), ROWS * q.shape[1], v.shape[1])
        powers = None if weights is None else total.new_empty(len(self.query), q.shape[1], self.size)
        for groups, rows, _, _, scores in self._scores(q, keys):
            peaks = scores.amax(-1, keepdim=True)
            peaks.masked_fill_(peaks == -math.inf, 0.0)
            self.arithmetic.power_(scores.sub_(peaks))
            peak[rows], total[rows] = peaks.view_as(peak[rows]), scores.sum(-1).view_as(peak[rows])
            if powers is not None:
                powers[rows] = scores.view_as(powers[rows])
            of_block = values.index_select(0, self.block[groups])
            torch.bmm(scores.to(v.dtype), of_block, out=products[groups])
        by_pair = (peak + self.arithmetic.log(total)).index_select(0, self.row).view(len(q), -1, q.shape[1])
        lse = (by_pair * self.arithmetic.nats).logsumexp(1) / self.arithmetic.nats
        shares = self.arithmetic.power_(
            peak[:-1] - lse.masked_fill(lse == -math.inf, math.inf).index_select(0, self.query)
        )
        shares.masked_fill_(total[:-1] == 0, 0.0)
        of_rows = products.view(*shares.shape, -1).to(total.dtype).mul_(shares[..., None])
        out = of_rows.new_zeros(*q.shape[:2], v.shape[1]).index_add_(0, self.query, of_rows)
        if powers is not None and weights is not None:
            for of_head, share in zip(powers.unbind(1), shares.unbind(1), strict=True):
                weights.addcmul_(of_head, share[:, None])
        return out, lse

    def backward(self, inputs: tuple[Tensor, ...], shift: Tensor, delta: Tensor, into: tuple[Tensor, Tensor]) -> Tensor:
        """Return the gradient of q, (n, H, D), and add those of k and v, (N, ·). The caller scales those of q and k."""
        q, k, v, grad_out = inputs
        keys, values = (self._in_blocks(x) for x in (k, v))
        grad_q = torch.zeros(q.shape, dtype=self.arithmetic.wide)
        grad_k, grad_v = (torch.zeros(x.shape, dtype=self.arithmetic.wide) for x in (keys, values))
        for groups, rows, queries, of_block, scores in self._scores(q, keys):
            query, block = self.query[rows], self.block[groups]
            grads, shifts, deltas = (
                x.index_select(0, query).view(len(block), ROWS * q.shape[1], -1) for x in (grad_out, shift, delta)
            )
            weights = self.arithmetic.power_(scores.sub_(shifts))
            grad_v.index_add_(0, block, torch.bmm(weights.to(q.dtype).mT, grads).to(self.arithmetic.wide))
            grad = torch.bmm(grads, values.index_select(0, block).mT).to(self.arithmetic.wide)
            grad_scores = grad.sub_(deltas).mul_(weights).to(q.dtype)
            of_keys = torch.bmm(grad_scores, of_block).view(-1, *q.shape[1:])
            grad_q.index_add_(0, query, of_keys.to(self.arithmetic.wide))
            grad_k.index_add_(0, block, torch.bmm(grad_scores.mT, queries).to(self.arithmetic.wide))
        for total, grads in zip(into, (grad_k, grad_v), strict=True):
            total += grads.flatten(0, 1)[: len(total)]
        return grad_q

    def _scores(self, q: Tensor, keys: Tensor) -> Iterator[tuple[slice, slice, Tensor, Tensor, Tensor]]:
        """Yield slices of groups and of their rows, queries (·, R · H, D), keys (·, L, D) and scores in exponents."""
        at_once = num_at_once(ROWS * q.shape[1] * self.size)
        edges = torch.searchsorted(self.partial, torch.arange(0, len(self.block) + at_once, at_once) * ROWS).tolist()
        for number, first in enumerate(range(0, len(self.block), at_once)):
            last = min(first + at_once, len(self.block))
            groups, rows = slice(first, last), slice(first * ROWS, last * ROWS)
            queries = q.index_select(0, self.query[rows]).view(last - first, -1, q.shape[2])
            of_block = keys.index_select(0, self.block[groups])
            scale = self.scale / self.arithmetic.nats
            scores = torch.baddbmm(q.new_zeros(()), queries, of_block.mT, beta=0, alpha=scale).to(self.arithmetic.wide)
            partial = slice(edges[number], edges[number + 1])
            bias = self.bias[partial, None].to(self.arithmetic.wide).expand(-1, q.shape[1], -1)
            scores.view(-1, q.shape[1], self.size).index_add_(0, self.partial[partial] - rows.start, bias)
            yield groups, rows, queries, of_block, scores

    def _in_blocks(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 0, self.padding)).view(-1, self.size, x.shape[1])


class _Tile(NamedTuple):
    """A few queries that gather their keys, or that compute the scores of all keys up to the last of them."""

    arithmetic: Numbers
    scale: float
    first: int
    numbers: Tensor  # (n, T) positions; -1 for none
    bias: Tensor  # (n, W): 0 where a query reads a column, else -inf
    columns: Tensor | None  # (n · T,) the position of each column, W = T; None: positions 0 to W - 1

    @classmethod
    def of(cls, arithmetic: Numbers, scale: float, first: int, keys: Tensor, *, gathers: bool) -> _Tile:
        """Prepare a tile of queries with keys (n, T)."""
        if gathers:
            bias = torch.zeros(keys.shape).masked_fill_(keys < 0, -math.inf)
            return cls(arithmetic, scale, first, keys, bias, keys.clamp_min(0).flatten())
        last = first + len(keys)
        bias = torch.full((len(keys), last + 1), -math.inf)  # one more column, for those that are missing
        bias.scatter_(1, keys.where(keys >= 0, last), 0.0)
        return cls(arithmetic, scale, first, keys, bias[:, :-1], None)

    @property
    def shape(self) -> torch.Size:
        """Return the shape of the weights that ``forward`` adds to: (n, W)."""
        return self.bias.shape

    def by_query(self, weights: Tensor) -> Tensor:
        """Return weights as ``_Blocks.by_query`` does."""
        if self.columns is not None:
            return weights
        return weights.gather(1, self.numbers.clamp_min(0)).masked_fill_(self.numbers < 0, 0.0)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        """Attend as ``_Blocks.forward`` does."""
        keys, values = (self._columns(x) for x in (k, v))
        scores = self._scores(q, keys)
        peak = scores.amax(-1, keepdim=True)
        peak.masked_fill_(peak == -math.inf, 0.0)
        powers = self.arithmetic.power_(scores.sub_(peak))
        total = powers.sum(-1, keepdim=True)
        lse = peak + self.arithmetic.log(total)
        shares = powers.div_(total.masked_fill(total == 0, 1.0))
        out = self._product(shares.to(v.dtype), values).to(self.arithmetic.wide)
        if weights is not None:
            weights += shares.sum(1)
        return out, lse[..., 0]

    def backward(self, inputs: tuple[Tensor, ...], shift: Tensor, delta: Tensor, into: tuple[Tensor, Tensor]) -> Tensor:
        """Return and add gradients as ``_Blocks.backward`` does."""
        q, k, v, grad_out = inputs
        keys, values = (self._columns(x) for x in (k, v))
        weights = self.arithmetic.power_(self._scores(q, keys).sub_(shift[..., None]))
        grad = self._product(grad_out, values.mT).to(self.arithmetic.wide).sub_(delta[..., None]).mul_(weights)
        grad_scores = grad.to(q.dtype)
        self._add(into[1], weights.to(q.dtype), grad_out)
        self._add(into[0], grad_scores, q)
        return self._product(grad_scores, keys).to(self.arithmetic.wide)

    def _columns(self, x: Tensor) -> Tensor:
        """Return the rows of x (N, D) that are read: (n, T, D), or (W, D) for all queries."""
        if self.columns is None:
            return x[: self.bias.shape[1]]
        return x.index_select(0, self.columns).view(*self.numbers.shape, x.shape[1])

    def _scores(self, q: Tensor, keys: Tensor) -> Tensor:
        products = self._product(q, keys.mT).to(self.arithmetic.wide)
        return products.mul_(self.scale / self.arithmetic.nats).add_(self.bias[:, None])

    def _product(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Multiply rows (n, H, ·) by a matrix of the columns, or of those of each query."""
        if self.columns is None:  # torch would multiply strided rows query by query
            return (rows.flatten(0, 1) @ columns).unflatten(0, rows.shape[:2])
        return rows @ columns

    def _add(self, total: Tensor, factors: Tensor, rows: Tensor) -> None:
        """Add the products of factors (n, H, W) and rows (n, H, D) to the rows (N, D) of the columns."""
        if self.columns is None:
            total[: self.bias.shape[1]] += factors.flatten(0, 1).T @ rows.flatten(0, 1)
        else:
            products = factors.mT @ rows if rows.shape[1] > 1 else factors.mT * rows
            total.index_add_(0, self.columns, products.flatten(0, 1).to(total.dtype))
