"""Damage: named before a sample of it is delivered, whatever it is."""

import itertools
import random
import shutil
from pathlib import Path

import pytest
import torch

from longstride.data_pipelines.building.build import build
from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.order.evaluation import evaluation_contexts
from longstride.data_pipelines.shards.verify import verify
from longstride.data_pipelines.stores import open_store
from tests.harness.data.streams import open_stream

VICTIM = "train-00001.tar"


@pytest.fixture
def copy(corpus, tmp_path):
    """Copy a data folder that may be damaged."""
    return shutil.copytree(corpus.folder, tmp_path / "data")


@pytest.fixture(scope="module")
def intact(corpus):
    """Read two epochs of batches of the undamaged folder."""
    return batches(corpus.folder)


def batches(folder: Path):
    stream = open_stream(folder, context=64, global_batch=6)
    return list(itertools.islice(stream, stream.lanes.batches_before(2)))


def deliver_until_damage(folder: Path, intact) -> DataError | None:
    """Read two epochs; all that is delivered must be what the undamaged folder holds."""
    delivered = 0
    try:
        stream = open_stream(folder, context=64, global_batch=6)
        for batch, expected in zip(stream, intact, strict=False):
            assert torch.equal(batch.tokens, expected.tokens)
            assert torch.equal(batch.sample_ids, expected.sample_ids)
            delivered += 1
        for _ in evaluation_contexts(folder, context=64, batch_size=8):
            pass
    except DataError as error:
        assert "\n" not in str(error)
        return error
    assert delivered == len(intact)
    return None


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1 << (offset % 8)
    path.write_bytes(content)


def member_offset(corpus, number: int) -> int:
    shard = next(shard for shard in corpus.manifest.splits["train"].shards if shard.name == VICTIM)
    return int(shard.load_index(open_store(corpus.folder))[number]["member"])


def test_damaged_payload_is_named(corpus, copy, intact):
    flip(copy / VICTIM, member_offset(corpus, 2) + 512)
    assert f"{VICTIM}: sample train-00001-0000002.txt is damaged" in str(deliver_until_damage(copy, intact))


def test_damage_behind_the_last_sample_is_named(copy, intact):
    flip(copy / VICTIM, (copy / VICTIM).stat().st_size - 3)
    assert f"{VICTIM}: is damaged after its last sample" in str(deliver_until_damage(copy, intact))


@pytest.mark.parametrize("field_offset", [0, 100, 124, 130, 150, 156, 257], ids=lambda value: f"byte{value}")
@pytest.mark.parametrize("number", [0, 2])
def test_damaged_header_is_named(corpus, copy, intact, number, field_offset):
    """WebDataset silently ends the shard there."""
    flip(copy / VICTIM, member_offset(corpus, number) + field_offset)
    assert VICTIM in str(deliver_until_damage(copy, intact))


def test_truncated_shard_is_named(copy, intact):
    content = (copy / VICTIM).read_bytes()
    for size in (0, 100, 512, 700, len(content) - 1):
        (copy / VICTIM).write_bytes(content[:size])
        assert f"{VICTIM}: {size} bytes, but" in str(deliver_until_damage(copy, intact))


@pytest.mark.parametrize("filler", [b"\0", b"x"], ids=["zeros", "rubbish"])
@pytest.mark.parametrize("begin", [0, 700])
def test_overwritten_shard_is_named(copy, intact, begin, filler):
    content = (copy / VICTIM).read_bytes()
    (copy / VICTIM).write_bytes(content[:begin] + filler * (len(content) - begin))
    assert VICTIM in str(deliver_until_damage(copy, intact))


@pytest.mark.parametrize("vanish", [lambda path: path.unlink(), lambda path: path.write_bytes(b"short")])
def test_shard_that_changes_under_a_run_is_named(copy, vanish):
    stream = open_stream(copy, context=64, global_batch=1)
    iterator = iter(stream)
    next(iterator)
    for path in copy.glob("*.tar"):
        vanish(path)
    with pytest.raises(DataError, match=r"train-\d{5}\.tar: "):
        for _ in range(stream.lanes.steps_in(0)):
            next(iterator)


def test_swapped_shards_are_named(copy, intact):
    first, second = (copy / f"train-0000{number}.tar" for number in (3, 4))
    first.rename(copy / "held")
    second.rename(first)
    (copy / "held").rename(second)
    assert "train-0000" in str(deliver_until_damage(copy, intact))


def test_swapped_shards_of_equal_size_are_named(tmp_path):
    """Sizes and payloads are equal, so only the samples' keys differ."""
    for number in range(8):
        (tmp_path / "source").mkdir(exist_ok=True)
        (tmp_path / "source" / f"{number}.py").write_bytes(b"the same\n" * 20)
    folder = tmp_path / "data"
    build([tmp_path / "source"], folder, validation_fraction=0, shard_bytes=400)
    shutil.copy(folder / "train-00001.tar", folder / "train-00002.tar")
    with pytest.raises(DataError, match=r"holds sample 'train-00001-0000000\.txt' in place of train-00002-0000000"):
        for _ in zip(range(20), open_stream(folder, context=90, global_batch=2), strict=False):
            pass


def run_damage(corpus, tmp_path: Path, intact, num_cases: int) -> None:
    """Apply random damage to shards, indexes and manifest; assert that each is reported before a wrong byte."""
    generator = random.Random(0)
    names = sorted(path.name for path in corpus.folder.iterdir())
    for case in range(num_cases):
        folder = shutil.copytree(corpus.folder, tmp_path / str(case))
        path = folder / generator.choice(names)
        kind = generator.choice(["flip", "flip", "flip", "cut", "swap", "delete"])
        if kind == "flip":
            flip(path, generator.randrange(path.stat().st_size))
        elif kind == "cut":
            path.write_bytes(path.read_bytes()[: generator.randrange(path.stat().st_size)])
        elif kind == "delete":
            path.unlink()
        else:
            others = [name for name in names if Path(name).suffix == path.suffix and name != path.name]
            path.write_bytes((corpus.folder / generator.choice(others or ["train-00000.tar"])).read_bytes())
        if path.name == "manifest.json" and kind == "delete":  # no data folder any more
            with pytest.raises(DataError, match=r"lacks manifest\.json"):
                verify(folder)
        else:
            assert verify(folder), (case, kind, path.name)
        assert deliver_until_damage(folder, intact) is not None, (case, kind, path.name)
        shutil.rmtree(folder)


def test_random_damage_never_passes(corpus, tmp_path, intact):
    run_damage(corpus, tmp_path, intact, num_cases=20)


@pytest.mark.campaign
def test_random_damage_campaign(corpus, tmp_path, intact):
    run_damage(corpus, tmp_path, intact, num_cases=500)
