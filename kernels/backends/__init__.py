"""Backends of attention, none of which imports another, and their common functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Saved(NamedTuple):
    """Inputs of a backward pass: those of the forward pass, its results, and the gradients of these."""

    q: Tensor  # (B, H, M, D)
    k: Tensor  # (B, K, N, D)
    v: Tensor  # (B, K, N, Dv)
    out: Tensor  # (B, H, M, Dv)
    grad_out: Tensor
    lse: Tensor  # (B, H, M)
    grad_lse: Tensor | None  # None: the logsumexp has no gradient


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of scores, sums and logsumexp: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def row_strides(shape: Sequence[int], like: Sequence[int]) -> tuple[int, ...]:
    """Return strides for (B, H, N, D): the heads of a position are adjacent in memory if they are in ``like``.

    A model views its heads in (B, N, H * D) and joins them again. In that order, joining needs no copy.
    """
    _, heads, context, width = shape
    by_head, by_position = (width, heads * width) if like[1] < like[2] else (context * width, width)
    return heads * context * width, by_head, by_position, 1


def empty_like_rows(
    like: Tensor, dtype: torch.dtype | None = None, *, heads: int | None = None, rows: int | None = None
) -> Tensor:
    """Allocate (B, H, N, D) in the layout of ``like`` (``row_strides``); ``heads`` and ``rows`` override H and N."""
    shape = (like.shape[0], heads or like.shape[1], rows or like.shape[2], like.shape[3])
    return like.new_empty_strided(shape, row_strides(shape, like.stride()), dtype=dtype or like.dtype)


def has_bf16_products() -> bool:
    """Whether the CPU has instructions that multiply bf16 faster than fp32; without them bf16 is emulated, slowly."""
    capabilities: Mapping[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()  # missing in torch 2.9
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
