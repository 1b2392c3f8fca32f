"""`data build` and `data verify`: what a person gets wrong, and what Ctrl-C leaves."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from data_pipelines import build
from launcher import cli
from tests.data_pipelines.faulty_server import FaultyServer


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which a person is, with twenty small files in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    for number in range(20):
        (tmp_path / f"texts/{number}.txt").write_text(str(number) * 100)
    return tmp_path


ON_THIS_MACHINE = "must be a file or folder on this machine, such as texts; fetch it first"
TO_MAKE = "must be a folder on this machine, such as data/mine; build, then upload"
LATER = ["texts", "--output", "data"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["http://host/x/y", "--output", "data"], f"PATH='http://host/x/y': {ON_THIS_MACHINE}"),
        (["texts", "", "--output", "data"], f"PATH='': {ON_THIS_MACHINE}"),
        (["texts", "--output", "s3://bucket/key"], f"--output='s3://bucket/key': {TO_MAKE}"),
        (["texts", "--output", ""], f"--output='': {TO_MAKE}"),
        (["texts", "texts/1.txt", "--output", "data"], "texts/1.txt: lies inside texts, and no file is taken twice; "),
        ([*LATER, "--exclude", "d0/"], "--exclude=d0/: must be a plain name, such as d0"),
        ([*LATER, "--suffix", "*.txt"], "--suffix=*.txt: must begin with a dot, such as .txt"),
        ([*LATER, "--shard-bytes", "0"], "--shard-bytes=0: must be at least 1, such as 16777216"),
        ([*LATER, "--validation-fraction", "2"], "--validation-fraction=2.0: must be at least 0 and less than 1, such"),
        (
            [*LATER, "--modality", "image", "--image-size", "9000x9000"],
            "--image-size=9000x9000: must be at most 67,108,864 pixels in all, such as 64x64",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_build_refuses_in_one_line(
    texts: Path, words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["data", "build", *words]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith(f"longstride: error: {line}")
    assert [path.name for path in texts.iterdir()] == ["texts"]


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_build_that_is_stopped_tells_what_is_kept(
    texts: Path, share: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(done: int, total: int) -> None:
        if done > share * total:
            raise KeyboardInterrupt

    words = ["data", "build", "texts", "--output", "data", "--shard-bytes", "400"]
    monkeypatch.setattr("launcher.data.build", lambda *given, **options: build(*given, **{**options, "progress": stop}))
    assert cli.main(words) == 130
    kept = f"; what is finished is kept in {texts}/.data.unfinished: the same command goes on from there"
    assert capsys.readouterr().err == f"longstride: stopped{kept if share else ''}\n"
    monkeypatch.undo()
    assert cli.main([*words[:2], str(texts / "texts"), *words[3:4], str(texts / "data"), *words[5:]]) == 0


def test_build_tells_what_the_system_refuses(
    texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*given: object, **options: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "there")

    met = []
    monkeypatch.setattr("launcher.data.build", fail)
    monkeypatch.setattr("data_pipelines.crew.Crew.meet", lambda crew: met.append(crew))
    assert cli.main(["data", "build", "texts", "--output", "data"]) == 2
    assert capsys.readouterr().err == "longstride: error: there: Permission denied\n"
    assert len(met) == 1  # the other ranks wait there


def test_verify_refuses_an_empty_name(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["data", "verify", ""]) == 2
    assert capsys.readouterr().err == "longstride: error: DIR|URL='': must be a data folder, such as data/mine\n"


def test_what_a_url_has_of_secrets_is_not_printed(
    texts: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    build([texts / "texts"], texts / "data")
    with FaultyServer(texts / "data") as url:
        location = f"{url}?token=secret"
        assert cli.main(["data", "verify", location]) == 0
        assert cli.main(["data", "show", location]) == 0
        assert cli.main(["data", "show", location, "--split", "test"]) == 2
    printed = "".join(capsys.readouterr())
    assert "whole" in printed and "no split 'test'" in printed and "secret" not in printed
