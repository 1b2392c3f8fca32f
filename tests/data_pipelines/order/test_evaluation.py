"""A split scored once: each byte on exactly one rank, every rank the same number of batches."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.order.contexts import Cut
from longstride.data_pipelines.order.evaluation import evaluation_contexts, split_bytes


def test_split_bytes_are_the_shards_payloads(corpus):
    for split in ("train", "validation"):
        assert b"".join(split_bytes(corpus.folder, split)) == b"".join(corpus.shard_payloads(split))


@settings(max_examples=25, deadline=None)
@given(
    context=st.integers(10, 9000),
    batch_size=st.integers(1, 9),
    world_size=st.integers(1, 7),
    limit=st.none() | st.integers(1, 50),
)
def test_evaluation_covers_split_once(corpus, context, batch_size, world_size, limit):
    content = b"".join(corpus.shard_payloads("validation"))
    found = {}
    lengths = set()
    for rank in range(world_size):
        batches = list(
            evaluation_contexts(
                corpus.folder, context=context, batch_size=batch_size, rank=rank, world_size=world_size, limit=limit
            )
        )
        lengths.add(len(batches))
        for batch in batches:
            assert batch.tokens.shape == (batch_size, context) and batch.tokens.dtype == torch.uint8
            for row, size, number in zip(
                batch.tokens.numpy(), batch.lengths.tolist(), batch.sample_ids.tolist(), strict=True
            ):
                assert not row[size:].any()
                if number < 0:
                    assert size == 0
                    continue
                assert number not in found
                found[number] = row[:size].tobytes()
    assert len(lengths) == 1
    in_all = -(-len(content) // context)
    assert len(found) == min(limit or in_all, in_all)
    assert all(found[number] == content[number * context : (number + 1) * context] for number in found)
    if limit is None or limit >= in_all:
        assert b"".join(found[number] for number in sorted(found)) == content


@pytest.mark.parametrize("limit", [None, 11])
@pytest.mark.parametrize("min_context", [0, 70])
def test_a_batch_holds_the_same_rows_for_any_number_of_ranks(corpus, limit, min_context):
    def batches(world_size):
        options = {"context": 100, "batch_size": 4, "limit": limit, "min_context": min_context}
        options["cut"] = Cut(separator=10, apart=True)
        everyones = [
            list(evaluation_contexts(corpus.folder, rank=rank, world_size=world_size, **options))
            for rank in range(world_size)
        ]
        assert len({len(own) for own in everyones}) == 1
        return [batch for own in everyones for batch in own if (batch.sample_ids >= 0).any()]

    alone = batches(1)
    for world_size in (2, 3, 4, 7):
        for one, same in zip(alone, batches(world_size), strict=True):
            for name in one.__slots__:
                here, there = getattr(one, name), getattr(same, name)
                assert here is there is None or torch.equal(here, there)


def test_evaluation_limit_is_spread_evenly(corpus):
    batches = evaluation_contexts(corpus.folder, "train", context=100, batch_size=4, limit=4)
    numbers = [number for batch in batches for number in batch.sample_ids.tolist()]
    in_all = -(-corpus.manifest.splits["train"].content_bytes // 100)
    assert numbers == [place * in_all // 4 for place in range(4)]


@pytest.mark.parametrize(
    "change",
    [{"context": 0}, {"batch_size": 0}, {"world_size": 0}, {"rank": -1}, {"rank": 1}, {"limit": 0}, {"split": "test"}],
    ids=str,
)
def test_evaluation_refuses_arguments_out_of_range(corpus, change):
    with pytest.raises(DataError):
        evaluation_contexts(corpus.folder, **{"context": 64, "batch_size": 2, **change})
