"""The attention weights of a model that runs, for some queries: exact, by hooks that change nothing.

The softmax runs over a query's allowed keys, from the model's own queries and keys and each head's own pattern.

Letters: H heads, N positions, P queries that are asked for, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longstride.kernels.patterns import Pattern
from longstride.sparse_model import Attention, SparseTransformer

SCORES_IN_WORK = 1 << 24  # at once: P queries are taken so many at a time
Keep = Callable[[np.ndarray], np.ndarray]  # what is kept of some rows (p, N) float64


def attention_rows(
    model: SparseTransformer,
    tokens: Tensor,
    queries: Sequence[int],
    *,
    layers: Sequence[int],
    head: int | None = None,
    keep: Keep = np.asarray,
) -> dict[int, np.ndarray]:
    """The weights of some queries in some layers while the model reads one context.

    Args:
        model: in evaluation mode.
        tokens: (N,) bytes of the context.
        queries: P positions.
        layers: which layers, by number.
        head: one head; None is the mean over all that have a key for the query.
        keep: what is kept of each row, such as its sums over bins of keys: O(P x N) rows are never held at once.

    Returns:
        For each layer what was kept of its rows, (P, …) float64. A row sums to 1, or to 0 where a query has no key.
    """
    found: dict[int, np.ndarray] = {}
    with ExitStack() as hooks, torch.no_grad():
        for layer in layers:
            attention: Any = model.blocks[layer].attention

            def take(_: Any, __: Any, output: Tensor, layer: int = layer, attention: Attention = attention) -> None:
                found[layer] = _rows_of(attention, output, queries, head, keep)

            hooks.callback(attention.query_key_value.register_forward_hook(take).remove)
        model(tokens[None], return_nats=True)  # without the logits of the whole context
    return found


def _rows_of(
    attention: Attention, query_key_value: Tensor, queries: Sequence[int], head: int | None, keep: Keep
) -> np.ndarray:
    """What is kept of a layer's rows, from what its projection gave, (1, N, channels)."""
    widths = attention.widths
    q, k = (part.unflatten(-1, (attention.heads, -1))[0] for part in query_key_value.split(widths, dim=-1)[:2])
    heads = range(attention.heads) if head is None else [head]
    count = max(1, SCORES_IN_WORK // len(k))
    kept = []
    for start in range(0, len(queries), count):
        rows = torch.tensor(queries[start : start + count], device=k.device)
        total = torch.zeros(len(rows), len(k), dtype=torch.float64, device=k.device)
        seeing = torch.zeros(len(rows), 1, device=k.device)  # heads that have a key for the query
        for each in heads:
            weights = _weights(q[rows, each], k[:, each], attention.patterns[each], rows)
            total += weights
            seeing += weights.any(-1, keepdim=True)
        kept.append(keep((total / seeing.clamp_min(1)).cpu().numpy()))
    return np.concatenate(kept)


def _weights(q: Tensor, k: Tensor, pattern: Pattern, rows: Tensor) -> Tensor:
    """(P, D), (N, D), and the position of each query (P,) to the weights of one head: (P, N) float64."""
    allowed = pattern.mask(rows[:, None], torch.arange(len(k), device=k.device))
    scores = (q.double() @ k.double().T) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~allowed, float("-inf"))
    return torch.softmax(scores, -1).masked_fill(~allowed, 0.0)  # a query without keys has a softmax of NaN
