"""One query at a time, as generation asks: attention against a cache that reads only what the pattern allows.

Letters: B batch, H heads, N positions of the context, D width of q and k, Dv width of v.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from longstride.kernels.attention import check_tensors, choose_backend, head_patterns, load
from longstride.kernels.patterns import Pattern
from longstride.kernels.plan import num_reads, reads

BACKENDS = ("triton", "cpu", "reference")

# What a backend prepares: (q, position, return_lse) to the output and the logsumexp, None at most where not asked for.
Prepared = Callable[[Tensor, int, bool], tuple[Tensor, Tensor | None]]


@overload
def attend_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | Sequence[Pattern],
    position: int,
    *,
    scale: float | None = None,
    backend: str = "auto",
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def attend_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | Sequence[Pattern],
    position: int,
    *,
    scale: float | None = None,
    backend: str = "auto",
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def attend_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | Sequence[Pattern],
    position: int,
    *,
    scale: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Row ``position`` of ``sparse_attention``, from the keys that its pattern allows (Child et al. 2019, section 4.2).

    What a sparse pattern reads grows with the root of N. Rows of the caches that are not allowed, those behind
    ``position`` among them, may hold anything. There is no gradient.

    Args:
        q: (B, H, D), the query of ``position``; one of fp16, bf16, fp32, fp64, as k and v.
        k: (B, H, N, D), the keys of the whole context; channels adjacent in memory, as v's, or a call would copy all.
        v: (B, H, N, Dv); Dv may differ from D.
        pattern: one pattern, or one per head; where heads differ by themselves (``num_summaries``) each gets its own.
        position: of the query, 0 … N-1.
        scale: factor of the scores; 1/sqrt(D) where None.
        backend: auto, triton, cpu or reference (which reads all N). A named backend that cannot run here raises.
        return_lse: also return the logsumexp of the query's scaled scores, (B, H) fp32 (fp64 for fp64).

    Returns:
        (B, H, Dv) in q's dtype, and the logsumexp where it was asked for; 0 and -inf for a query without keys.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, the position is outside the context, something is no pattern,
            the scale is not finite, or a gradient would be needed.
        ConfigError: the backend is unknown or cannot run here.
    """
    _check(q, k, v)
    _check_position(position, k.shape[2])
    out, lse = _prepare(q, k, v, pattern, scale, backend, once=True)(q, position, return_lse)
    if return_lse:
        assert lse is not None
        return out, lse
    return out


class CachedAttention:
    """``attend_one`` for the queries of one cache that is written row by row.

    What stays the same from call to call is checked and chosen once, and a backend may keep copies of what it read. So
    rows before a query's are taken to be as they were at the calls before: a position that comes back says that rows
    are new from it on, and ``forget`` that others are. There is no gradient, whatever k and v are used for elsewhere.
    """

    def __init__(
        self,
        k: Tensor,
        v: Tensor,
        pattern: Pattern | Sequence[Pattern],
        *,
        scale: float | None = None,
        backend: str = "auto",
    ) -> None:
        """All as ``attend_one`` has it.

        Raises:
            ValueError, ConfigError: where ``attend_one`` would, whatever the query.
        """
        check_tensors({"k": (k, "BHND"), "v": (v, "BHND")})
        self.k, self.v = k, v
        self.pattern, self.scale, self.backend = pattern, scale, backend
        q = k[:, :, 0]  # what every query is like
        _check(q, k, v)
        self._fits = (q.shape, q.dtype, q.device)
        self.forget()

    def __call__(self, q: Tensor, position: int) -> Tensor:
        """The output of one query, (B, H, D) to (B, H, Dv).

        Raises:
            ValueError: the query does not fit the cache or requires a gradient, or the position is outside the context.
        """
        if (q.shape, q.dtype, q.device) != self._fits or q.requires_grad:
            _check(q, self.k, self.v)
        _check_position(position, self.k.shape[2])
        return self._prepared(q, position, False)[0]

    def forget(self) -> None:
        """Rows were written that earlier calls may have read."""
        like = self.k[:, :, 0]
        self._prepared = _prepare(like, self.k, self.v, self.pattern, self.scale, self.backend, once=False)


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
    """Room for keys or values, (B, H, N, D), in the order in memory in which its reads are quickest; nothing is set.

    On a CPU a row of all heads lies in one place, as it is written and as a column is read, unless a head reads more
    than half of the context: such long runs are quicker head by head.

    Raises:
        ValueError: something is no pattern, or a list has another length than there are heads.
    """
    patterns = dict.fromkeys(head_patterns(pattern, heads))
    if device.type != "cpu" or any(2 * num_keys_read(p, context - 1, context) > context for p in patterns):
        return torch.empty(batch, heads, context, width, device=device, dtype=dtype)
    return torch.empty(context, batch, heads, width, device=device, dtype=dtype).permute(1, 2, 0, 3)


def allowed_keys(pattern: Pattern, position: int, context: int) -> Tensor:
    """The positions that the query of a position attends to, ascending: (M,) int64 on the CPU.

    The cost is that of M keys, not of the context; where a pattern has no closed form at this context, its vectors are
    made at the first call and kept.

    Args:
        pattern: one; where heads differ by themselves that of a head, by ``for_head``.
        position: of the query, 0 … N-1.
        context: N.

    Raises:
        ValueError: the position is outside the context, or heads differ and none was chosen.
    """
    _check_position(position, context)
    found = [read.positions() for read in reads(pattern, position, context)]
    return torch.cat(found).sort().values if found else torch.empty(0, dtype=torch.int64)


def num_keys_read(pattern: Pattern, position: int, context: int) -> int:
    """How many keys ``attend_one`` reads for a head of this pattern: as many as ``allowed_keys`` names.

    Raises:
        ValueError: the position is outside the context, or heads differ and none was chosen.
    """
    _check_position(position, context)
    return num_reads(pattern, position, context)


def _check_position(position: int, context: int) -> None:
    if type(position) is not int:  # a tensor's value would have to be waited for
        raise ValueError(f"position must be an int, not {type(position).__name__}")
    if not 0 <= position < context:
        raise ValueError(f"position={position}: must be 0 to {context - 1}, within the context")


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    check_tensors({"q": (q, "BHD"), "k": (k, "BHND"), "v": (v, "BHND")})
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires a gradient, and attend_one has none: call it under torch.no_grad()")
        if name != "q" and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name} has strides {tensor.stride()}: its channels must be adjacent, the last stride 1")
    if (*k.shape[:2], k.shape[3]) != q.shape:
        raise ValueError(f"k {tuple(k.shape)} must have the batch, heads and channels of q {tuple(q.shape)}")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v {tuple(v.shape)} must have the batch, heads and positions of k {tuple(k.shape)}")


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern | Sequence[Pattern], scale: float | None, backend: str, once: bool
) -> Prepared:
    """The backend, prepared for tensors that were checked; for ``once`` it has nothing to keep."""
    patterns = head_patterns(pattern, q.shape[1])
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if not math.isfinite(scale):
        raise ValueError(f"scale={scale}: must be a finite number")
    advice = 'backend="reference" runs everywhere, and reads the whole cache'
    return load(choose_backend(backend, BACKENDS, (q, k, v), advice)).prepare(k, v, patterns, scale, once)
