"""Remote data folders: every fault of a server, resumes, the shared and bounded cache, processes, credentials."""

import hashlib
import io
import logging
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.settings import RemoteSettings
from longstride.data_pipelines.stores import StoredFile, open_store, remote, transport
from longstride.data_pipelines.stores.cache import Cache
from tests.hostile.generators.http_servers import FAULTS, FaultyServer, serving_folder
from tests.hostile.generators.lies import LIES

ROOT = Path(__file__).resolve().parents[3]
FORK_BESIDE_THREADS = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
FINGERPRINT = "0123456789abcdef" * 4


@pytest.fixture(autouse=True)
def environment(monkeypatch, quick_servers):
    """Set keys for a bucket that needs none."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret-of-s3")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")


def make_files(folder: Path, *sizes: int) -> list[StoredFile]:
    """Write random files in a folder, which is also the S3 bucket, with the records of a manifest."""
    folder.mkdir(exist_ok=True)
    (folder / "manifest.json").write_bytes(b"{}")
    files = []
    for number, size in enumerate(sizes):
        content = random.Random(number).randbytes(size)
        files.append(StoredFile(f"train-{number:05d}.tar", size, hashlib.sha256(content).hexdigest()))
        (folder / files[-1].name).write_bytes(content)
    return files


@pytest.fixture
def bucket(tmp_path) -> Path:
    return tmp_path / "bucket"


@pytest.fixture
def opened(tmp_path):
    """Opens stores with a cache in tmp_path, and closes them."""
    stores = []

    def open_one(location: str, *, fingerprint: str = FINGERPRINT, **settings):
        chosen = {"cache": str(tmp_path / "cache"), "timeout_seconds": 0.3, "attempts": 4, **settings}
        store = open_store(location, RemoteSettings(**chosen))
        store.bind(fingerprint)
        stores.append(store)
        return store

    yield open_one
    for store in stores:
        store.close()


def cached(tmp_path: Path) -> set[str]:
    """Names of the files in the cache, locks left out."""
    return {path.name for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.name != ".lock"}


def wait_until(condition) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def location_at(protocol: str, url: str, monkeypatch) -> str:
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    return "s3://bucket" if protocol == "s3" else f"{url}/bucket/"


@pytest.mark.parametrize("protocol", ["http", pytest.param("s3", marks=pytest.mark.campaign)])
@pytest.mark.parametrize("fault", FAULTS)
def test_fetch_survives_each_fault(fault, protocol, bucket, opened, monkeypatch):
    files = make_files(bucket, 0, 1, 200_000, 300_001)
    monkeypatch.setattr(transport, "CHUNK_BYTES", 2**15)
    monkeypatch.setattr(transport, "SMALLEST_CHUNK_BYTES", 2**15)
    with FaultyServer(bucket.parent, 0.4, seed=5, faults=(fault,), stall_seconds=1) as url:
        store = opened(location_at(protocol, url, monkeypatch), attempts=20)  # s3fs makes three requests to read one
        for file in files:
            assert store.local(file).read_bytes() == (bucket / file.name).read_bytes()
        assert store.read("manifest.json") == b"{}"
        store.close()


@pytest.mark.parametrize("protocol", ["http", "s3"])
def test_fetch_survives_all_faults_at_once_in_the_background(protocol, bucket, opened, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "longstride.data_pipelines")
    files = make_files(bucket, *[100_000] * 30)
    server = FaultyServer(bucket.parent, 0.2, seed=2, stall_seconds=1)
    with server as url:
        store = opened(location_at(protocol, url, monkeypatch), attempts=10)
        store.expect(files)
        for file in files:
            assert store.local(file).read_bytes() == (bucket / file.name).read_bytes()
        store.close()
    drawn = [request.fault for request in server.requests if request.fault]
    assert len(set(drawn)) >= 4
    assert "trying again in" in caplog.text


def test_bytes_that_came_at_once_with_a_break_are_kept(bucket, opened):
    """This includes the manifest, if the server states its version."""
    (file,) = make_files(bucket, 100_000)
    (bucket / "manifest.json").write_bytes((bucket / file.name).read_bytes())
    server = FaultyServer(bucket, lie=LIES["cut at 20,000 bytes"])
    with server as url:
        store = opened(url, attempts=2)
        assert store.local(file).read_bytes() == store.read("manifest.json") == (bucket / file.name).read_bytes()
    for name in (file.name, "manifest.json"):
        assert [request.offset for request in server.of(name)] == [0, 20_000, 40_000, 60_000, 80_000]


def test_files_that_a_page_links_to_are_found(bucket, opened):
    make_files(bucket, 10)
    for name in ("deeper/b c.tar", "deeper/.hidden.tar", ".hidden/c.tar", "other.txt"):
        (bucket / name).parent.mkdir(exist_ok=True)
        (bucket / name).write_bytes(b"content")
    with serving_folder(bucket.parent) as url:
        store = opened(f"{url}/bucket")
        assert list(store.find(".tar")[0]) == ["deeper/b%20c.tar", "train-00000.tar"]
        assert store.size("deeper/b%20c.tar") == 7


def test_errors_that_no_attempt_mends_come_at_once(bucket, opened, monkeypatch):
    files = make_files(bucket, 10, 10)
    gone = StoredFile("train-00009.tar", 10, "0" * 64)
    server = FaultyServer(bucket.parent, statuses={f"bucket/{files[1].name}": 403})
    with server as url:
        for protocol in ("http", "s3"):
            store = opened(location_at(protocol, url, monkeypatch))
            with pytest.raises(DataError, match=r"bucket/train-00009\.tar: no such file"):
                store.local(gone)
            with pytest.raises(DataError, match=r"bucket/train-00001\.tar: access denied"):
                store.local(files[1])
            with pytest.raises(DataError, match=r"bucket/nothing\.json: no such file; check the location"):
                store.read("nothing.json")
            store.close()
    assert len(server.of(f"bucket/{gone.name}")) == 2
    assert len(server.of(f"bucket/{files[1].name}")) == 2


def test_server_that_is_not_there_is_an_error(opened):
    with pytest.raises(DataError, match=r"http://127\.0\.0\.1:9/data/manifest\.json: .* given up after 4 attempts"):
        opened("http://127.0.0.1:9/data").read("manifest.json")


def test_corrupted_remote_file_is_told_from_a_corrupted_transfer(bucket, opened, tmp_path):
    files = make_files(bucket, 50_000, 50_000)
    server = FaultyServer(bucket, corrupt={files[0].name})
    with server as url:
        store = opened(url)
        with pytest.raises(DataError, match=r"its SHA-256 does not match: .* belongs to another set"):
            store.local(files[0])
        assert len(server.requests) == remote.ROUNDS
        server.corrupt = ()
        assert store.local(files[0]).stat().st_size == 50_000
        longer = StoredFile(files[1].name, 49_999, files[1].sha256)
        with pytest.raises(DataError, match=r"50000 bytes, but it should have 49999"):
            store.local(longer)
        shorter = StoredFile(files[1].name, 50_001, files[1].sha256)
        with pytest.raises(DataError, match=r"it ends before byte 50000"):
            store.local(shorter)
    assert cached(tmp_path) == {files[0].name}


def test_partial_of_a_corrupted_transfer_is_dropped(bucket, opened, tmp_path):
    files = make_files(bucket, 50_000)
    folder = tmp_path / "cache" / FINGERPRINT[:16]
    folder.mkdir(parents=True)
    (folder / f"{files[0].name}.50000-{files[0].sha256[:8]}.partial").write_bytes(bytes(20_000))
    with FaultyServer(bucket) as url:
        assert opened(url).local(files[0]).read_bytes() == (bucket / files[0].name).read_bytes()


def forked(call) -> int:
    """Process id of a child that exits with 0 if ``call`` returns and with 1 if it raises."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # the child never hangs
        try:
            call()
            os._exit(0)
        finally:
            os._exit(1)
    return child


