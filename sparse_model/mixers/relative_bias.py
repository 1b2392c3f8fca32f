"""Dense attention to both sides with biases by distance (Raffel et al. 2020, T5; Song et al. 2020, MPNet).

Letters: B batch, H heads of queries, N positions of a context, R rows of the network, P queries.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from longstride.kernels.selections import selection_mask
from longstride.sparse_model.mixers.attention import Attention, AttentionConfig, HeadPatterns
from longstride.sparse_model.network import NetworkConfig, RelativePositions
from longstride.sparse_model.part import PLAIN, BlockContext, HeadWidths, MixerOutput, Part, draw
from longstride.sparse_model.rotary import Rotary
from longstride.sparse_model.tiles import wide_of


@dataclass(frozen=True)
class BiasedPatterns(HeadPatterns):
    """Configuration of dense attention to both sides in a network with ``relative_bias``."""

    supports: ClassVar = AttentionConfig.supports | {"documents"}

    def head_widths(self, network: NetworkConfig) -> HeadWidths:
        return super().head_widths(network)._replace(in_kernels=False)

    def make(self, network: NetworkConfig, rotary: Rotary | None) -> BiasedAttention:
        return BiasedAttention(network, self.patterns, rotary, key_value_heads=self.key_value_heads)

    def make_shared(self, network: NetworkConfig) -> RelativeBias:
        assert network.relative_bias is not None
        return RelativeBias(network, network.relative_bias)


class RelativeBias(Part):
    """A bias for each head and bucket of distances, for all layers (T5, section 2.1).

    Half of the buckets are for keys up to the query, half for later ones. Of each half, one half has a bucket for each
    distance, and the other is logarithmic up to the last distance.
    """

    part = "attention"

    def __init__(self, network: NetworkConfig, positions: RelativePositions) -> None:
        super().__init__()
        self.network, self.positions = network, positions
        self.biases = nn.Embedding(positions.buckets, network.heads)

    def initialize(self) -> None:
        draw(self.biases.weight, self.network, self.network.width)

    def forward(self) -> Tensor:
        """Return the biases of keys at distances from 1 - N to N - 1 of a query, (H, 2N - 1), fp32 or fp64.

        Their gradients are sums over all pairs, for which 16 bits are too few.
        """
        last, device = self.network.context - 1, self.biases.weight.device
        biases = self.biases(torch.arange(self.positions.buckets, device=device))
        distances = torch.arange(-last, last + 1, device=device)
        buckets = bucket_of(distances, self.positions.buckets, self.positions.distance)
        by_distance: Tensor = biases.T.to(wide_of(biases))[:, buckets]
        return by_distance


class BiasedAttention(Attention):
    """softmax(Q Kᵀ / √D + biases) V, by torch: attention kernels read no bias. Memory grows with the square of R."""

    reads_shared = True

    def attend_in(self, context: BlockContext, q: Tensor, k: Tensor, v: Tensor, heads: slice) -> MixerOutput:
        rows, selection = q.shape[2], context.selection
        places = torch.arange(rows, device=q.device)[None]
        if context.places is not None and self.division.size == 1:  # else a section's; distances are those of positions
            places = context.places
        biases = self._biases(context, places, places)[:, heads].to(q.dtype)
        if selection is not None:
            selection = selection if self.division.size == 1 else selection.of_heads(heads)
            biases = biases.masked_fill(~selection_mask(selection, rows), -math.inf)
        # Other kernels are taken with or without gradients alone, and recomputation would have other bits.
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            out = F.scaled_dot_product_attention(q, k, v, biases, enable_gqa=q.shape[1] != k.shape[1])
        return MixerOutput(out)

    def weights(self, h: Tensor, context: BlockContext = PLAIN) -> Callable[[Tensor, int], Tensor]:
        without_bias = super().weights(h, context)
        positions = torch.arange(h.shape[1], device=h.device)

        def of_head(queries: Tensor, head: int) -> Tensor:
            biases = self._biases(context, queries[None], positions[None])[0, head].double()
            weights = without_bias(queries, head) * biases.exp()
            return weights / weights.sum(-1, keepdim=True)

        return of_head

    @staticmethod
    def _biases(context: BlockContext, queries: Tensor, keys: Tensor) -> Tensor:
        """Return the biases (B, H, R, R) of queries and keys at positions (B, R)."""
        assert context.shared is not None
        distances = keys[:, None, :] - queries[:, :, None]
        return context.shared[:, distances + context.shared.shape[1] // 2].transpose(0, 1)


def bucket_of(distances: Tensor, buckets: int, last: int) -> Tensor:
    """Return the buckets of distances from query to key, int64; negative ones are those of earlier keys.

    For half = buckets / 2 and exact = half / 2 (rounded down), n < exact has bucket n, and a longer distance has
    exact + ⌊(half - exact) · log(n / exact) / log(last / exact)⌋, at most half - 1. Later keys have half more.
    """
    half = buckets // 2
    exact = half // 2
    steps = half - exact
    # The shortest distance of each logarithmic bucket but the first, in integers, as logarithms are rounded.
    starts = [
        exact + bisect_left(range(exact, last), True, key=lambda n: n**steps * exact**j >= last**j * exact**steps)
        for j in range(1, steps)
    ]
    lengths = distances.abs()
    longer = torch.bucketize(lengths, torch.tensor(starts, device=distances.device), right=True) + exact
    return torch.where(lengths < exact, lengths, longer) + half * (distances > 0)
