"""What every backend is held against: attention in fp64, and the error that its own precision explains.

Letters: B batch, H heads, K heads of keys and values, N positions, D width of queries and keys, Dv width of values.

A result passes where the root of its mean squared error against fp64 is at most twice that of the same computation
done densely in the dtype itself (``dense_same_precision``). Where that error happens to be 0 (one key a query, say), a
few units in the last place of the accumulator, at the largest intermediate, take its place. Single numbers are held to
four times the largest dense error or those same few units: extremes of a few thousand numbers scatter, and in rows of
few keys softmax's own backward cancels what no backward from a stored output and logsumexp can.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longstride.kernels.attention import head_patterns, sparse_attention
from longstride.kernels.backends import accumulator_dtype
from longstride.kernels.backends.reference import pattern_mask
from longstride.kernels.forms import intervals_of, positions_of
from longstride.kernels.patterns import PATTERNS, Pattern, pattern_from_json
from longstride.kernels.selected import selected_attention
from longstride.kernels.selections import Selection, selection_mask

Reads = Pattern | Sequence[Pattern] | Selection
RESULTS = ("out", "lse", "dq", "dk", "dv")
MEAN_RATIO = 2.0  # of the same-precision error
LARGEST_RATIO = 4.0
ULPS = 4  # where the same-precision error is 0
EXAMPLE_VALUES: dict[str, Any] = {  # of the required fields; any other gets 5
    "window": 11,
    "stride": 8,
    "summary": 2,
    "num_summaries": 3,
    "segments": [8, 24],
    "dilations": [1, 2],
}
EXAMPLES_OF = {"bigbird": {"block": 4, "window": 2, "globals": 1, "random": 2}}  # where they mean something else
VARIANTS: tuple[dict[str, object], ...] = (  # what the required fields alone do not reach
    {"type": "local", "window": 1},
    {"type": "column", "stride": 1},
    {"type": "strided", "stride": 8, "span": "paper"},
    {"type": "summary", "stride": 8, "summary": 2, "include_self": True},
    {"type": "summary", "stride": 9, "summary": 2, "num_summaries": 3},
    {"type": "fixed", "stride": 8, "summary": 8},
    {"type": "fixed", "stride": 9, "summary": 2, "num_summaries": 3},
    {"type": "local", "window": 5, "dilation": 4},
    {"type": "strided", "stride": 2, "num_factors": 4},
    {"type": "longformer", "window": 5, "dilation": 4},
)


class Shape(NamedTuple):
    """The sizes of one case."""

    batch: int
    heads: int
    context: int
    width: int
    value_width: int
    key_heads: int | None = None  # of k and v, where they are fewer than q's


class Inputs(NamedTuple):
    """What attention and its gradient are computed from; the gradient of lse may be None."""

    q: Tensor  # (B, H, N, D)
    k: Tensor  # (B, K, N, D)
    v: Tensor  # (B, K, N, Dv)
    grad_out: Tensor  # (B, H, N, Dv)
    grad_lse: Tensor | None  # (B, H, N)


def example_patterns() -> list[Pattern]:
    """One pattern of every registered type, found through the registry, and the variants."""
    examples: list[Pattern] = []
    for name, cls in PATTERNS.items():
        required = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]
        values = {field: EXAMPLE_VALUES.get(field, 5) for field in required}
        examples.append(pattern_from_json({"type": name, **values, **EXAMPLES_OF.get(name, {})}))
    return examples + [pattern_from_json(variant) for variant in VARIANTS]


def heads_to_see(pattern: Pattern) -> int:
    """How many heads the slow interpreter is given of a pattern: 1 where all read alike."""
    return 1 if pattern.for_head(0) == pattern.for_head(1) else 2


def mask_of(pattern: Pattern, context: int) -> Tensor:
    """(N, N) bool: the definition."""
    position = torch.arange(context)
    return pattern.mask(position[:, None], position[None, :])


def assert_parts_are_the_mask(pattern: Pattern, context: int) -> None:
    """Assert that the parts of a head's pattern are disjoint and make it up, each by intervals in its own orders."""
    natural = torch.arange(context)
    union = torch.zeros(context, context, dtype=torch.bool)
    for part in pattern.parts():
        mask = part.mask(natural[:, None], natural[None, :])
        assert not (union & mask).any(), f"{part} holds pairs of an earlier part"
        union |= mask
        query_order, key_order = positions_of(part.query_order(context)), positions_of(part.key_order(context))
        query_order = natural if query_order is None else query_order
        key_order = natural if key_order is None else key_order
        low, high = intervals_of(part.by_query(context))
        column = torch.arange(len(key_order))
        inside = (column >= low[:, None]) & (column < high[:, None])
        assert torch.equal(query_order.sort().values, natural)
        assert len(key_order.unique()) == len(key_order)
        assert bool((low <= high).all() and (low.diff() >= 0).all() and (high.diff() >= 0).all()), part
        assert torch.equal(inside, mask[query_order][:, key_order]), part
        assert int(mask.sum()) == int(inside.sum()), "a key was left out"
        by_key = part.by_key(context)
        if by_key is not None:
            low, high = by_key(torch.arange(len(key_order)))
            assert torch.equal((natural >= low[:, None]) & (natural < high[:, None]), inside.T)
    assert torch.equal(union, mask_of(pattern, context)), pattern


