"""Tables with rows, of which a position reads a few, and those of n-grams.

Hash n-gram embeddings have a row for the last n tokens, for several n, added to the token embedding.

As in byte-latent transformers (Pagnoni et al. 2024, section 3.2.1) and over-tokenized transformers (Huang et al. 2025).
Letters: B batch, N positions, C width, V vocabulary, L longest order, O orders, R rows of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longstride.sparse_model.division import signed
from longstride.sparse_model.part import Part

NO_TOKEN = -1
_LOW_32, _LOW_31 = (1 << 32) - 1, (1 << 31) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2⁶⁴ / the golden ratio, odd
_MIXER = 0xD6E8FEB86659FD93  # odd; bits of every input reach all upper bits


class NgramHash:
    """The row of the last n tokens, for each order n: of tokens i - n to i - 1 at position i.

    The hash is part of the format of a model. Tokens are numbered from 1, and 0 stands where no token is yet. With the
    base b, the smallest odd number above V, the key of order n is k = Σ token(i - j) · bʲ⁻¹ over j = 1 … n, mod 2⁶⁴.
    Where bⁿ <= R the row is k, and no two share one. Elsewhere, all mod 2⁶⁴ and unsigned:

        x = k · m,  x = (x xor x >> 32) · 0xD6E8FEB86659FD93,  row = (x >> 33) · R >> 31

    with m = (2n + 1) · 0x9E3779B97F4A7C15, an odd number of its own for each order. Order number o begins at row o · R.
    """

    def __init__(self, orders: Sequence[int], rows: int, vocabulary: int) -> None:
        self.orders, self.num_rows = orders, rows
        self.base = vocabulary + 1 + vocabulary % 2  # odd, so that long orders do not lose their oldest tokens
        self._numbers: dict[torch.device, tuple[Tensor, ...]] = {}

    def __call__(self, before: Tensor, places: Tensor | None = None) -> Tensor:
        """Return the row of each order at each position.

        Args:
            before: (B, L + n - 1) int64, the tokens up to the last row's own; -1 for none.
            places: (B, n), each row's place in its document, before which there are no tokens; None: as ``before``
                says.

        Returns:
            (B, n, O) int64.
        """
        device = before.device
        if device not in self._numbers:  # not buffers: loading into a model on the meta device only sets parameters
            lists = (
                [signed(self.base**place) for place in range(self.orders[-1])],
                [order - 1 for order in self.orders],
                [signed((2 * order + 1) * _GOLDEN) for order in self.orders],
                [number * self.num_rows for number in range(len(self.orders))],
            )
            self._numbers[device] = tuple(torch.tensor(numbers, device=device) for numbers in lists)
        powers, columns, odd, offsets = self._numbers[device]
        # Newest first, so that the key of order n is the sum of the first n.
        tokens, longest = before + 1, len(powers)
        if torch.compiler.is_exporting():  # for any length: overlapping windows would fix it
            count = tokens.shape[1] - longest + 1
            tokens = torch.stack([tokens.narrow(1, longest - 1 - back, count) for back in range(longest)], -1)
        else:
            tokens = tokens.unfold(1, longest, 1).flip(-1)
        if places is not None:
            tokens = tokens.where(torch.arange(len(powers), device=before.device) < places[..., None], 0)
        keys = (tokens * powers).cumsum(-1)[..., columns]
        exact = sum(self.base**order <= self.num_rows for order in self.orders)  # the shortest orders
        x = keys[..., exact:] * odd[exact:]
        # int64 shifts carry the sign, which the masks take off.
        x = (x ^ (x >> 32 & _LOW_32)) * signed(_MIXER)
        rows = (x >> 33 & _LOW_31) * self.num_rows >> 31
        return torch.cat([keys[..., :exact], rows], -1) + offsets if exact else rows + offsets


class Table(Part):
    """Rows of which a position reads a few, and outputs their sum. A trainer may store the rows elsewhere."""

    trained_as = "tables"

    def __init__(self, rows: int, width: int, reads: int, *, weighted: bool = False) -> None:
        """Make the rows, of which each position reads ``reads``, maybe with weights."""
        super().__init__()
        self.reads, self.weighted = reads, weighted
        # Zeros take no memory until they change.
        self.rows = nn.Parameter(torch.zeros(rows, width))
        # If set, called as (ids, dtype, weights, real) by ``read``: the rows are stored elsewhere.
        self.reader: Callable[[Tensor, torch.dtype, Tensor | None, Tensor | None], Tensor] | None = None

    def read(
        self, ids: Tensor, dtype: torch.dtype, weights: Tensor | None = None, real: Tensor | None = None
    ) -> Tensor:
        """Sum rows.

        Args:
            ids: (B, n, K) int64, the rows that each position reads.
            dtype: of the result, to which the sum is rounded once.
            weights: (B, n, K), of these rows; None: 1.
            real: (B, n) bool, False where a position is padding, which trains no row; None: all are real.

        Returns:
            (B, n, C).
        """
        if self.reader is None:
            return self.sum(self.rows, ids, weights).to(dtype)
        return self.reader(ids, dtype, weights, real)

    @staticmethod
    def sum(rows: Tensor, ids: Tensor, weights: Tensor | None = None) -> Tensor:
        """Sum the rows (·, C) of ids (B, n, K), with weights (B, n, K) or 1: (B, n, C)."""
        if weights is not None:
            weights = weights.flatten(0, 1).to(rows.dtype)
        sums = F.embedding_bag(ids.flatten(0, 1), rows, mode="sum", per_sample_weights=weights)
        return sums.view(*ids.shape[:2], -1)


class Ngrams(Table):
    """The sum of one row for each order n, that of ``NgramHash``. All rows begin at 0; their gradients differ."""

    part = "n-gram tables"

    def __init__(self, orders: Sequence[int], rows: int, vocabulary: int, width: int) -> None:
        super().__init__(len(orders) * rows, width, len(orders))
        self.orders, self.num_rows = orders, rows
        self.ids = NgramHash(orders, rows, vocabulary)

    def forward(self, h: Tensor, before: Tensor, places: Tensor | None = None, real: Tensor | None = None) -> Tensor:
        """Add the n-gram rows to h.

        Args:
            h: (B, n, C).
            before, places: as ``NgramHash`` takes them.
            real: as ``read`` takes it.

        Returns:
            (B, n, C), in the dtype of h.
        """
        return h + self.read(self.ids(before, places), h.dtype, real=real)
