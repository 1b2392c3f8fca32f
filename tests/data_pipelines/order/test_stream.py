"""The stream against the definition of the order, over world sizes, resumes and epochs."""

import contextlib
import functools
import itertools
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.order.contexts import Cut
from longstride.data_pipelines.order.lanes import Lanes, StreamState, block_order, shard_order
from longstride.data_pipelines.order.stream import ByteStream, StreamSettings
from tests.harness.data.streams import open_stream

WORLD_SIZES = (1, 2, 3, 4, 6, 8, 12, 24)
WORKERS = (0, 1, 3)
SHORT_BLOCKS = 700  # bytes: some ten contexts, so that each lane has several blocks and resumes land inside later ones


def defined_stream(corpus, seed: int, num_epochs: int) -> bytes:
    """Compute the beginning of the endless stream, as lanes.py defines it."""
    shards = corpus.shard_payloads("train")
    orders = [shard_order(len(shards), seed, epoch) for epoch in range(num_epochs)]
    return b"".join(shards[number] for order in orders for number in order)


def take(stream, count):
    """Leaves no worker process behind."""
    with contextlib.closing(iter(stream)) as batches:
        return list(itertools.islice(batches, count))


def global_batches(corpus, count, world_size=1, state=None, workers=0, prefetch=2):
    """Join the first ``count`` global batches from all ranks."""
    ranks = [
        take(
            open_stream(
                corpus.folder,
                context=64,
                global_batch=24,
                seed=5,
                rank=rank,
                world_size=world_size,
                shuffle_bytes=SHORT_BLOCKS,
                workers=workers,
                prefetch=prefetch,
                state=state,
            ),
            count,
        )
        for rank in range(world_size)
    ]
    for step in zip(*ranks, strict=True):
        assert len({batch.state for batch in step}) == 1
        yield (
            torch.cat([batch.tokens for batch in step]),
            torch.cat([batch.sample_ids for batch in step]),
            step[0].state,
        )


cached_block_order = functools.lru_cache(block_order)


def defined_context(lanes: Lanes, seed: int, epoch: int, step: int, lane: int, block_contexts: int) -> int:
    """Compute the sample id that a lane reads at a step, as lanes.py defines it."""
    block, place = divmod(step, block_contexts)
    count = min(block_contexts, lanes.steps_in(epoch) - block * block_contexts)
    chosen = cached_block_order(count, seed, epoch, lane, block)[place]
    return lanes.context_id(epoch, block * block_contexts + int(chosen), lane)


