"""Checks of a pattern: its mask defines it, and its parts, kernels and cached steps agree with the mask.

Letters: N positions, H heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from longstride.kernels import ConfigError, attend_one, sparse_attention
from longstride.kernels.forms import intervals_of, positions_of
from longstride.kernels.patterns import Pattern, PatternPart, declares_causal
from longstride.testing.comparisons import require, require_close, require_rounding_explains

HEADS, WIDTH = 3, 4
SHORT = tuple(range(1, 65))
LONG = (97, 127, 128, 255)
LONGEST = 1023


def mask_of(pattern: Pattern | PatternPart, context: int) -> Tensor:
    """Return the mask (N, N) bool of a context."""
    position = torch.arange(context)
    return pattern.mask(position[:, None], position[None, :]).expand(context, context)


def _heads(pattern: Pattern) -> list[Pattern]:
    """List the distinct patterns of some heads."""
    return list(dict.fromkeys(pattern.for_head(head) for head in range(HEADS)))


def values(pattern: Pattern) -> None:
    """Check that a pattern, its heads' patterns and its factors are patterns and hashable values."""
    for item in (pattern, *_heads(pattern), *pattern.factors()):
        require(isinstance(item, Pattern), f"{item} is not a Pattern")
        require(hash(item) == hash(item) and item == item, f"{item} must be a hashable value")
        require(item.for_head(1).for_head(1) == item.for_head(1), f"{item}: for_head changes a pattern of a head")


def mask(pattern: Pattern) -> None:
    """Check that masks are bool, read no later position unless declared, and repeat by the pattern's period."""
    for context in (*SHORT, *LONG):
        for head_pattern in _heads(pattern):
            allowed = mask_of(head_pattern, context)
            require(allowed.dtype == torch.bool, f"mask is {allowed.dtype}, not bool")
            later = allowed.triu(1).nonzero()
            if len(later) and declares_causal(head_pattern):
                query, key = later[0].tolist()
                require(False, f"position {query} reads the later position {key}, in {context}")
            period = head_pattern.period()
            if period is not None and period < context:
                repeated = torch.equal(allowed[period:, period:], allowed[:-period, :-period])
                require(repeated, f"the mask does not repeat by period={period}, in {context}")


def parts(pattern: Pattern) -> None:
    """Check that parts are disjoint, and that intervals in their orders make up the mask."""
    for context in (*SHORT, *LONG):
        for head_pattern in _heads(pattern):
            require_parts_make_the_mask(head_pattern, context)


def require_parts_make_the_mask(pattern: Pattern, context: int) -> None:
    """Require that the parts of a head's pattern make up its mask, each by intervals in its own orders."""
    natural = torch.arange(context)
    union = torch.zeros(context, context, dtype=torch.bool)
    for part in pattern.parts():
        where = f"{part} in {context}"
        allowed = mask_of(part, context)
        require(not (union & allowed).any(), f"{where}: holds pairs of an earlier part")
        union |= allowed
        query_order, key_order = positions_of(part.query_order(context)), positions_of(part.key_order(context))
        query_order = natural if query_order is None else query_order
        key_order = natural if key_order is None else key_order
        low, high = intervals_of(part.by_query(context))
        column = torch.arange(len(key_order))
        inside = (column >= low[:, None]) & (column < high[:, None])
        require(torch.equal(query_order.sort().values, natural), f"{where}: query_order is no permutation")
        require(len(key_order.unique()) == len(key_order), f"{where}: key_order repeats a key")
        ascends = bool((low <= high).all() and (low.diff() >= 0).all() and (high.diff() >= 0).all())
        require(ascends, f"{where}: bounds of by_query must not decrease")
        agrees = torch.equal(inside, allowed[query_order][:, key_order]) and int(allowed.sum()) == int(inside.sum())
        require(agrees, f"{where}: by_query and the orders disagree with mask")
        by_key = part.by_key(context)
        if by_key is not None:
            low, high = by_key(torch.arange(len(key_order)))
            by_keys = (natural >= low[:, None]) & (natural < high[:, None])
            require(torch.equal(by_keys, inside.T), f"{where}: by_key disagrees with by_query")
    require(torch.equal(union, mask_of(pattern, context)), f"{pattern} in {context}: the parts are not the mask")


def _inputs(context: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return q, k, v and the gradient of the output, (1, H, N, D) each."""
    generator = torch.Generator().manual_seed(context)
    size = (4, 1, HEADS, context, WIDTH)
    return list(torch.randn(size, generator=generator, dtype=torch.float64).to(dtype))


def _results(pattern: Pattern, inputs: list[Tensor], backend: str) -> dict[str, Tensor]:
    """Return the output, its logsumexp and all gradients."""
    q, k, v, grad_out = inputs
    q, k, v = (tensor.detach().requires_grad_() for tensor in (q, k, v))
    out, lse = sparse_attention(q, k, v, pattern, backend=backend, return_lse=True)
    gradients = torch.autograd.grad(out, (q, k, v), grad_out)
    return dict(zip(("output", "logsumexp", "dq", "dk", "dv"), (out, lse, *gradients), strict=True))


def lengths(pattern: Pattern) -> None:
    """Check attention and its gradients against masked dense attention, for lengths of all remainders."""
    for context in (*SHORT, *LONG, LONGEST):
        inputs = _inputs(context)
        expected = _results(pattern, inputs, "reference")
        for name, computed in _results(pattern, inputs, "auto").items():
            require_close(f"{name} of {context} positions", computed, expected[name])


def precision(pattern: Pattern) -> None:
    """Check that rounding explains the errors in fp32, bf16 and fp16."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        inputs = _inputs(53, dtype)
        for name, computed in _results(pattern, inputs, "auto").items():

            def exact(moved: list[Tensor], name: str = name) -> Tensor:
                return _results(pattern, moved, "reference")[name]

            require_rounding_explains(name, computed, exact, inputs, dtype)


def cache(pattern: Pattern) -> None:
    """Check that single queries give the rows of a full forward pass, and read no later rows of a cache.

    A pattern that reads later positions has no cache.
    """
    if not declares_causal(pattern):
        return
    for context in (7, 40, 53):
        q, k, v, _ = _inputs(context)
        expected = sparse_attention(q, k, v, pattern)
        later = torch.arange(context)[:, None]
        for position in range(context):
            known_k, known_v = (x.masked_fill(later > position, torch.nan) for x in (k, v))
            row = attend_one(q[:, :, position], known_k, known_v, pattern, position)
            require_close(f"position {position} of {context}", row, expected[:, :, position])


def refusals(pattern: Pattern) -> None:
    """Check that a context is either accepted or refused by a ConfigError with a message."""
    for context in SHORT:
        try:
            pattern.check(context)
        except ConfigError as error:
            require(bool(str(error)), "check must say what is wrong")


PATTERN_PROPERTIES: dict[str, Callable[[Pattern], None]] = {
    "values": values,
    "mask": mask,
    "parts": parts,
    "lengths": lengths,
    "precision": precision,
    "cache": cache,
    "refusals": refusals,
}
