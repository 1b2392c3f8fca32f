"""Masked tokens: which are drawn, what is read in their place, and that all others, to both sides, predict them.

Letters: B batch, N positions, V vocabulary.
"""

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from longstride.kernels import ConfigError
from longstride.sparse_model import Session, SparseTransformer
from longstride.sparse_model.objectives import Masked
from tests.harness.configs import MASKED, TWO_SIDED, small

V = 200
every_system = pytest.mark.parametrize("name", TWO_SIDED)


def network(name: str, **changes: Any) -> SparseTransformer:
    """Return a masked model in fp64 in which every weight matters."""
    torch.manual_seed(0)
    model = SparseTransformer(small(**{"objective": MASKED, "vocabulary": V, **TWO_SIDED[name], **changes})).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def contexts(lengths: tuple[int, ...] = (40, 40, 23), **changes: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return tokens (B, 40), and what else a masked model takes."""
    tokens = torch.randint(V, (len(lengths), 40), generator=torch.Generator().manual_seed(1))
    of, numbers = torch.tensor(lengths), torch.arange(len(lengths))
    corrupted = Masked.model_validate({**MASKED, **changes}).corrupt(tokens, of, numbers, 3, V)
    return tokens, {**corrupted._asdict(), "real": torch.arange(40) < of[:, None]}


@pytest.mark.parametrize("span", [1, 3, 20])
def test_a_draw_has_the_exact_number_and_depends_on_seed_and_number_alone(span: int) -> None:
    objective = Masked(type="masked", share=0.2, span=span)
    tokens, lengths = torch.randint(V, (5, 64)), torch.tensor([64, 64, 33, 1, 0])
    numbers = torch.tensor([7, 2**62, 5, 9, -1])
    inputs, predicted = objective.corrupt(tokens, lengths, numbers, 11, V)
    assert predicted.sum(1).tolist() == [13, 13, 7, 1, 0]
    assert torch.equal(inputs[~predicted], tokens.int()[~predicted])
    alone = [objective.corrupt(tokens[i, None], lengths[i, None], numbers[i, None], 11, V) for i in (4, 1)]
    assert all(torch.equal(drawn.inputs[0], inputs[i]) for i, drawn in zip((4, 1), alone, strict=True))
    for other in (
        objective.corrupt(tokens, lengths, numbers, 12, V),
        objective.corrupt(tokens, lengths, numbers + 1, 11, V),
    ):
        assert not torch.equal(other.predicted, predicted)


def test_all_arrangements_of_spans_are_equally_likely() -> None:
    """Of 9 tokens 5 are predicted: spans of 2, 2 and 1 in any order between 4 others."""
    objective, count = Masked(type="masked", share=0.55, span=2, random=0.3, unchanged=0.2), 14_000
    tokens = torch.full((count, 9), V)  # none is drawn, so that random tokens are told from it
    inputs, predicted = objective.corrupt(tokens, torch.full((count,), 9), torch.arange(count), 0, V + 1)
    free = list(itertools.combinations(range(7), 3))  # slots of the spans among 4 tokens and 3 spans
    expected: Counter[tuple[int, ...]] = Counter()
    for slots, short in itertools.product(free, range(3)):
        sizes, row = [2, 2, 2], []
        sizes[short] = 1
        for slot in range(7):
            row += [1] * sizes[slots.index(slot)] if slot in slots else [0]
        expected[tuple(row)] += 1
    found = Counter(map(tuple, predicted.int().tolist()))
    share = {row: times / expected.total() for row, times in expected.items()}
    assert found.keys() == share.keys()
    assert all(abs(found[row] - count * p) < 5 * (count * p) ** 0.5 for row, p in share.items())
    kinds = torch.bincount((inputs == V + 1).int()[predicted] + 2 * (inputs == V).int()[predicted]) / (5 * count)
    assert kinds.tolist() == pytest.approx([0.3, 0.5, 0.2], abs=0.02)  # random, masked, unchanged


@every_system
def test_nats_are_those_of_the_predicted_tokens_and_so_are_the_gradients(name: str) -> None:
    model, (tokens, extra) = network(name).train(), contexts()
    nats = model(tokens, return_nats=True, **extra)
    nats.sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    for row, length in enumerate((40, 40, 23)):  # each as a context alone, without padding
        logits = model(extra["inputs"][row : row + 1, :length])[0]
        each = F.cross_entropy(logits, tokens[row, :length], reduction="none")
        assert torch.allclose(nats[row, :length], each.where(extra["predicted"][row, :length], 0.0), rtol=0, atol=1e-11)
        assert not nats[row, length:].any()
    logits = model(extra["inputs"], real=extra["real"])
    F.cross_entropy(logits[extra["predicted"]], tokens[extra["predicted"]], reduction="sum").backward()
    for found, parameter in zip(gradients, model.parameters(), strict=True):
        assert found is not None and parameter.grad is not None
        torch.testing.assert_close(found, parameter.grad, rtol=1e-9, atol=1e-10 * float(found.abs().max()))


@every_system
def test_rows_read_both_sides_but_no_target_and_no_padding(name: str) -> None:
    model, (tokens, extra) = network(name).eval(), contexts()
    with torch.no_grad():
        before = model(extra["inputs"], real=extra["real"])
        nats = model(tokens, return_nats=True, **extra)
        for place in (0, 12, 22):
            inputs = extra["inputs"].clone()
            inputs[:, place] = (inputs[:, place] + 1) % V
            changed = (model(inputs, real=extra["real"]) - before).abs().amax(-1) > 1e-9
            assert changed[2, :23].all() if name != "patterns" else changed[2, place]
            assert changed[:, :place].any() or place == 0
            assert changed[:, place + 1 : 23].any() or place == 22
            target = tokens.clone()
            target[:, place] = (target[:, place] + 1) % V
            other = model(target, return_nats=True, **extra) != nats
            assert not other[:, torch.arange(40) != place].any()
        padding = extra["inputs"].clone()
        padding[2, 23:] = 5
        assert torch.equal(model(padding, real=extra["real"])[2, :23], before[2, :23])


@pytest.mark.parametrize("mask", ["learned", "zero"])
def test_a_mask_is_the_only_token_beyond_the_vocabulary(mask: str) -> None:
    model = network("dense", objective={**MASKED, "mask": mask})
    tokens = torch.full((1, 40), V)
    assert bool(model.embedding(tokens).any()) == (mask == "learned") or model.embedding.sizes
    with pytest.raises(IndexError):
        model.embedding(tokens + 1)


def test_a_masked_model_has_no_next_token() -> None:
    with pytest.raises(ConfigError, match=r"^model\.objective\.type=\"masked\": predicts no next token, so it cannot "):
        Session(network("linformer").eval())


def test_parameters_are_those_of_the_published_shapes() -> None:
    """Count Linformer's (Wang et al. 2020: 12 layers, N 512, k 256), and with zeros for masks (Image GPT).

    A row for masks takes the place of the start.
    """
    shape = {"context": 512, "layers": 12, "heads": 12, "width": 768, "embedding": {"type": "learned"}}
    dense = {"attention": {"type": "dense"}, "objective": {"type": "autoregressive"}, "convolution": None}
    count = SparseTransformer.num_parameters
    causal = count(small(**shape, **dense))
    for share, numbers in (("heads", 3_145_728), ("layers", 131_072), ("keys_and_values", 1_572_864)):
        linformer = {"type": "linformer", "rows": 256, "share": share}
        assert count(small(**shape, attention=linformer, objective={"type": "masked"})) == causal + numbers
    zero = {"type": "masked", "mask": "zero"}
    assert count(small(**shape, attention=linformer, objective=zero)) == causal + numbers - 768
