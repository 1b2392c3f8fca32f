"""Keys and values that later positions still read, and attention that adds to them.

Letters: B batch, H heads, N positions there is room for, n positions at hand, D width of q and k, Dv width of v.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import ConfigError, attend_one, sparse_attention
from kernels.patterns.base import Pattern
from sparse_model.config import ModelConfig


class KeyValues(NamedTuple):
    """Keys (B, H, N, D) and values (B, H, N, Dv) of one attention; rows not known yet hold anything."""

    keys: Tensor
    values: Tensor

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, patterns: Sequence[Pattern], first: int, backend: str = "auto"
    ) -> Tensor:
        """Keep the rows from ``first`` on, and attend from them: the rows of ``sparse_attention`` over all known ones.

        One row reads what its pattern allows, in place (section 4.2). Several are a whole beginning.

        Args:
            q, k: (B, H, n, D).
            v: (B, H, n, Dv).
            patterns: one a head.
            first: position of the first of the n rows; 0 where there are several.
            backend: of attention. One query at a time has no "flex": "auto" stands in.

        Returns:
            (B, H, n, Dv).

        Raises:
            ValueError: several rows that are no beginning.
            ConfigError: the backend cannot run here.
        """
        rows = q.shape[2]
        if rows > 1 and first:
            raise ValueError(f"first={first}: {rows} rows at once must begin at position 0")
        self.keys[:, :, first : first + rows] = k
        self.values[:, :, first : first + rows] = v
        if rows > 1:
            return sparse_attention(q, k, v, patterns, backend=backend)
        backend = "auto" if backend == "flex" else backend
        return attend_one(q.squeeze(2), self.keys, self.values, patterns, first, backend=backend).unsqueeze(2)


def allocate(config: ModelConfig, batch: int, length: int, device: torch.device, dtype: torch.dtype) -> list[KeyValues]:
    """Room for ``length`` positions, layer by layer: pages of a CPU's memory are taken when they are written."""
    widths = (config.query_key_width // config.heads, config.width // config.heads)
    shapes = [(batch, config.heads, length, width) for width in widths]
    return [
        KeyValues(*(torch.empty(shape, device=device, dtype=dtype) for shape in shapes)) for _ in range(config.layers)
    ]


def even_length(config: ModelConfig, least: int) -> int:
    """The smallest length, from ``least`` to the context, that all patterns divide evenly.

    A causal pattern means the same rows at any length, but only where its stride divides the length are its reads found
    in closed form, and its columns read in place.
    """
    patterns = {pattern for layer in config.layer_patterns() for pattern in layer}
    return next((n for n in range(max(least, 1), config.context) if _divided(patterns, n)), config.context)


def _divided(patterns: Iterable[Pattern], length: int) -> bool:
    try:
        for pattern in patterns:
            pattern.check(length)
    except ConfigError:
        return False
    return True
