"""The n-gram tables of a model in training: a step computes with the few rows that its bytes touch, and changes those.

As parameters of DeepSpeed's, tables of 10⁸ numbers would have a dense gradient, moments and an all-reduce in every
step, for some ten thousand rows. So they are taken out of the model before the engine is made.

**Forward**: rows are kept in fp32, the only copy. Under ZeRO 0 to 2 every rank has all of them, under ZeRO 3 rank r mod
W has row r, and each rank asks the owners for the rows that its batch needs. **Backward**: all rows of a position get
the gradient of its embedding, so a rank keeps that and the numbers of the rows. **Step**: the ranks exchange what they
kept, in the model's precision; each sums the gradients of the rows that it holds, in fp32 and in the order of the
ranks, and changes those. So replicas stay equal to the bit.

Letters: W ranks, P positions of a step, O orders, C width, U rows touched.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from longstride.launcher.config import TrainConfig
from longstride.launcher.engine.optimizer import rate_factor
from longstride.launcher.engine.states import followed
from longstride.launcher.models import AVERAGE
from longstride.launcher.ranks import Ranks
from longstride.sparse_model import Ngrams, add_rows

DECAY = 0.95  # of the second moment, at each touch
_GATHERED_ROWS = 1 << 16  # at once
_PADDING = -1  # in place of the number of a row
_TINY = 1e-12  # beside the root of the second moment, of gradients that no batch makes so small


class Tables:
    """Rows of a model's n-gram tables, and their optimiser: row-wise Adam without a first moment.

    With g the gradient of a row, at each step where that is not zero, n counting those steps:

        v = 0.95 v + 0.05 · mean(g²),  row = row - rate · g / √(v / (1 - 0.95ⁿ))

    A row that few steps touch is so moved as far at each of them as one that all do (as torch's SparseAdam counts).
    There is no decay of weights, which would take a pass over all rows, and no clipping of gradients: the length of g
    takes no part in the length of the step, and the norm would be known after one more exchange alone.
    """

    def __init__(self, ngrams: Ngrams, train: TrainConfig, ranks: Ranks, *, sharded: bool) -> None:
        """Takes the rows out of a model, which from then on asks for them here. The process group must stand."""
        self._train, self._ranks = train, ranks
        self._part, self._parts = (ranks.rank, ranks.world_size) if sharded else (0, 1)
        whole = ngrams.rows.detach()
        self.shape = whole.shape
        self.steps = 0  # of the optimiser, taken
        # On a CPU without ranks to share with, the model's own memory, which nothing has written yet.
        self.rows = whole[self._part :: self._parts].to(ranks.device, torch.float32).contiguous()
        self._second = self.rows.new_zeros(len(self.rows))
        self._touches = torch.zeros_like(self._second)
        self._average: Tensor | None = None
        self._average_step = torch.zeros_like(self._second)  # up to which the average of each row is known
        if train.ema_decay is not None:  # begins at the weights before the first step, as that of other parameters
            self._average = self.rows.clone()
        ngrams.register_parameter("rows", None)
        ngrams.adder = self.add
        self._pending: list[tuple[Tensor, Tensor]] = []  # row numbers (·, O) int32 and gradients (·, C) of each pass

    def add(self, h: Tensor, ids: Tensor, real: Tensor | None = None) -> Tensor:
        """h (B, n, C) plus the rows of ids (B, n, O); keeps their gradients for ``step``. All ranks must call.

        ``real``: (B, n) bool, False where a row is padding, which touches no row of a table; None: all are real.
        """
        rows, places = (self.rows, ids) if self._parts == 1 else self._fetched(ids)
        if real is not None:
            ids = ids.where(real[..., None], _PADDING)
        return _Added.apply(h, ids, rows, places, self._pending)

    def forget(self) -> None:
        """Drops the gradients of a step that is not taken."""
        self._pending.clear()

    @torch.no_grad()
    def step(self, number: int, scale: float) -> None:
        """Takes a step with the gradients since the last one. All ranks must call.

        Args:
            number: of the steps taken before, by which the schedule has the rate.
            scale: what the loss was multiplied by.
        """
        ids, gradients = (torch.cat(each).contiguous() for each in zip(*self._pending, strict=True))
        self._pending.clear()
        width = gradients.shape[1] * gradients.itemsize
        both = torch.cat([gradients.view(torch.uint8), ids.view(torch.uint8)], 1)  # one collective
        gathered = self._ranks.gather(both).flatten(0, 1)  # (P, bytes)
        gradients = gathered[:, :width].contiguous().view(gradients.dtype).float()
        ids = gathered[:, width:].contiguous().view(torch.int32)
        touched, sums = self._summed(ids, gradients.div_(scale * self._ranks.world_size))
        rate = self._train.rate_of("tables") * rate_factor(self._train, number)
        decay = self._train.ema_decay
        if self._average is None or decay is None:
            self._move(touched, sums, rate)
        else:  # brought to the last step first: until then the rows have stood still
            lag = self.steps - self._average_step[touched]
            average = followed(self._average[touched], self.rows[touched], decay, lag)
            self._move(touched, sums, rate)
            self._average[touched] = average.lerp_(self.rows[touched], 1 - decay)
            self._average_step[touched] = self.steps + 1.0
        self.steps += 1

    def _summed(self, ids: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
        """The rows held here that ids (P, O) name, (U,) int64, and the sums of their gradients (U, C), of (P, C)."""
        orders, flat = ids.shape[1], ids.flatten()
        if self._parts > 1:
            mine = ((flat % self._parts == self._part) & (flat != _PADDING)).nonzero().squeeze(1)
            held, order = (flat[mine] // self._parts).sort(stable=True)
            order = mine[order]
        else:
            held, order = flat.sort(stable=True)
            padding = int((flat == _PADDING).sum())  # which stands first
            held, order = held[padding:], order[padding:]
        touched, counts = torch.unique_consecutive(held, return_counts=True)
        # The positions of a row lie together, in their order: so its sum has the same bits everywhere.
        sums = F.embedding_bag(order // orders, gradients, counts.cumsum(0) - counts, mode="sum")
        return touched.long(), sums

    def _move(self, touched: Tensor, sums: Tensor, rate: float) -> None:
        """One step of row-wise Adam; ``sums`` is overwritten."""
        square = torch.linalg.vector_norm(sums, dim=1).square_().div_(sums.shape[1])
        moved = square > 0  # a row whose gradient is zero is as before
        second, touches = self._second[touched], self._touches[touched] + moved
        second = torch.where(moved, DECAY * second + (1 - DECAY) * square, second)
        self._second[touched], self._touches[touched] = second, touches
        size = (second / (1 - DECAY ** touches.clamp(min=1))).sqrt_().add_(_TINY)
        self.rows.index_add_(0, touched, sums.div_(size[:, None]), alpha=-rate)

    def _fetched(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of ids from the ranks that hold them, each once, (·, C) fp32; and the place of each among them."""
        share = -(-self.shape[0] // self._parts)
        keys, places = torch.unique(ids % self._parts * share + ids // self._parts, return_inverse=True)  # by owner
        counts = torch.bincount(keys // share, minlength=self._parts).tolist()
        asked, expected = self._ranks.swap(keys % share, counts)
        rows, _ = self._ranks.swap(self.rows.index_select(0, asked), expected, counts)
        return rows, places

    def whole(self) -> dict[str, Tensor]:
        """All rows by the name of the parameter that they were, on every rank. All ranks must call."""
        if self._parts == 1:
            return {"rows": self.rows}
        rows, share = self.rows.new_empty(self.shape), -(-self.shape[0] // self._parts)
        for first in range(0, share, _GATHERED_ROWS):
            own = self.rows[first : first + _GATHERED_ROWS]
            count = min(share - first, _GATHERED_ROWS)  # the last ranks may have one row less
            everyone = self._ranks.gather(F.pad(own, (0, 0, 0, count - len(own))))
            for part, of_part in enumerate(everyone):
                places = rows[part :: self._parts][first : first + count]
                places.copy_(of_part[: len(places)])
        return {"rows": rows}

    def _tensors(self) -> dict[str, Tensor]:
        """What a checkpoint keeps of each row held here, by its name there."""
        tensors = {"fp32": self.rows, "exp_avg_sq": self._second, "touches": self._touches}
        if self._average is not None:
            tensors |= {AVERAGE: self._average, f"{AVERAGE}_step": self._average_step}
        return tensors

    def share(self) -> dict[str, Tensor]:
        """What this rank writes: of rows rank, rank + W, rank + 2 W … each tensor of a row, and the steps taken.

        All in fp32, which counts to 16,777,216 exactly: later a bias correction is 1.
        """
        first, stride = (0, 1) if self._parts > 1 else (self._ranks.rank, self._ranks.world_size)
        tensors = {name: tensor[first::stride].contiguous().cpu() for name, tensor in self._tensors().items()}
        return tensors | {"steps": torch.tensor([float(self.steps)])}

    @torch.no_grad()
    def fill(self, first: int, stride: int, saved: Mapping[str, Tensor], decay: float | None) -> None:
        """Takes rows first, first + stride … as a rank of so many has saved them, as far as they belong here.

        ``decay``: of the average in it. An average of another decay is brought to its last step; where none was kept
        it begins at the weights.
        """
        self.steps = int(saved["steps"])
        rows, average_step = saved["fp32"], torch.full_like(saved["exp_avg_sq"], float(self.steps))
        if decay != self._train.ema_decay:
            average = (
                rows if decay is None else followed(saved[AVERAGE], rows, decay, self.steps - saved[f"{AVERAGE}_step"])
            )
            saved = {**saved, AVERAGE: average, f"{AVERAGE}_step": average_step}
        ids = torch.arange(first, self.shape[0], stride)
        mine = (ids % self._parts == self._part).nonzero().squeeze(1)
        places = (ids[mine] // self._parts).to(self.rows.device)
        for name, tensor in self._tensors().items():
            tensor.index_copy_(0, places, saved[name][mine].to(tensor.device))


class _Added(torch.autograd.Function):
    """h plus rows; the gradient of both is kept beside the numbers of the rows, and handed on to h."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, ids: Tensor, rows: Tensor, places: Tensor, pending: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        ctx.ids, ctx.pending = ids.flatten(0, 1).int(), pending
        return add_rows(h, rows, places)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.pending.append((ctx.ids, gradient.flatten(0, 1)))
        return gradient, None, None, None, None