@FORK_BESIDE_THREADS
def test_partial_of_a_killed_process_is_gone_on_with(bucket, opened):
    files = make_files(bucket, 2**21)
    server = FaultyServer(bucket, pause_seconds=0.05)
    with server as url:
        child = forked(lambda: opened(url).local(files[0]))
        wait_until(lambda: server.sent >= 2**19)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        server.pause_seconds = 0
        assert opened(url).local(files[0]).read_bytes() == (bucket / files[0].name).read_bytes()
    _, second = server.requests
    assert second.offset >= 2**18
    assert second.sent == files[0].size - second.offset


@FORK_BESIDE_THREADS
def test_processes_fetch_a_file_once(bucket, opened):
    files = make_files(bucket, 2**20)
    server = FaultyServer(bucket, pause_seconds=0.02)
    with server as url:
        children = [forked(lambda: opened(url).local(files[0])) for _ in range(3)]
        assert [os.waitpid(child, 0)[1] for child in children] == [0] * 3
    assert len(server.requests) == 1


@FORK_BESIDE_THREADS
def test_lock_of_a_killed_parent_does_not_live_on_in_its_child(bucket, tmp_path):
    """A forked process holds its parent's open files, and so their locks, until it closes them."""
    (file,) = make_files(bucket, 10)
    told, tell = os.pipe()
    killed, kill = os.pipe()

    def be_killed() -> None:
        cache = Cache(RemoteSettings(cache=str(tmp_path / "cache"), cache_bytes=100), FINGERPRINT)
        assert cache.claim(file, threading.Event()) is not None

        def outlive_it() -> None:
            os.write(tell, b"1")
            assert os.read(killed, 1) == b"!"
            cache.forget_locks()
            assert cache.claim(file, threading.Event()) is not None
            os.write(tell, b"2")

        forked(outlive_it)
        time.sleep(60)

    parent = forked(be_killed)
    assert os.read(told, 1) == b"1"
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    os.write(kill, b"!")
    assert os.read(told, 1) == b"2"
    for end in (told, tell, killed, kill):
        os.close(end)


