"""Schemes of fsspec: all are read alike, here from doubles of their packages' file systems, and within bounds."""

import asyncio
import hashlib
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.settings import RemoteSettings
from longstride.data_pipelines.shards.verify import verify
from longstride.data_pipelines.stores import StoredFile, open_store, transport

ROOT = Path(__file__).resolve().parents[3]
SCHEMES = ("s3", "gs", "gcs", "az", "abfs", "hf")
PACKAGES = {
    "https": "aiohttp", "s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs",
    "hf": "huggingface_hub", "sftp": "paramiko",
}  # fmt: skip
CONTENT = random.Random(0).randbytes(3 * 2**18 + 5)
FILE = StoredFile("a.tar", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())


class Double(MemoryFileSystem):
    """A file system without an event loop, as the Hugging Face hub's is. Options are taken as they are."""

    store, pseudo_dirs = {}, [""]
    seconds = 0.0  # that a read takes

    @classmethod
    def _strip_protocol(cls, path):
        return "/" + path.partition("://")[2].strip("/") if "://" in path else path.rstrip("/")

    def cat_file(self, path, **interval):
        time.sleep(self.seconds)
        return super().cat_file(path, **interval)


class AsyncDouble(AsyncFileSystem):
    """A file system in fsspec's event loop, as those of S3, Google and Azure are."""

    error = None  # that reads raise
    seconds = 0.0  # that a read takes
    is_changing = False
    etag = 0

    async def _info(self, path, **options):
        return {"name": path, "size": len(CONTENT), "type": "file", "etag": self.etag}

    async def _cat_file(self, path, start=None, end=None, **options):
        await asyncio.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        AsyncDouble.etag += self.is_changing
        return CONTENT[start:end]


@pytest.fixture(autouse=True)
def doubles(monkeypatch):
    monkeypatch.setattr(transport, "FIRST_WAIT_SECONDS", 0.001)
    monkeypatch.setattr(transport, "CHUNK_BYTES", 2**18)
    monkeypatch.setattr(Double, "store", {})
    for scheme in SCHEMES:
        monkeypatch.setitem(_registry, scheme, Double)
    monkeypatch.setitem(_registry, "double", AsyncDouble)


@pytest.fixture
def opened(tmp_path):
    def open_one(location, **settings):
        store = open_store(location, RemoteSettings(cache=str(tmp_path / "cache"), attempts=2, **settings))
        store.bind("0123456789abcdef")
        return store

    return open_one


@pytest.mark.parametrize("scheme", SCHEMES)
def test_data_folder_is_read_by_each_scheme(scheme, corpus, opened):
    url = f"{scheme}://bucket/mine"
    for path in corpus.folder.iterdir():
        Double().pipe(f"{url}/{path.name}", path.read_bytes())
    Double().pipe(f"{url}/{FILE.name}", CONTENT)
    assert verify(url) == []
    store = opened(url)
    assert store.local(FILE).read_bytes() == b"".join(store.blocks(FILE.name, FILE.size)) == CONTENT
    assert store.find("a.tar") == ({FILE.name: FILE.size}, 0)
    with pytest.raises(DataError, match=rf"{url}/b\.tar: no such file; check the location"):
        store.size("b.tar")
    with pytest.raises(DataError, match=f"{FILE.size} bytes, but it should have {FILE.size + 1}"):
        store.local(StoredFile(FILE.name, FILE.size + 1, FILE.sha256))


def error_of(name: str = "HttpError", words: str = "words", **attributes: object) -> Exception:
    """Create an exception as a library defines it."""
    error = type(name, (Exception,), {})(words)
    vars(error).update(attributes)
    return error


@pytest.mark.parametrize(
    ("error", "is_final"),
    [
        (error_of(code=401), True),  # gcsfs
        (OSError("Forbidden: bucket/a.tar"), True),
        (error_of("DefaultCredentialsError"), True),
        (error_of(status_code=403), True),  # adlfs
        (error_of("ClientAuthenticationError"), True),
        (error_of(response=error_of(status_code=401)), True),  # huggingface_hub
        (error_of("NoCredentialsError"), True),  # s3fs
        (error_of(status_code=429), False),
        (error_of(code=503), False),
        (OSError("reset"), False),
    ],
)
def test_answers_that_no_attempt_changes_end_a_fetch_at_once(error, is_final, opened, monkeypatch):
    monkeypatch.setattr(AsyncDouble, "error", error)
    rule = "check the location, and the credentials" if is_final else "given up after 2 attempts"
    with pytest.raises(DataError, match=rf"double://bucket/a\.tar: .*{rule}"):
        opened("double://bucket").local(FILE)


@pytest.mark.parametrize(("scheme", "double"), [("hf", Double), ("double", AsyncDouble)])
def test_file_system_that_falls_silent_is_an_error_in_bounded_time(scheme, double, opened, monkeypatch):
    monkeypatch.setattr(double, "seconds", 5.0)
    began = time.monotonic()
    with pytest.raises(DataError, match=r"nothing came for 0\.1 s .* given up after 2 attempts"):
        opened(f"{scheme}://bucket", window_seconds=0.2, timeout_seconds=0.1).local(FILE)
    assert time.monotonic() - began < 2


def test_file_that_changes_while_it_is_read_without_a_checksum_is_noticed(opened, monkeypatch):
    store = opened("double://bucket")
    assert b"".join(store.blocks(FILE.name, FILE.size)) == CONTENT
    monkeypatch.setattr(AsyncDouble, "is_changing", True)
    assert store.local(FILE).read_bytes() == CONTENT  # its checksum is right
    with pytest.raises(
        DataError, match=r"a\.tar: a different version: the file changed while it was read; start again"
    ):
        b"".join(store.blocks(FILE.name, FILE.size))


def test_missing_package_is_named_with_what_to_install():
    script = (
        f"import sys; sys.modules.update(dict.fromkeys({sorted(set(PACKAGES.values()))}))\n"
        "from longstride.data_pipelines.stores import open_store\n"
        f"for scheme in {list(PACKAGES)}:\n"
        "    try: open_store(scheme + '://host/data')\n"
        "    except ValueError as error: print(error)"
    )
    printed = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    for line, package in zip(printed.splitlines(), PACKAGES.values(), strict=True):
        assert line.endswith(f"is not installed; pip install {package}")
