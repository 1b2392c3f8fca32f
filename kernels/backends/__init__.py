"""Ways to compute attention over a pattern, and what they share; none imports another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores, sums and logsumexp: fp32, and fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def row_strides(shape: Sequence[int], like: Sequence[int]) -> tuple[int, ...]:
    """Strides for (B, H, N, D); the heads of a position are adjacent in memory where they are so by strides ``like``.

    A model views its heads in (B, N, H * D) and joins them again: in that order, results are joined without a copy.
    """
    _, heads, context, width = shape
    by_head, by_position = (width, heads * width) if like[1] < like[2] else (context * width, width)
    return heads * context * width, by_head, by_position, 1


def empty_like_rows(
    like: Tensor, dtype: torch.dtype | None = None, *, heads: int | None = None, rows: int | None = None
) -> Tensor:
    """Allocate (B, H, N, D) laid out as ``like`` is (``row_strides``); ``heads`` and ``rows`` override its H and N."""
    shape = (like.shape[0], heads or like.shape[1], rows or like.shape[2], like.shape[3])
    return like.new_empty_strided(shape, row_strides(shape, like.stride()), dtype=dtype or like.dtype)


def has_bf16_products() -> bool:
    """Whether torch finds instructions that multiply bf16 faster than fp32; without them bf16 is imitated, slowly."""
    found: Mapping[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()  # torch 2.9 does not have it
    return bool(found.get("avx512_bf16") or found.get("amx_bf16"))
