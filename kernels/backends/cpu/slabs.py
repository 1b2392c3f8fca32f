"""Softmax and gradients of a slab of chunks on the CPU, its memory, and threads, for patterns and selections.

Letters: G batch entries times heads of one piece, N positions, M keys of a part, D and E widths of keys and values,
b chunks of a slab, R rows and W columns of a chunk. Softmax, sums and products are in fp32 (fp64 for fp64). For bf16
inputs, products are in bf16 if the CPU multiplies it faster: see ``Numbers``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from longstride.kernels.backends import Saved, accumulator_dtype, empty_like_rows, has_bf16_products
from longstride.kernels.backends.cpu.chunks import Chunks, EqualChunks
from longstride.kernels.forms import Fold

SCORES_IN_WORK = 1 << 19  # scores of a slab: enough to amortise a call, few enough to stay in the cache
VALUES_IN_WORK = 1 << 20  # values of q (or v) of a piece, likewise
Kind = TypeVar("Kind", bound=Hashable)  # a pattern or a selection of heads


class Numbers(NamedTuple):
    """The arithmetic for one dtype of q, k and v.

    Powers are of 2, as torch's ``exp`` is slow, especially at -inf. In fp64 they are of e, as in the specification.
    """

    narrow: torch.dtype  # dtype of the operands and results of products
    wide: torch.dtype  # dtype of everything else

    @classmethod
    def of(cls, dtype: torch.dtype) -> Numbers:
        """Return the arithmetic for a dtype on this machine."""
        wide = accumulator_dtype(dtype)
        return cls(dtype if dtype == torch.bfloat16 and has_bf16_products() else wide, wide)

    @property
    def nats(self) -> float:
        """Nats per unit of the exponents."""
        return 1.0 if self.wide == torch.float64 else math.log(2)

    def power_(self, exponents: Tensor) -> Tensor:
        """Replace exponents by powers, in place."""
        return exponents.exp_() if self.wide == torch.float64 else exponents.exp2_()

    def log(self, powers: Tensor) -> Tensor:
        """Return the exponents of powers."""
        return powers.log() if self.wide == torch.float64 else powers.log2()


class Scratch:
    """Buffers that slabs reuse, so that they stay in the CPU cache and are allocated once."""

    def __init__(self, numbers: Numbers) -> None:
        self.numbers = numbers
        self.buffers: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor in the buffer of that name. A name always has the same dtype."""
        size = math.prod(shape)
        if name not in self.buffers or self.buffers[name].numel() < size:
            self.buffers[name] = torch.empty(size, dtype=dtype)
        return self.buffers[name][:size].view(shape)

    def wide(self, name: str, x: Tensor) -> Tensor:
        """Return a product in the wide dtype: ``x`` itself or a copy in a buffer."""
        return self._cast(name, x, self.numbers.wide)

    def narrow(self, name: str, x: Tensor) -> Tensor:
        """Return an operand of a product in the narrow dtype, likewise."""
        return self._cast(name, x, self.numbers.narrow)

    def _cast(self, name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x if x.dtype == dtype else self.take(name, *x.shape, dtype=dtype).copy_(x)

    def rows(self, name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return (B, H, N, D) as (G, N, D) in this dtype with adjacent channels: ``x`` itself or a copy in a buffer."""
        regular = x.is_contiguous() or (dtype == torch.bfloat16 and 1 in x.shape[:2] and x.stride(3) == 1)
        if x.dtype != dtype or not regular:
            x = self.take(f"{name} rows", *x.shape, dtype=dtype).copy_(x)
        return x.flatten(0, 1)

    def ordered(self, name: str, x: Tensor, order: Tensor | None) -> Tensor:
        """Return (G, N, D) with rows in this order: a copy in a buffer, or ``x`` itself for the natural order."""
        if order is None:
            return x
        return torch.index_select(x, 1, order, out=self.take(name, len(x), len(order), x.shape[2], dtype=x.dtype))

    def results(self, name: str, target: Tensor, piece: Piece) -> Tensor:
        """Return where to compute a piece's (G, N, D): in place, or in a buffer that ``put`` copies from."""
        x = target[piece]  # a copy if heads are a list
        if isinstance(piece[1], slice) and x.dtype == self.numbers.wide and (1 in x.shape[:2] or x.is_contiguous()):
            return x.flatten(0, 1)
        return self.take(f"{name} of a piece", x.shape[0] * x.shape[1], *x.shape[2:], dtype=self.numbers.wide)

    def target(self, name: str, x: Tensor, rows: int, order: Tensor | None) -> Tensor:
        """Return where to compute results in this order: ``x`` itself for the natural order, else a buffer."""
        return x if order is None else self.take(name, len(x), rows, x.shape[2], dtype=x.dtype)


class Slab(NamedTuple):
    """Equal chunks computed together: ``chunks`` from ``first_chunk`` on, of ``groups`` from ``first_group`` on."""

    batch: EqualChunks
    columns: tuple[Fold, Fold] | None  # orders of queries and keys, if tensors stay in the natural order
    first_group: int
    groups: int
    first_chunk: int
    chunks: int

    def num_chunks(self) -> int:
        """Return b."""
        return self.groups * self.chunks

    def rows_of(self, x: Tensor) -> Tensor:
        """Return the queries' rows of (G, N, D): (b, R, D), a view if possible."""
        return _join_groups(self._rows(x))

    def keys_of(self, x: Tensor) -> Tensor:
        """Return the keys' rows of (G, M, D): (b, W, D), a view if possible."""
        return _join_groups(self._keys(x))

    def write_rows(self, x: Tensor, rows: Tensor, divisor: Tensor | None = None) -> None:
        """Write (b, R, D), divided by (b, R, 1), to the queries' rows of (G, N, D)."""
        target = self._rows(x)
        if divisor is None:
            target.copy_(rows.view(target.shape))
        else:
            torch.div(rows.view(target.shape), divisor.view(*target.shape[:3], 1), out=target)

    def add_rows(self, x: Tensor, rows: Tensor) -> None:
        """Add (b, R, D) to the queries' rows of (G, N, D)."""
        target = self._rows(x)
        target.add_(rows.view(target.shape))

    def write_keys(self, x: Tensor, rows: Tensor) -> None:
        """Write (b, W, D) to the keys' rows of (G, M, D). No key may occur twice."""
        target = self._keys(x)
        target.copy_(rows.view(target.shape))

    def add_keys(self, x: Tensor, rows: Tensor) -> None:
        """Add (b, W, D) to the keys' rows of (G, M, D)."""
        width, step = self.batch.width, self.batch.key_step
        parts = rows.view(self.groups, self.chunks, width, -1)
        if step == 0 and self.chunks > 1:  # all chunks read the same keys
            parts = parts.sum(1, keepdim=True)
        # Adjacent chunks overlap: add slices no wider than a step, so that no key occurs twice in a slice.
        for column in range(0, width, step if parts.shape[1] > 1 else width):
            piece = parts[:, :, column : column + step if parts.shape[1] > 1 else width]
            self._keys(x, column, piece.shape[2])[:, : parts.shape[1]].add_(piece)

    def _rows(self, x: Tensor) -> Tensor:
        """Return the queries' rows of (G, N, D) without a copy: (groups, chunks, R, D)."""
        columns = self.columns and self.columns[0]
        return self._view(x, self.batch.row, self.batch.row_step, self.batch.rows, columns)

    def _keys(self, x: Tensor, first: int = 0, count: int | None = None) -> Tensor:
        """Return the keys' rows of (G, M, D), or some of them, without a copy: (groups, chunks, W, D)."""
        columns = self.columns and self.columns[1]
        count = self.batch.width if count is None else count
        return self._view(x, self.batch.key + first, self.batch.key_step, count, columns)

    def _view(self, x: Tensor, first: int, step: int, length: int, columns: Fold | None) -> Tensor:
        """Return rows first + i * step … of chunk i without a copy: (groups, chunks, length, D)."""
        between_groups, between_rows, _ = x.stride()
        spacing = 1  # positions from one row of a chunk to the next
        first += self.first_chunk * step
        if columns is not None:
            first, step, spacing = columns(first), step // columns.period, columns.stride
        strides = (between_groups, step * between_rows, spacing * between_rows, 1)
        offset = self.first_group * between_groups + first * between_rows
        return x.as_strided((self.groups, self.chunks, length, x.shape[2]), strides, x.storage_offset() + offset)


def _join_groups(chunks: Tensor) -> Tensor:
    """Return (groups, chunks, L, D) as (b, L, D)."""
    joined = chunks.flatten(0, 1)
    # A bf16 product would copy overlapping chunks itself, slowly.
    return joined.contiguous() if joined.dtype == torch.bfloat16 else joined


def num_at_once(size: int) -> int:
    """Return how many chunks of ``size`` scores make a slab."""
    return max(1, SCORES_IN_WORK // size)


def slabs_of(chunks: Chunks, groups: int) -> Iterator[Slab]:
    """Yield the chunks in slabs of about SCORES_IN_WORK scores: all chunks of some groups, or some of one group."""
    for batch in chunks.batches:
        size = batch.rows * batch.width
        groups_at_once = num_at_once(size * batch.count)
        chunks_at_once = num_at_once(size)
        for group in range(0, groups, groups_at_once):
            for chunk in range(0, batch.count, chunks_at_once):
                num_groups, num_chunks = min(groups_at_once, groups - group), min(chunks_at_once, batch.count - chunk)
                yield Slab(batch, chunks.columns, group, num_groups, chunk, num_chunks)


def slab_forward(
    slab: Slab, scratch: Scratch, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> None:
    """Compute the softmax of a slab's scores times its values; all tensors are in the part's orders."""
    batch, numbers = slab.batch, scratch.numbers
    scores = _scores(scratch, slab.rows_of(q), slab.keys_of(k), batch, scale, None)
    peak = scores.amax(-1, keepdim=True)
    if batch.has_blind_rows:
        peak.masked_fill_(peak == -math.inf, 0.0)
    weights = numbers.power_(scores.sub_(peak))
    total = weights.sum(-1, keepdim=True)
    slab.write_rows(lse, peak.add_(numbers.log(total)))  # log 0 is the -inf of a row without keys
    if batch.has_blind_rows:
        total.masked_fill_(total == 0, 1.0)
    products = scratch.take("slab", len(weights), batch.rows, v.shape[2], dtype=numbers.narrow)
    slab.write_rows(out, torch.bmm(scratch.narrow("weights", weights), slab.keys_of(v), out=products), total)


def slab_backward(
    slab: Slab,
    scratch: Scratch,
    by_row: list[Tensor],
    by_key: list[Tensor],
    grads: tuple[Tensor, Tensor, Tensor],
    adds: tuple[bool, bool],
    scale: float,
) -> None:
    """Write or add a slab's gradients of q, and those of k and v; all tensors are in the part's orders."""
    q, grad_out, minus_lse, minus_delta = (slab.rows_of(x) for x in by_row)
    k, v = (slab.keys_of(x) for x in by_key)
    batch, b, numbers = slab.batch, slab.num_chunks(), scratch.numbers
    into_rows, into_keys = slab.add_rows if adds[0] else slab.write_rows, slab.add_keys if adds[1] else slab.write_keys
    weights = numbers.power_(_scores(scratch, q, k, batch, scale / numbers.nats, minus_lse))
    narrow_weights = scratch.narrow("weights", weights)
    grad_v = scratch.take("slab", b, batch.width, v.shape[2], dtype=numbers.narrow)
    torch.bmm(narrow_weights.transpose(1, 2), grad_out, out=grad_v)
    into_keys(grads[2], scratch.wide("wide slab", grad_v))
    if numbers.narrow == numbers.wide:
        grad_scores = scratch.take("grad_scores", *weights.shape, dtype=numbers.wide).copy_(
            minus_delta.expand(weights.shape)
        )
        grad_scores.baddbmm_(grad_out, v.transpose(1, 2))
    else:
        # Delta is part of the product, so only the difference is rounded. In a row of one key it is almost 0.
        ones = v.new_ones(1, 1, minus_delta.shape[2]).expand(b, batch.width, -1)
        products = scratch.take("products", *weights.shape, dtype=numbers.narrow)
        torch.bmm(torch.cat([grad_out, minus_delta], -1), torch.cat([v, ones], -1).transpose(1, 2), out=products)
        grad_scores = scratch.wide("grad_scores", products)
    grad_scores = scratch.narrow("products", grad_scores.mul_(weights))
    grad_q = scratch.take("slab", b, batch.rows, q.shape[2], dtype=numbers.narrow)
    into_rows(grads[0], _multiply(grad_q, grad_scores, k, scale))
    grad_k = scratch.take("slab", b, batch.width, q.shape[2], dtype=numbers.narrow)
    into_keys(grads[1], scratch.wide("wide slab", _multiply(grad_k, grad_scores.transpose(1, 2), q, scale)))


def _multiply(out: Tensor, left: Tensor, right: Tensor, scale: float, beta: int = 0) -> Tensor:
    """Set ``out`` to ``beta`` times itself plus the scaled product, and return it."""
    if scale == 0 and beta == 0:  # torch's product in bf16 would leave it as it was
        return out.zero_()
    return out.baddbmm_(left, right, beta=beta, alpha=scale)


def _scores(scratch: Scratch, q: Tensor, k: Tensor, batch: EqualChunks, scale: float, shift: Tensor | None) -> Tensor:
    """Return q . k * scale, -inf for masked pairs, plus ``shift`` (b, R, 1): (b, R, W)."""
    edges, narrow = batch.edges, scratch.numbers.narrow
    scores = scratch.take("products", len(q), batch.rows, batch.width, dtype=narrow)
    late = shift if narrow != scratch.numbers.wide else None  # a product would round it
    early = shift if late is None else None
    # Adding before the product is free, as the product accumulates onto it.
    is_full = len(edges) == 1 and edges[0].last - edges[0].first == batch.width
    if is_full and early is not None:
        torch.add(edges[0].bias, early, out=scores)
    elif is_full:
        scores.copy_(edges[0].bias)
    elif early is not None:
        scores.copy_(early.expand_as(scores))
    _multiply(scores, q, k.transpose(1, 2), scale, beta=1 if is_full or early is not None else 0)
    scores = scratch.wide("scores", scores)
    for edge in () if is_full else edges:
        scores[..., edge.first : edge.last].add_(edge.bias)
    return scores if late is None else scores.add_(late)


def input_rows(scratch: Scratch, piece: Piece, **inputs: Tensor) -> dict[str, Tensor]:
    """Return the rows of inputs, with q among them, that belong to a piece: (G, N, ·) by name."""
    heads, narrow = inputs["q"].shape[1], scratch.numbers.narrow
    return {name: scratch.rows(name, take_piece(x, piece, heads), narrow) for name, x in inputs.items()}


def backward_rows(scratch: Scratch, piece: Piece, saved: Saved) -> dict[str, Tensor]:
    """Return what ``slab_backward`` reads of a piece, (G, N, ·): q, k, v, grad_out, minus_lse and minus_delta."""
    numbers = scratch.numbers
    q, k, v, out, grad_out, lse, grad_lse = saved
    rows = input_rows(scratch, piece, q=q, k=k, v=v, grad_out=grad_out)
    lse_rows = lse[piece].reshape(-1, lse.shape[2], 1)
    # d loss / d score = weight x (grad_out . v - delta); a gradient of the logsumexp adds weight x grad_lse.
    products = grad_out[piece].to(numbers.wide) * out[piece].to(numbers.wide)
    minus_delta = -products.contiguous().sum(-1)  # contiguous, as the bits of a sum depend on memory order
    if grad_lse is not None:
        minus_delta += grad_lse[piece]
    # A row without keys gets weights exp(score - inf) = 0 in the chunks that it is in.
    blind = lse_rows == -math.inf
    rows["minus_lse"] = (lse_rows / -numbers.nats).masked_fill_(blind, -math.inf)
    rows["minus_delta"] = minus_delta.reshape(blind.shape).masked_fill_(blind, 0.0)
    if numbers.narrow != numbers.wide:
        # As four terms, (G, N, 4): bf16 has 8 bits of precision, fp32 has 24. Products take terms in pairs, hence four.
        remainder = rows["minus_delta"]
        rows["minus_delta"] = remainder.new_empty(*remainder.shape[:2], 4, dtype=numbers.narrow)
        for term in rows["minus_delta"].split(1, -1):
            term.copy_(remainder)
            remainder = remainder - term
    return rows


def merge(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Merge the outputs (G, N, E) and logsumexps (G, N, 1) of two disjoint sets of keys."""
    share = torch.sigmoid(second[1] - first[1])  # of the second
    share.masked_fill_((first[1] == -math.inf) & (second[1] == -math.inf), 0.0)
    return first[0].lerp_(second[0], share), torch.logaddexp(first[1], second[1])


Piece = tuple[slice, slice | list[int]]  # entries of the batch, and heads of one kind


def _pieces(kind: Kind, kinds: tuple[Kind, ...], q: Tensor, v: Tensor) -> list[Piece]:
    """Cut the heads of one kind into pieces of about VALUES_IN_WORK values, and at least one per thread."""
    heads = [head for head in range(len(kinds)) if kinds[head] == kind]
    values = max(q.shape[2], v.shape[2]) * max(q.shape[3], v.shape[3])  # of a head
    size = min(VALUES_IN_WORK // values, len(q) * len(heads) // torch.get_num_threads())
    pieces: list[Piece] = []
    entries = max(1, size // len(heads))
    for entry in range(0, len(q), entries):
        for first in range(0, len(heads), max(1, size)):
            group = heads[first : first + max(1, size)]
            is_run = group[-1] - group[0] == len(group) - 1  # a slice is faster than a list
            pieces.append((slice(entry, entry + entries), slice(group[0], group[-1] + 1) if is_run else group))
    return pieces


def take_piece(x: Tensor, piece: Piece, heads: int) -> Tensor:
    """Select the piece's part of (B, H, N, ·). Keys and values may have fewer heads than queries."""
    group = heads // x.shape[1]
    if group == 1:
        return x[piece]
    read = range(heads)[piece[1]] if isinstance(piece[1], slice) else piece[1]
    return x[piece[0], [head // group for head in read]]


def empty_by_query_head(like: Tensor, heads: int, wide: torch.dtype) -> Tensor:
    """Allocate the gradient of k or v for each head of q, in dtype ``wide`` if heads of k and v are shared."""
    return empty_like_rows(like, None if heads == like.shape[1] else wide, heads=heads)


def sum_groups(gradient: Tensor, like: Tensor) -> Tensor:
    """Sum the gradients of k or v over heads of q that share a head, (B, K, N, ·), in a fixed order."""
    if gradient.shape[1] == like.shape[1]:
        return gradient
    return empty_like_rows(like).copy_(gradient.unflatten(1, (like.shape[1], -1)).sum(2))


def put(x: Tensor, piece: Piece, rows: Tensor) -> None:
    """Write (G, N, ·) to the piece of x (B, H, N, ·), in its dtype, unless it was computed in place."""
    target = x[piece]  # a copy if heads are a list
    values = rows.view(target.shape)
    if isinstance(piece[1], slice):
        if values.data_ptr() != target.data_ptr():
            target.copy_(values)
    else:
        x[piece] = values.to(x.dtype)


def run_pieces(work: Callable[[Scratch, Kind, Piece], None], kinds: tuple[Kind, ...], q: Tensor, v: Tensor) -> None:
    """Compute all pieces, on as many threads as torch has if a kind of head has a piece for each thread.

    A slab is many short operations. Torch's threads synchronise after each of them, which doubles the cost. The threads
    started here synchronise once.
    """
    threads = torch.get_num_threads()
    inference = torch.is_inference_mode_enabled()  # new threads do not inherit it, but need it for their writes

    def run(kind: Kind, pieces: list[Piece]) -> None:
        scratch = Scratch(Numbers.of(q.dtype))
        for piece in pieces:
            work(scratch, kind, piece)

    def run_alone(kind: Kind, pieces: list[Piece]) -> None:
        torch.set_num_threads(1)  # of this thread, or MKL would use every core
        with torch.inference_mode(inference), torch.no_grad():
            run(kind, pieces)

    for kind in dict.fromkeys(kinds):
        pieces = _pieces(kind, kinds, q, v)
        if len(pieces) < threads or threads == 1:
            run(kind, pieces)
            continue
        bounds = [len(pieces) * i // threads for i in range(threads + 1)]
        # Newer versions of torch have one number of threads for all threads. Until the last job ends it must be 1, or
        # each job would spread its products over many threads: slower, and with other bits from time to time.
        torch.set_num_threads(1)
        try:
            with ThreadPoolExecutor(threads) as pool:
                jobs = [pool.submit(run_alone, kind, pieces[slice(*ends)]) for ends in itertools.pairwise(bounds)]
        finally:
            torch.set_num_threads(threads)
        for job in jobs:
            job.result()