def make_inputs(shape: Shape, dtype: torch.dtype, *, seed: int = 0, grad_lse: bool = False) -> Inputs:
    """Normal inputs, the same on every machine."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    lead = (shape.batch, shape.heads, shape.context)
    shared = (shape.batch, shape.key_heads or shape.heads, shape.context)
    q, k = (normal(*sizes, shape.width).to(dtype) for sizes in (lead, shared))
    v, grad_out = (normal(*sizes, shape.value_width).to(dtype) for sizes in (shared, lead))
    return Inputs(q, k, v, grad_out, normal(*lead).to(accumulator_dtype(dtype)) if grad_lse else None)


def attention_and_gradients(
    attend: Callable[..., tuple[Tensor, Tensor]], inputs: Inputs, device: str = "cpu"
) -> dict[str, Tensor]:
    """out, lse, dq, dk and dv of ``attend(q, k, v) -> (out, lse)`` on a device; results are on the CPU."""
    inputs = Inputs(*(t if t is None else t.to(device) for t in inputs))
    leaves = [t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
    out, lse = attend(*leaves)
    outputs, grads = [out], [inputs.grad_out.to(out.dtype)]
    if inputs.grad_lse is not None:
        outputs, grads = [out, lse], [*grads, inputs.grad_lse.to(lse.dtype)]
    found = torch.autograd.grad(outputs, leaves, grads)
    return {name: t.cpu() for name, t in zip(RESULTS, (out.detach(), lse.detach(), *found), strict=True)}


def exact(inputs: Inputs, reads: Reads, scale: float | None = None) -> dict[str, Tensor]:
    """All results by the specification in fp64."""
    wide = Inputs(*(t if t is None else t.double() for t in inputs))
    if isinstance(reads, Selection):
        attend: Callable[..., Any] = selected_attention
    else:
        attend = sparse_attention
    return attention_and_gradients(
        lambda q, k, v: attend(q, k, v, reads, scale=scale, backend="reference", return_lse=True), wide
    )


def allowed_by(reads: Reads, heads: int, context: int) -> Tensor:
    """The mask (H, N, N) or (B, H, N, N) of a pattern, one a head, or a selection."""
    if isinstance(reads, Selection):
        return selection_mask(reads, context)
    return pattern_mask(head_patterns(reads, heads), context, torch.device("cpu"))


def dense_same_precision(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """What a plain dense layer computes in this dtype: products in the dtype, softmax in fp32, weights rounded."""
    blind = ~allowed.any(-1, keepdim=True)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2)).to(accumulator_dtype(q.dtype)) * scale
    scores = scores.masked_fill(~allowed, float("-inf")).masked_fill(blind, 0.0)
    weights = torch.softmax(scores, -1).masked_fill(blind, 0.0)
    lse = torch.logsumexp(scores, -1).masked_fill(blind.squeeze(-1), float("-inf"))
    return weights.to(v.dtype) @ v, lse


def check_against_reference(
    backend: str,
    pattern: Pattern | Sequence[Pattern],
    dtype: torch.dtype,
    shape: Shape,
    *,
    scale: float | None = None,
    seed: int = 0,
    grad_lse: bool = False,
    inputs: Inputs | None = None,
    device: str = "cpu",
) -> dict[str, float]:
    """Assert that a backend's forward, logsumexp and gradients pass; their mean errors over the same-precision ones."""
    inputs = make_inputs(shape, dtype, seed=seed, grad_lse=grad_lse) if inputs is None else inputs
    found = attention_and_gradients(
        lambda q, k, v: sparse_attention(q, k, v, pattern, scale=scale, backend=backend, return_lse=True),
        inputs,
        device,
    )
    return assert_within_precision(found, inputs, pattern, scale)


