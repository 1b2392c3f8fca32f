"""Stochastic arithmetic: the effect of rounding in a dtype, from a formula in fp64 with random errors.

A formula without bounds of its own (``oracles`` has those of attention) takes its tolerance from here, and not from an
error that some processor made. In fp64 each operation's result is changed at random by as much as rounding would change
it (Parker 1997, "Monte Carlo arithmetic"). Factors of matrix products and their results are in the dtype, everything
else is in its accumulator's dtype.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from longstride.kernels.backends import accumulator_dtype

SAFETY = 2.0  # times the root mean square of many numbers
PRODUCTS = {"mm", "bmm", "addmm", "baddbmm"}


class Roundings(TorchDispatchMode):
    """Change every fp64 result of an operation by a uniform error of the size of its rounding."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.generator = dtype, torch.Generator().manual_seed(0)
        self.narrow, self.wide = (torch.finfo(x).eps / 2 for x in (dtype, accumulator_dtype(dtype)))

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = op.overloadpacket.__name__, kwargs or {}
        if name in PRODUCTS:
            factors = [
                x if torch.equal(x.to(self.dtype).double(), x) else self.moved(x, self.narrow) for x in args[-2:]
            ]
            result, squares = op(*args[:-2], *factors, **kwargs), factors[0] ** 2 @ factors[1] ** 2
            summed = (factors[0].shape[-1] * (result**2 + squares)).sqrt()
            return self.moved(self.moved(result, self.wide, summed), self.narrow)
        result = op(*args, **kwargs)
        if op.is_view:
            return result
        if name == "sum":
            count = args[0].numel() // max(1, result.numel())
            return self.moved(result, self.wide, (count * (result**2 + op(args[0] ** 2, *args[1:], **kwargs))).sqrt())
        return torch.utils._pytree.tree_map_only(torch.Tensor, lambda x: self.moved(x, self.wide), result)

    def moved(self, x: Tensor, unit: float, size: Tensor | None = None) -> Tensor:
        """Return x with errors of up to ``unit`` times its size, or times ``size``."""
        if x.dtype != torch.float64:
            return x
        errors = 2 * torch.rand(x.shape, generator=self.generator, dtype=x.dtype) - 1
        return x + unit * (x if size is None else size) * errors


def assert_rounding_explains(
    found: Sequence[Tensor], formula: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]
) -> None:
    """Assert that results are as close to a formula in fp64 as rounding in the first input's dtype allows.

    Args:
        found: the results to check.
        formula: maps copies of ``inputs`` in fp64, which require gradients, to the right results.
        inputs: of the formula.
    """

    def results() -> Sequence[Tensor]:
        return formula(*(x.detach().double().requires_grad_() for x in inputs))

    right = results()
    with Roundings(inputs[0].dtype):
        moved = results()
    for number, (mine, exact, perturbed) in enumerate(zip(found, right, moved, strict=True)):
        last = torch.finfo(mine.dtype).eps / 2 * exact / 3**0.5  # the result's own rounding
        error, explained = ((x**2).mean().sqrt() for x in (mine.double() - exact, torch.hypot(perturbed - exact, last)))
        assert error <= SAFETY * explained, f"result {number} is off by {error:.3g}; rounding explains {explained:.3g}"


def with_gradients(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return a function's output, and the gradients of its inputs along a direction that its shape determines."""
    out = function(*inputs)
    generator = torch.Generator().manual_seed(1)
    direction = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, list(inputs), direction)]
