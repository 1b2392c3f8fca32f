"""The arithmetic of the order: pure, so tested against its definition."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.order.lanes import Lanes, StreamState, block_order, shard_order, substitutes

LANES = st.builds(
    lambda context, extra, global_batch: Lanes(context + extra, context, global_batch),
    context=st.integers(1, 300),
    extra=st.integers(0, 20_000),
    global_batch=st.integers(1, 24),
)


@given(LANES, st.integers(0, 2000))
def test_position_inverts_batch_number(lanes, batch):
    epoch, step = lanes.position(batch)
    assert 0 <= step < lanes.steps_in(epoch)
    assert lanes.batch_number(epoch, step) == batch


@given(LANES, st.integers(0, 30))
def test_epoch_contexts_each_once(lanes, epoch):
    steps = lanes.steps_in(epoch)
    ids = [lanes.context_id(epoch, step, lane) for step in range(steps) for lane in range(lanes.global_batch)]
    first = lanes.batches_before(epoch) * lanes.global_batch
    assert sorted(ids) == list(range(first, first + steps * lanes.global_batch))


@given(LANES, st.integers(0, 30))
def test_epoch_ends_within_its_own_units(lanes, epoch):
    end = lanes.batches_before(epoch + 1) * lanes.batch_units
    assert end <= (epoch + 1) * lanes.total_units < end + lanes.batch_units


@given(LANES, st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24]))
def test_ranks_share_lanes_in_order(lanes, world_size):
    if lanes.global_batch % world_size:
        with pytest.raises(DataError, match="multiple of the world size"):
            lanes.of_rank(0, world_size)
    else:
        own = [lane for rank in range(world_size) for lane in lanes.of_rank(rank, world_size)]
        assert own == list(range(lanes.global_batch))


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 2), (2, 2), (0, 0)])
def test_rank_out_of_range_is_refused(rank, world_size):
    with pytest.raises(DataError):
        Lanes(100, 10, 4).of_rank(rank, world_size)


@pytest.mark.parametrize(("total", "context", "batch"), [(9, 10, 1), (10, 0, 1), (10, 1, 0), (0, 1, 1)])
def test_lanes_refuse_what_cannot_be_cut(total, context, batch):
    with pytest.raises(DataError):
        Lanes(total, context, batch)


def test_shard_order_is_pinned():
    """The order of every run so far depends on these numbers."""
    assert shard_order(8, seed=0, epoch=0).tolist() == [7, 4, 2, 6, 5, 0, 1, 3]
    assert shard_order(8, seed=0, epoch=1).tolist() == [0, 1, 5, 4, 6, 2, 3, 7]
    assert shard_order(8, seed=2**64 - 1, epoch=0).tolist() == [6, 2, 5, 4, 1, 3, 7, 0]


def test_block_order_and_substitutes_are_pinned():
    assert block_order(8, seed=0, epoch=1, lane=2, block=3).tolist() == [7, 6, 0, 2, 3, 1, 4, 5]
    assert substitutes(range(100, 200), seed=0, epoch=1, context=150)[:4] == [173, 123, 157, 112]


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**70))
def test_substitutes_are_of_the_epoch(seed, context):
    chosen = substitutes(range(10, 17), seed, 3, context)
    assert len(chosen) > 20 and set(chosen) <= set(range(10, 17)) and len(set(chosen)) > 1


@given(st.integers(0, 200), st.integers(0, 2**64 - 1), st.integers(0, 2**40))
def test_shard_order_is_a_permutation(count, seed, epoch):
    order = shard_order(count, seed, epoch)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(count))


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_shard_order_refuses_seed_beyond_64_bits(seed):
    with pytest.raises(DataError, match="seed"):
        shard_order(4, seed, 0)


def test_state_round_trips_through_json():
    state = StreamState("abc", seed=3, epoch=2, step=1, global_batch=8)
    assert StreamState.from_json(json.loads(json.dumps(state.to_json()))) == state


@pytest.mark.parametrize(
    "change",
    [
        {"step": -1},
        {"epoch": "1"},
        {"seed": True},
        {"global_batch": 0},
        {"fingerprint": ""},
        {"extra": 1},
        {"step": 1.0},
    ],
    ids=str,
)
def test_state_from_json_refuses_what_is_no_state(change):
    content = StreamState("abc", seed=3, epoch=2, step=1, global_batch=8).to_json()
    with pytest.raises(DataError, match="state"):
        StreamState.from_json({**content, **change})


@pytest.mark.parametrize("content", [None, [], {}, {"seed": 1}])
def test_state_from_json_refuses_what_is_incomplete(content):
    with pytest.raises(DataError, match="state"):
        StreamState.from_json(content)
