"""Bistable cells beside those of the package `brc-pytorch`, with copied weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longstride.sparse_model import SparseTransformer
from longstride.sparse_model.mixers.recurrences.gated import Recurrent
from tests.clients.conftest import assert_rounded
from tests.harness.clients import client
from tests.harness.configs import small

WIDTH, STATE = 16, 6


@client("brc-pytorch", "its cells with copied weights", "outputs and gradients, to rounding in fp64")
@pytest.mark.parametrize("cell", ["nbrc", "brc"])
def test_cells_are_those_of_the_package(cell: str) -> None:
    from brc_pytorch.layers import BistableRecurrentCell, NeuromodulatedBistableRecurrentCell

    torch.manual_seed(0)
    attention = {"type": "recurrent", "cell": cell, "width": STATE}
    sizes = {"context": 40, "heads": 2, "width": WIDTH, "layers": 1}
    (ours,) = SparseTransformer(small(attention=attention, **sizes)).double().mixers
    assert isinstance(ours, Recurrent) and ours.gate_bias is not None
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    theirs = (NeuromodulatedBistableRecurrentCell if cell == "nbrc" else BistableRecurrentCell)(WIDTH, STATE)
    reset, update, candidate = ours.inputs.weight.chunk(3)
    weights: dict[str, Any] = {"kernelr": reset.T, "kernelz": update.T, "kernelh": candidate.T}
    weights |= dict(zip(("memoryr", "memoryz"), ours.gates if cell == "nbrc" else ours.gates.chunk(2), strict=True))
    if cell == "nbrc":  # they multiply from the other side
        weights |= {name: weights[name].T for name in ("memoryr", "memoryz")}
    weights |= dict(zip(("br", "bz"), ours.gate_bias.chunk(2), strict=True))
    assert weights.keys() == dict(theirs.named_parameters()).keys()
    x = torch.randn(3, 40, WIDTH, dtype=torch.float64, requires_grad=True)
    h, states = torch.zeros(3, STATE, dtype=torch.float64), []
    for row in x.unbind(1):
        h = torch.func.functional_call(theirs, weights, (row, h))
        states.append(h)
    expected, actual = ours.projection(torch.stack(states, 1)), ours(x).rows
    assert_rounded(actual, expected)
    slopes, tensors = torch.randn_like(expected), (x, *ours.parameters())
    gradients = [torch.autograd.grad((rows * slopes).sum(), tensors) for rows in (actual, expected)]
    for result, reference in zip(*gradients, strict=True):
        assert reference.any() and (result - reference).abs().max() <= 1e-11 * reference.abs().max()