def assert_follows_definition(corpus, context, global_batch, seed, num_epochs, shuffle_bytes=1000):
    stream = open_stream(
        corpus.folder, context=context, global_batch=global_batch, seed=seed, shuffle_bytes=shuffle_bytes
    )
    num_batches = stream.lanes.batches_before(num_epochs)
    content = defined_stream(corpus, seed, num_epochs)
    seen = []
    for number, batch in enumerate(take(stream, num_batches)):
        epoch, step = stream.lanes.position(number)
        for lane, (row, sample) in enumerate(zip(batch.tokens, batch.sample_ids.tolist(), strict=True)):
            wanted = defined_context(stream.lanes, seed, epoch, step, lane, max(1, shuffle_bytes // context))
            assert sample == wanted
            assert row.numpy().tobytes() == content[sample * context : (sample + 1) * context]
            seen.append(sample)
    # Every byte of the epochs is delivered exactly once, save the carry, which is less than one global batch.
    assert sorted(seen) == list(range(num_batches * global_batch))
    carried = len(content) - num_batches * context * global_batch
    assert 0 <= carried < context * global_batch


@settings(max_examples=15, deadline=None)
@example(context=7, global_batch=7, seed=5, shuffle_bytes=700)
@example(context=4096, global_batch=16, seed=5, shuffle_bytes=2**20)
@example(context=333, global_batch=5, seed=5, shuffle_bytes=0)
@given(
    context=st.integers(20, 5000),
    global_batch=st.integers(1, 30),
    seed=st.integers(0, 2**64 - 1),
    shuffle_bytes=st.integers(0, 20_000),
)
def test_stream_follows_definition_anywhere(corpus, context, global_batch, seed, shuffle_bytes):
    assert_follows_definition(corpus, context, global_batch, seed, 2, shuffle_bytes)


@pytest.mark.campaign
@settings(max_examples=1000, deadline=None)
@given(
    context=st.integers(5, 30_000),
    global_batch=st.integers(1, 60),
    seed=st.integers(0, 2**64 - 1),
    shuffle_bytes=st.integers(0, 100_000),
)
def test_stream_follows_definition_campaign(corpus, context, global_batch, seed, shuffle_bytes):
    assert_follows_definition(corpus, context, global_batch, seed, 3, shuffle_bytes)


def test_blocks_are_shuffled_each_in_its_own_way():
    orders = {(lane, block): block_order(100, 5, 0, lane, block).tolist() for lane in range(3) for block in range(3)}
    assert all(sorted(order) == list(range(100)) for order in orders.values())
    assert len({tuple(order) for order in orders.values()}) == 9


@pytest.fixture(scope="module")
def uninterrupted(corpus):
    """Read three epochs of global batches on one rank."""
    stream = open_stream(corpus.folder, context=64, global_batch=24, seed=5, shuffle_bytes=SHORT_BLOCKS)
    assert stream.lanes.steps_in(0) > 2 * (SHORT_BLOCKS // 64)
    return list(global_batches(corpus, stream.lanes.batches_before(3)))


@pytest.mark.parametrize("world_size", [3, 8, 24])
def test_stream_does_not_depend_on_world_size(corpus, uninterrupted, world_size):
    assert_same(global_batches(corpus, len(uninterrupted), world_size), uninterrupted)


def assert_same(found, expected):
    found, expected = list(found), list(expected)
    assert len(found) == len(expected)
    for (tokens, ids, state), (other_tokens, other_ids, other_state) in zip(found, expected, strict=True):
        assert torch.equal(tokens, other_tokens) and torch.equal(ids, other_ids) and state == other_state


@pytest.mark.parametrize(("world_size", "workers"), [(1, 3), (6, 1)])
def test_stream_does_not_depend_on_workers(corpus, uninterrupted, world_size, workers):
    assert_same(global_batches(corpus, 40, world_size, workers=workers, prefetch=3), uninterrupted[:40])


def test_stream_leaves_the_random_numbers_of_others_alone(corpus):
    """Dropout draws from the same generator as a loader would: a resume must find it where it was."""
    for workers in WORKERS:
        before = torch.get_rng_state()
        take(open_stream(corpus.folder, context=64, global_batch=24, workers=workers), 3)
        assert torch.equal(torch.get_rng_state(), before)


def test_workers_hand_on_damage_as_it_is(corpus, tmp_path):
    """The message is one line, without the traceback of the worker."""
    folder = shutil.copytree(corpus.folder, tmp_path / "data")
    for path in folder.glob("train-*.tar"):
        path.write_bytes(path.read_bytes()[:600] + bytes(path.stat().st_size - 600))
    for workers in (0, 2):
        with pytest.raises(DataError, match=r"^/\S+train-\d+\.tar: [^\n]+$"):
            take(open_stream(folder, context=64, global_batch=4, workers=workers), 100)


def assert_resumes(corpus, uninterrupted, data, workers):
    """Assert that resumes at random steps, world sizes and numbers of workers give the batches of one run."""
    place, state = 0, None
    while place < len(uninterrupted):
        count = data.draw(st.integers(1, len(uninterrupted) - place))
        world_size = data.draw(st.sampled_from(WORLD_SIZES))
        part = list(
            global_batches(
                corpus, count, world_size, state, data.draw(st.sampled_from(workers)), data.draw(st.integers(1, 4))
            )
        )
        assert_same(part, uninterrupted[place : place + count])
        place += count
        state = StreamState.from_json(part[-1][2].to_json())


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_stream_resumes_anywhere_with_any_world_size(corpus, uninterrupted, data):
    assert_resumes(corpus, uninterrupted, data, workers=[0])


@settings(max_examples=2, deadline=None)
@given(data=st.data())
def test_stream_resumes_anywhere_with_any_workers(corpus, uninterrupted, data):
    assert_resumes(corpus, uninterrupted[:60], data, WORKERS)


@pytest.mark.campaign
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_stream_resumes_campaign(corpus, uninterrupted, data):
    assert_resumes(corpus, uninterrupted, data, WORKERS)


def test_stream_far_ahead_costs_the_same(corpus):
    """Resuming in epoch 10 million reads no more than the first batch does."""
    lanes = Lanes(corpus.manifest.splits["train"].content_bytes, 64, 24)
    start = open_stream(corpus.folder, context=64, global_batch=24).state
    epoch, step = lanes.position(lanes.batches_before(10_000_000) + 3)
    state = StreamState(start.fingerprint, 0, epoch, step, 24)
    batch = next(iter(open_stream(corpus.folder, context=64, global_batch=24, state=state)))
    shards = corpus.shard_payloads("train")
    content = b"".join(shards[number] for number in shard_order(len(shards), 0, epoch))
    sample = int(batch.sample_ids[12])
    offset = sample * 64 - epoch * lanes.total_units
    assert 0 <= offset < lanes.total_units - 64
    assert batch.tokens[12].numpy().tobytes() == content[offset : offset + 64]


def test_stream_batch_has_shapes_and_types(corpus):
    batch = next(iter(open_stream(corpus.folder, context=64, global_batch=24, rank=1, world_size=3)))
    assert batch.tokens.shape == (8, 64) and batch.tokens.dtype == torch.uint8
    assert batch.sample_ids.shape == (8,) and batch.sample_ids.dtype == torch.int64
    assert (batch.state.epoch, batch.state.step) == (0, 1)


def test_stream_iterates_again_from_its_state(corpus):
    stream = open_stream(corpus.folder, context=64, global_batch=24)
    assert torch.equal(next(iter(stream)).tokens, next(iter(stream)).tokens)


def test_stream_can_be_sent_to_another_process(corpus):
    stream = open_stream(corpus.folder, context=64, global_batch=24)
    first = next(iter(stream))
    assert torch.equal(next(iter(pickle.loads(pickle.dumps(stream)))).tokens, first.tokens)


def test_stream_passes_over_epochs_without_a_step(corpus):
    total = corpus.manifest.splits["train"].content_bytes
    stream = open_stream(corpus.folder, context=total // 2, global_batch=5)
    assert [stream.lanes.steps_in(epoch) for epoch in range(3)] == [0, 0, 1]
    assert (stream.state.epoch, stream.state.step) == (2, 0)
    content = defined_stream(corpus, seed=0, num_epochs=3)
    tokens = next(iter(stream)).tokens.numpy()
    assert tokens.tobytes() == content[: tokens.size]


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"fingerprint": "0" * 64}, "another data set, split, cutting into contexts or shuffle"),
        ({"seed": 1}, "another order"),
        ({"global_batch": 12}, "steps of another size"),
        ({"step": 10_000}, "has .* steps"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_stream_refuses_state_of_another_stream(corpus, change, rule):
    state = open_stream(corpus.folder, context=64, global_batch=24).state
    with pytest.raises(DataError, match=rule):
        open_stream(corpus.folder, context=64, global_batch=24, state=StreamState(**{**state.to_json(), **change}))


@pytest.mark.parametrize(
    "change",
    [
        {"context": 128},
        {"split": "validation"},
        {"shuffle_bytes": 0},
        *({"cut": cut} for cut in (Cut(separator=0), Cut(packing=False), Cut(packing=False, hop=32))),
    ],
    ids=str,
)
def test_stream_refuses_state_of_another_split_context_cut_or_shuffle(corpus, change):
    state = open_stream(corpus.folder, context=64, global_batch=4).state
    with pytest.raises(DataError, match="another data set, split, cutting into contexts or shuffle"):
        open_stream(corpus.folder, **{"context": 64, "global_batch": 4, "state": state, **change})


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"world_size": 5}, "multiple of the world size 5; nearest 20, 25"),
        ({"world_size": 2, "rank": 2}, "rank=2"),
        ({"context": 10**6}, "context=1000000: is longer than the split"),
        ({"split": "test"}, "no split 'test'.*train"),
        ({"seed": -1}, "seed=-1"),
        ({"shuffle_bytes": -1}, "shuffle_bytes=-1: must be at least 0"),
        ({"workers": -1}, "workers=-1: must be at least 0"),
        ({"prefetch": 0}, "prefetch=0: must be at least 1"),
        ({"on_damage": "hide"}, "on_damage='hide': must be one of abort, substitute"),
        ({"cut": Cut(separator=256)}, "separator=256: must be a byte"),
        ({"cut": Cut(hop=8)}, "hop=8: packed documents are cut every 64 bytes; set packing=false"),
        ({"cut": Cut(packing=False, separator=0)}, "separator=0: only applies to packed documents"),
        ({"cut": Cut(packing=False, hop=65)}, "hop=65: must be from 1 to the context 64"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_stream_refuses_arguments_that_do_not_fit(corpus, change, rule):
    with pytest.raises(DataError, match=rule):
        open_stream(corpus.folder, **{"context": 64, "global_batch": 24, **change})


def test_stream_names_an_argument_of_another_type(corpus):
    asked = StreamSettings(context=64, global_batch=24)
    with pytest.raises(DataError, match=r"^settings: str is not a StreamSettings; give ByteStream\(location, settings"):
        ByteStream(corpus.folder, "train", asked)
    with pytest.raises(DataError, match=r"^split: int is not a str"):
        ByteStream(corpus.folder, asked, 1)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts open files where Linux lists them")
def test_stream_keeps_no_file_open(corpus):
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    stream = iter(open_stream(corpus.folder, context=64, global_batch=24))
    for _ in range(5):
        next(stream)
        assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_of_torch_gives_the_batches_of_the_stream(corpus, num_workers):
    stream = open_stream(corpus.folder, context=64, global_batch=6, shuffle_bytes=500)
    expected = take(stream, 5)
    assert StreamState.from_json(stream.state_dict()) == expected[-1].state
    loader = torch.utils.data.DataLoader(stream, batch_size=None, num_workers=num_workers)
    found = list(itertools.islice(iter(loader), 5))
    for ours, theirs in zip(expected, found, strict=True):
        assert torch.equal(ours.tokens, theirs.tokens) and ours.state == theirs.state
    stream.load_state_dict(expected[2].state.to_json())
    assert torch.equal(next(iter(stream)).tokens, expected[3].tokens)


def test_a_loader_whose_workers_would_repeat_batches_is_refused(corpus):
    stream = open_stream(corpus.folder, context=64, global_batch=6)
    with pytest.raises(
        DataError, match=r"num_workers=2: each worker of the loader would read the same batches; at most"
    ):
        next(iter(torch.utils.data.DataLoader(stream, batch_size=None, num_workers=2)))
