"""Attention of one query at a time to a cache, for generation: reads only the keys that the pattern allows.

Letters: B batch, H heads of q, K heads of k and v, N positions of the context, D width of q and k, Dv width of v.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from longstride.kernels.attention import check_heads, check_tensors, choose_backend, head_patterns, load, resolve_scale
from longstride.kernels.patterns import Pattern, declares_causal
from longstride.kernels.plan import query_views, reads

BACKENDS = ("triton", "cpu", "reference")
ADVICE = 'backend="reference" runs everywhere, and reads the whole cache'

# Maps (q, position, return_lse) to the output and the logsumexp, which may be None without ``return_lse``.
# The position is an int, or with triton a tensor on the cache's device.
Prepared = Callable[[Tensor, Any, bool], tuple[Tensor, Tensor | None]]


# fmt: off
@overload
def attend_one(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern | Sequence[Pattern], position: int | Tensor, *,
    scale: float | None = None, backend: str = "auto", return_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def attend_one(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern | Sequence[Pattern], position: int | Tensor, *,
    scale: float | None = None, backend: str = "auto", return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
# fmt: on


def attend_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | Sequence[Pattern],
    position: int | Tensor,
    *,
    scale: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute row ``position`` of ``sparse_attention`` from the keys of its pattern (Child et al. 2019, section 4.2).

    The number of keys that a sparse pattern reads grows with the root of N. Other rows of the caches may be
    uninitialised, such as all rows after ``position``. There is no gradient.

    Args:
        q: (B, H, D), the query of ``position``, in fp16, bf16, fp32 or fp64, as k and v.
        k: (B, K, N, D), the keys of the full context. Its channels must be adjacent in memory, as those of v. K may be
            less than H: see ``sparse_attention``.
        v: (B, K, N, Dv); Dv may differ from D.
        pattern: one pattern, or one per head of q. A pattern with different heads (``num_summaries``) is resolved.
        position: position of the query, 0 … N-1: an int, or an int32 or int64 tensor without axes. The triton backend
            reads a tensor on the cache's device, so that a CUDA graph can be replayed with other positions. Its value
            is not checked, but clamped to the context. Other backends accept a tensor on the CPU.
        scale: factor of the scores. Default: 1/sqrt(D).
        backend: auto, triton, cpu or reference (which reads all N). A named backend that cannot run here raises.
        return_lse: also return the logsumexp of the query's scaled scores, (B, H) fp32 (fp64 for fp64).

    Returns:
        (B, H, Dv) in q's dtype, and with ``return_lse`` the logsumexp; 0 and -inf for a query without keys.

    Raises:
        ValueError: shapes, dtypes or devices do not match, the position is outside the context or is neither an int nor
            such a tensor, ``pattern`` is not a pattern or not causal, the scale is not finite, or an input requires a
            gradient.
        ConfigError: the backend is unknown or cannot run here.
    """
    _check(q, k, v)
    backend = choose_backend(backend, BACKENDS, (q, k, v), ADVICE)
    position = _checked_position(position, k, backend)
    prepared = load(backend).prepare(k, v, _causal_patterns(pattern, q.shape[1]), resolve_scale(k, scale), True)
    out, lse = prepared(q, position, return_lse)
    if return_lse:
        assert lse is not None
        return out, lse
    return out


class CachedAttention:
    """``attend_one`` for the queries of one cache that is written row by row.

    Checks and choices are made once, and a backend may copy rows that it reads. So rows before the query must not
    change between calls. A position that is not after the last one means that rows from it on are new. Call ``forget``
    after changing other rows. There is no gradient, even if k and v require one.

    With the triton backend and a position on the cache's device, a call can be captured in a CUDA graph after one
    normal call. The tables that it reads stay in place as long as this object lives, until ``forget``.
    """

    def __init__(
        self,
        k: Tensor,
        v: Tensor,
        pattern: Pattern | Sequence[Pattern],
        *,
        heads: int | None = None,
        scale: float | None = None,
        backend: str = "auto",
    ) -> None:
        """Take the arguments of ``attend_one``, and ``heads``: H, if it is not K.

        Raises:
            ValueError, ConfigError: as ``attend_one``, for everything but the query.
        """
        check_tensors({"k": (k, "BHND"), "v": (v, "BHND")})
        self.k, self.v = k, v
        self.pattern, self.scale = pattern, scale
        q = k[:, :1, 0].expand(-1, heads or k.shape[1], -1)  # has the shape, dtype and device of every query
        _check(q, k, v)
        self.backend = choose_backend(backend, BACKENDS, (q, k, v), ADVICE)
        self.heads = q.shape[1]
        self._query_type = (q.shape, q.dtype, q.device)
        self.forget()

    def __call__(self, q: Tensor, position: int | Tensor) -> Tensor:
        """Return the output of one query, (B, H, D) to (B, H, Dv).

        Raises:
            ValueError: the query does not match the cache or requires a gradient, or the position is invalid, as in
                ``attend_one``.
        """
        return self._attend(q, position, False)[0]

    def with_lse(self, q: Tensor, position: int | Tensor) -> tuple[Tensor, Tensor]:
        """Return the output of one query, and the logsumexp of its scaled scores, (B, H) fp32 (fp64 for fp64)."""
        out, lse = self._attend(q, position, True)
        assert lse is not None
        return out, lse

    def _attend(self, q: Tensor, position: int | Tensor, return_lse: bool) -> tuple[Tensor, Tensor | None]:
        if (q.shape, q.dtype, q.device) != self._query_type or q.requires_grad:
            _check(q, self.k, self.v)
            if q.shape[1] != self.heads:
                raise ValueError(f"q {tuple(q.shape)} must have heads={self.heads}, as the cache was created for")
        return self._prepared(q, _checked_position(position, self.k, self.backend), return_lse)

    def forget(self) -> None:
        """Drop copies of rows. Call this after changing rows that earlier calls may have read."""
        patterns = _causal_patterns(self.pattern, self.heads)
        prepare = load(self.backend).prepare
        self._prepared: Prepared = prepare(self.k, self.v, patterns, resolve_scale(self.k, self.scale), False)


