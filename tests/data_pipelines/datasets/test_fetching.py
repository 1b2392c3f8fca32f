"""Datasets that are fetched: whole or not at all. An error is one line."""

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from longstride.data_pipelines.building.build import build_dataset
from longstride.data_pipelines.datasets import DATASETS
from longstride.data_pipelines.datasets.byte_corpus import ENWIK8
from longstride.data_pipelines.datasets.dataset import Archive, PublishedFile
from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.stores.cache import lock_file, unlock_file
from tests.harness.data.builds import folder_bytes
from tests.harness.data.published_files import zipped
from tests.hostile.generators.http_servers import FaultyServer

TEXT = np.random.default_rng(1).integers(0, 256, 300_000, dtype=np.uint8).tobytes()


@pytest.fixture
def served(tmp_path, monkeypatch) -> Path:
    """Serve a folder with the archive. The working directory is another folder."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr("longstride.data_pipelines.stores.transport.FIRST_WAIT_SECONDS", 0.01)
    (tmp_path / "served").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    zipped(tmp_path / "served" / "enwik8.zip", {"enwik8": TEXT})
    return tmp_path / "served"


def published(monkeypatch, folder: Path, url: str) -> None:
    """Makes the server's archive the published enwik8."""
    content = (folder / "enwik8.zip").read_bytes()
    archive = Archive(f"{url}/enwik8.zip", len(content), hashlib.sha256(content).hexdigest())
    known = PublishedFile(len(TEXT), "md5", hashlib.md5(TEXT).hexdigest())
    monkeypatch.setitem(DATASETS, "enwik8", replace(ENWIK8, archive=archive, content=known))


def test_download_goes_into_downloads_and_is_kept(served, monkeypatch):
    told = []
    with FaultyServer(served) as url:
        published(monkeypatch, served, url)
        build_dataset("enwik8", None, Path("data"), download=True, progress=lambda *how: told.append(how))
    size = (served / "enwik8.zip").stat().st_size
    assert (size, size) in told and told[-1] == (300_000, 300_000)
    assert sorted(path.name for path in Path().iterdir()) == ["data", "downloads"]
    assert (Path("downloads") / "enwik8.zip").read_bytes() == (served / "enwik8.zip").read_bytes()
    assert [path.name for path in Path("downloads").iterdir()] == ["enwik8.zip"]
    build_dataset("enwik8", None, Path("again"), download=True)  # no server is asked: there is none now
    assert folder_bytes(Path("again")) == folder_bytes(Path("data"))


@pytest.mark.parametrize("given", ["new/folder", "new/file.zip", "downloads"])
def test_download_goes_where_the_input_says(served, monkeypatch, given):
    Path("downloads").mkdir()
    with FaultyServer(served) as url:
        published(monkeypatch, served, url)
        build_dataset("enwik8", Path(given), Path("data"), download=True)
    target = Path(given) if given.endswith(".zip") else Path(given) / "enwik8.zip"
    assert target.read_bytes() == (served / "enwik8.zip").read_bytes()


def test_download_goes_on_where_it_broke_off(served, monkeypatch):
    """This works after a process was killed, and with a server that fails most requests."""
    whole = (served / "enwik8.zip").read_bytes()
    Path("downloads").mkdir()
    Path("downloads/enwik8.zip.partial").write_bytes(whole[:100_000])
    server = FaultyServer(served, share=0.6, seed=1, faults=("drop", "cut", "error"))
    with server as url:
        published(monkeypatch, served, url)
        build_dataset("enwik8", None, Path("data"), download=True)
    assert Path("downloads/enwik8.zip").read_bytes() == whole
    assert len(server.requests) > 1 and all(request.offset >= 100_000 for request in server.requests)


def refused(rule: str, **options) -> None:
    with pytest.raises(DataError, match=rule) as caught:
        build_dataset("enwik8", options.pop("given", None), Path("data"), **{"download": True, **options})
    assert "\n" not in str(caught.value) and not Path("data").exists()


def test_download_of_another_file_is_refused(served, monkeypatch):
    with FaultyServer(served, corrupt=["enwik8.zip"]) as url:
        published(monkeypatch, served, url)
        refused(rf"{url}/enwik8\.zip: its SHA-256 does not match: .* or fetch {url}/enwik8\.zip by hand")
    assert not Path("downloads/enwik8.zip").exists()


def test_download_without_a_network_is_told(served, monkeypatch):
    with FaultyServer(served) as url:
        published(monkeypatch, served, url)
    refused(
        rf"{url}/enwik8\.zip: .*given up after 4 attempts .* or fetch {url}/enwik8\.zip by hand and name it with --in"
    )
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("given", ["mine", "mine/new/enwik8.zip", "mine/new", "mine/new/deep/enwik8.zip"])
def test_download_that_fails_leaves_the_folders_as_they_were(served, monkeypatch, given):
    """The user's empty folder stays; folders that the download created are removed."""
    Path("mine").mkdir()
    with FaultyServer(served, statuses={"enwik8.zip": 404}) as url:
        published(monkeypatch, served, url)
        refused(rf"{url}/enwik8\.zip: no such file; .* name it with --input$", given=Path(given))
    assert sorted(Path().rglob("*")) == [Path("mine")]


def test_download_into_a_folder_of_other_things_is_done(served, monkeypatch):
    """The dataset counts as present by the name of its archive or file, here or one folder further down."""
    Path("downloads/other").mkdir(parents=True)
    Path("downloads/cifar-10-binary.tar.gz").write_bytes(b"other")
    with FaultyServer(served) as url:
        published(monkeypatch, served, url)
        build_dataset("enwik8", Path("downloads"), Path("data"), download=True)
    assert Path("downloads/enwik8.zip").read_bytes() == (served / "enwik8.zip").read_bytes()
    Path("downloads/enwik8.zip").unlink()
    Path("downloads/other/enwik8").write_bytes(TEXT)
    build_dataset("enwik8", Path("downloads"), Path("again"), download=True)  # no server is asked: there is none now
    assert folder_bytes(Path("again")) == folder_bytes(Path("data"))


def test_download_by_two_processes_is_refused(served, monkeypatch):
    published(monkeypatch, served, "http://127.0.0.1:9")
    Path("downloads").mkdir()
    held = lock_file(Path("downloads/enwik8.zip.partial"))
    refused(r"downloads/enwik8\.zip\.partial: is being fetched by another process; wait")
    unlock_file(held)


def test_output_that_cannot_be_is_told_before_a_download(served, monkeypatch):
    published(monkeypatch, served, "http://127.0.0.1:9")
    (Path("data")).write_bytes(b"")
    with pytest.raises(DataError, match="data: already exists, is not a data folder"):
        build_dataset("enwik8", None, Path("data"), download=True)
    assert [path.name for path in Path().iterdir()] == ["data"]


def test_imagenet64_is_fetched_by_no_program(served):
    with pytest.raises(DataError, match=r"--download: imagenet64 may not be fetched by a program; log in at https"):
        build_dataset("imagenet64", None, Path("data"), download=True)


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        (
            None,
            r"--input: must name the archive or folder of enwik8; fetch http://mattmahoney\.net/dc/enwik8\.zip, or let",
        ),
        (Path("nothing"), r"--input=nothing: no such file or folder; fetch http.* or let --download do it"),
    ],
)
def test_input_that_is_missing_is_told(served, given, rule):
    refused(rule, given=given, download=False)
