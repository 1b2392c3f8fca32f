"""Training and scoring from a server that fails: the bytes and their order are those of the disk."""

import contextlib
import itertools
import shutil
from pathlib import Path

import pytest
import torch

from longstride.data_pipelines.building.build import build
from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.order.evaluation import evaluation_contexts
from longstride.data_pipelines.settings import RemoteSettings
from longstride.data_pipelines.shards import DataFolder, verify
from tests.harness.data.streams import open_stream
from tests.hostile.generators.http_servers import FaultyServer

pytestmark = pytest.mark.usefixtures("quick_servers")
OPTIONS = {"context": 64, "global_batch": 12, "seed": 5, "shuffle_bytes": 700}
FORK_BESIDE_THREADS = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


@pytest.fixture
def settings(tmp_path) -> RemoteSettings:
    """Configure a cache for about a third of the corpus, so that shards are fetched again and again."""
    return RemoteSettings(cache=str(tmp_path / "cache"), cache_bytes=140_000, timeout_seconds=0.3)


def batches(location, count, remote=None, **changes):
    stream = open_stream(location, remote=remote, **{**OPTIONS, **changes})
    with contextlib.closing(iter(stream)) as steps:
        return list(itertools.islice(steps, count))


def assert_equal(found, expected):
    for batch, same in zip(found, expected, strict=True):
        assert torch.equal(batch.tokens, same.tokens) and torch.equal(batch.sample_ids, same.sample_ids)


@FORK_BESIDE_THREADS
@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.campaign), 2])
def test_stream_from_a_failing_server_is_that_of_the_disk(corpus, settings, workers):
    server = FaultyServer(corpus.folder, share=0.2, seed=1, stall_seconds=1)
    with server as url:
        found = batches(url, 60, settings, workers=workers)
    assert_equal(found, batches(corpus.folder, 60))
    assert sum(request.fault is not None for request in server.requests) >= 3
    held = sum(path.stat().st_size for path in Path(settings.cache).rglob("*.*"))
    assert 0 < held <= settings.cache_bytes


def test_evaluation_and_verification_from_a_failing_server(corpus, settings):
    def rows(location, **remote):
        found = evaluation_contexts(DataFolder(location, **remote), context=64, batch_size=4)
        return [(batch.tokens.tolist(), batch.lengths.tolist()) for batch in found]

    with FaultyServer(corpus.folder, share=0.2, seed=2, faults=("drop", "cut", "error", "short")) as url:
        assert rows(url, remote=settings) == rows(corpus.folder)
        assert verify(url) == []


def test_damaged_copy_in_the_cache_is_fetched_again(corpus, settings, tmp_path):
    with FaultyServer(corpus.folder) as url:
        expected = batches(url, 20, settings)
        for path in (tmp_path / "cache").rglob("*.tar"):
            content = bytearray(path.read_bytes())
            content[600] ^= 1
            path.write_bytes(content)
        for path in (tmp_path / "cache").rglob("*.npy"):
            path.write_bytes(bytes(path.stat().st_size))
        assert_equal(batches(url, 20, settings), expected)


def test_verification_names_what_is_damaged_on_the_server(corpus):
    with FaultyServer(corpus.folder, corrupt=["train-00002.tar"]) as url:
        (finding,) = verify(url)
    assert f"{url}/train-00002.tar: " in finding and "SHA-256" in finding


def test_folder_that_is_replaced_on_the_server_is_noticed(corpus, settings, tmp_path):
    """The current run finds files that differ from its manifest. A new run gets a new cache."""
    served = shutil.copytree(corpus.folder, tmp_path / "served")
    with FaultyServer(served) as url:
        stream = open_stream(url, remote=settings, **OPTIONS)
        shutil.rmtree(served)
        build([corpus.source], served, validation_fraction=0.1, shard_bytes=2500, seed=8)
        with pytest.raises(DataError, match=r"train-\d+.*: .*(but it should have|SHA-256 does not match)"):
            list(itertools.islice(stream, 60))
        assert_equal(batches(url, 60, settings), batches(served, 60))


def test_cache_that_is_too_small_is_refused(corpus, tmp_path):
    with (
        FaultyServer(corpus.folder) as url,
        pytest.raises(DataError, match=r"cache_bytes=5000: .* are needed at the same time; set at least"),
    ):
        open_stream(url, remote=RemoteSettings(cache=str(tmp_path), cache_bytes=5000), **OPTIONS)
