"""A short causal convolution over positions. Letters: B batch, N positions, C width, k positions that a row reads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longstride.sparse_model.part import Part, Work
from longstride.sparse_model.tiles import tiles, wide_of


class CausalConvolution(Part):
    """x_i + Σ_j w_j · x_(i-j) for j from 0 to k - 1, for each channel (So et al. 2021; Gu & Dao 2023).

    The weights begin at 0, so that it changes nothing at first.
    """

    part, trained_as = "convolutions", "vectors"

    def __init__(self, positions: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(positions, width))  # row j weighs the position j before

    def forward(
        self,
        h: Tensor,
        state: RecentRows | None = None,
        first: int = 0,
        places: Tensor | None = None,
        earlier: Tensor | None = None,
    ) -> Tensor:
        """Apply the convolution to (B, N, C).

        With a state: positions from ``first`` on, which also read the cached rows.

        ``places`` (B, N) is each row's place in its document: no row reads one before its document.

        ``earlier`` (B, k - 1, C) are the rows of the context before, which the first document continues; without
        sequence parallelism.
        """
        reach = self.weight.shape[0] - 1
        if state is not None:
            if h.shape[1] == 1:
                return state.step(h, first)
            if first:
                return torch.cat([state.step(row, first + n) for n, row in enumerate(h.split(1, 1))], 1)
            state.begin(h)
            earlier = state.earlier
        if earlier is not None and places is not None:
            places = places + reach * (places == torch.arange(h.shape[1], device=h.device))
        if self.division.size > 1:
            earlier = self.division.before(h, reach)
        if earlier is None:
            return ShiftedSum.apply(h, self.weight, places)
        if places is not None:
            places = F.pad(places, (reach, 0))
        h = torch.cat([earlier.to(h.dtype), h], 1)
        return ShiftedSum.apply(h, self.weight, places)[:, reach:]

    def new_state(self, batch: int, length: int, device: torch.device, back: int) -> RecentRows:
        """Make room for the rows that a step reads, also after ``back`` of ``length`` rows were forgotten."""
        weight = self.weight.detach().to(wide_of(self.weight))
        weight = torch.cat([weight[:1] + 1, weight[1:]])  # the row itself is added
        blocks = min(max(1, -(-length // len(weight))), 2 - -back // len(weight))
        # In the dtype of the weights, which is that of the stream under autocast too.
        shape = blocks, len(weight), batch, 1, weight.shape[1]
        rows = torch.zeros(shape, device=device, dtype=self.weight.dtype)
        # The row j before position p is at index (p - j) % k: reversed, the weights are in the order of the rows.
        weights = torch.stack([weight.flip(0).roll(position + 1, 0) for position in range(len(weight))])
        return RecentRows(rows, weights[:, :, None, None])

    def work(self, positions: int, batch: int) -> Work:
        return Work(linear=2 * positions * self.weight.numel())


class RecentRows:
    """The last rows of a context in blocks of k, in which a step finds the last k rows at their positions modulo k.

    A block begins as a copy of the block before, the first one as zeros. So a repeated step writes what it wrote before
    and nothing that it reads. Rows can be forgotten as long as the block of the new end and the block before it are
    still there. With room for R blocks, block b of the context is stored at b % R.
    """

    def __init__(self, rows: Tensor, weights: Tensor) -> None:
        """Take rows (R, k, B, 1, C), and weights (k, k, 1, 1, C) in fp32 (fp64 for fp64), one set for each place."""
        self.rows, self.weights = rows, weights
        self.block_before: Tensor | None = None  # block -1, of the context before (k, B, 1, C); None: zeros

    @property
    def earlier(self) -> Tensor | None:
        """The last k - 1 rows of the context before, (B, k - 1, C); None: nothing came before."""
        return None if self.block_before is None else self.block_before[1:, :, 0].transpose(0, 1)

    def carry(self, length: int) -> None:
        """Begin the next context, after one of ``length`` rows."""
        block, place = divmod(length, len(self.weights))
        if place == 0:
            self._begin_block(block, 0)
        # Row j before the next context is at (length - j) % k, and belongs to -j % k.
        self.block_before = self.rows[block % len(self.rows)].roll(-place, 0)

    def begin(self, h: Tensor) -> None:
        """Store the first n rows, (B, n, C), as far as there is room."""
        (room, size), count = self.rows.shape[:2], h.shape[1]
        blocks = -(-count // size)
        for block in range(max(0, blocks - room), blocks) if room < blocks else ():
            rows = h[:, block * size : (block + 1) * size].transpose(0, 1)
            self.rows[block % room, : len(rows)] = rows[:, :, None]
        if blocks <= room:  # all at once
            self.rows.flatten(0, 1)[:count] = h.transpose(0, 1)[:, :, None]
        self.truncate(count)

    def step(self, h: Tensor, position: int) -> Tensor:
        """Store one row (B, 1, C), and return its row of the convolution."""
        block, place = divmod(position, len(self.weights))
        rows = self.rows[block % len(self.rows)]
        if place == 0:
            self._begin_block(block, 0)
        rows[place] = h
        return (rows * self.weights[place]).sum(0).to(h.dtype)

    def take(self, source: Any, order: Tensor, length: int, into: slice) -> None:
        blocks = -(-length // len(self.weights))  # of a longer context, all
        self.rows[:blocks, :, into] = source.rows[:blocks, :, order]
        if self.block_before is None and source.block_before is not None:
            self.block_before = torch.zeros_like(self.rows[0])
        if self.block_before is not None:
            before = source.block_before
            self.block_before[:, into] = 0.0 if before is None else before[:, order]

    def truncate(self, length: int) -> None:
        """Forget all rows but the first ``length``; with 0, also those of the context before."""
        if length == 0:
            self.block_before = None
        block, place = divmod(length, len(self.weights))
        if place:  # a row that begins a block overwrites all that it reads
            self._begin_block(block, place)

    def _begin_block(self, block: int, place: int) -> None:
        """Copy a block's rows from ``place`` on from the block before."""
        rows = self.rows[block % len(self.rows), place:]
        if block:
            rows.copy_(self.rows[(block - 1) % len(self.rows), place:])
        elif self.block_before is None:
            rows.zero_()
        else:
            rows.copy_(self.block_before[place:])