EXPECT = """
import sys, time
from longstride.data_pipelines.stores import StoredFile, open_store
from longstride.data_pipelines.settings import RemoteSettings
url, cache, name, size, sha256 = sys.argv[1:]
store = open_store(url, RemoteSettings(cache=cache, timeout_seconds=60))
store.bind("0123456789abcdef")
store.expect([StoredFile(name, int(size), sha256)])
time.sleep(0.5)
"""


def test_stalled_fetch_does_not_keep_a_process_from_ending(bucket, tmp_path):
    files = make_files(bucket, 10)
    with FaultyServer(bucket, 1, faults=("stall",), stall_seconds=60) as url:
        arguments = [url, str(tmp_path / "cache"), files[0].name, "10", files[0].sha256]
        subprocess.run([sys.executable, "-c", EXPECT, *arguments], cwd=ROOT, check=True, timeout=30)


def test_cache_is_bounded_and_drops_what_was_used_least_recently(bucket, opened, tmp_path, caplog):
    caplog.set_level(logging.INFO, "longstride.data_pipelines")
    files = make_files(bucket, *[1000] * 5)
    with FaultyServer(bucket) as url:
        other = opened(url, fingerprint="f" * 64, cache_bytes=3500)
        other.local(files[4])
        store = opened(url, cache_bytes=3500)
        for number in (0, 1, 0, 2):
            kept = store.local(files[number])
        assert cached(tmp_path) == {files[number].name for number in (0, 1, 2)}
        assert not (tmp_path / "cache" / ("f" * 16)).exists()
        with store.local(files[1]).open("rb") as still_open:
            for number in (0, 2, 3):
                kept = store.local(files[number])
            assert cached(tmp_path) == {files[number].name for number in (0, 2, 3)}
            assert still_open.read() == (bucket / files[1].name).read_bytes()
        assert kept.name == files[3].name
        assert store.local(files[1]).read_bytes() == (bucket / files[1].name).read_bytes()
    assert "removed from the cache, 1000 bytes" in caplog.text


def test_cache_drops_abandoned_partials_of_other_sets(bucket, opened, tmp_path):
    files = make_files(bucket, 1000)
    folder = tmp_path / "cache" / ("e" * 16)
    folder.mkdir(parents=True)
    (folder / "train-00000.tar.5000-00000000.partial").write_bytes(b"begun")
    with FaultyServer(bucket) as url:
        opened(url, cache_bytes=5999).local(files[0])
    assert cached(tmp_path) == {files[0].name}


def test_cache_that_is_too_small_is_refused(bucket, opened, tmp_path):
    files = make_files(bucket, 1000)
    with FaultyServer(bucket) as url:
        store = opened(url, cache_bytes=999)
        with pytest.raises(
            DataError, match=r"cache_bytes=999: train-00000\.tar alone has 1000 bytes; set at least 1000"
        ):
            store.local(files[0])
        with pytest.raises(DataError, match=r"cache_bytes=999: 1000 bytes of http.* at the same time; set .* 1000"):
            store.bind(FINGERPRINT, room_for=1000)


