"""Comparisons that all checks share.

Two ways to compute one number in fp64 differ by the order of sums: of a few hundred terms, through a few layers. Each
sum is off by less than 2⁻⁵² of its terms for each of them. ``BOUND`` leaves 2¹² such steps, relative to the largest
number of a tensor, or to 1, the size of the terms, where they cancel.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

BOUND = 2.0**-40
SAFETY = 8.0  # up to 64 roundings for each number that is read: independent errors add up by their root


class ConformanceError(AssertionError):
    """A property that a part must have and does not have."""


class UndeclaredError(Exception):
    """An optional ability that a part does not declare; the message names the part."""


def require(holds: bool, message: str) -> None:
    """Raise ConformanceError with this message unless the condition holds."""
    if not holds:
        raise ConformanceError(message)


def require_close(what: str, computed: Tensor, expected: Tensor, bound: float = BOUND) -> None:
    """Require that two tensors are equal up to a share of the largest number that is expected, or of 1."""
    require(computed.shape == expected.shape, f"{what} {tuple(computed.shape)} must be {tuple(expected.shape)}")
    finite = expected.isfinite()
    require_equal(f"{what}: infinite numbers", computed[~finite], expected[~finite])
    computed, expected = (each.detach()[finite].double() for each in (computed, expected))
    if expected.numel():
        error, largest = float((computed - expected).abs().max()), float(expected.abs().max())
        require(error <= bound * max(largest, 1.0), f"{what}: differs by {error:.3g}, the largest is {largest:.3g}")


def require_equal(what: str, computed: Tensor, expected: Tensor) -> None:
    """Require that two tensors have equal bits."""
    require(torch.equal(computed, expected), f"{what}: bits differ")


def require_rounding_explains(
    what: str, computed: Tensor, exact: Callable[[list[Tensor]], Tensor], inputs: list[Tensor], dtype: torch.dtype
) -> None:
    """Require that an error is as small as the rounding of inputs to this dtype makes it.

    The exact result is computed twice in fp64: from the inputs, and from inputs that are each moved at random by as
    much as one rounding moves them. Their distance is what one rounding of each input explains, at least one of 1.

    Args:
        computed: from inputs in ``dtype``.
        exact: computes the same in fp64.
        inputs: in ``dtype``.
    """
    generator, unit = torch.Generator().manual_seed(0), torch.finfo(dtype).eps / 2
    plain = [each.detach().double() for each in inputs]
    moved = [x * (1 + unit * (2 * torch.rand(x.shape, generator=generator, dtype=x.dtype) - 1)) for x in plain]
    expected = exact(plain).detach()
    finite = expected.isfinite()
    error, explained = (
        float((other.detach().double() - expected)[finite].square().mean().sqrt()) for other in (computed, exact(moved))
    )
    explained = max(explained, unit)
    rule = f"off by {error:.3g}, where rounding each number once explains {explained:.3g}"
    require(error <= SAFETY * explained, f"{what} in {dtype} is {rule}")
