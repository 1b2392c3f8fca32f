"""Which contexts continue the text of the context before them, if lanes are not shuffled."""

import itertools

import pytest
import torch

from longstride.data_pipelines.order.contexts import Cut
from longstride.data_pipelines.order.evaluation import evaluation_contexts
from longstride.data_pipelines.order.lanes import shard_order
from tests.harness.data.streams import open_stream

CONTEXT, LANES = 64, 6


def test_lanes_go_on_until_the_next_shard_is_another(corpus):
    sizes = [len(payload) for payload in corpus.shard_payloads("train")]
    order = [int(number) for epoch in range(3) for number in shard_order(len(sizes), 0, epoch)]
    edges = list(itertools.accumulate(sizes[number] for number in order))
    begins = {0} | {
        edge for edge, pair in zip(edges, itertools.pairwise(order), strict=False) if pair[1] != pair[0] + 1
    }
    num_begun, size = 0, 3
    stream = open_stream(corpus.folder, context=size, global_batch=LANES, shuffle_bytes=0)
    for batch in itertools.islice(stream, stream.lanes.batches_before(2)):
        places = (batch.sample_ids * size).tolist()
        num_begun += sum(place in begins for place in places)
        assert batch.goes_on.tolist() == [place not in begins for place in places]
    assert num_begun > 3


def test_shards_in_order_are_one_text(corpus):
    text = b"".join(corpus.shard_payloads("train"))
    stream = open_stream(
        corpus.folder, context=CONTEXT, global_batch=LANES, shuffle_bytes=0, shuffle_shards=False, seed=3
    )
    endless = 4 * text
    for batch in itertools.islice(stream, stream.lanes.batches_before(3)):
        starts = (batch.sample_ids * CONTEXT).tolist()
        assert batch.goes_on.tolist() == [start % len(text) > 0 for start in starts]
        for row, context in zip(batch.tokens, batch.sample_ids.tolist(), strict=True):
            assert bytes(row.tolist()) == endless[context * CONTEXT : (context + 1) * CONTEXT]


def test_documents_with_contexts_of_their_own_end(corpus):
    settings = {"shuffle_bytes": 0, "shuffle_shards": False, "cut": Cut(packing=False)}
    stream = open_stream(corpus.folder, context=CONTEXT, global_batch=1, **settings)
    texts = []
    documents = [text for shard in corpus.manifest.splits["train"].shards for text in corpus.documents_of(shard)]
    for batch in itertools.islice(stream, stream.lanes.steps_in(0)):
        content = bytes(batch.tokens[0, : batch.lengths[0]].tolist())
        if batch.goes_on[0]:
            texts[-1] += content
        else:
            texts.append(content)
    assert texts == documents


def test_documents_kept_apart_begin_anew(corpus):
    streams = (
        open_stream(corpus.folder, context=3, global_batch=LANES, shuffle_bytes=0, cut=Cut(apart=apart))
        for apart in (True, False)
    )
    num_begun = 0
    for apart, together in itertools.islice(zip(*streams, strict=True), 1000):
        begun = apart.begins[:, 0]
        assert torch.equal(apart.goes_on, together.goes_on & ~begun)
        num_begun += int((together.goes_on & begun).sum())
    assert num_begun


def test_shuffled_lanes_do_not_say(corpus):
    stream = open_stream(corpus.folder, context=CONTEXT, global_batch=LANES, shuffle_bytes=700)
    assert next(iter(stream)).goes_on is None


@pytest.mark.parametrize("limit", [None, 40, 3])
def test_evaluations_read_lanes_side_by_side_on_any_ranks(corpus, limit):
    count = sum(1 for _ in rows_of(corpus.folder, 1, lanes=None, limit=limit))
    expected = rows_of(corpus.folder, 1, LANES, limit)
    assert len(expected) == len({number for number, _, _ in expected}) == count, "each context once"
    starts = [number for number, goes_on, _ in expected if not goes_on]
    assert len(starts) == min(LANES, count)
    for number, goes_on, before in expected:
        assert not goes_on or before == number - 1
    for world_size in (2, 3, 4):
        assert rows_of(corpus.folder, world_size, LANES, limit) == expected


def rows_of(folder, world_size, lanes, limit, batch_size=4):
    """List the context of each row, whether it goes on, and the context of the same row of the batch before."""
    rows = []
    for rank in range(world_size):
        before = torch.full((batch_size,), -1)
        for batch in evaluation_contexts(
            folder, context=CONTEXT, batch_size=batch_size, rank=rank, world_size=world_size, limit=limit, lanes=lanes
        ):
            goes_on = torch.zeros(batch_size, dtype=torch.bool) if batch.goes_on is None else batch.goes_on
            rows += zip(batch.sample_ids.tolist(), goes_on.tolist(), before.tolist(), strict=True)
            before = batch.sample_ids
    return [(number, goes_on, previous if goes_on else None) for number, goes_on, previous in rows if number >= 0]