class ShiftedSum(torch.autograd.Function):
    """The convolution as a sum of shifted rows: for so few positions, faster on a CPU than torch's own.

    Takes and saves x (B, N, C), the weights (k, C), and places in documents (B, N) or None. Sums are fp32 (fp64 for
    fp64).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, places: Tensor | None = None) -> Tensor:
        ctx.save_for_backward(x, weight, places)
        out, weights = torch.empty_like(x), weight.to(wide_of(x))
        for place, (rows, total) in tiles(x, 0, scratch=2):
            rows.copy_(x[place])
            torch.addcmul(rows, rows, weights[0], out=total)
            if torch.compiler.is_exporting():  # for any length: no shape that depends on it
                for j in range(1, weight.shape[0]):
                    total.addcmul_(F.pad(rows, (0, 0, j, 0))[:, : x.shape[1]], weights[j])
            else:
                for j in range(1, min(len(weights), x.shape[1])):
                    total[:, j:].addcmul_(_within(rows[:, :-j], places, place, j), weights[j])
            out[place] = total
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, places = ctx.saved_tensors
        grad_x, weights = torch.empty_like(x), weight.to(wide_of(x))
        grad_weight = torch.zeros_like(weights)
        for place, (rows, grad, work) in tiles(x, 0, scratch=3):
            rows.copy_(x[place])
            grad.copy_(grad_out[place])
            for j in range(min(len(weights), x.shape[1])):
                later, earlier = _within(grad[:, j:], places, place, j), rows[:, : x.shape[1] - j]
                products = work.flatten()[: later.numel()].view(later.shape)
                grad_weight[j] += torch.mul(later, earlier, out=products).sum((0, 1))
            torch.addcmul(grad, grad, weights[0], out=work)
            for j in range(1, min(len(weights), x.shape[1])):
                work[:, :-j].addcmul_(_within(grad[:, j:], places, place, j), weights[j])
            grad_x[place] = work
        return grad_x, grad_weight.to(weight.dtype), None


def _within(rows: Tensor, places: Tensor | None, batch: slice, j: int) -> Tensor:
    """Return pairs j positions apart, (b, N - j, C), with 0 if the earlier position is of another document."""
    return rows if places is None or j == 0 else rows.masked_fill(places[batch, j:, None] < j, 0.0)
