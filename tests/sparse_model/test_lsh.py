"""Attention by hashing against the paper's formula by loops, its cost, its state, and wrong configurations."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from longstride.kernels.selections import hash_rounds, selection_mask
from longstride.launcher.planning.costs import work
from longstride.sparse_model import SparseTransformer
from longstride.sparse_model.mixers.lsh import HashedAttention
from tests.harness.configs import small


def hashed(**changes: Any) -> dict[str, Any]:
    return {"attention": {"type": "lsh", "buckets": 4, "rounds": 3, "chunk": 3, **changes}, "layers": 1}


def mixer(**changes: Any) -> HashedAttention:
    """The mixer of a model in fp64 whose every weight matters."""
    torch.manual_seed(0)
    model = SparseTransformer(small(**{"backend": "reference", **changes})).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.mixers[0]


def keys_of(buckets: list[int], chunk: int) -> list[set[int]]:
    """Which positions each position reads in one round, its own left out."""
    read = []
    for i, bucket in enumerate(buckets):
        earlier = [j for j in range(i) if buckets[j] == bucket]
        first = max(0, len(earlier) // chunk - 1) * chunk
        read.append(set(earlier[first:]))
    return read


def of_one_head(q: Tensor, v: Tensor, rounds: list[list[set[int]]]) -> Tensor:
    """The paper's equations 2 to 6, pair by pair: rounds by exp(logsumexp), with the correction for repeated keys."""
    width = q.shape[-1]
    out = torch.zeros_like(v)
    for i in range(len(q)):
        keys = [read[i] for read in rounds]
        if not any(keys):
            keys = [{i}]  # itself only where it has nothing else
        partial, sizes = [], []
        for own in keys:
            scores = {}
            for j in own:
                times = sum(j in others for others in keys)
                scores[j] = float(q[i] @ q[j] / q[j].norm()) / math.sqrt(width) - math.log(times)
            if not scores:
                continue
            size = math.log(sum(math.exp(score) for score in scores.values()))
            partial.append(sum(math.exp(score - size) * v[j] for j, score in scores.items()))
            sizes.append(size)
        whole = math.log(sum(map(math.exp, sizes)))
        out[i] = sum(math.exp(size - whole) * each for size, each in zip(sizes, partial, strict=True))
    return out


@pytest.mark.parametrize("rounds", [1, 3])
@torch.no_grad()
def test_it_is_the_papers_formula_with_its_buckets(rounds: int) -> None:
    attention = mixer(**hashed(rounds=rounds), query_key_ratio=0.5)
    assert attention.rotations is not None and attention.rotations.shape == (4, rounds, 8, 2)
    q, k, v = attention.heads_of(attention.query_key_value(torch.randn(2, 40, 64, dtype=torch.float64)))
    found = attention.attend(q, k, v).rows
    for b, h in itertools.product(range(2), range(4)):
        lists = []
        for each in attention.rotations[h]:
            rotated = torch.cat([q[b, h] @ each, -(q[b, h] @ each)], -1)
            lists.append(keys_of([int(row.argmax()) for row in rotated], chunk=3))
        torch.testing.assert_close(found[b, h], of_one_head(q[b, h], v[b, h], lists), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["random", "one", "each its own", "in turn"])
def test_rounds_are_those_of_the_definition(kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    buckets = torch.randint(5, (2, 2, 3, 37), generator=generator)
    if kind != "random":
        buckets[:] = {"one": torch.zeros(37), "each its own": torch.arange(37), "in turn": torch.arange(37) % 4}[kind]
    for chunk in (1, 4, 50):
        selection = hash_rounds(buckets, chunk)
        selection.check(37)
        found = selection_mask(selection, 37)
        for b, h in itertools.product(range(2), range(2)):
            rounds = [keys_of(each, chunk) for each in buckets[b, h].tolist()]
            for i in range(37):
                wanted = set().union(*(read[i] for read in rounds)) or {i}
                assert set(found[b, h, i].nonzero().flatten().tolist()) == wanted


def test_pairs_are_at_most_those_that_are_counted() -> None:
    """As many where all are in one bucket of one round."""
    for positions, chunk, rounds in itertools.product((1, 2, 7, 40), (1, 3, 8), (1, 2)):
        attention = mixer(**hashed(chunk=chunk, rounds=rounds))
        most = attention.num_pairs(positions)
        for high in (1, 2, positions):
            buckets = torch.randint(high, (1, 4, rounds, positions))
            pairs = int(selection_mask(hash_rounds(buckets, chunk), positions).sum())
            assert pairs <= most and (pairs == most or high > 1 or rounds > 1)


def test_keys_have_no_weights() -> None:
    dense, shared = (SparseTransformer(small(**each, query_key_ratio=0.5)) for each in ({"layers": 1}, hashed()))
    counts = [sum(parameter.numel() for parameter in model.parameters()) for model in (dense, shared)]
    assert counts[0] - counts[1] == 32 * (64 + 1)
    assert shared.parameter_roles()["blocks.0.attention.query_key_value.weight"].rows == (32, 64)
    assert [name for name, _ in shared.named_buffers()] == ["blocks.0.attention.rotations"]


def test_rotations_cost_a_forward_pass_alone() -> None:
    few, many = (work(small(**hashed(buckets=buckets))).total for buckets in (4, 12))
    assert many.forward - few.forward == 2 * 40 * 4 * 3 * 16 * (6 - 2)
    assert many.backward == few.backward
