"""The public call: checks its inputs, resolves heads, chooses a backend, and runs it as one torch custom op.

A backend that has ``forward`` and ``backward`` runs behind the op (``op``); one that has only a differentiable
``attend`` (reference, flex) is called directly.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any, Literal, overload

import torch
from torch import Tensor

from longstride.kernels import plan
from longstride.kernels.errors import ConfigError
from longstride.kernels.op import attention_op
from longstride.kernels.patterns import PATTERNS, Pattern, pattern_from_json, pattern_to_json
from longstride.kernels.selections import Selection, queries_behind

BACKENDS = ("triton", "cpu", "reference", "flex")
ALL_QUERIES = -1  # in place of the first one's position: a query for each key
ADVICE = 'backend="reference" runs everywhere, with memory that grows with N^2'
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@overload
def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | Sequence[Pattern],
    *,
    scale: float | None = None,
    backend: str = "auto",
    return_lse: Literal[False] = False,
    first_query: int | None = None,
) -> Tensor: ...


@overload
def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | Sequence[Pattern],
    *,
    scale: float | None = None,
    backend: str = "auto",
    return_lse: Literal[True],
    first_query: int | None = None,
) -> tuple[Tensor, Tensor]: ...


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | Sequence[Pattern],
    *,
    scale: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    first_query: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention in which each position reads the keys its pattern allows (Child et al. 2019, section 4.2).

    A query without keys gives output 0, logsumexp -inf and zero gradients. NaN in q, k, v and gradients reaches what
    reads it, as NaN, and may reach other rows of the same context: tiles are multiplied whole. Other contexts of the
    batch keep their bits. An inf does likewise, or becomes what arithmetic makes of it.

    ``first_query`` takes M queries behind a cache of N keys, such as a chunk of a prompt. The result is rows
    ``first_query`` to ``first_query + M - 1`` of the attention of all N queries, and gradients flow too. Keys that
    these queries do not read may hold anything, of a causal pattern all those behind the last query. The cpu and triton
    backends list the keys that are read, once for each position and length: O(N) integers, kept for the next layers.

    Args:
        q: (B, H, N, D), or (B, H, M, D) with ``first_query``; one of fp16, bf16, fp32, fp64. Scores and sums are kept
            in fp32 (fp64 for fp64).
        k: (B, K, N, D). Where K is not H, it divides H, and head h of q reads head h // (H / K) of k and v: grouped
            queries (Ainslie et al. 2023, section 2.2; of K = 1 Shazeer 2019, section 3).
        v: (B, K, N, Dv); Dv may differ from D.
        pattern: one pattern, or one per head of q. One whose heads differ (``num_summaries``) is resolved for each.
        scale: factor of the scores; 1/sqrt(D) where None.
        backend: auto, triton, cpu, reference or flex. A named backend that cannot run here raises.
        return_lse: also return the logsumexp of each query's scaled scores, (B, H, N) fp32 (fp64 for fp64).
        first_query: position of the first query, 0 … N - M. By default there are N queries, one per key.

    Returns:
        (B, H, N, Dv) in q's dtype, or (B, H, M, Dv); with ``return_lse`` the logsumexp too.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, something is no pattern, the scale is not finite, or a query
            stands behind the last key.
        ConfigError: the backend is unknown or cannot run here.
    """
    if first_query is None:
        check_whole(q, k, v)
    else:
        _check_queries(q, k, v, first_query)
        if q.shape[2] == k.shape[2]:
            first_query = None
    patterns = head_patterns(pattern, q.shape[1])
    scale = checked_scale(q, scale)
    backend = choose_backend(backend, BACKENDS, (q, k, v), ADVICE)
    module = load(backend)
    if hasattr(module, "attend"):
        out, lse = module.attend(q, k, v, patterns, scale, first_query or 0)
    else:
        out, lse = _attention(
            q, k, v, _encode(patterns), scale, backend, ALL_QUERIES if first_query is None else first_query
        )
    return (out, lse) if return_lse else out


def check_backend(
    name: str, *, device: torch.device, dtype: torch.dtype, head_width: int, value_width: int, training: bool
) -> None:
    """Check that ``sparse_attention`` can run a backend on tensors like these, without computing anything.

    Args:
        name: auto, triton, cpu, reference or flex.
        device, dtype: of q, k and v.
        head_width, value_width: D of q and k, and Dv.
        training: a backward pass will follow.

    Raises:
        ConfigError: the backend is unknown or cannot run there; the path is ``backend``.
    """
    with torch.set_grad_enabled(training):
        q, k, v = (
            torch.empty(0, 1, 1, width, device=device, dtype=dtype, requires_grad=training)
            for width in (head_width, head_width, value_width)
        )
        choose_backend(name, BACKENDS, (q, k, v), ADVICE)