def test_small_cache_serves_many_fetches_at_once(bucket, opened, tmp_path):
    files = make_files(bucket, *[50_000] * 12)
    with FaultyServer(bucket, 0.2, seed=3, faults=("cut", "error")) as url:
        stores = [opened(url, cache_bytes=100_000, attempts=10) for _ in range(2)]
        for store in stores:
            store.expect(files[6:])
        for file in files:
            for store in stores:
                assert store.local(file).name == file.name
        for store in stores:
            store.close()
    assert sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*.tar")) <= 100_000


def test_cache_tells_data_sets_apart_and_mends_a_wrong_size(bucket, opened, tmp_path):
    files = make_files(bucket, 1000)
    server = FaultyServer(bucket)
    with server as url:
        path = opened(url).local(files[0])
        content = bytes(reversed(path.read_bytes()))
        (bucket / files[0].name).write_bytes(content)
        rebuilt = StoredFile(files[0].name, 1000, hashlib.sha256(content).hexdigest())
        store = opened(url, fingerprint="f" * 64)
        assert store.local(rebuilt).read_bytes() == content
        store.local(rebuilt).write_bytes(b"cut short")
        assert store.local(rebuilt).read_bytes() == content
        store.local(rebuilt).write_bytes(bytes(1000))  # of the right size: only a reader notices
        assert store.discard(rebuilt)
        assert store.local(rebuilt).read_bytes() == content
    assert len(server.requests) == 4


def test_cache_that_cannot_be_written_is_named(bucket, opened, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match=r"file/cache.*: the cache cannot be used \(Not a directory\)"):
        opened("memory://set", cache=str(tmp_path / "file" / "cache"))


def test_full_disk_is_named(bucket, opened, tmp_path, monkeypatch):
    files = make_files(bucket, 1000)
    full = type("Full", (io.FileIO,), {"write": lambda *_: Path("/dev/full").write_bytes(b"x")})
    monkeypatch.setattr("longstride.data_pipelines.stores.cache.lock_file", lambda path: full(path, "w+"))
    with FaultyServer(bucket) as url, pytest.raises(DataError, match=r"\.partial: cannot be written \(No space left"):
        opened(url).local(files[0])


def test_error_in_the_background_is_raised_where_the_file_is_asked_for(bucket, opened, caplog):
    files = make_files(bucket, 10)
    server = FaultyServer(bucket, statuses={files[0].name: 403})
    with server as url:
        store = opened(url)
        store.expect(files)
        wait_until(lambda: "prefetching it failed" in caplog.text)
        with pytest.raises(DataError, match="access denied"):
            store.local(files[0])
        server.statuses = {}
        assert store.local(files[0]).stat().st_size == 10


@FORK_BESIDE_THREADS
def test_store_works_in_forked_and_in_spawned_processes(bucket, opened, tmp_path):
    files = make_files(bucket, 100_000, 100_000, 100_000, 100_000)
    with FaultyServer(bucket, pause_seconds=0.1) as url:
        store = opened(url, timeout_seconds=5)
        store.local(files[0])
        store.expect(files[1:2])
        wait_until(lambda: list(tmp_path.rglob("*.partial")))
        child = forked(lambda: [store.local(file) for file in files[:3]])
        assert os.waitpid(child, 0)[1] == 0
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            assert pool.apply(store.local, (files[3],)).name == files[3].name
        assert pickle.loads(pickle.dumps(store)).local(files[1]).read_bytes() == (bucket / files[1].name).read_bytes()


def test_credentials_are_used_and_never_shown(bucket, opened, caplog):
    caplog.set_level(logging.INFO, "longstride.data_pipelines")
    files = make_files(bucket, 1000, 1000)
    server = FaultyServer(bucket, 0.5, seed=1, faults=("error", "cut"), statuses={files[1].name: 403})
    with server as url:
        secret = f"{url.replace('://', '://somebody:hunter2@')}/?signature=hush&more=1"
        store = opened(secret)
        store.local(files[0])
        messages = [store.location, store.path_for_messages("a.tar"), caplog.text]
        for call in (lambda: store.local(files[1]), lambda: store.read("nothing")):
            with pytest.raises(DataError) as caught:
                call()
            messages.append(str(caught.value))
    assert all(request.authorization == "Basic c29tZWJvZHk6aHVudGVyMg==" for request in server.requests)
    assert all(request.query == "signature=hush&more=1" for request in server.requests)
    for message in messages:
        assert "127.0.0.1" in message
        assert not any(word in message for word in ("somebody", "hunter2", "hush"))
    assert messages[1] == f"{url.replace('://', '://***@')}/a.tar?***"
