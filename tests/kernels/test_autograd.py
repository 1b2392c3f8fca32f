"""The custom op: what compilers and checkpointing see of it, and how its results lie in memory."""

import math

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longstride.kernels import selected_attention, sparse_attention
from longstride.kernels.patterns import Fixed, Pattern, Strided
from longstride.kernels.selections import Selection, recent_members
from tests.harness.backends import DEVICES, on, use_tiles
from tests.harness.oracles import Shape, make_inputs

BACKENDS = [on(name, DEVICES[name]) for name in ("cpu", "triton")]


def leaves_of(shape: Shape, device: str, *, heads_side_by_side: bool) -> list[Tensor]:
    """q, k, v and a gradient of the output, in either order of memory."""
    inputs = [t.to(device) for t in make_inputs(shape, torch.float32)[:4]]
    if heads_side_by_side:
        inputs = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs]
    return [t.requires_grad_() for t in inputs[:3]] + [inputs[3]]


def selection_of(q: Tensor) -> Selection:
    """Two rounds of clusters, which follow from q; one has orders, the other is natural in its queries."""
    with torch.no_grad():
        parts = [recent_members(q[..., :clusters].argmax(-1), window=7) for clusters in (3, 5)]
    return Selection(tuple(parts), 7, disjoint=False)


READS: dict[str, Pattern | None] = {"strided": Strided(8), "fixed": Fixed(8, 2, 2), "selection": None}


@pytest.mark.parametrize(
    "reads, heads_side_by_side",
    [
        ("fixed", True),
        ("selection", True),
        *(
            pytest.param(*each, marks=pytest.mark.campaign)
            for each in (("fixed", False), ("strided", True), ("strided", False))
        ),
    ],
)
@pytest.mark.parametrize("backend, device", BACKENDS)
def test_compile_and_checkpoint_see_through(backend: str, device: str, reads: str, heads_side_by_side: bool) -> None:
    """Output and gradients have the same bits as one graph, and where they are recomputed."""
    *leaves, grad_out = leaves_of(Shape(2, 2, 20, 16, 16), device, heads_side_by_side=heads_side_by_side)

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pattern = READS[reads]
        if pattern is None:
            out, lse = selected_attention(q * 2, k, v, selection_of(q), backend=backend, return_lse=True)
        else:
            out, lse = sparse_attention(q * 2, k, v, pattern, backend=backend, return_lse=True)
        return out + torch.where(lse == -math.inf, 0.0, lse)[..., None]

    def gradients(out: Tensor) -> tuple[Tensor, ...]:
        return out.detach(), *torch.autograd.grad(out, leaves, grad_out)

    wanted = gradients(layer(*leaves))
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for found in (gradients(compiled(*leaves)), gradients(checkpoint(layer, *leaves, use_reentrant=False))):
        assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("heads_side_by_side", [False, True])
@pytest.mark.parametrize("backend, device", BACKENDS)
def test_results_lie_in_memory_as_the_inputs_do(backend: str, device: str, heads_side_by_side: bool) -> None:
    """So that a model puts its heads back, and cuts them out in the backward pass, without a copy."""
    *leaves, grad_out = leaves_of(Shape(2, 3, 24, 16, 32), device, heads_side_by_side=heads_side_by_side)
    out = sparse_attention(*leaves, Strided(8), backend=backend)
    for result, like in zip((out, *torch.autograd.grad(out, leaves, grad_out)), (leaves[2], *leaves), strict=True):
        assert result.stride() == like.stride()
        assert result.transpose(1, 2).is_contiguous() == heads_side_by_side


@pytest.mark.parametrize("pattern", [Fixed(8, 2), pytest.param(Strided(8), marks=pytest.mark.campaign)], ids=str)
@pytest.mark.parametrize("backend, device", BACKENDS)
def test_expanded_tensors_are_read_as_copies_of_them(
    backend: str, device: str, pattern: Pattern, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strides of 0: keys that heads share, queries that contexts share, and the gradient of a sum."""
    if backend == "triton":
        use_tiles(monkeypatch, (16, 16), closed=16)
    *leaves, grad_out = leaves_of(Shape(2, 2, 24, 16, 16), device, heads_side_by_side=False)
    leaves = [leaf.detach() for leaf in leaves]
    q, k, v = leaves[0][:1].expand(2, -1, -1, -1), leaves[1][:, :1].expand(-1, 2, -1, -1), leaves[2]
    for grad in (grad_out[:, :, :1].expand_as(v), grad_out.new_ones(()).expand_as(v)):
        found, wanted = (
            torch.autograd.grad(sparse_attention(*given, pattern, backend=backend), given, last)
            for given, last in (
                ([t.detach().requires_grad_() for t in (q, k, v)], grad),
                ([t.detach().contiguous().requires_grad_() for t in (q, k, v)], grad.contiguous()),
            )
        )
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    "case",
    ["heads apart", "heads side by side, shared keys", "columns apart", "behind a cache", "selection",
     "selection, heads side by side, shared keys"],
)  # fmt: skip
@pytest.mark.parametrize("backend, device", BACKENDS)
def test_the_ops_are_what_they_tell_compilers(backend: str, device: str, case: str) -> None:
    shape = Shape(1, 2, 16, 16, 16, key_heads=1 if "shared" in case else 2)
    *leaves, _ = leaves_of(shape, device, heads_side_by_side="side by side" in case)
    if case == "columns apart":
        leaves = [torch.randn(1, 16, 16, 2, device=device).permute(0, 3, 1, 2).requires_grad_() for _ in range(3)]
    elif case == "behind a cache":
        leaves[0] = leaves[0].detach()[:, :, 3:10].requires_grad_()
    if "selection" in case:
        parts = [tensor for part in selection_of(leaves[0]).parts for tensor in part]
        op, options = torch.ops.longstride.selected_attention, (parts, 7, False, 0.25, backend)
    else:
        patterns, first = repr([{"type": "local", "window": 5}] * 2), 3 if case == "behind a cache" else None
        op, options = torch.ops.longstride.attention, (patterns, 0.25, backend, first)
    torch.library.opcheck(op.default, (*leaves, *options))
