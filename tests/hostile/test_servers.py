"""From a server that lies come the bytes of the disk, in its order; or one line within bounds of time and bytes."""

import contextlib
import itertools
import json
import logging
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longstride.data_pipelines.building.build import build
from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.settings import RemoteSettings
from longstride.data_pipelines.stores import open_store, remote
from tests.harness.data.builds import write_files
from tests.harness.data.streams import open_stream
from tests.harness.runs import configuration
from tests.hostile.commands import Commands, campaign, sampled
from tests.hostile.generators.http_servers import Exchange, FaultyServer, QuietHandler, serving
from tests.hostile.generators.lies import CUT_BYTES, LIES, SECRET

pytestmark = pytest.mark.usefixtures("quick_servers")
SECONDS = {"timeout_seconds": 0.3, "window_seconds": 1.5, "least_bytes_per_second": 20_000.0}
MOST_BYTES = 2**20
# Of one answer: both ends' sockets and what is read or decompressed at once, sent before it is noticed.
BUFFERS_BYTES = 2**20
MEMORY_BYTES = 2**28
MANIFEST = "manifest.json"
# Kinds of which both manifest and shards come whole, those of which shards do, and those of which chance decides.
HEALED = {
    "cut at 20,000 bytes", "cut at 20,000 bytes, with Last-Modified alone", "cut in a chunk", "cut without ranges",
    "range where none was asked for", "unavailable twice", "redirect with a cookie",
}  # fmt: skip
HEALED_SHARDS = HEALED | {"trailers without end", "part of another version"}
EITHER = {"reset", "bytes behind the answer", "length too short"}  # what is behind an answer may spoil the next one
SAMPLE = (
    "cut at 20,000 bytes", "another range", "endless body", "trickle", "head that trickles", "compressed bomb",
    "chunk extension without end", "reason of 8,000 letters", "redirect to a file", "redirect on and on",
    "status line of 95 kB",
)  # fmt: skip


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a data folder whose manifest and shards are longer than what a cutting server sends."""
    generator = np.random.default_rng(7)
    files = {f"{number:03d}.py": generator.integers(0, 256, 24_000, dtype=np.uint8).tobytes() for number in range(150)}
    sources, folder = (tmp_path_factory.mktemp(name) for name in ("sources", "served"))
    build([write_files(sources, files)], folder / "data", validation_fraction=0.05, shard_bytes=24_000, seed=3)
    served = [folder / "data" / MANIFEST, *folder.glob("data/*.tar")]
    assert min(path.stat().st_size for path in served) > CUT_BYTES
    return folder / "data"


@pytest.fixture
def settings(tmp_path: Path) -> RemoteSettings:
    return RemoteSettings(cache=str(tmp_path / "cache"), attempts=3, parallel=1, most_bytes=MOST_BYTES, **SECONDS)


def of(manifest: bool, lie: Callable[[Exchange], object]) -> Callable[[Exchange], object]:
    """Apply a lie only to the manifest, or only to everything else."""
    return lambda exchange: lie(exchange) if (exchange.request.name == MANIFEST) is manifest else False


def order(location: str | Path, settings: RemoteSettings | None = None) -> list[Any]:
    """Return the first steps of a run."""
    stream = open_stream(location, remote=settings, context=512, global_batch=4, seed=5, shuffle_bytes=20_000)
    with contextlib.closing(iter(stream)) as steps:
        return [(batch.tokens.tolist(), batch.sample_ids.tolist()) for batch in itertools.islice(steps, 60)]


def check_message(text: str) -> None:
    """Check for one printable line of bounded length, without file content and secrets."""
    assert text.isprintable() and len(text) <= 1000, text[:2000]
    assert SECRET not in text


@pytest.mark.parametrize("manifest", [True, False], ids=["manifest", "shards"])
@pytest.mark.parametrize("kind", sampled(LIES, SAMPLE))
def test_bytes_are_those_of_the_disk_or_one_line_says_why(
    folder: Path, settings: RemoteSettings, kind: str, manifest: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    expected = order(folder)
    server = FaultyServer(folder, lie=of(manifest, LIES[kind]))
    healed = kind in (HEALED if manifest else HEALED_SHARDS)
    with server as url:
        location = url.replace("://", f"://somebody:{SECRET}@")
        peak, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
        if healed:
            assert order(location, settings) == expected
        elif kind in EITHER:
            with contextlib.suppress(DataError):
                assert order(location, settings) == expected
        else:
            with pytest.raises(DataError) as caught:
                order(location, settings)
            check_message(str(caught.value))
        seconds = time.monotonic() - start
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024
    for record in caplog.records:
        if record.name.startswith("longstride"):
            check_message(record.getMessage())
    names = {request.name for request in server.requests}
    largest = MOST_BYTES if manifest else max((folder / name).stat().st_size for name in names)
    rounds = remote.ROUNDS * len(names)
    assert grown < MEMORY_BYTES
    if kind != "early hints without end":  # a head's bytes are bounded by its time-out alone, and by no size
        assert server.sent <= rounds * (settings.attempts + 1) * (largest + BUFFERS_BYTES)
    assert seconds < rounds * (settings.window_seconds + settings.attempts * settings.timeout_seconds) + 5
    assert not any("cookie" in request.headers for request in server.requests)


@pytest.mark.parametrize("kind", ["endless body", "redirect on and on", "compressed bomb", "gone"])
def test_verification_of_a_folder_behind_a_server_that_lies(commands: Commands, folder: Path, kind: str) -> None:
    with FaultyServer(folder) as url:
        honest = commands("data", "verify", url, environment={"no_proxy": "127.0.0.1"})
    assert honest.code == 0, honest.err
    with FaultyServer(folder, lie=LIES[kind]) as url:
        line = commands("data", "verify", url, environment={"no_proxy": "127.0.0.1"}).check_refused(honest)
    assert line.startswith(f"{url}/{MANIFEST}: ")


@pytest.mark.parametrize("kind", ["trickle", *campaign(["head that trickles"])])
def test_training_from_a_server_that_is_too_slow(commands: Commands, folder: Path, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "run.json"
    with FaultyServer(folder, lie=LIES[kind]) as url:
        run = configuration(folder, tmp_path / "run")
        run["data"] = {"path": url, "remote": {"cache": str(tmp_path / "cache"), "attempts": 2, **SECONDS}}
        path.write_text(json.dumps(run))
        line = commands("train", "--config", path, environment={"no_proxy": "127.0.0.1"}).check_refused()
    assert line.startswith(f"{url}/{MANIFEST}: ")
    assert not (tmp_path / "run").exists()


def test_tls_of_a_server_that_speaks_none(folder: Path, settings: RemoteSettings) -> None:
    with FaultyServer(folder) as url, pytest.raises(DataError, match="given up after 3 attempts") as caught:
        open_store(url.replace("http:", "https:"), settings).read(MANIFEST)
    check_message(str(caught.value))


def test_pages_without_end_are_not_listed(tmp_path: Path, settings: RemoteSettings) -> None:
    """Serve pages each of which links to a folder below it."""

    class Pages(QuietHandler):
        def do_GET(self) -> None:  # noqa: N802
            self.answer(b'<a href="below/">below/</a> <a href="a.tar">a.tar</a>')

    start = time.monotonic()
    with serving(Pages) as url, pytest.raises(DataError, match=r"window_seconds=1\.5; name the files themselves"):
        open_store(url, settings).find(".tar")
    assert time.monotonic() - start < 10
