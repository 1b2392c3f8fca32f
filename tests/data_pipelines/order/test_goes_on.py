"""Which rows of a batch continue the text of the same rows of the batch before it, if lanes are not shuffled."""

import itertools
import shutil

import pytest
import torch

from longstride.data_pipelines.order.contexts import Cut
from longstride.data_pipelines.order.evaluation import evaluation_contexts
from longstride.data_pipelines.order.lanes import StreamState, shard_order
from tests.harness.data.streams import open_stream

CONTEXT, LANES = 64, 6


def batches(folder, count, world_size=1, state=None, **settings):
    """Read the rows, ids and continuations of all ranks together."""
    streams = [
        open_stream(
            folder, context=CONTEXT, global_batch=LANES, rank=rank, world_size=world_size, shuffle_bytes=0, state=state,
            **settings,
        )
        for rank in range(world_size)
    ]  # fmt: skip
    for step in zip(*(itertools.islice(stream, count) for stream in streams), strict=True):
        joined = (torch.cat([getattr(batch, name) for batch in step]) for name in ("tokens", "sample_ids", "goes_on"))
        yield *joined, step[0].state


def test_lanes_go_on_until_the_next_shard_is_another(corpus):
    sizes = [len(payload) for payload in corpus.shard_payloads("train")]
    order = [int(number) for epoch in range(3) for number in shard_order(len(sizes), 0, epoch)]
    edges = list(itertools.accumulate(sizes[number] for number in order))
    begins = {edge for edge, pair in zip(edges, itertools.pairwise(order), strict=False) if pair[1] != pair[0] + 1}
    num_begun, size = 0, 3
    stream = open_stream(corpus.folder, context=size, global_batch=LANES, shuffle_bytes=0)
    for number, batch in enumerate(itertools.islice(stream, stream.lanes.batches_before(2))):
        is_first = stream.lanes.position(number)[1] == 0
        places = (batch.sample_ids * size).tolist()
        num_begun += sum(place in begins for place in places)
        assert batch.goes_on.tolist() == [not is_first and place not in begins for place in places]
    assert num_begun > 3


def test_shards_in_order_are_one_text(corpus):
    text = b"".join(corpus.shard_payloads("train"))
    stream = open_stream(
        corpus.folder, context=CONTEXT, global_batch=LANES, shuffle_bytes=0, shuffle_shards=False, seed=3
    )
    endless = 4 * text
    for number, batch in enumerate(itertools.islice(stream, stream.lanes.batches_before(3))):
        first = stream.lanes.position(number)[1] == 0
        assert batch.goes_on.tolist() == LANES * [not first]
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


@pytest.mark.parametrize("world_size", [1, 3])
def test_substitutes_end_a_text_wherever_a_run_resumes(corpus, tmp_path, monkeypatch, world_size):
    folder = shutil.copytree(corpus.folder, tmp_path / "data")
    shards = corpus.manifest.splits["train"].shards
    for number in (2, 7):
        (folder / shards[number].name).write_bytes(bytes((folder / shards[number].name).stat().st_size))
    monkeypatch.setattr("longstride.data_pipelines.shards.SampleReader.READ_BYTES", 4 * CONTEXT)
    intact = [goes_on for _, _, goes_on, _ in batches(corpus.folder, 60)]
    damaged = list(batches(folder, 60, on_damage="substitute"))
    expected, replaced = [], torch.zeros(LANES, dtype=torch.bool)
    for (_, ids, _, _), (_, whole_ids, goes_on, _) in zip(damaged, batches(corpus.folder, 60), strict=True):
        is_substitute = ids != whole_ids
        expected.append(goes_on & ~is_substitute & ~replaced)
        replaced = is_substitute
    assert any(not torch.equal(a, b) for a, b in zip(expected, intact, strict=True))
    assert all(torch.equal(batch[2], goes_on) for batch, goes_on in zip(damaged, expected, strict=True))
    for step in range(1, 59):
        state = damaged[step - 1][3]
        assert isinstance(state, StreamState)
        _, _, goes_on, _ = next(batches(folder, 1, world_size, state, on_damage="substitute"))
        assert torch.equal(goes_on, expected[step]), step


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
