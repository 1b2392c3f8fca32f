"""Damage under `substitute`: the same substitute wherever it is read, named, and nothing else changed."""

import itertools
import shutil

import pytest
import torch

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.order.evaluation import evaluation_contexts
from longstride.data_pipelines.stores import open_store
from tests.harness.data.streams import open_stream

CONTEXT, GLOBAL_BATCH = 64, 12


@pytest.fixture
def damaged(corpus, tmp_path):
    """Copy the folder with a flipped payload, a lost shard of the same size, and a damaged header."""
    folder = shutil.copytree(corpus.folder, tmp_path / "data")
    shards = corpus.manifest.splits["train"].shards
    for number, field in ((1, "content"), (5, "member")):
        path = folder / shards[number].name
        content = bytearray(path.read_bytes())
        content[int(shards[number].load_index(open_store(folder))[1][field])] ^= 8
        path.write_bytes(content)
    lost = folder / shards[9].name
    lost.write_bytes(bytes(lost.stat().st_size))
    return folder


def steps(folder, world_size=1, workers=0, count=None):
    """Read two epochs of (tokens, ids, substitutions) of all ranks together."""
    streams = [
        open_stream(
            folder,
            context=CONTEXT,
            global_batch=GLOBAL_BATCH,
            rank=rank,
            world_size=world_size,
            shuffle_bytes=500,
            on_damage="substitute",
            workers=workers,
        )
        for rank in range(world_size)
    ]
    count = count or streams[0].lanes.batches_before(2)
    for step in zip(*(itertools.islice(stream, count) for stream in streams), strict=True):
        yield (
            torch.cat([batch.tokens for batch in step]),
            torch.cat([batch.sample_ids for batch in step]).tolist(),
            [each for batch in step for each in batch.substitutions],
        )


def test_substitutes_stand_in_for_damaged_contexts_alone(corpus, damaged):
    intact = list(steps(corpus.folder))
    content = {number: row for tokens, ids, _ in intact for number, row in zip(ids, tokens.tolist(), strict=True)}
    found = list(steps(damaged))
    num_substituted = 0
    for (tokens, ids, substitutions), (_, expected, _) in zip(found, intact, strict=True):
        replaced = {each.damaged: each.context for each in substitutions}
        num_substituted += len(replaced)
        assert ids == [replaced.get(number, number) for number in expected]
        assert tokens.tolist() == [content[number] for number in ids]
        assert all("train-0000" in each.damage and "\n" not in str(each) for each in substitutions)
    touched = {name for _, _, each in found for one in each for name in [one.damage.split(": ")[0].rsplit("/", 1)[1]]}
    assert touched == {"train-00001.tar", "train-00005.tar", "train-00009.tar"}
    assert num_substituted > 30


@pytest.mark.parametrize(("world_size", "workers"), [(3, 0), (12, 0), (2, 2)])
def test_substitutes_do_not_depend_on_ranks_or_workers(damaged, world_size, workers):
    expected = list(steps(damaged, count=100))
    for (tokens, ids, replaced), (same, same_ids, same_replaced) in zip(
        steps(damaged, world_size, workers, count=100), expected, strict=True
    ):
        assert torch.equal(tokens, same) and ids == same_ids and replaced == same_replaced


def test_a_data_set_that_is_lost_is_no_data_set(corpus, tmp_path):
    folder = shutil.copytree(corpus.folder, tmp_path / "data")
    for path in folder.glob("train-*.tar"):
        path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(DataError, match="all 32 contexts that could replace it are damaged too"):
        next(iter(steps(folder)))


def test_evaluation_never_substitutes(corpus, damaged):
    with pytest.raises(DataError, match="train-00001"):
        for _ in evaluation_contexts(damaged, "train", context=CONTEXT, batch_size=4):
            pass
