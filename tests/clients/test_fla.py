"""The delta rule beside the recurrence of the package `fla-core`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from longstride.kernels.recurrences import delta_rule
from tests.harness.clients import client


@client("fla-core", "`naive_recurrent_gated_delta_rule`, from an initial state", "output, state and gradients, to 1e-5")
@pytest.mark.filterwarnings("ignore")
def test_delta_rule_is_that_of_the_package() -> None:
    """The package computes in fp32, with positions before heads."""
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule

    torch.manual_seed(0)
    batch, positions, heads, width, value_width = 2, 150, 3, 16, 24
    q, k = torch.randn(2, batch, positions, heads, width)
    k, v = F.normalize(k, dim=-1), torch.randn(batch, positions, heads, value_width)
    beta, g = torch.rand(batch, positions, heads), -torch.rand(batch, positions, heads)
    initial = torch.randn(batch, heads, width, value_width)
    inputs = [x.requires_grad_() for x in (q, k, v, beta, g, initial)]
    expected = naive_recurrent_gated_delta_rule(q, k, v, beta, g, 1.0, initial, output_final_state=True)
    by_head = (x.transpose(1, 2) for x in (q, k, v, g, beta))
    out, final = delta_rule(*by_head, initial)
    actual = out.transpose(1, 2), final
    directions = [torch.randn_like(x) for x in actual]

    def gradients(results: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(results, inputs, directions)

    for result, reference in zip((*actual, *gradients(actual)), (*expected, *gradients(expected)), strict=True):
        assert (result - reference).abs().max() <= 1e-5 * reference.abs().max()
