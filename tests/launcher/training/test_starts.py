"""The record of a run's starts: what cannot be written ends nothing, and what is torn stays apart."""

import json
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from longstride.launcher.output import version_of
from longstride.launcher.training import resume


def test_start_is_told_where_no_file_can_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "starts.jsonl").symlink_to("/dev/full")
    resume.write_start(tmp_path, {"step": 3})
    (line,) = capsys.readouterr().err.splitlines()
    path = tmp_path / "starts.jsonl"
    assert line == f"longstride: {path}: is a link, not a plain file; this start is not recorded"


def test_start_is_dropped_whole_where_the_disk_fills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    resume.write_start(tmp_path, {"step": 0})
    monkeypatch.setattr(resume.LineFile, "_write", Mock(side_effect=OSError(28, os.strerror(28))))
    resume.write_start(tmp_path, {"step": 3})
    assert "1 line from this start on are lost" in capsys.readouterr().err
    assert (tmp_path / "starts.jsonl").read_text() == '{"step": 0}\n'


def test_start_stands_apart_from_a_torn_line(tmp_path: Path) -> None:
    (tmp_path / "starts.jsonl").write_text('{"step": 0}\n{"st')
    resume.write_start(tmp_path, {"step": 3})
    first, torn, last = (tmp_path / "starts.jsonl").read_text().splitlines()
    assert (json.loads(first), torn, json.loads(last)) == ({"step": 0}, '{"st', {"step": 3})


def test_a_checkout_that_is_not_installed_says_so() -> None:
    assert version_of("longstride-that-is-nowhere") == "not installed"
