"""The state that each lane of a rank hands from one context to the next, for models that carry it.

Letters: L lanes of this rank, one for each of its contexts in a global batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from longstride.data_pipelines.order import Batch, EvaluationBatch
from longstride.sparse_model import SparseTransformer

_NONE = -2  # instead of a context's number: no context follows it
LAST = "last"  # the name of the contexts' numbers in a checkpoint


class LaneStates:
    """The carried tensors of a rank's lanes, and which context each is of.

    They depend on the weights of all earlier steps, so that a checkpoint saves them. A context takes them only if it
    goes on where that context ends. After a rewind of the weights, a substitute or an epoch, lanes begin anew.
    """

    def __init__(self, model: SparseTransformer, lanes: int, device: torch.device) -> None:
        self.tensors = model.new_carried(lanes, device, model.embedding.tokens.weight.dtype)
        self.last = torch.full((lanes,), _NONE)  # numbers of the contexts
        self._next: list[Sequence[Tensor]] = []

    def take(self, batch: Batch | EvaluationBatch, rows: slice) -> tuple[Tensor, ...]:
        """Return what some contexts of a batch continue: zeros for those that begin."""
        assert batch.goes_on is not None
        goes_on = batch.goes_on[rows] & (batch.sample_ids[rows] == self.last[rows] + 1)
        selected = goes_on.to(self.tensors[0].device)
        return tuple(tensor[rows].where(selected.view(-1, *(tensor.dim() - 1) * [1]), 0) for tensor in self.tensors)

    def put(self, carried: Sequence[Tensor]) -> None:
        """Keep what contexts have returned, in the order of their rows, until ``advance`` or ``drop``."""
        self._next.append(carried)

    def advance(self, batch: Batch | EvaluationBatch) -> None:
        """Continue with the next batch, after all contexts of this one. A lane that is not finite will begin anew."""
        self.tensors = tuple(torch.cat(parts) for parts in zip(*self._next, strict=True))
        self._next.clear()
        finite = [tensor.isfinite().view(len(tensor), -1).all(1) for tensor in self.tensors]
        self.last = batch.sample_ids.where(torch.stack(finite).all(0).cpu(), _NONE)

    def drop(self) -> None:
        """Forget the contexts since the last ``advance``: their step is not taken, and they will be read again."""
        self._next.clear()

    def share(self) -> dict[str, Tensor]:
        """Return this rank's part of a checkpoint."""
        tensors = {str(number): tensor.contiguous().cpu() for number, tensor in enumerate(self.tensors)}
        return tensors | {LAST: self.last}

    def fill(self, lanes: slice, saved: Mapping[str, Tensor], of_saved: slice) -> None:
        """Load ``lanes`` of this rank from lanes ``of_saved`` of what a rank of any precision saved."""
        self.last[lanes] = saved[LAST][of_saved]
        for number, tensor in enumerate(self.tensors):
            tensor[lanes] = saved[str(number)][of_saved].to(tensor)
