"""Attention to keys that a learned indexer chooses (DeepSeek-AI 2025, arXiv 2512.02556, section 2.1).

All heads of a query read the same keys. Letters: B batch, H heads of queries, K heads of keys and values, N positions,
D and E widths of keys and values, J heads of the indexer of width I, T numbers of a query, L positions of a block.

A number is that of a block of L positions, counted from position 0; with L = 1 it is a position. -1 stands for none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from longstride.kernels.attention import check_inputs, choose_backend, load, resolve_scale
from longstride.kernels.backends import Saved, accumulator_dtype, empty_like_rows, reference, triton
from longstride.kernels.selected import ADVICE, BACKENDS, selected_attention
from longstride.kernels.selections import chosen_blocks, listed_positions

SCORES = {"cpu": 1 << 19}  # of all heads of an indexer or of attention at once, so that a CPU's cache holds them
MOST_SCORES = 1 << 25  # on other devices
SHORTEST_IN_TILES, FEWEST_IN_TILES = 64, 1 << 18  # positions of a block, and keys of all heads, with which tiles pay


def choose_keys(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    *,
    count: int,
    block: int = 1,
    window: int = 1,
    starts: Tensor | None = None,
    backend: str = "auto",
    first: int = 0,
) -> Tensor:
    """Choose the blocks of keys with the highest scores Σ_j w_j · ReLU(q_j · k), up to each query (equation 1).

    A block has the highest score of its keys. Blocks with any of the query's last ``window`` positions come first.
    Scores are rounded to fp32 before they are compared, and the later of equal ones is chosen. There is no gradient.

    Args:
        q: (B, n, J, I), of the positions from ``first`` on.
        k: (B, first + n, I), one key a position.
        weights: (B, n, J).
        count: the most blocks of a query.
        block: L.
        window: at least 1, the query's own position counted; at most the positions that ``count`` blocks surely have.
        starts: (B, n) int64, the first position whose key each query may read, from which its blocks are counted.
        backend: as of attention; triton has a kernel for the scores.

    Returns:
        (B, n, T) int32 in any order, T at most ``count``; -1 where a query has fewer blocks. With ``starts`` these are
        the positions of all their keys, T at most ``count`` · L.
    """
    return _choose_keys(q.detach(), k.detach(), weights.detach(), count, block, window, starts, backend, first)


# Opaque operations for torch.compile and plans, as they walk through tiles.
@torch.library.custom_op("longstride::choose_keys", mutates_args=())
def _choose_keys(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    count: int,
    block: int,
    window: int,
    starts: Tensor | None,
    backend: str,
    first: int,
) -> Tensor:
    rows, backend = q.shape[1], choose_backend(backend, BACKENDS, (q, q, q), ADVICE)
    if backend != "triton":
        k = k.to(accumulator_dtype(k.dtype))  # once for all tiles
    numbers = q.new_full((len(q), rows, min(count, -(-k.shape[1] // block))), -1, dtype=torch.int32)
    in_blocks = block if starts is None else 1
    for entry, some, columns in tiles(len(q), rows, 1, first, q.device):  # index_scores sums heads
        index = q[entry, some], k[entry, :columns], weights[entry, some]
        scores = index_scores(*index, first + some.start, backend, window, in_blocks)
        if starts is not None:
            position = torch.arange(columns, device=q.device)
            scores.masked_fill_(position < starts[entry, some, None], -torch.inf)
            if block > 1:  # position s of a document moves to place s
                shifted = position + starts[entry, some, None]
                scores = scores.gather(1, shifted.clamp_max(columns - 1)).masked_fill_(shifted >= columns, -torch.inf)
                scores = F.max_pool1d(scores, block, ceil_mode=True)
        chosen = last_highest(scores, min(count, scores.shape[1]), backend)
        numbers[entry, some, : chosen.shape[1]] = chosen
    if block > 1 and starts is not None:
        places = torch.arange(first, first + rows, device=q.device) - starts
        positions = listed_positions(numbers, block, places)
        numbers = (positions + starts[..., None]).where(positions >= 0, -1).int()
    return numbers


@_choose_keys.register_fake
def _(q: Tensor, k: Tensor, _: Tensor, count: int, block: int, __: int, starts: Tensor | None, *___: Any) -> Tensor:
    listed = min(count, -(-k.shape[1] // block)) * (1 if starts is None else block)
    return q.new_empty((*q.shape[:2], listed), dtype=torch.int32)


def index_scores(
    q: Tensor, k: Tensor, weights: Tensor, first: int, backend: str = "auto", window: int = 0, block: int = 1
) -> Tensor:
    """Return Σ_j w_j · ReLU(q_j · k) of queries (n, J, I) from position ``first`` on: (n, first + n) fp32.

    That of a later key is -inf, that of each query's last ``window`` keys inf. With ``block``, L, it is the highest of
    L keys: (n, ⌈(first + n) / L⌉).
    """
    if choose_backend(backend, BACKENDS, (q, q, q), ADVICE) == "triton":
        return triton.index_scores(q[None], k[None], weights[None], first, window, block)[0].float()
    rows, keys, factors = (x.to(accumulator_dtype(q.dtype)) for x in (q.flatten(0, 1), k, weights[:, None]))
    scores = q.new_empty(len(q), len(k), dtype=torch.float32)
    at_once = max(64, SCORES.get(q.device.type, MOST_SCORES) // len(rows))
    with torch.autocast(q.device.type, enabled=False):  # autocast would round to 16 bits
        for some, of_keys in zip(scores.split(at_once, 1), keys.split(at_once), strict=True):
            products = torch.mm(rows, of_keys.T).relu_().view(*q.shape[:2], -1)
            some.copy_(torch.bmm(factors, products)[:, 0])
    near = slice(max(0, first - window + 1), None)  # the queries' positions, and all that are in a window
    behind = torch.arange(first, len(k), device=q.device)[:, None] - torch.arange(len(k), device=q.device)[near]
    scores[:, near].masked_fill_(behind < window, torch.inf).masked_fill_(behind < 0, -torch.inf)
    return scores if block == 1 else F.max_pool1d(scores, block, ceil_mode=True)


def last_highest(scores: Tensor, count: int, backend: str = "cpu") -> Tensor:
    """Return the places of the ``count`` highest of scores (n, W) fp32, the later of equal ones; -1 for one of -inf.

    Returns:
        (n, count) int32, in any order.
    """
    width = scores.shape[1]
    if backend == "triton" and (found := triton.last_highest(scores, count)) is not None:
        return found
    places = torch.arange(width, device=scores.device).expand_as(scores)
    span = math.isqrt(width // count)
    if span > 2 and (count > 64 or backend == "triton"):  # topk alone is faster for fewer
        # They lie in ``count`` spans: those of the highest peaks, the later of equal ones.
        spans = last_highest(F.max_pool1d(scores, span, ceil_mode=True), count, backend)
        listed = listed_positions(spans, span, places[:, -1])
        places = listed.clamp_min(0)
        scores = scores.gather(1, places).masked_fill_(listed < 0, -torch.inf)
        if backend == "triton":
            found = last_highest(scores, count, backend)
            return places.gather(1, found.clamp_min(0).long()).where(found >= 0, -1).int()
    # Bits of fp32 have the order of integers once those of negative numbers are reversed; 0 is added to -0.
    bits = (scores + 0.0).view(torch.int32)
    codes = (bits ^ (bits >> 31 & 0x7FFFFFFF)).long() << 32 | places
    top = codes.topk(count, sorted=False).values
    found = (top & 0xFFFFFFFF).where(top >> 32 > -0x7F800001, -1).int()
    return found.sort(-1).values if backend == "triton" else found  # whose kernel takes the later places of a row


def tiles(
    batch: int, rows: int, heads: int, first: int, device: torch.device, width: int | None = None
) -> Iterator[tuple[int, slice, int]]:
    """Yield tiles of queries from position ``first`` on: number in the batch, rows, and how many keys come up to there.

    Scores of all heads of a tile may stand in memory, with ``width`` keys of a query; None: with all up to there.
    """
    most = SCORES.get(device.type, MOST_SCORES)
    for entry in range(batch):
        begin = 0
        while begin < rows:
            scores, before = most // heads, first + begin
            # With all keys, a tile of n queries has n · (before + n) scores.
            size = scores // width if width else (math.isqrt(before**2 + 4 * scores) - before) // 2
            size = max(1, min(rows - begin, size))
            yield entry, slice(begin, begin + size), first + begin + size
            begin += size


def indexed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    numbers: Tensor,
    *,
    block: int = 1,
    scale: float | None = None,
    backend: str = "auto",
    return_weights: bool = False,
) -> Any:
    """Compute softmax attention of all heads of a query to the blocks that it lists, up to its own position.

    Args:
        q: (B, H, N, D) in fp16, bf16, fp32 or fp64. Scores and sums are in fp32 (fp64 for fp64).
        k: (B, K, N, D). K may be less than H: see ``sparse_attention``.
        v: (B, K, N, E).
        numbers: (B, N, T) int32, blocks that begin no later than the query, none twice; -1 for none.
        block: L.
        scale: factor of the scores. Default: 1/sqrt(D).
        backend: auto, triton, cpu or reference. A named backend that cannot run here raises.
        return_weights: also return the weights, averaged over heads, (B, N, T · L) fp32 (fp64 for fp64) without a
            gradient; 0 where there is no key.

    Returns:
        (B, H, N, E) in q's dtype, 0 for a query without keys; and with ``return_weights`` these.

    Raises:
        ValueError: shapes, dtypes or devices do not match, or the scale is not finite.
        ConfigError: the backend is unknown or cannot run here.
    """
    check_inputs(q, k, v)
    if numbers.shape[:2] != (len(q), q.shape[2]) or numbers.dtype != torch.int32:
        rule = f"must be ({len(q)}, {q.shape[2]}, T) int32, as q is {tuple(q.shape)}"
        raise ValueError(f"numbers {tuple(numbers.shape)} {numbers.dtype} {rule}")
    scale = resolve_scale(q, scale)
    backend = choose_backend(backend, BACKENDS, (q, k, v), ADVICE)
    own = torch.arange(q.shape[2], device=q.device)
    if backend == "triton" and block >= SHORTEST_IN_TILES and k.shape[1] * k.shape[2] >= FEWEST_IN_TILES:
        # Tiles of a block and the queries that choose it, as in mixture of block attention. Otherwise keys are listed.
        others = numbers.where(numbers != own[:, None] // block, -1)[:, None].expand(-1, q.shape[1], -1, -1)
        selection = chosen_blocks(others, block)
        out, lse = selected_attention(q, k, v, selection, scale=scale, backend=backend, return_lse=True)
        if return_weights:
            weights = triton.summed_weights(q, k, lse, numbers, block, scale)
    elif backend == "reference":
        out, weights = reference.attend_indexed(q, k, v, listed_positions(numbers, block, own), scale)
    else:
        out, _, weights = _indexed_attention(q, k, v, numbers, block, scale, return_weights, backend)
    return (out, weights.detach()) if return_weights else out


@torch.library.custom_op("longstride::indexed_attention", mutates_args=())
def _indexed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    numbers: Tensor,
    block: int,
    scale: float,
    return_weights: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, the logsumexp (B, H, N) and the weights, which are empty unless wanted."""
    with torch.autocast(q.device.type, enabled=False):
        results: tuple[Tensor, Tensor, Tensor] = load(backend).indexed_forward(
            q, k, v, numbers, block, scale, return_weights
        )
        return results