def empty_cache(
    batch: int,
    heads: int,
    context: int,
    width: int,
    pattern: Pattern | Sequence[Pattern],
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    """Allocate uninitialised keys or values, (B, K, N, D), in the memory order with the fastest reads.

    On a CPU a row of all heads is contiguous, as rows are written and columns are read. If a head reads more than half
    of the context, heads are contiguous instead, because long runs are then faster.

    Args:
        batch, heads, context, width: B, K, N and D.
        pattern: one pattern, or one per head of queries.

    Raises:
        ValueError: ``pattern`` is not a pattern or not causal, or the length of a list is not a multiple of ``heads``.
    """
    count = len(pattern) if isinstance(pattern, Sequence) else heads
    patterns = dict.fromkeys(_causal_patterns(pattern, heads if count % heads else count))
    if device.type != "cpu" or any(2 * num_keys_read(p, context - 1, context) > context for p in patterns):
        return torch.empty(batch, heads, context, width, device=device, dtype=dtype)
    return torch.empty(context, batch, heads, width, device=device, dtype=dtype).permute(1, 2, 0, 3)


def allowed_keys(pattern: Pattern, position: int, context: int) -> Tensor:
    """Return the positions that one query attends to, ascending: (M,) int64 on the CPU.

    The cost grows with M, not with the context. If a pattern has no closed form at this context, the first call
    computes vectors and caches them.

    Args:
        pattern: pattern of one head (``for_head``).
        position: position of the query, 0 … N-1.
        context: N.

    Raises:
        ValueError: the position is outside the context, or heads differ and none was chosen.
    """
    _check_position(position, context)
    runs = [read.positions() for read in reads(pattern, position, context)]
    return torch.cat(runs).sort().values if runs else torch.empty(0, dtype=torch.int64)


def num_keys_read(pattern: Pattern, position: int, context: int) -> int:
    """Return the number of keys that ``attend_one`` reads for a head of this pattern.

    Raises:
        ValueError: the position is outside the context, or heads differ and none was chosen.
    """
    _check_position(position, context)
    intervals = (part.interval_at(position) for part in query_views(pattern, context))
    return sum(high - low for low, high in intervals)


def _causal_patterns(pattern: Pattern | Sequence[Pattern], heads: int) -> tuple[Pattern, ...]:
    """Return one resolved pattern per head; ValueError for one that reads later positions, as a cache has none."""
    patterns = head_patterns(pattern, heads)
    for resolved in dict.fromkeys(patterns):
        if not declares_causal(resolved):
            raise ValueError(f"pattern={resolved}: a cache has no later positions; decode with a causal pattern")
    return patterns


def _check_position(position: int, context: int) -> None:
    if type(position) is not int:  # reading a tensor's value would wait for its device
        raise ValueError(f"position must be an int, not {type(position).__name__}")
    if not 0 <= position < context:
        raise ValueError(f"position={position}: must be 0 to {context - 1}, within the context")


def _checked_position(position: int | Tensor, k: Tensor, backend: str) -> int | Tensor:
    """Return the position in the form that the backend needs: a checked int, or a tensor that only the device reads."""
    if isinstance(position, Tensor):
        if position.dim() or position.dtype not in (torch.int32, torch.int64):
            kind = f"{position.dtype} {tuple(position.shape)}"
            raise ValueError(f"position must be an int, or an int32 or int64 tensor without axes, not {kind}")
        if backend == "triton" and position.device == k.device:
            return position
        if position.device.type != "cpu":  # reading its value would wait for its device
            raise ValueError(f"position is on {position.device}: {backend} reads an int, or a tensor on the CPU")
        position = int(position)
    _check_position(position, k.shape[2])
    return position


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    check_tensors({"q": (q, "BHD"), "k": (k, "BHND"), "v": (v, "BHND")})
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires a gradient, and attend_one has none: call it under torch.no_grad()")
        if name != "q" and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name} has strides {tensor.stride()}: its channels must be adjacent, the last stride 1")
    if (k.shape[0], k.shape[3]) != (q.shape[0], q.shape[2]):
        raise ValueError(f"k {tuple(k.shape)} must have the batch and channels of q {tuple(q.shape)}")
    check_heads(q, k, v)
