"""The benchmark's training is the trainer's, its dense attention exact, and its windows score every byte once."""

import pytest
import torch
from torch import nn

from benchmarks.paper.cases import PATTERNS, SIZES
from benchmarks.paper.training import BITS, Contestant, curve, spread_regions, windows
from longstride.data_pipelines.order.evaluation import EvaluationBatch
from longstride.data_pipelines.order.lanes import StreamState
from longstride.data_pipelines.order.stream import Batch
from longstride.kernels import sparse_attention
from longstride.sparse_model import SparseTransformer

CPU = torch.device("cpu")
CASE = SIZES["tiny"][0]


def batch_of(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(97, 123, (CASE.batch, CASE.context), dtype=torch.uint8, generator=generator)
    lengths = torch.full((CASE.batch,), CASE.context)
    return Batch(tokens, lengths, torch.arange(CASE.batch), StreamState("none", 0, 0, 0, CASE.batch))


def trained(pattern: str, dtype: torch.dtype = torch.float32, steps: int = 3) -> Contestant:
    learner = Contestant(CASE, pattern, 0, CPU, dtype)
    for step in range(steps):
        learner.take_step(batch_of(step))
    return learner


@pytest.mark.parametrize("size", SIZES)
def test_patterns_of_a_case_have_the_same_parameters(size: str) -> None:
    for case in SIZES[size]:
        with torch.device("meta"):
            shapes = {
                tuple((name, p.shape) for name, p in SparseTransformer(case.model_config(pattern)).named_parameters())
                for pattern in PATTERNS
            }
        assert len(shapes) == 1


def test_the_dense_model_computes_what_ours_computes() -> None:
    learner = trained("dense")
    tokens = batch_of(9).tokens
    with torch.no_grad():
        ours = learner.network(tokens, return_nats=True).double()  # by our own dense pattern
    torch.testing.assert_close(learner._nats_of(tokens), ours)
    assert not torch.allclose(trained("strided")._nats_of(tokens), ours)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_only_the_dense_model_is_served_by_torch(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def noted(*arguments, **others):
        seen.append(1)
        return sparse_attention(*arguments, **others)

    monkeypatch.setattr("longstride.sparse_model.mixers.attention.sparse_attention", noted)
    trained(pattern, steps=1)
    assert len(seen) == (0 if pattern == "dense" else CASE.layers)


def test_a_learner_learns_and_remembers_what_it_read() -> None:
    one, same, other = trained("fixed", steps=6), trained("fixed", steps=6), trained("fixed", steps=5)
    assert one.training_bits()[0] == pytest.approx(8.0) and one.training_bits()[-1] < 7.8
    assert one.data_order_crc32 == same.data_order_crc32 != other.data_order_crc32
    assert one.training_bits() == same.training_bits() and one.bytes_trained == 6 * CASE.batch * CASE.context


def test_masters_keep_what_bf16_weights_would_lose() -> None:
    learner = trained("fixed", torch.bfloat16)
    pairs = list(zip(learner.weights.values(), learner.masters.values(), strict=True))
    assert all(weight.dtype == torch.bfloat16 and master.dtype == torch.float32 for weight, master in pairs)
    for weight, master in pairs:
        torch.testing.assert_close(weight, master.to(torch.bfloat16), rtol=0, atol=0)
    assert any(not torch.equal(weight.float(), master) for weight, master in pairs)
    assert learner.training_bits()[-1] == pytest.approx(trained("fixed").training_bits()[-1], abs=0.05)


def test_clipping_limits_the_gradient_that_is_stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    norms = []
    real = nn.utils.clip_grad_norm_

    def noted(parameters, limit):
        norms.append((float(real(parameters, limit)), float(nn.utils.get_total_norm([p.grad for p in parameters]))))

    monkeypatch.setattr(nn.utils, "clip_grad_norm_", noted)
    trained("fixed", steps=3)
    assert len(norms) == 3 and all(after <= min(before, 1.0) * 1.001 for before, after in norms)


def test_padding_is_not_scored() -> None:
    learner = trained("fixed")
    tokens = batch_of(5).tokens
    lengths = torch.tensor([CASE.context, 7])
    ids = torch.arange(2)
    nats = learner._nats_of(tokens)
    wanted = (nats[0].sum() + nats[1, :7].sum()).item() / (CASE.context + 7) * BITS
    bits, num_bytes = learner.score([EvaluationBatch(tokens, lengths, torch.zeros_like(lengths), ids)])
    assert bits == pytest.approx(wanted) and num_bytes == CASE.context + 7


@pytest.mark.parametrize("minimum", [0, 1, 32, 57, 63])
def test_windows_score_every_byte_once_behind_the_minimum(minimum: int) -> None:
    region = range(100, 100 + 2 * CASE.context)
    seen = []
    for start, scored in windows(region, CASE.context, minimum):
        assert start >= region.start - CASE.context and scored.start >= minimum and scored.stop <= CASE.context
        seen += [start + row for row in scored]
    assert seen == list(region)


def test_regions_leave_room_for_their_windows() -> None:
    for num_bytes in (256, 257, 5_000):
        regions = spread_regions(num_bytes, 3, 64)
        assert len(regions) == 3 and all(len(region) == 128 for region in regions)
        assert regions[0].start == 64 and regions[-1].stop == num_bytes - 64


def test_scores_at_a_minimum_are_those_of_its_rows() -> None:
    learner = trained("fixed")
    text = torch.randint(0, 256, (6 * CASE.context,), dtype=torch.uint8)
    region, minimum = range(100, 100 + 2 * CASE.context), 48
    total = 0.0
    for byte in region:
        first = byte - minimum - (byte - region.start) % (CASE.context - minimum)
        total += learner._nats_of(text[None, first : first + CASE.context])[0, byte - first].item()
    bits, num_bytes = learner.score_at(text, [region], minimum)
    assert num_bytes == len(region) and bits == pytest.approx(total / len(region) * BITS)


def test_a_curve_is_the_mean_of_its_parts() -> None:
    assert curve([4.0, 2.0]) == [(1, 4.0), (2, 2.0)]
    found = curve([float(x) for x in range(100)])
    assert len(found) == 20 and found[-1][0] == 100 and found[0] == (5, 2.0)
