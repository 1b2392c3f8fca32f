"""Attention over patterns: checks inputs, resolves heads, chooses a backend, and runs it as one torch custom op.

Backends with ``forward`` and ``backward`` run behind the op (``op``). Backends with a differentiable ``attend``
(reference, flex) are called directly.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType
from typing import Literal, overload

import torch
from torch import Tensor

from longstride.kernels import plan
from longstride.kernels.backends import Saved, cpu, reference, triton
from longstride.kernels.errors import ConfigError
from longstride.kernels.op import attention_op
from longstride.kernels.patterns import PATTERNS, Pattern, pattern_from_json, pattern_to_json
from longstride.kernels.selections import Selection, queries_behind

BACKENDS = ("triton", "cpu", "reference", "flex")
ADVICE = 'backend="reference" runs everywhere, with memory that grows with N^2'
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


# fmt: off
@overload
def sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern | Sequence[Pattern], *, scale: float | None = None,
    backend: str = "auto", return_lse: Literal[False] = False, first_query: int | None = None,
) -> Tensor: ...
@overload
def sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern | Sequence[Pattern], *, scale: float | None = None,
    backend: str = "auto", return_lse: Literal[True], first_query: int | None = None,
) -> tuple[Tensor, Tensor]: ...
# fmt: on


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
    """Compute softmax attention where each query reads the keys its pattern allows (Child et al. 2019, section 4.2).

    A query without keys has output 0, logsumexp -inf and zero gradients. NaN or inf propagates to every row that reads
    it. It may also affect other rows of the same context, as tiles are multiplied in full. It never crosses contexts.

    With ``first_query``, there are M queries and a cache of N keys, such as for a chunk of a prompt. The result is rows
    ``first_query`` to ``first_query + M - 1`` of the attention of all N queries, and is differentiable. Keys that no
    query reads may be uninitialised. With a causal pattern, these are all keys after the last query. The cpu and triton
    backends list the keys that are read for each position and length: O(N) integers, cached for the next layers.

    Args:
        q: (B, H, N, D), or (B, H, M, D) with ``first_query``; in fp16, bf16, fp32 or fp64. Scores and sums are in fp32
            (fp64 for fp64).
        k: (B, K, N, D). K divides H, and head h of q reads head h // (H / K) of k and v: grouped-query attention
            (Ainslie et al. 2023, section 2.2; Shazeer 2019, section 3, for K = 1).
        v: (B, K, N, Dv); Dv may differ from D.
        pattern: one pattern, or one per head of q. A pattern that varies by head (``num_summaries``) is expanded.
        scale: factor of the scores. Default: 1/sqrt(D).
        backend: auto, triton, cpu, reference or flex. A named backend that cannot run here raises.
        return_lse: also return the logsumexp of each query's scaled scores, (B, H, N) fp32 (fp64 for fp64).
        first_query: position of the first query, 0 … N - M. Default: there are N queries, one per key.

    Returns:
        (B, H, N, Dv) in q's dtype, or (B, H, M, Dv); with ``return_lse`` the logsumexp too.

    Raises:
        ValueError: shapes, dtypes or devices do not match, ``pattern`` is not a pattern, the scale is not finite, or a
            query is after the last key.
        ConfigError: the backend is unknown or cannot run here.
    """
    if first_query is None:
        check_inputs(q, k, v)
    else:
        check_queries(q, k, v, first_query)
        if q.shape[2] == k.shape[2]:
            first_query = None
    patterns = head_patterns(pattern, q.shape[1])
    scale = resolve_scale(q, scale)
    backend = choose_backend(backend, BACKENDS, (q, k, v), ADVICE)
    module = load(backend)
    if hasattr(module, "attend"):
        out, lse = module.attend(q, k, v, patterns, scale, first_query or 0)
    else:
        encode = _encode if torch.compiler.is_compiling() else _encode_cached
        out, lse = _attention(q, k, v, encode(patterns), scale, backend, first_query)
    return (out, lse) if return_lse else out


def check_backend(
    name: str, *, device: torch.device, dtype: torch.dtype, head_width: int, value_width: int, training: bool
) -> None:
    """Check that ``sparse_attention`` can run a backend on tensors like these, without computing anything.

    Args:
        name: auto, triton, cpu, reference or flex.
        device, dtype: device and dtype of q, k and v.
        head_width, value_width: D of q and k, and Dv.
        training: whether a backward pass will follow.

    Raises:
        ConfigError: the backend is unknown or cannot run there; the path is ``backend``.
    """
    with torch.set_grad_enabled(training):
        q, k, v = (
            torch.empty(0, 1, 1, width, device=device, dtype=dtype, requires_grad=training)
            for width in (head_width, head_width, value_width)
        )
        choose_backend(name, BACKENDS, (q, k, v), ADVICE)


def num_pairs(pattern: Pattern, context: int, like: Tensor | None = None, backend: str = "auto") -> int:
    """Return the number of query-key pairs that a pattern allows: (N + 1) N / 2 if it is dense and causal.

    Args:
        pattern: pattern of one head (``for_head``).
        context: N.
        like: an empty tensor with the inputs' dtype, device and head width. If given, count all pairs whose scores a
            forward pass computes, including masked ones.
        backend: backend that computes them, as in ``sparse_attention``.

    Raises:
        ConfigError: the backend is unknown or cannot run there.
    """
    if like is None:
        return plan.num_pairs(pattern, context)
    rows = like.new_empty(0, 1, context, like.shape[-1])
    module = load(choose_backend(backend, BACKENDS, (rows, rows, rows), ADVICE))
    # Reference and flex compute and mask every pair.
    visited: int = module.visited_pairs(rows, pattern) if hasattr(module, "visited_pairs") else context**2
    return visited


def head_patterns(pattern: Pattern | Sequence[Pattern], heads: int) -> tuple[Pattern, ...]:
    """Return one resolved pattern per head; ValueError for values that are no patterns or a wrong number of them."""
    if isinstance(pattern, Sequence) and not isinstance(pattern, str):
        by_head = list(pattern)
        for number, entry in enumerate(by_head):
            _require_pattern(f"pattern[{number}]", entry)
    else:
        _require_pattern("pattern", pattern)
        by_head = [pattern] * heads
    if len(by_head) != heads:
        raise ValueError(f"{len(by_head)} patterns for {heads} heads: give one pattern, or one per head")
    return tuple(p.for_head(head) for head, p in enumerate(by_head))


def _require_pattern(name: str, value: object) -> None:
    # Faster than checking every method. torch 2.11 cannot trace a view of a dict.
    if type(value) in tuple(PATTERNS.values()):
        return
    if isinstance(value, type) or not isinstance(value, Pattern):
        kind = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
        raise ValueError(f"{name} must be a Pattern (pattern_from_json makes one), not {kind}")


def check_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check that q is (B, H, N, D), k (B, K, N, D) and v (B, K, N, Dv), of one dtype and device, else ValueError."""
    check_tensors({"q": (q, "BHND"), "k": (k, "BHND"), "v": (v, "BHND")})
    if k.shape != q.shape and (k.shape[0], *k.shape[2:]) != (q.shape[0], *q.shape[2:]):
        rule = f"must match q {tuple(q.shape)} in every dimension except heads; behind a cache, give first_query"
        raise ValueError(f"k {tuple(k.shape)} {rule}")
    check_heads(q, k, v)


