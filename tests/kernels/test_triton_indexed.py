"""The Triton kernels of attention to listed keys against attention under their mask, and indexer scores.

Letters: B batch, H heads, N positions, T numbers of a query.
"""

import pytest
import torch
from torch import Tensor

from longstride.kernels.backends import Saved, triton
from longstride.kernels.indexed import index_scores, last_highest
from tests.harness.backends import DEVICES, DTYPES, IN_THE_INTERPRETER, ON_A_CARD, WITH_TRITON
from tests.harness.oracles import RESULTS, Inputs, Shape, assert_within_precision, make_inputs

pytestmark = WITH_TRITON
DEVICE = DEVICES["triton"]
HALF, BRAIN, SINGLE, DOUBLE = DTYPES


def random_numbers(batch: int, context: int, length: int) -> Tensor:
    """Draw different positions up to each query in any order, with -1 anywhere; every seventh query reads none."""
    generator = torch.Generator().manual_seed(context)
    position = torch.arange(context)
    order = torch.rand(batch, context, max(context, length), generator=generator).argsort(-1)
    numbers = torch.where(order <= position[:, None], order, -1)[..., :length]
    numbers[:, 5::7] = -1
    return numbers.int()


def mask_of(numbers: Tensor) -> Tensor:
    """Return the pairs that are read, (B, 1, N, N)."""
    batch, context, _ = numbers.shape
    mask = torch.zeros(batch, context, context + 1, dtype=torch.bool)
    return mask.scatter(2, numbers.long() % (context + 1), True)[:, None, :, :context]  # -1 is the last column


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make some keys have several pieces of readers."""
    from longstride.kernels.backends.triton import indexed

    monkeypatch.setattr(indexed, "PIECE", 4)


def run(inputs: Inputs, numbers: Tensor, scale: float) -> dict[str, Tensor]:
    """Compute all results on the device."""
    from longstride.kernels.backends.triton.indexed import indexed_backward, indexed_forward

    q, k, v, grad_out, grad_lse = Inputs(*(x if x is None else x.to(DEVICE) for x in inputs))  # type: ignore[arg-type]
    numbers = numbers.to(DEVICE)
    out, lse = indexed_forward(q, k, v, numbers, scale)
    grads = indexed_backward(Saved(q, k, v, out, grad_out, lse, grad_lse), numbers, scale)
    return dict(zip(RESULTS, (out, lse, *grads), strict=True))


def check(dtype: torch.dtype, shape: Shape, length: int, grad_lse: bool = True) -> None:
    """Compare all results with attention under the mask in fp64."""
    inputs, numbers = make_inputs(shape, dtype, grad_lse=grad_lse), random_numbers(shape.batch, shape.context, length)
    results = run(inputs, numbers, shape.width**-0.5)
    assert_within_precision(results, inputs, lambda rows: mask_of(numbers)[:, :, rows])


@pytest.mark.parametrize(
    ("dtype", "shape", "length"),
    [
        (SINGLE, Shape(1, 2, 1, 16, 32, 1), 3),
        (SINGLE, Shape(2, 4, 17, 32, 16, 2), 20),
        (HALF, Shape(1, 3, 17, 64, 24, 3), 5),
        (BRAIN, *((Shape(1, 32, 2_048, 128, 64, 2), 300) if ON_A_CARD else (Shape(1, 4, 70, 16, 40, 1), 20))),
    ],
)
def test_results_equal_attention_under_the_mask(dtype: torch.dtype, shape: Shape, length: int) -> None:
    check(dtype, shape, length)


@IN_THE_INTERPRETER
def test_results_equal_attention_under_the_mask_in_fp64() -> None:
    check(DOUBLE, Shape(1, 2, 17, 16, 24, 1), 9, grad_lse=False)


def test_groups_may_have_more_heads_than_a_tile() -> None:
    check(SINGLE, Shape(1, 35, 5, 16, 16, 1), 4)


def test_nothing_unread_leaves_a_trace() -> None:
    """Keys that no query reads, and the gradient of the logsumexp of queries without keys, are NaN."""
    inputs, numbers = make_inputs(Shape(1, 2, 9, 16, 16, 1), SINGLE, grad_lse=True), random_numbers(1, 9, 4)
    numbers[numbers == 2] = -1
    expected = run(inputs, numbers, 0.25)
    assert inputs.grad_lse is not None and expected["lse"][0, 0, 5] == -torch.inf
    for name, position in (("k", 2), ("v", 2), ("grad_lse", 5)):
        getattr(inputs, name)[:, :, position] = torch.nan
    results = run(inputs, numbers, 0.25)
    assert all(torch.equal(results[name], expected[name]) for name in RESULTS)
    assert not results["out"][:, :, 5].any() and not results["dq"][:, :, 5].any()
    assert not results["dk"][:, :, 2].any() and not results["dv"][:, :, 2].any()


def test_queries_may_have_no_numbers_at_all() -> None:
    results = run(make_inputs(Shape(1, 2, 3, 16, 16, 1), SINGLE), random_numbers(1, 3, 0), 0.25)
    assert (results.pop("lse") == -torch.inf).all() and not any(x.any() for x in results.values())


def test_two_runs_have_equal_bits() -> None:
    inputs, numbers = make_inputs(Shape(1, 2, 17, 16, 16, 1), BRAIN, grad_lse=True), random_numbers(1, 17, 9)
    first, second = run(inputs, numbers, 0.25), run(inputs, numbers, 0.25)
    assert all(torch.equal(first[name], second[name]) for name in RESULTS)


@pytest.mark.parametrize(("dtype", "width"), [(SINGLE, 32), (BRAIN, 24)])
def test_summed_weights_equal_the_mean_of_the_heads(dtype: torch.dtype, width: int) -> None:
    from longstride.kernels.backends.triton.indexed import summed_weights

    q, k, *_ = make_inputs(Shape(2, 6, 17, width, 16, 2), dtype)
    numbers, scale = random_numbers(2, 17, 20), width**-0.5
    wide_q, wide_k = q.double(), k.double().repeat_interleave(3, 1)
    scores = (scale * wide_q @ wide_k.mT).masked_fill(~mask_of(numbers), -torch.inf)
    lse = scores.logsumexp(-1)
    dense = (scores - lse[..., None]).exp().nan_to_num().mean(1)  # (B, N, N)
    position = numbers.long().clamp_min(0)
    wanted = dense.gather(-1, position).masked_fill(numbers < 0, 0)
    actual = summed_weights(*(x.to(DEVICE) for x in (q, k, lse.float(), numbers)), scale).cpu()
    # An error of an exponent, a sum of products minus lse, is a relative error of a weight.
    size = (scale * wide_q.abs() @ wide_k.abs().mT).amax(1).gather(-1, position)
    bound = 2**-24 * ((width + 8) * size + 8 * lse.nan_to_num(neginf=0).abs().amax(1)[..., None] + 8)
    assert actual.dtype == torch.float32 and ((actual - wanted).abs() <= bound * wanted).all()


@pytest.mark.parametrize(("dtype", "first"), [(SINGLE, 0), (BRAIN, 29), (HALF, 40)])
def test_scores_equal_the_definition(dtype: torch.dtype, first: int) -> None:
    generator = torch.Generator().manual_seed(first)
    shapes = (2, 41, 3, 24), (2, first + 41, 24), (2, 41, 3)
    q, k, weights = (torch.randn(*shape, generator=generator).to(dtype) for shape in shapes)
    wide_q, wide_k, wide_weights = q.double(), k.double(), weights.double()
    wanted = torch.einsum("bnj,bnjm->bnm", wide_weights, torch.einsum("bnjd,bmd->bnjm", wide_q, wide_k).relu())
    size = torch.einsum("bnj,bnjd,bmd->bnm", wide_weights.abs(), wide_q.abs(), wide_k.abs())
    actual = triton.index_scores(*(x.to(DEVICE) for x in (q, k, weights)), first).cpu()
    later = torch.arange(first + 41) > first + torch.arange(41)[:, None]
    assert actual.dtype == torch.float32 and torch.equal(actual == -torch.inf, later.expand_as(actual))
    assert ((actual - wanted).abs() <= 2**-24 * (24 + 3 + 8) * size)[:, ~later].all()


def test_scores_of_a_tile_of_queries_have_the_bits_of_all() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, weights = (torch.randn(1, 70, *shape, generator=generator).to(DEVICE) for shape in ((2, 16), (16,), (2,)))
    part = triton.index_scores(q[:, 33:50], k[:, :50], weights[:, 33:50], 33)
    whole = triton.index_scores(q, k, weights, 0)
    assert torch.equal(part, whole[:, 33:50, :50])


@pytest.mark.parametrize("block", [4, 5, 16])  # 5 divides no tile
def test_scores_of_blocks_are_the_highest_of_their_keys(block: int) -> None:
    """Those of the last positions of a query are infinite."""
    generator = torch.Generator().manual_seed(0)
    q, k, weights = (torch.randn(*shape, generator=generator) for shape in ((17, 2, 16), (50, 16), (17, 2)))
    index = [x.to(DEVICE) for x in (q, k, weights)]
    found = index_scores(*index, 33, "triton", 6, block).cpu()
    torch.testing.assert_close(found, index_scores(q, k, weights, 33, "cpu", 6, block), rtol=1e-5, atol=1e-5)
    assert (found == torch.inf).any() and (found == -torch.inf).any()


@pytest.mark.parametrize(
    ("width", "count"), [(1, 1), (100, 7), (1_000, 65), (1_000, 999), (9_000, 20), (9_000, 300), (60_000, 3_000)]
)
@pytest.mark.parametrize("kind", ["spread", "equal", "few"])
def test_highest_scores_equal_a_plain_sort(width: int, count: int, kind: str) -> None:
    """Of equal ones the later; rows of more than 8,192 span by span."""
    scores = torch.randn(3, width, generator=torch.Generator().manual_seed(0))
    if kind == "equal":
        scores = scores.round()
        scores[1] = -0.0
    elif kind == "few":
        scores[:, torch.arange(width) % 17 > 0] = -torch.inf
    found = last_highest(scores.to(DEVICE), count, "triton").cpu()
    order = (scores + 0.0).sort(dim=-1, stable=True).indices[:, -count:]
    wanted = order.where(scores.gather(1, order) > -torch.inf, -1).int()
    assert torch.equal(found.sort(-1).values, wanted.sort(-1).values)
