"""Files that a person names: whole or not at all, over nothing, and read only where they have an end."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from longstride.kernels import ConfigError
from longstride.launcher.files import check_new, read_file, write_new


def test_file_appears_whole_and_alone(tmp_path: Path) -> None:
    write_new(tmp_path / "new", b"content")
    assert read_file(tmp_path / "new", "FILE") == b"content"
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_file_appears_where_files_have_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    write_new(tmp_path / "new", b"content")
    with pytest.raises(ConfigError, match="already exists"):
        write_new(tmp_path / "new", b"other")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("new", b"content")]


@pytest.mark.parametrize("kind", ["file", "folder", "dangling link"])
def test_what_came_to_lie_there_stays(kind: str, tmp_path: Path) -> None:
    there = tmp_path / "there"
    if kind == "file":
        there.write_bytes(b"old")
    elif kind == "folder":
        there.mkdir()
    else:
        there.symlink_to("nowhere")
    for make in (check_new, lambda path: write_new(path, b"new")):
        with pytest.raises(ConfigError, match=r"--output=.*there: already exists and is not overwritten"):
            make(there)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_full_disk_is_told_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match=r"--output=.*new: cannot be written: No space left on device"):
        write_new(tmp_path / "new", b"content")
    assert not list(tmp_path.iterdir())


def test_pipes_and_folders_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"FILE=.*pipe: is a pipe, not a plain file"):
        read_file(tmp_path / "pipe", "FILE")
    with pytest.raises(ConfigError, match=r"FILE=.*: is a folder, not a plain file"):
        read_file(tmp_path, "FILE")
