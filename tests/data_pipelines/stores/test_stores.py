"""Local folders as stores; which locations are remote; what settings are refused."""

import hashlib
import pickle

import pytest

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.settings import RemoteSettings
from longstride.data_pipelines.stores import StoredFile, open_store
from longstride.data_pipelines.stores.local import LocalStore

CONTENT = b"some bytes"
FILE = StoredFile("train-00000.tar", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())


@pytest.fixture
def folder(tmp_path):
    (tmp_path / FILE.name).write_bytes(CONTENT)
    (tmp_path / "manifest.json").write_bytes(b"{}")
    return tmp_path


def test_local_store_hands_out_the_files_own_path(folder):
    for location in (folder, str(folder), f"file://{folder}"):
        store = pickle.loads(pickle.dumps(open_store(location)))
        store.bind("0" * 64, room_for=10**15)
        store.expect([FILE])
        assert store.local(FILE) == folder / FILE.name
        assert store.read("manifest.json") == b"{}"
        assert store.location == str(folder) and store.folder == folder
        assert store.path_for_messages(FILE.name) == str(folder / FILE.name)
        assert not store.discard(FILE)
        store.close()


def test_local_store_names_what_is_wrong_with_a_file(folder):
    store = open_store(folder)
    with pytest.raises(DataError, match=r"train-00001\.tar: is missing, but the manifest lists it"):
        store.local(StoredFile("train-00001.tar", 1, FILE.sha256))
    with pytest.raises(DataError, match=r"train-00000\.tar: 10 bytes, but the manifest says 11: .* cut short"):
        store.local(StoredFile(FILE.name, 11, FILE.sha256))


def test_local_store_names_what_is_wrong_with_a_folder(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"nowhere: no such folder"):
        open_store(tmp_path / "nowhere").read("manifest.json")
    with pytest.raises(DataError, match=r"the folder is empty: it lacks manifest\.json"):
        open_store(tmp_path / "empty").read("manifest.json")
    with pytest.raises(DataError, match=r"lacks manifest\.json, so it is not a data folder"):
        open_store(tmp_path).read("manifest.json")


def test_open_store_tells_remote_from_local():
    assert isinstance(open_store("data/a:b"), LocalStore)
    assert not isinstance(open_store("memory://data"), LocalStore)
    with pytest.raises(DataError, match=r"nosuch:// is not a protocol that fsspec knows; use https"):
        open_store("nosuch://host/data")
    with pytest.raises(DataError, match=r"chained protocols"):
        open_store("simplecache::https://host/data")


@pytest.mark.parametrize(
    ("setting", "rule"),
    [
        ({"cache_bytes": 0}, "cache_bytes=0: must be an integer of at least 1"),
        ({"attempts": 0}, "attempts=0"),
        ({"parallel": 1.5}, r"parallel=1\.5"),
        ({"most_bytes": 0}, "most_bytes=0: must be an integer of at least 1, such as 67108864"),
        ({"timeout_seconds": 0}, "timeout_seconds=0: must be a positive number"),
        (
            {"window_seconds": 1e300},
            r"window_seconds=1e\+300: must be a positive number of at most 1000000, such as 360",
        ),
        ({"least_bytes_per_second": float("nan")}, "least_bytes_per_second=nan: .* such as 1000"),
    ],
)
def test_settings_out_of_range_are_refused(setting, rule):
    with pytest.raises(DataError, match=rule):
        RemoteSettings(**setting)
