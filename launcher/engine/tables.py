"""The tables of a model in training: n-grams, product keys. A step reads and changes only the few rows that it touches.

As DeepSpeed parameters, tables of 10⁸ numbers would have dense gradients, moments and an all-reduce in every step, for
some ten thousand rows. They are therefore removed from the model before the engine is built.

**Forward**: rows are stored once, in fp32. Under ZeRO 0 to 2 every rank has all of them. Under ZeRO 3 rank r mod W has
row r, and each rank requests the rows of its batch from their owners. **Backward**: each row of a position gets the
gradient of their sum, times its weight, so a rank stores that gradient, the row numbers and the weights. **Step**: the
ranks exchange these, gradients in the model's precision. Each sums the gradients of its rows in fp32, in the order of
the ranks, so replicas stay equal to the bit.

Letters: W ranks, P positions of a step, K rows of a position (orders of n-grams), C width, U rows touched.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from longstride.launcher.config import TrainConfig
from longstride.launcher.engine import states
from longstride.launcher.engine.optimizer import rate_factor
from longstride.launcher.models import AVERAGE
from longstride.launcher.ranks import Ranks
from longstride.sparse_model import Table

DECAY = 0.95  # of the second moment, for each step that touches the row
_GATHERED_ROWS = 1 << 16  # at once
_PADDING = -1  # instead of a row number
_TINY = 1e-12  # added to the root of the second moment, far below any gradient's


class Bags(NamedTuple):
    """The rows that the positions of a pass read, and the gradients of their sums."""

    gradients: Tensor  # (P, C)
    ids: Tensor  # (P, K) int32
    weights: Tensor | None = None  # (P, K) fp32; None: 1


class HeldTable:
    """The rows of a table of a model and their optimiser: row-wise Adam without a first moment. See ``Held``.

    With g the gradient of a row and n the number of steps in which it was not zero, each such step computes:

        v = 0.95 v + 0.05 · mean(g²),  row = row - rate · g / √(v / (1 - 0.95ⁿ))

    A rarely touched row thus moves as far in each step as a frequent one (torch's SparseAdam counts the same way).
    There is no weight decay, which would need a pass over all rows. Clipping changes g, and so the moments alone.
    """

    kind = "tables"

    def __init__(self, name: str, table: Table, train: TrainConfig, ranks: Ranks, *, sharded: bool) -> None:
        """Move the rows, the model's parameter ``name``, out of it. The process group must exist."""
        self.name, self._train, self._ranks = name, train, ranks
        self.weighted = table.weighted
        self._part, self._parts = (ranks.rank, ranks.world_size) if sharded else (0, 1)
        rows = table.rows.detach()
        self.shape = rows.shape
        self.steps = 0  # taken by the optimiser
        # On a CPU without sharding, this is the model's own memory.
        self.rows = rows[self._part :: self._parts].to(ranks.device, torch.float32).contiguous()
        self._second = self.rows.new_zeros(len(self.rows))
        self._touches = torch.zeros_like(self._second)
        self._average: Tensor | None = None
        self._average_step = torch.zeros_like(self._second)  # step of each row's average
        if train.ema_decay is not None:  # begins at the first weights, as for other parameters
            self._average = self.rows.clone()
        table.register_parameter("rows", None)
        table.reader = self.read
        self._pending: list[Bags] = []
        self._anchor = torch.zeros((), device=ranks.device, requires_grad=True)  # lets autograd call ``_Storing``
        self._reduced: tuple[Tensor, Tensor, Tensor] | None = None  # of a step: rows, sums and mean squares of their g

    def read(self, ids: Tensor, dtype: torch.dtype, weights: Tensor | None, real: Tensor | None) -> Tensor:
        """Compute ``Table.read``, and store gradients for ``step`` in the backward pass. All ranks must call."""
        rows, places = self.rows, ids
        if self._parts > 1:
            # Fetch each row once from its owner, (·, C) fp32.
            share = -(-self.shape[0] // self._parts)
            keys, places = torch.unique(ids % self._parts * share + ids // self._parts, return_inverse=True)  # by owner
            counts = torch.bincount(keys // share, minlength=self._parts).tolist()
            requested, expected = self._ranks.swap(keys % share, counts)
            rows, _ = self._ranks.swap(self.rows.index_select(0, requested), expected, counts)
        if real is not None:
            ids = ids.where(real[..., None], _PADDING)
        sums = Table.sum(rows, places, weights).to(dtype)
        return _Storing.apply(sums, self._anchor, ids, weights, self._pending)

    def freeze(self, frozen: bool) -> None:
        """Collect no gradients from now on, or collect them again."""
        self._anchor.requires_grad_(not frozen)

    def forget(self) -> None:
        """Drop the gradients of a step that is not taken."""
        self._pending.clear()
        self._reduced = None

    @torch.no_grad()
    def reduce(self, scale: float) -> Tensor:
        """Sum the gradients of losses times ``scale`` since the last step; return the sum of all their squares."""
        columns = zip(*self._pending, strict=True)
        local = [torch.cat(parts).contiguous() for parts in columns if parts[0] is not None]
        self._pending.clear()
        in_bytes = [part.view(torch.uint8) for part in local]
        gathered = self._ranks.gather(torch.cat(in_bytes, 1)).flatten(0, 1)  # (P, bytes), in one collective
        pieces = gathered.split([part.shape[1] for part in in_bytes], 1)
        bags = Bags(*(piece.contiguous().view(part.dtype) for piece, part in zip(pieces, local, strict=True)))
        gradients = bags.gradients.float().div_(scale * self._ranks.world_size)
        touched, sums = self._sum_by_row(bags._replace(gradients=gradients))
        squares = torch.linalg.vector_norm(sums, dim=1).square_()
        total = squares.sum()
        self._reduced = touched, sums, squares.div_(sums.shape[1])
        return total if self._parts == 1 else self._ranks.gather(total[None]).sum()

    @torch.no_grad()
    def step(self, number: int, factor: float) -> None:
        """Take step ``number`` + 1 with the reduced gradients times ``factor``."""
        assert self._reduced is not None
        touched, sums, squares = self._reduced
        self._reduced = None
        if factor != 1:
            sums.mul_(factor)
            squares.mul_(factor**2)
        rate = self._train.rate_of("tables") * rate_factor(self._train, number)
        decay = self._train.ema_decay
        if self._average is None or decay is None:
            self._move(touched, sums, squares, rate)
        else:  # first advance the average to the last step, as the rows have not changed since
            lag = self.steps - self._average_step[touched]
            average = states.advance_average(self._average[touched], self.rows[touched], decay, lag)
            self._move(touched, sums, squares, rate)
            self._average[touched] = average.lerp_(self.rows[touched], 1 - decay)
            self._average_step[touched] = self.steps + 1.0
        self.steps += 1

    def _sum_by_row(self, bags: Bags) -> tuple[Tensor, Tensor]:
        """Return this rank's rows among those of bags, as (U,) int64, and the sums (U, C) of their fp32 gradients."""
        each, flat = bags.ids.shape[1], bags.ids.flatten()
        if self._parts > 1:
            mine = ((flat % self._parts == self._part) & (flat != _PADDING)).nonzero().squeeze(1)
            rows, order = (flat[mine] // self._parts).sort(stable=True)
            order = mine[order]
        else:
            rows, order = flat.sort(stable=True)
            padding = int((flat == _PADDING).sum())  # sorts first
            rows, order = rows[padding:], order[padding:]
        touched, counts = torch.unique_consecutive(rows, return_counts=True)
        # A row's positions are adjacent and in order, so its sum has the same bits on every rank.
        weights = None if bags.weights is None else bags.weights.flatten()[order]
        begins = counts.cumsum(0) - counts
        sums = F.embedding_bag(order // each, bags.gradients, begins, mode="sum", per_sample_weights=weights)
        return touched.long(), sums

    def _move(self, touched: Tensor, sums: Tensor, square: Tensor, rate: float) -> None:
        """Take one step of row-wise Adam with the sums (U, C) of gradients, whose mean squares are ``square`` (U,)."""
        moved = square > 0  # a row with zero gradient stays
        second, touches = self._second[touched], self._touches[touched] + moved
        second = torch.where(moved, DECAY * second + (1 - DECAY) * square, second)
        self._second[touched], self._touches[touched] = second, touches
        size = (second / (1 - DECAY ** touches.clamp(min=1))).sqrt_().add_(_TINY)
        # Rows are distinct, so they can be read, moved and written. index_add_ adds row by row, in twice the time.
        rows = self.rows.index_select(0, touched).addcdiv_(sums, size[:, None], value=-rate)
        self.rows.index_copy_(0, touched, rows)

    @property
    def numel(self) -> int:
        """The numbers of the complete table."""
        return self.shape.numel()

    def usage(self) -> tuple[float, float]:
        """Return the share of rows that steps have moved, and the KL divergence of their use from an even one, in nats.

        The use of a row is the number of steps that have moved it. All ranks must call.
        """
        used = self._touches.double()
        sums = torch.stack([(used > 0).double().sum(), used.sum(), torch.xlogy(used, used).sum()])
        if self._parts > 1:
            sums = self._ranks.gather(sums).sum(0)
        moved, total, weighted = sums.tolist()
        rows = self.shape[0]
        return moved / rows, weighted / total + math.log(rows / total) if total else 0.0

    def local(self) -> Iterator[Tensor]:
        """Yield this rank's rows."""
        yield self.rows

    def whole(self) -> dict[str, Tensor]:
        """Return all rows by the parameter's name, on every rank. All ranks must call."""
        if self._parts == 1:
            return {self.name: self.rows}
        rows, share = self.rows.new_empty(self.shape), -(-self.shape[0] // self._parts)
        for first in range(0, share, _GATHERED_ROWS):
            local = self.rows[first : first + _GATHERED_ROWS]
            count = min(share - first, _GATHERED_ROWS)  # the last ranks may have one row less
            shares = self._ranks.gather(F.pad(local, (0, 0, 0, count - len(local))))
            for part, share_of_part in enumerate(shares):
                places = rows[part :: self._parts][first : first + count]
                places.copy_(share_of_part[: len(places)])
        return {self.name: rows}

    def _tensors(self) -> dict[str, Tensor]:
        """Return the tensors of this rank's rows, by their names in a checkpoint."""
        tensors = {"fp32": self.rows, "exp_avg_sq": self._second, "touches": self._touches}
        if self._average is not None:
            tensors |= {AVERAGE: self._average, f"{AVERAGE}_step": self._average_step}
        return tensors

    def share(self) -> dict[str, Tensor]:
        """Return this rank's part of a checkpoint: rows rank, rank + W, rank + 2 W … and the number of steps.

        Names begin with the parameter's, except those of n-gram tables. All are fp32, which counts exactly to
        16,777,216; by then a bias correction is 1.
        """
        first, stride = (0, 1) if self._parts > 1 else (self._ranks.rank, self._ranks.world_size)
        tensors = {name: tensor[first::stride].contiguous().cpu() for name, tensor in self._tensors().items()}
        tensors["steps"] = torch.tensor([float(self.steps)])
        return {states.table_prefix(self.name) + name: tensor for name, tensor in tensors.items()}

    @torch.no_grad()
    def fill(self, first: int, stride: int, saved: Mapping[str, Tensor], decay: float | None) -> None:
        """Load those of rows first, first + stride … that belong to this rank, as one rank saved them.

        Names in ``saved`` have no prefix. ``decay`` is that of the saved average, or None. An average of another decay
        is advanced to its last step; without one it begins at the weights.
        """
        self.steps = int(saved["steps"])
        rows, average_step = saved["fp32"], torch.full_like(saved["exp_avg_sq"], float(self.steps))
        if decay != self._train.ema_decay:
            average = rows
            if decay is not None:
                average = states.advance_average(saved[AVERAGE], rows, decay, self.steps - saved[f"{AVERAGE}_step"])
            saved = {**saved, AVERAGE: average, f"{AVERAGE}_step": average_step}
        ids = torch.arange(first, self.shape[0], stride)
        mine = (ids % self._parts == self._part).nonzero().squeeze(1)
        places = (ids[mine] // self._parts).to(self.rows.device)
        for name, tensor in self._tensors().items():
            tensor.index_copy_(0, places, saved[name][mine].to(tensor.device))


class _Storing(torch.autograd.Function):
    """The identity of sums (B, n, C). Its backward pass, which runs once a step, stores what the step needs."""

    @staticmethod
    def forward(
        ctx: Any, sums: Tensor, anchor: Tensor, ids: Tensor, weights: Tensor | None, pending: list[Bags]
    ) -> Tensor:
        ctx.ids, ctx.pending = ids.flatten(0, 1).int(), pending
        ctx.weights = None if weights is None else weights.detach().flatten(0, 1).float()
        return sums.view_as(sums)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.pending.append(Bags(gradient.flatten(0, 1), ctx.ids, ctx.weights))
        return gradient, None, None, None, None