@_indexed_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, numbers: Tensor, block: int, _: float, return_weights: bool, __: str
) -> tuple[Tensor, Tensor, Tensor]:
    lse = q.new_empty(q.shape[:3], dtype=accumulator_dtype(q.dtype))
    shape = (*numbers.shape[:2], numbers.shape[2] * block) if return_weights else (0,)
    return empty_like_rows(v, q.dtype, heads=q.shape[1]), lse, lse.new_empty(shape)


@torch.library.custom_op("longstride::indexed_attention_backward", mutates_args=())
def _indexed_attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    grad_out: Tensor,
    lse: Tensor,
    numbers: Tensor,
    block: int,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    saved = Saved(q, k, v, out, grad_out, lse, None)
    with torch.autocast(q.device.type, enabled=False):
        grads: tuple[Tensor, Tensor, Tensor] = load(backend).indexed_backward(saved, numbers, block, scale)
        return grads


@_indexed_attention_backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return empty_like_rows(q), empty_like_rows(k), empty_like_rows(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, numbers, block, scale, _, backend = inputs
    ctx.save_for_backward(q, k, v, output[0], output[1], numbers)
    ctx.values = block, scale, backend


def _differentiate(ctx: Any, grad_out: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, numbers = ctx.saved_tensors
    grads = _indexed_attention_backward(q, k, v, out, grad_out, lse, numbers, *ctx.values)
    return *grads, *[None] * 5


_indexed_attention.register_autograd(_differentiate, setup_context=_save)


def indexer_loss(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    attention: tuple[Tensor, Tensor],
    *,
    numbers: Tensor | None = None,
    block: int = 1,
    target: Tensor | None = None,
    starts: Tensor | None = None,
    real: Tensor | None = None,
) -> Tensor:
    """Compute KL(p ‖ softmax(scores)) of the indexer's scores, averaged over queries (equations 3 and 4).

    p are the attention weights of a query, averaged over heads. Only q, k and weights have gradients.

    Args:
        q, k, weights: as ``choose_keys`` takes them, of whole contexts.
        attention: queries (B, H, N, D) and keys (B, K, N, D) of the attention, from which p follows without ``target``.
        numbers: (B, N, T) int32, the blocks that each query reads; None: all keys from ``starts`` up to it.
        block: L.
        target: p, (B, N, T · L), as ``indexed_attention`` returns it; given with ``numbers``.
        starts: (B, N) int64, as ``choose_keys`` takes it.
        real: (B, N) bool, False for queries to leave out; None: none.

    Returns:
        () fp32 (fp64 for fp64).
    """
    wide = accumulator_dtype(q.dtype)
    shares = q.new_ones(q.shape[:2], dtype=wide) if real is None else real.to(wide)
    shares = shares / shares.sum().clamp_min(1)
    keep = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or weights.requires_grad)
    pair = [x.detach() for x in attention] if numbers is None else [None, None]
    loss: Tensor = _indexer_loss(q, k, weights, *pair, numbers, target, starts, shares, block, keep)[0]
    return loss


@torch.library.custom_op("longstride::indexer_loss", mutates_args=())
def _indexer_loss(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    queries: Tensor | None,
    keys: Tensor | None,
    numbers: Tensor | None,
    target: Tensor | None,
    starts: Tensor | None,
    shares: Tensor,
    block: int,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the loss, and with ``keep`` its gradients by q, k and weights, so that scores are computed once."""
    wide = accumulator_dtype(q.dtype)
    grads = [torch.zeros_like(x, dtype=wide) if keep else x.new_empty(0, dtype=wide) for x in (q, k, weights)]
    loss = q.new_zeros((), dtype=wide)
    in_blocks = F.pad(k.to(wide), (0, 0, 0, -k.shape[1] % block)).unflatten(1, (-1, block)).flatten(2)  # (B, C, L · I)
    grad_blocks = torch.zeros_like(in_blocks)
    heads = q.shape[2] if queries is None else max(q.shape[2], queries.shape[1])
    width = None if numbers is None else numbers.shape[2] * block * q.shape[3] // q.shape[2]
    with torch.autocast(q.device.type, enabled=False):
        for entry, some, columns in tiles(len(q), q.shape[1], heads, 0, q.device, width):
            query = torch.arange(some.start, columns, device=q.device)
            if numbers is None:
                assert queries is not None and keys is not None
                position = torch.arange(columns, device=q.device)
                read = k[entry, :columns].to(wide)
                is_read = position <= query[:, None]
                if starts is not None:
                    is_read &= position >= starts[entry, some, None]
                p = _mean_weights(queries[entry, :, some], keys[entry, :, :columns], is_read)
            else:
                assert target is not None
                places = listed_positions(numbers[entry, some], block, query)
                is_read, p = places >= 0, target[entry, some]
                # The query's own in place of none, so that zeros are not all summed at one block, one after another.
                listed = numbers[entry, some].where(numbers[entry, some] >= 0, query[:, None] // block).flatten().long()
                read = in_blocks[entry].index_select(0, listed).view(*places.shape, -1)
            index_q, factors = q[entry, some].to(wide), weights[entry, some].to(wide)
            products = (index_q @ read.mT).relu_()  # (R, J, W)
            scores = (factors[:, None] @ products)[:, 0].masked_fill_(~is_read, torch.finfo(wide).min)
            log_index = scores.log_softmax(-1)
            share = shares[entry, some, None]
            log_p = p.clamp_min(torch.finfo(wide).tiny).log()  # finite, as 0 times it must be 0
            loss += (log_p - log_index).mul_(p).mul_(share).sum()
            if not keep:
                continue
            grad = (log_index.exp() * p.sum(-1, keepdim=True) - p).mul_(share)
            grads[2][entry, some] = (products * grad[:, None]).sum(-1)
            grad = torch.ops.aten.threshold_backward(factors[..., None] * grad[:, None], products, 0)  # (R, J, W)
            grads[0][entry, some] = grad @ read
            if numbers is None:
                grad_blocks[entry].view(-1, k.shape[2])[:columns] += grad.flatten(0, 1).T @ index_q.flatten(0, 1)
            else:
                of_keys = (grad.mT @ index_q).view(len(listed), -1)
                if q.device.type == "cpu":
                    grad_blocks[entry].index_add_(0, listed, of_keys)
                else:  # index_add_ is not deterministic there
                    grad_blocks[entry].index_put_((listed,), of_keys, accumulate=True)
    if keep:
        grads[1] = grad_blocks.view(len(k), -1, k.shape[2])[:, : k.shape[1]].contiguous()
    return loss, grads[0], grads[1], grads[2]


def _mean_weights(q: Tensor, k: Tensor, is_read: Tensor) -> Tensor:
    """Return the attention weights of queries (H, n, D) to keys (K, W, D), averaged over heads: (n, W)."""
    wide = accumulator_dtype(q.dtype)
    queries = (q.to(wide) * q.shape[-1] ** -0.5).unflatten(0, (len(k), -1)).flatten(1, 2)
    scores = (queries @ k.to(wide).mT).view(len(q), *is_read.shape)
    return scores.masked_fill_(~is_read, torch.finfo(wide).min).softmax(-1).mean(0).masked_fill_(~is_read, 0.0)


@_indexer_loss.register_fake
def _(q: Tensor, k: Tensor, weights: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide, keep = accumulator_dtype(q.dtype), arguments[-1]
    grads = [torch.empty_like(x, dtype=wide) if keep else x.new_empty(0, dtype=wide) for x in (q, k, weights)]
    return q.new_empty((), dtype=wide), grads[0], grads[1], grads[2]


def _save_loss(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.dtypes = [x.dtype for x in inputs[:3]]


def _differentiate_loss(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    grads = (grad_loss * grad for grad in ctx.saved_tensors)
    return *(grad.to(dtype) for grad, dtype in zip(grads, ctx.dtypes, strict=True)), *[None] * 8


_indexer_loss.register_autograd(_differentiate_loss, setup_context=_save_loss)