def num_pairs(pattern: Pattern, context: int, visited_by: Tensor | None = None, backend: str = "auto") -> int:
    """Pairs of a query and a key that a pattern allows: (N + 1) N / 2 where it is dense.

    Args:
        pattern: that of one head (``for_head``).
        context: N.
        visited_by: count the pairs instead whose scores a forward pass computes for heads of this empty tensor's last
            size, in its dtype, on its device: all those of the tiles that kernels visit, masked ones included.
        backend: that visits them, as ``sparse_attention`` takes it.

    Raises:
        ConfigError: the backend is unknown or cannot run there.
    """
    if visited_by is None:
        return plan.num_pairs(pattern, context)
    rows = visited_by.new_empty(0, 1, context, visited_by.shape[-1])
    module = load(choose_backend(backend, BACKENDS, (rows, rows, rows), ADVICE))
    # Reference and flex compute every pair and mask.
    visited: int = module.visited_pairs(rows, pattern) if hasattr(module, "visited_pairs") else context**2
    return visited


def head_patterns(pattern: Pattern | Sequence[Pattern], heads: int) -> tuple[Pattern, ...]:
    """One resolved pattern per head; ValueError where something is no pattern or a list has another length."""
    if isinstance(pattern, Sequence) and not isinstance(pattern, str):
        given = list(pattern)
        for number, entry in enumerate(given):
            _require_pattern(f"pattern[{number}]", entry)
    else:
        _require_pattern("pattern", pattern)
        given = [pattern] * heads
    if len(given) != heads:
        raise ValueError(f"{len(given)} patterns for {heads} heads: give one pattern, or one per head")
    return tuple(p.for_head(head) for head, p in enumerate(given))


def _require_pattern(name: str, value: object) -> None:
    if type(value) in tuple(PATTERNS.values()):  # quicker than a check of every method; torch 2.11 traces no view
        return
    if isinstance(value, type) or not isinstance(value, Pattern):
        kind = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
        raise ValueError(f"{name} must be a Pattern (pattern_from_json makes one), not {kind}")


def check_whole(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check that q is (B, H, N, D), k (B, K, N, D) and v (B, K, N, Dv), of one dtype and device, else ValueError."""
    check_tensors({"q": (q, "BHND"), "k": (k, "BHND"), "v": (v, "BHND")})
    if k.shape != q.shape and (k.shape[0], *k.shape[2:]) != (q.shape[0], *q.shape[2:]):
        rule = f"must match q {tuple(q.shape)} in every dimension except heads; behind a cache, give first_query"
        raise ValueError(f"k {tuple(k.shape)} {rule}")
    check_heads(q, k, v)


def _check_queries(q: Tensor, k: Tensor, v: Tensor, first_query: int) -> None:
    """Check q (B, H, M, D) from this position on against k (B, K, N, D) and v (B, K, N, Dv); ValueError if unfit."""
    check_tensors({"q": (q, "BHMD"), "k": (k, "BHND"), "v": (v, "BHND")})
    if (k.shape[0], k.shape[3]) != (q.shape[0], q.shape[3]):
        raise ValueError(f"k {tuple(k.shape)} must have the batch and channels of q {tuple(q.shape)}")
    check_heads(q, k, v)
    if type(first_query) is bool or not isinstance(first_query, int | torch.SymInt):
        raise ValueError(f"first_query must be an int, not {type(first_query).__name__}")
    last = k.shape[2] - q.shape[2]
    if not 0 <= first_query <= last:
        rule = f"must be 0 to {last}" if last >= 0 else "leaves no room"
        raise ValueError(f"first_query={first_query}: {rule} for {q.shape[2]} queries and {k.shape[2]} keys")


def check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check that k (B, K, N, D) and v (B, K, N, Dv) belong together, and K divides q's H; ValueError where not."""
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v {tuple(v.shape)} must have the batch, heads and positions of k {tuple(k.shape)}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"k and v have {k.shape[1]} heads: their number must divide the {q.shape[1]} heads of q")


def checked_scale(q: Tensor, scale: float | None) -> float:
    """The factor of the scores, 1/sqrt(D) where None; ValueError where it is not finite."""
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if not math.isfinite(scale):
        raise ValueError(f"scale={scale}: must be a finite number")
    return scale