def assert_within_precision(
    found: dict[str, Tensor], inputs: Inputs, reads: Reads, scale: float | None = None
) -> dict[str, float]:
    """Assert that results are within their precision of fp64; their mean errors over the same-precision ones."""
    factor = inputs.q.shape[-1] ** -0.5 if scale is None else scale
    allowed = allowed_by(reads, *inputs.q.shape[1:3])
    wanted = exact(inputs, reads, scale)
    dense = attention_and_gradients(lambda q, k, v: dense_same_precision(q, k, v, allowed, factor), inputs)
    magnitude = magnitudes(inputs, factor)
    where = f"{reads} {inputs.q.dtype}"
    return {
        name: assert_explained(name, found[name], dense[name], wanted[name], magnitude[name], inputs.q.dtype, where)
        for name in RESULTS
    }


def assert_explained(
    name: str, found: Tensor, dense: Tensor, wanted: Tensor, magnitude: float, dtype: torch.dtype, where: str
) -> float:
    """Assert that one result is within its precision: its mean error over that of ``dense``, computed in this dtype.

    ``wanted`` is exact; ``magnitude`` is that of the largest intermediate; ``where`` names the case.
    """
    assert found.dtype == dense.dtype, f"{name} is {found.dtype}, not {dense.dtype}"
    assert found.shape == wanted.shape, f"{name} is {tuple(found.shape)}"
    error, explained = (_errors(result, wanted, name) for result in (found, dense))
    floor = ULPS * torch.finfo(accumulator_dtype(dtype)).eps * magnitude
    # In fp64 the specification has an error of its own, which the dense computation repeats step by step.
    floored = explained.mean == 0 or dtype == torch.float64
    mean_limit = max(MEAN_RATIO * explained.mean, floor if floored else 0.0)
    largest_limit = max(LARGEST_RATIO * explained.largest, floor)
    assert error.mean <= mean_limit, f"{name} is off by {error.mean:.3g}, {mean_limit:.3g} allowed: {where}"
    assert error.largest <= largest_limit, (
        f"{name} is off by up to {error.largest:.3g}, {largest_limit:.3g} allowed: {where}"
    )
    return error.mean / explained.mean if explained.mean else 0.0


class _Error(NamedTuple):
    mean: float  # root of the mean square
    largest: float


def _errors(found: Tensor, wanted: Tensor, name: str) -> _Error:
    """Absolute differences; infinities must agree, and nothing may be NaN."""
    found = found.double()
    assert not bool(found.isnan().any()), f"{name} holds NaN"
    infinite = wanted.isinf()
    assert torch.equal(found[infinite], wanted[infinite]), f"{name} differs in its infinities"
    difference = (found - wanted)[~infinite].abs()
    if difference.numel() == 0:
        return _Error(0.0, 0.0)
    return _Error(float(difference.square().mean().sqrt()), float(difference.max()))


def magnitudes(inputs: Inputs, scale: float) -> dict[str, float]:
    """The largest intermediate behind each result: what rounding is relative to where terms cancel."""
    q, k, v, grad_out = (t.double().repeat_interleave(len(inputs.q[0]) // t.shape[1], 1) for t in inputs[:4])
    gradient = float((grad_out.abs() @ v.abs().transpose(-1, -2)).max())  # of a weight
    if inputs.grad_lse is not None:
        gradient += float(inputs.grad_lse.abs().max())
    exponent = float((q.abs() @ k.abs().transpose(-1, -2)).max()) * abs(scale)  # whose rounding a weight multiplies
    return {
        "out": float(v.abs().max()),
        "lse": exponent,
        "dq": gradient * float(k.abs().max()) * abs(scale),
        "dk": gradient * float(q.abs().max()) * abs(scale),
        "dv": float(grad_out.abs().max()) * max(1.0, exponent),
    }
