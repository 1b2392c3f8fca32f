"""What every backend is held against: attention in fp64, and how far rounding may take each number from it.

Letters: B batch, H heads, K heads of keys and values, N positions, R rows of queries, D width of queries and keys, Dv
width of values; s scaled scores, w weights, p = grad_out . v, delta = sum_j w p, g = p - delta + grad_lse, ds = w g.

The bounds follow from the formula, the dtype and the inputs; nothing that a machine computed enters them. A rounding
changes x by at most u max(|x|, the smallest normal number), where u is half of an epsilon: of the dtype (``narrow``) or
of the accumulator (``wide``). Rounding errors are independent and uniform. A sum of such errors, each at most a_i,
exceeds SAFETY sqrt(sum a_i^2 / 3) with a probability below 2 exp(-SAFETY^2 / 2), as a uniform number is sub-Gaussian
with its own variance (after Higham and Mary 2019, "A new approach to probabilistic rounding error analysis"). ``of_x``
is such a sum of squares for x.

- A sum of n terms t has n partial sums, each rounded in ``wide``, and in ``narrow`` where a kernel adds up parts. The
  square of one is about (sum t)^2 + sum t^2 at most, by its end and a random walk (Higham and Mary 2020, "Sharper
  probabilistic backward error analysis for basic linear algebra kernels with random data").
- An error of s or lse is a relative error of w. One of s moves out by w (v - out) and lse by w; one of lse moves dq
  by dq.
- Parts are merged by their shares of the weights. One near 1 loses its last unit, which is that of any value.
- An error of delta, which comes from w or from a rounded out, is shared by its row: it moves dq by sum_j w k.
- A kernel may round s, p, g and the factors w and ds to ``narrow``. A result is rounded last, by at most u.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longstride.kernels.attention import head_patterns, sparse_attention
from longstride.kernels.backends import accumulator_dtype
from longstride.kernels.backends.reference import pattern_mask
from longstride.kernels.patterns import PATTERNS, Pattern, pattern_from_json
from longstride.kernels.selected import selected_attention
from longstride.kernels.selections import Selection, selection_mask

Reads = Pattern | Sequence[Pattern] | Selection
Mask = Callable[[Tensor], Tensor]
RESULTS = ("out", "lse", "dq", "dk", "dv")
SAFETY = 6.0  # a bound fails by chance for less than one number in 30 million
FEW = 8  # roundings of one number beside those of sums: exp, log, scaling, merging
EXAMPLE_VALUES: dict[str, Any] = {  # of the required fields; any other gets 5
    "window": 11,
    "stride": 8,
    "summary": 2,
    "num_summaries": 3,
    "segments": [8, 24],
    "dilations": [1, 2],
    "pattern": {"type": "strided", "stride": 8},
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
    {"type": "column", "stride": 8, "align": "target"},
    {"type": "strided", "stride": 8, "align": "target"},
    {"type": "strided", "stride": 2, "num_factors": 4, "align": "target"},
    {"type": "local", "window": 5, "dilation": 4, "align": "target"},
    {"type": "longformer", "window": 5, "dilation": 4, "align": "target"},
)
TWO_SIDED: tuple[dict[str, object], ...] = (  # all with "causal": false
    {"type": "dense"},
    {"type": "local", "window": 11},
    {"type": "local", "window": 5, "dilation": 4},
    {"type": "column", "stride": 8},
    {"type": "strided", "stride": 8},
    {"type": "strided", "stride": 2, "num_factors": 4},
    {"type": "block", "stride": 8},
    {"type": "summary", "stride": 8, "summary": 2, "include_self": True},
    {"type": "fixed", "stride": 9, "summary": 2, "num_summaries": 3},
    {"type": "longformer", "window": 5, "globals": 9},
    {"type": "longformer", "window": 3, "dilation": 4, "globals": 2},
    {"type": "bigbird", "block": 4, "window": 2, "globals": 1, "random": 2, "context": 72},
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
    """The inputs of attention and of its gradient; the gradient of lse may be None."""

    q: Tensor  # (B, H, N, D)
    k: Tensor  # (B, K, N, D)
    v: Tensor  # (B, K, N, Dv)
    grad_out: Tensor  # (B, H, N, Dv)
    grad_lse: Tensor | None  # (B, H, N)


def example_of(kind: str, cls: Any) -> dict[str, Any]:
    """Return JSON of a registered class: its required fields, with values by name."""
    if dataclasses.is_dataclass(cls):
        required = [field.name for field in dataclasses.fields(cls) if field.default is dataclasses.MISSING]
    else:
        required = [name for name, field in cls.model_fields.items() if field.is_required()]
    values = {name: EXAMPLE_VALUES.get(name, 5) for name in required}
    return {**values, **EXAMPLES_OF.get(kind, {}), "type": kind}


def example_patterns() -> list[Pattern]:
    """Return one pattern of every registered type, and the variants."""
    examples = [pattern_from_json(example_of(kind, cls)) for kind, cls in PATTERNS.items()]
    return examples + [pattern_from_json(variant) for variant in VARIANTS]


def two_sided_patterns() -> list[Pattern]:
    """Return a pattern of every type that has a two-sided form, in that form."""
    return [pattern_from_json({**each, "causal": False}) for each in TWO_SIDED]


def all_patterns() -> list[Pattern]:
    """Return causal and two-sided patterns."""
    return example_patterns() + two_sided_patterns()


def heads_to_see(pattern: Pattern) -> int:
    """Return how many heads of a pattern to test in the slow interpreter: 1 if all heads read alike."""
    return 1 if pattern.for_head(0) == pattern.for_head(1) else 2


def mask_of(pattern: Pattern, context: int) -> Tensor:
    """Return the definition of a pattern as a mask, (N, N) bool."""
    position = torch.arange(context)
    return pattern.mask(position[:, None], position[None, :])


def make_inputs(shape: Shape, dtype: torch.dtype, *, seed: int = 0, grad_lse: bool = False) -> Inputs:
    """Draw normal inputs, the same on every machine."""
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
    """Compute out, lse, dq, dk and dv of ``attend(q, k, v) -> (out, lse)`` on a device; results are on the CPU."""
    inputs = Inputs(*(t if t is None else t.to(device) for t in inputs))  # type: ignore[arg-type]
    leaves = [t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
    out, lse = attend(*leaves)
    outputs, grads = [out], [inputs.grad_out.to(out.dtype)]
    if inputs.grad_lse is not None:
        outputs, grads = [out, lse], [*grads, inputs.grad_lse.to(lse.dtype)]
    gradients = torch.autograd.grad(outputs, leaves, grads)
    return {name: t.cpu() for name, t in zip(RESULTS, (out.detach(), lse.detach(), *gradients), strict=True)}


def exact(inputs: Inputs, reads: Reads, scale: float | None = None) -> dict[str, Tensor]:
    """Compute all results by the specification in fp64."""
    wide = Inputs(*(t if t is None else t.double() for t in inputs))  # type: ignore[arg-type]
    if isinstance(reads, Selection):
        attend: Callable[..., Any] = selected_attention
    else:
        attend = sparse_attention
    return attention_and_gradients(
        lambda q, k, v: attend(q, k, v, reads, scale=scale, backend="reference", return_lse=True), wide
    )


def allowed_by(reads: Reads, heads: int, context: int) -> Tensor:
    """Return the mask (H, N, N) or (B, H, N, N) of a pattern, of patterns by head, or of a selection."""
    if isinstance(reads, Selection):
        return selection_mask(reads, context)
    return pattern_mask(head_patterns(reads, heads), context, torch.device("cpu"))


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
    """Assert that a backend's forward, logsumexp and gradients are within their bounds.

    Returns:
        The largest share of its bound for each result.
    """
    inputs = make_inputs(shape, dtype, seed=seed, grad_lse=grad_lse) if inputs is None else inputs
    results = attention_and_gradients(
        lambda q, k, v: sparse_attention(q, k, v, pattern, scale=scale, backend=backend, return_lse=True),
        inputs,
        device,
    )
    return assert_within_precision(results, inputs, pattern, scale)


def assert_within_precision(
    results: dict[str, Tensor], inputs: Inputs, reads: Reads | Mask, scale: float | None = None
) -> dict[str, float]:
    """Assert that rounding explains how far results are from fp64; return the largest share of its bound for each."""
    bounds = expected(inputs, reads, scale)
    return {name: assert_explained(name, results[name], bounds[name], reads) for name in RESULTS}


class Expected(NamedTuple):
    """An exact result, and how far rounding may take it from there."""

    exact: Tensor  # fp64
    bound: Tensor  # fp64, of each number
    dtype: torch.dtype

    def at(self, rows: Any) -> Expected:
        """Select some rows."""
        return self._replace(exact=self.exact[:, :, rows], bound=self.bound[:, :, rows])

    def share(self, result: Tensor) -> float:
        """Return the largest ratio of an error to its bound; inf for NaN or a wrong infinity."""
        result, infinite = result.to(self.exact.device).double(), self.exact.isinf()
        error = (result - self.exact)[~infinite].abs()
        if error.isnan().any() or not torch.equal(result[infinite], self.exact[infinite]):
            return math.inf
        return float(torch.where(error == 0, 0.0, error / self.bound[~infinite]).amax()) if error.numel() else 0.0


def assert_explained(name: str, result: Tensor, expectation: Expected, reads: Reads | Mask) -> float:
    """Assert that rounding explains how far each number is from fp64; return the largest share of its bound."""
    assert result.dtype == expectation.dtype, f"{name} is {result.dtype}, not {expectation.dtype}"
    assert result.shape == expectation.exact.shape, f"{name} is {tuple(result.shape)}"
    share = expectation.share(result)
    assert share <= 1, f"{name} is off by {share:.3g} times what rounding explains: {reads} {expectation.dtype}"
    return share


def expected(inputs: Inputs, reads: Reads | Mask, scale: float | None = None, rows: int = 1_024) -> dict[str, Expected]:
    """Return all results and their bounds, computed where the inputs lie, so many rows of queries at a time.

    Args:
        inputs: q, grad_out and grad_lse may be of some queries alone; ``reads`` is a mask then.
        reads: patterns or a selection; or a function from numbers of rows (R,) to their mask (H, R, N) or (B, H, R, N).
    """
    dtype, heads, shared = inputs.q.dtype, inputs.q.shape[1], inputs.k.shape[1]
    factor = inputs.q.shape[3] ** -0.5 if scale is None else scale
    if not callable(reads):
        reads = partial(allowed_by(reads, heads, inputs.k.shape[2]).to(inputs.q.device).index_select, -2)
    q, k, v, grad_out = (t.double().repeat_interleave(heads // t.shape[1], 1) for t in inputs[:4])
    grad_lse = q.new_zeros(q.shape[:3]) if inputs.grad_lse is None else inputs.grad_lse.double()
    roundings, by_rows, sums = _Roundings.of_dtype(dtype), [], [q.new_zeros(())] * 7
    for some in torch.arange(q.shape[2], device=q.device).split(rows):
        rows_of_inputs = Inputs(q[:, :, some], k, v, grad_out[:, :, some], grad_lse[:, :, some, None])
        allowed = reads(some).expand(*q.shape[:2], -1, -1)
        outputs, added = _of_rows(rows_of_inputs, allowed, factor, roundings)
        by_rows.append(outputs)
        sums = [total + term for total, term in zip(sums, added, strict=True)]
    pairs = [[torch.cat(x, 2) for x in zip(*pair, strict=True)] for pair in zip(*by_rows, strict=True)]
    count, *sums = (total.unflatten(1, (shared, -1)).sum(2) for total in sums)
    for total, squares, variance in (sums[:3], sums[3:]):
        pairs.append([total, variance + roundings.of_sum(count, total, squares)])
    results = {}
    for name, (exact, variance) in zip(RESULTS, pairs, strict=True):
        bound = SAFETY * (variance / 3).sqrt()
        if name == "lse":
            results[name] = Expected(exact.squeeze(-1), bound.squeeze(-1), accumulator_dtype(dtype))
        else:
            results[name] = Expected(exact, bound + roundings.once(exact**2).sqrt(), dtype)
    if dtype == torch.float64:  # the exact results are rounded as well
        results = {name: result._replace(bound=2 * result.bound) for name, result in results.items()}
    return results


class _Roundings(NamedTuple):
    """Squares of errors, from squares of numbers."""

    narrow: float  # half of the dtype's epsilon
    wide: float  # of the accumulator's
    smallest: float  # normal number of the dtype

    @classmethod
    def of_dtype(cls, dtype: torch.dtype) -> _Roundings:
        narrow, wide = (torch.finfo(x) for x in (dtype, accumulator_dtype(dtype)))
        return cls(narrow.eps / 2, wide.eps / 2, narrow.smallest_normal)

    def once(self, square: Tensor, unit: float = 1.0) -> Tensor:
        """Return that of a number rounded to ``narrow`` in this unit."""
        return self.narrow**2 * square.clamp_min((unit * self.smallest) ** 2)

    def of_sum(self, count: Tensor | int, total: Tensor, squares: Tensor) -> Tensor:
        """Return that of a sum of so many terms, from its end and the sum of the squares of its terms."""
        partial_sums = total**2 + squares
        return self.once(partial_sums) + (count + FEW) * self.wide**2 * partial_sums


def _of_rows(
    inputs: Inputs, allowed: Tensor, factor: float, roundings: _Roundings
) -> tuple[list[tuple[Tensor, Tensor]], list[Tensor]]:
    """Compute what some rows give: out, lse and dq with their variances; and their share in the sums of keys.

    These are the number of queries that read a key, and for each of dk and dv the sum, the sum of the squares of its
    terms, and that of the squares of their errors.
    """
    (q, k, v, grad_out, grad_lse), wide = inputs, roundings.wide**2
    assert grad_lse is not None
    reading = allowed.sum(-1, keepdim=True)  # keys of a query
    s = factor * (q @ k.mT)
    bare = s.masked_fill(~allowed, -torch.inf)
    lse = torch.logsumexp(bare, -1, keepdim=True)
    shift = lse.masked_fill(reading == 0, 0.0)  # of exponents; a product may be accumulated onto it
    w = (bare - shift).exp()
    w2, out = w**2, w @ v
    of_s = roundings.of_sum(q.shape[3], s, factor**2 * (q**2 @ (k**2).mT)) + wide * (q.shape[3] + FEW) * (1 + shift**2)
    moved = w2 * of_s
    of_lse = moved.sum(-1, keepdim=True) + wide * (reading + FEW * (1 + shift**2))
    of_w = roundings.once(w2) * allowed
    of_share = wide * (v**2).amax(-2, keepdim=True)
    of_out = (
        (moved @ v**2 - 2 * out * (moved @ v) + out**2 * moved.sum(-1, keepdim=True)).clamp_min(0.0)
        + of_w @ v**2
        + roundings.of_sum(reading, out, w2 @ v**2)
        + of_share
    )

    p = grad_out @ v.mT
    delta = (w * p).sum(-1, keepdim=True)
    g = p - delta + grad_lse
    around = delta**2 + grad_lse**2  # a product may be accumulated onto these, too
    of_p = roundings.of_sum(v.shape[3], p, grad_out**2 @ (v**2).mT) + wide * (v.shape[3] + FEW) * around
    of_g = of_p + roundings.once(g**2)
    products = grad_out**2 * out**2
    of_delta = (
        (moved * (p - delta) ** 2 + of_w * p**2 + w2 * of_p).sum(-1, keepdim=True)
        + (grad_out**2 * (roundings.once(out**2) + of_share)).sum(-1, keepdim=True)
        + wide * (reading + v.shape[3] + FEW) * (delta**2 + products.sum(-1, keepdim=True))
    )
    ds = factor * w * g
    ds2, coupling = ds**2, factor**2 * w2
    of_ds = coupling * of_g + ds2 * of_s + roundings.once(ds2, max(1.0, abs(factor))) * allowed
    dq = ds @ k
    of_dq = of_ds @ k**2 + of_delta * (factor * w @ k) ** 2 + of_lse * dq**2 + roundings.of_sum(reading, dq, ds2 @ k**2)
    of_dk = (of_ds + coupling * of_delta + ds2 * of_lse).mT @ q**2
    of_dv = (moved + w2 * of_lse + of_w).mT @ grad_out**2
    sums = [ds.mT @ q, ds2.mT @ q**2, of_dk, w.mT @ grad_out, w2.mT @ grad_out**2, of_dv]
    return [(out, of_out), (lse, of_lse), (dq, of_dq)], [allowed.sum(-2).unsqueeze(-1), *sums]