def check_tensors(named: dict[str, tuple[Tensor, str]]) -> None:
    """Check that tensors have their axes, none empty but the batch, and share the first one's dtype and device.

    Args:
        named: each name with its tensor and that tensor's axes, one letter an axis.

    Raises:
        ValueError: one line about the first tensor that does not fit.
    """
    first, (reference, _) = next(iter(named.items()))
    for name, (tensor, axes) in named.items():
        if tensor.dim() != len(axes):
            raise ValueError(f"{name} must be ({', '.join(axes)}), not {tuple(tensor.shape)}")
        if 0 in tensor.shape[1:]:
            raise ValueError(f"{name} {tuple(tensor.shape)} must have at least one head, position and channel")
        if tensor.dtype not in DTYPES or tensor.dtype != reference.dtype:
            raise ValueError(f"{name} is {tensor.dtype}: q, k and v must share one of fp16, bf16, fp32, fp64")
        if tensor.device != reference.device:
            raise ValueError(f"{name} is on {tensor.device}, {first} on {reference.device}: they must share a device")


def choose_backend(name: str, known: tuple[str, ...], tensors: tuple[Tensor, Tensor, Tensor], advice: str) -> str:
    """The backend to run: the named one, or with auto the fast one of the device; never a slower substitute.

    Args:
        name: auto, or one of ``known``.
        known: the backends that serve this call.
        tensors: q, k and v.
        advice: what to do instead where auto's choice cannot run.

    Raises:
        ConfigError: the backend is unknown or cannot run here; the path is ``backend``.
    """
    if name != "auto" and name not in known:
        raise ConfigError.at("backend", name, f"must be one of auto, {', '.join(known)}")
    chosen = name if name != "auto" else "triton" if tensors[0].is_cuda else "cpu"
    reason = load(chosen).why_not(*tensors)
    if reason is None:
        return chosen
    if name != "auto":
        raise ConfigError.at("backend", name, f"cannot run here: {reason}")
    raise ConfigError.at("backend", name, f"{chosen} cannot run here: {reason}; {advice}")


def load(backend: str) -> ModuleType:
    """A backend's module, imported at first use, as triton may not be installed.

    Its ``why_not`` gives the reason why it cannot run on q, k and v, or None. It has ``forward`` and ``backward``, or a
    differentiable ``attend``; those that serve single queries have ``prepare``.
    """
    # torch.compile can trace an import statement, but not importlib.
    if backend == "triton":
        from longstride.kernels.backends import triton

        return triton
    if backend == "cpu":
        from longstride.kernels.backends import cpu

        return cpu
    if backend == "flex":
        from longstride.kernels.backends import flex

        return flex
    from longstride.kernels.backends import reference

    return reference


def _written(patterns: tuple[Pattern, ...]) -> str:
    """Patterns as text, the only form that an op can take; ``pattern_from_json`` reads each of them."""
    # torch.compile traces this: hence repr, not json.
    return repr([pattern_to_json(pattern) for pattern in patterns])


_remembered = lru_cache(maxsize=4096)(_written)


def _encode(patterns: tuple[Pattern, ...]) -> str:
    """Patterns as text: from a cache, except under torch.compile, which would trace the cache itself."""
    return _written(patterns) if torch.compiler.is_compiling() else _remembered(patterns)


@lru_cache(maxsize=4096)
def _decode(patterns: str) -> tuple[Pattern, ...]:
    return tuple(pattern_from_json(value) for value in ast.literal_eval(patterns))


def _forward(
    q: Tensor, k: Tensor, v: Tensor, patterns: str, scale: float, backend: str, first_query: int
) -> tuple[Tensor, Tensor]:
    module = load(backend)
    if first_query == ALL_QUERIES:
        return module.forward(q, k, v, _decode(patterns), scale)
    return module.selected_forward(q, k, v, _selection(q, k, patterns, first_query), scale)


def _backward(grad_out: Tensor, grad_lse: Tensor | None, *tensors_and_arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    *tensors, patterns, scale, backend, first_query = tensors_and_arguments  # tensors: q, k, v, out, lse
    module = load(backend)
    if first_query == ALL_QUERIES:
        return module.backward(grad_out, grad_lse, *tensors, _decode(patterns), scale)
    q, k = tensors[:2]
    return module.selected_backward(grad_out, grad_lse, *tensors, _selection(q, k, patterns, first_query), scale)


def _selection(q: Tensor, k: Tensor, patterns: str, first_query: int) -> Selection:
    return queries_behind(_decode(patterns), q.shape[0], first_query, q.shape[2], k.shape[2], q.device)


_attention = attention_op(
    "attention", "str patterns, float scale, str backend, SymInt first_query", _forward, _backward
)