def check_queries(q: Tensor, k: Tensor, v: Tensor, first_query: int) -> None:
    """Check q (B, H, M, D) at ``first_query`` against k (B, K, N, D) and v (B, K, N, Dv), else ValueError."""
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
    """Check that k (B, K, N, D) and v (B, K, N, Dv) match, and that K divides q's H, else ValueError."""
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v {tuple(v.shape)} must have the batch, heads and positions of k {tuple(k.shape)}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"k and v have {k.shape[1]} heads: their number must divide the {q.shape[1]} heads of q")


def resolve_scale(q: Tensor, scale: float | None) -> float:
    """Return the factor of the scores, by default 1/sqrt(D); ValueError if it is not finite."""
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if not math.isfinite(scale):
        raise ValueError(f"scale={scale}: must be a finite number")
    return scale


def check_tensors(named: dict[str, tuple[Tensor, str]]) -> None:
    """Check the axes, dtype and device of each tensor. Only the batch may be empty.

    Args:
        named: each tensor by name, with its axes as one letter per axis.

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


def choose_backend(name: str, choices: tuple[str, ...], tensors: tuple[Tensor, Tensor, Tensor], advice: str) -> str:
    """Choose the backend to run: the named one, or with auto the fast one of the device. There is no slower fallback.

    Args:
        name: auto, or one of ``choices``.
        choices: backends that support this call.
        tensors: q, k and v.
        advice: part of the message if auto's choice cannot run.

    Raises:
        ConfigError: the backend is unknown or cannot run here; the path is ``backend``.
    """
    if name != "auto" and name not in choices:
        raise ConfigError.at("backend", name, f"must be one of auto, {', '.join(choices)}")
    chosen = name if name != "auto" else "triton" if tensors[0].is_cuda else "cpu"
    reason = load(chosen).why_not(*tensors)
    if reason is None:
        return chosen
    if name != "auto":
        raise ConfigError.at("backend", name, f"cannot run here: {reason}")
    raise ConfigError.at("backend", name, f"{chosen} cannot run here: {reason}; {advice}")


def load(backend: str) -> ModuleType:
    """Return a backend's module.

    ``why_not`` returns the reason why it cannot run on q, k and v, or None. A backend has ``forward`` and ``backward``,
    or a differentiable ``attend``. Backends for single queries have ``prepare``.
    """
    if backend == "flex":  # imported at first use, as that takes long
        from longstride.kernels.backends import flex

        return flex
    return {"triton": triton, "cpu": cpu, "reference": reference}[backend]


def _encode(patterns: tuple[Pattern, ...]) -> str:
    """Encode patterns as text, the only form that an op accepts."""
    # torch.compile traces this, hence repr and not json.
    return repr([pattern_to_json(pattern) for pattern in patterns])


_encode_cached = lru_cache(maxsize=4096)(_encode)  # torch.compile would trace the cache


@lru_cache(maxsize=4096)
def _decode(patterns: str, context: int) -> tuple[Pattern, ...]:
    """Decode the patterns of a call over N = ``context`` positions, and compare them with their masks."""
    decoded = tuple(pattern_from_json(value) for value in ast.literal_eval(patterns))
    for pattern in dict.fromkeys(decoded):
        plan.query_views(pattern, context)
    return decoded


def _forward(
    q: Tensor, k: Tensor, v: Tensor, patterns: str, scale: float, backend: str, first_query: int | None
) -> tuple[Tensor, Tensor]:
    module, decoded = load(backend), _decode(patterns, k.shape[2])
    if first_query is None:
        return module.forward(q, k, v, decoded, scale)
    return module.selected_forward(q, k, v, _behind(decoded, q, k, first_query), scale)


def _backward(
    saved: Saved, patterns: str, scale: float, backend: str, first_query: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    module, decoded = load(backend), _decode(patterns, saved.k.shape[2])
    if first_query is None:
        return module.backward(saved, decoded, scale)
    return module.selected_backward(saved, _behind(decoded, saved.q, saved.k, first_query), scale)


def _behind(patterns: tuple[Pattern, ...], q: Tensor, k: Tensor, first_query: int) -> Selection:
    return queries_behind(patterns, q.shape[0], first_query, q.shape[2], k.shape[2], q.device)


_attention = attention_op(
    "attention", "str patterns, float scale, str backend, SymInt? first_query", _forward, _backward
)
