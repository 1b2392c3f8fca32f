"""Files and folders appear whole or never, on the disk, and over nothing."""

import errno
from pathlib import Path

import pytest

from longstride.data_pipelines import durable
from longstride.data_pipelines.durable import complete_folder, make_folders, naming, working_folder, write_new


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_complete_folder_appears_once_it_is_full_and_without_what_a_killed_process_left(tmp_path):
    (tmp_path / ".made.partial" / "sub").mkdir(parents=True)
    (tmp_path / ".made.partial" / "sub" / "old").write_bytes(b"half")
    (tmp_path / ".made.partial" / "link").symlink_to(tmp_path)
    with complete_folder(tmp_path / "made") as folder:
        assert not (tmp_path / "made").exists() and not list(folder.iterdir())
        (folder / "new").write_bytes(b"whole")
    assert names(tmp_path) == ["made", "made/new"]


def test_complete_folder_that_fails_leaves_nothing_and_no_folder_above_it(tmp_path):
    with pytest.raises(KeyError), complete_folder(tmp_path / "a" / "b" / "made") as folder:
        (folder / "file").write_bytes(b"half")
        raise KeyError
    assert names(tmp_path) == []


def test_complete_folder_is_flushed_before_it_has_its_name_and_then_the_names_above_it(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(durable, "flush_folder", lambda folder: flushed.append(folder.relative_to(tmp_path).as_posix()))
    with complete_folder(tmp_path / "a" / "made") as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "file").write_bytes(b"whole")
        del flushed[:]
    assert flushed == ["a/.made.partial/sub", "a/.made.partial", "a"]


def test_folder_that_another_process_fills_is_left_to_it(tmp_path):
    with complete_folder(tmp_path / "made") as folder:
        (folder / "file").write_bytes(b"mine")
        refused = pytest.raises(OSError, match="another process works in it; wait for its end")
        with refused as caught, complete_folder(tmp_path / "made"):
            pass
        assert caught.value.errno == errno.EBUSY and caught.value.filename == str(folder)
    assert names(tmp_path) == ["made", "made/file"]


def test_folder_that_is_there_is_not_replaced(tmp_path):
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "mine").write_bytes(b"mine")
    with pytest.raises(OSError), complete_folder(tmp_path / "made") as folder:
        (folder / "file").write_bytes(b"new")
    assert names(tmp_path) == ["made", "made/mine"]


def test_working_folder_is_empty_and_goes(tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "old").write_bytes(b"half")
    with working_folder(tmp_path / "work") as folder:
        assert not list(folder.iterdir())
        (folder / "new").write_bytes(b"")
    assert names(tmp_path) == []


def test_make_folders_flushes_every_new_name(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(durable, "flush_folder", flushed.append)
    make_folders(tmp_path / "a" / "b")
    assert sorted(flushed) == [tmp_path, tmp_path / "a"]
    make_folders(tmp_path / "a" / "b")
    assert len(flushed) == 2


@pytest.mark.parametrize("links", [True, False])
def test_new_file_is_flushed_and_never_replaces_one(tmp_path, monkeypatch, links):
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    if not links:
        monkeypatch.setattr(durable.os, "link", refuse)
    flushed = []
    monkeypatch.setattr(durable, "flush_folder", flushed.append)
    write_new(tmp_path / "made", b"first")
    assert flushed == [tmp_path]
    with pytest.raises(FileExistsError):
        write_new(tmp_path / "made", b"second")
    (tmp_path / "link").symlink_to("nothing")
    with pytest.raises(FileExistsError):
        write_new(tmp_path / "link", b"second")
    assert (tmp_path / "made").read_bytes() == b"first" and names(tmp_path) == ["link", "made"]


def test_error_gets_a_name_where_it_has_none(tmp_path):
    with pytest.raises(OSError, match="worn out") as caught, naming(tmp_path):
        raise OSError(errno.EIO, "worn out")
    assert caught.value.filename == str(tmp_path)
    with pytest.raises(OSError, match="worn out") as caught, naming(tmp_path):
        raise OSError(errno.EIO, "worn out", "other")
    assert caught.value.filename == "other"
