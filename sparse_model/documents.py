"""Several documents in one context, none of which sees another. Letters: B batch, N positions."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from longstride.kernels.selections import Selection


class Documents(NamedTuple):
    """How documents lie in the contexts of a batch, as one block needs it."""

    places: Tensor  # (B, n) int64, the place of each row in its document, from 0; of a divided context its own rows
    selection: Selection | None  # which positions each head of the block's mixer reads, of all; None: it has no mixer


def places_of(begins: Tensor) -> Tensor:
    """Return each position's place in its document, (B, N) int64, from a mask that is True where a document begins.

    Position 0 always begins one.
    """
    positions = torch.arange(begins.shape[1], device=begins.device)
    return positions - torch.where(begins, positions, 0).cummax(-1).values
