"""Comparisons for all checks.

Two ways to compute a number in fp64 differ in the order of sums: of a few hundred terms, through a few layers. Each
term adds a relative error below 2⁻⁵². ``BOUND`` allows 2¹² such errors, relative to the largest number of a tensor, or
to 1, the size of the terms, if they cancel.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

BOUND = 2.0**-40
SAFETY = 8.0  # allows 64 roundings per input, as independent errors grow with the square root of their number


class ConformanceError(AssertionError):
    """A part lacks a property that it must have."""


class UndeclaredError(Exception):
    """A part does not declare an optional ability; the message names the part."""


def require(holds: bool, message: str) -> None:
    """Raise ConformanceError with this message unless the condition holds."""
    if not holds:
        raise ConformanceError(message)


def require_close(what: str, computed: Tensor, expected: Tensor, bound: float = BOUND) -> None:
    """Require that two tensors are equal up to ``bound`` times the largest expected number, or 1."""
    require(computed.shape == expected.shape, f"{what} {tuple(computed.shape)} must be {tuple(expected.shape)}")
    finite = expected.isfinite()
    require_equal(f"{what}: infinite numbers", computed[~finite], expected[~finite])
    computed, expected = (tensor.detach()[finite].double() for tensor in (computed, expected))
    if expected.numel():
        error, largest = float((computed - expected).abs().max()), float(expected.abs().max())
        require(error <= bound * max(largest, 1.0), f"{what}: differs by {error:.3g}, the largest is {largest:.3g}")


def require_equal(what: str, computed: Tensor, expected: Tensor) -> None:
    """Require that two tensors have equal bits."""
    require(torch.equal(computed, expected), f"{what}: bits differ")


def require_rounding_explains(
    what: str, computed: Tensor, exact: Callable[[list[Tensor]], Tensor], inputs: list[Tensor], dtype: torch.dtype
) -> None:
    """Require that the rounding of inputs to a dtype explains an error.

    The exact result is computed twice in fp64: from the inputs, and from inputs moved at random by up to one rounding.
    Their distance is the error that one rounding of each input explains. It counts as at least one rounding of 1.

    Args:
        computed: from inputs in ``dtype``.
        exact: computes the same in fp64.
        inputs: in ``dtype``.
    """
    generator, unit = torch.Generator().manual_seed(0), torch.finfo(dtype).eps / 2
    plain = [tensor.detach().double() for tensor in inputs]
    moved = [x * (1 + unit * (2 * torch.rand(x.shape, generator=generator, dtype=x.dtype) - 1)) for x in plain]
    expected = exact(plain).detach()
    finite = expected.isfinite()
    error, explained = (
        float((result.detach().double() - expected)[finite].square().mean().sqrt())
        for result in (computed, exact(moved))
    )
    explained = max(explained, unit)
    rule = f"off by {error:.3g}, where rounding each number once explains {explained:.3g}"
    require(error <= SAFETY * explained, f"{what} in {dtype} is {rule}")
