"""`data build` and `data verify`: what a person gets wrong, and what Ctrl-C leaves."""

import errno
import gzip
import os
from pathlib import Path

import pytest

from longstride.data_pipelines.building.build import build
from longstride.launcher import cli
from tests.hostile.generators.http_servers import FaultyServer
from tests.launcher.conftest import Refusal


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
SET = ["--output", "data", "--dataset", "text8"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["http://host/x/y", "--output", "data"], f"PATH='http://host/x/y': {ON_THIS_MACHINE}"),
        (["texts", "", "--output", "data"], f"PATH='': {ON_THIS_MACHINE}"),
        (["texts", "--output", "s3://bucket/key"], f"--output='s3://bucket/key': {TO_MAKE}"),
        (["texts", "--output", ""], f"--output='': {TO_MAKE}"),
        ([*LATER, "--exclude", "d0/"], "--exclude=d0/: must be a plain name, such as d0"),
        ([*LATER, "--suffix", "*.txt"], "--suffix=*.txt: must begin with a dot, such as .txt"),
        ([*LATER, "--suffix", ".c", "--all-files"], "--suffix=.c: --all-files takes files of any name; leave one of"),
        ([*LATER, "--field", "text", "--raw"], "--field=text: reads the records of a file, and raw its bytes; leave"),
        ([*LATER, "--raw", "--modality", "image"], "--raw: only applies to --modality text, and this is image"),
        ([*LATER, "--shard-bytes", "0"], "--shard-bytes=0: must be at least 1, such as 16777216"),
        ([*LATER, "--validation-fraction", "2"], "--validation-fraction=2.0: must be at least 0 and less than 1, such"),
        (["--output", "data"], "PATH: missing; name files or folders, such as texts, or a --dataset"),
        ([*LATER, "--input", "texts"], "--input: only applies with --dataset; name one of cifar10, enwik8, imagenet64"),
        ([*LATER, "--unpublished"], "--unpublished: only applies with --dataset; "),
        ([*LATER, "--dataset", "text8"], "PATH=texts: cannot be combined with --dataset; name the dataset's archive"),
        ([*SET, "--dataset", "mnist"], "--dataset=mnist: is not a known dataset; take one of cifar10, enwik8, "),
        ([*SET, "--modality", "text"], "--modality=text: cannot be combined with --dataset, which has its own; leave"),
        ([*SET, "--all-files"], "--all-files: cannot be combined with --dataset, which has its own; leave it out"),
        ([*SET, "--validation-fraction", "0.0"], "--validation-fraction=0.0: cannot be combined with --dataset"),
        ([*SET, "--suffix", ".bin"], "--suffix=.bin: cannot be combined with --dataset"),
        ([*SET, "--field", "text"], "--field=text: cannot be combined with --dataset"),
        ([*SET, "--rate", "8000"], "--rate=8000: cannot be combined with --dataset"),
        ([*SET, "--shard-bytes", "0"], "--shard-bytes=0: must be at least 1"),
        ([*SET, "--input", "s3://b/k"], "--input='s3://b/k': must be a file or folder on this machine, such as down"),
        ([*LATER, "--modality", "image", "--image-size", "9000x9000"], "--image-size=9000x9000: must be at most 67,"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_build_refuses_in_one_line(texts: Path, words: list[str], line: str, refusal: Refusal) -> None:
    assert refusal("data", "build", *words).startswith(line)


def test_build_of_a_dataset_tells_its_splits(texts: Path, capsys: pytest.CaptureFixture[str], refusal: Refusal) -> None:
    (texts / "text8").write_text("a few words " * 100)
    words = ["data", "build", "--dataset", "text8", "--input", "text8", "--output", "data"]
    assert refusal(*words).startswith("text8: 1,200 bytes, but the published file has 100,000,000; ")
    assert cli.main([*words, "--unpublished"]) == 0
    splits = ["train 1,080 bytes of 1 document", "validation 60 bytes of 1 document", "test 60 bytes of 1 document"]
    assert capsys.readouterr().err == f"data: {', '.join(splits)}\n"
    assert cli.main(["data", "verify", "data"]) == 0
    assert cli.main(["data", "show", "data", "--split", "test"]) == 0


def test_build_of_records_and_of_raw_files(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [f'{{"text": "{number}"}}' for number in range(10, 40)] + ['{"text": null}']
    (texts / "rows.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    words = ["data", "build", "rows.jsonl.gz", "--validation-fraction", "0", "--output"]
    assert cli.main([*words, "data", "--field", "text"]) == 0
    assert cli.main([*words, "raw", "--raw"]) == 0
    records, raw = capsys.readouterr().err.splitlines()
    assert records == "data: train 60 bytes of 30 documents; left out 1 null records"
    assert raw == f"raw: train {(texts / 'rows.jsonl.gz').stat().st_size} bytes of 1 document"


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_build_that_is_stopped_tells_what_is_kept(
    texts: Path, share: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(done: int, total: int) -> None:
        if done > share * total:
            raise KeyboardInterrupt

    words = ["data", "build", "texts", "--output", "data", "--shard-bytes", "400"]
    monkeypatch.setattr(
        "longstride.launcher.folders.build",
        lambda *given, **options: build(*given, **{**options, "progress": stop}),
    )
    assert cli.main(words) == 130
    kept = f"; finished shards are kept in {texts}/.data.unfinished: the same command continues from there"
    assert capsys.readouterr().err == f"longstride: stopped{kept if share else ''}\n"
    monkeypatch.undo()
    assert cli.main([*words[:2], str(texts / "texts"), *words[3:4], str(texts / "data"), *words[5:]]) == 0


def test_build_tells_what_the_system_refuses(texts: Path, monkeypatch: pytest.MonkeyPatch, refusal: Refusal) -> None:
    def fail(*given: object, **options: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "there")

    met = []
    monkeypatch.setattr("longstride.launcher.folders.build", fail)
    monkeypatch.setattr("longstride.data_pipelines.building.crew.Crew.meet", lambda crew: met.append(crew))
    assert refusal("data", "build", "texts", "--output", "data") == "there: Permission denied"
    assert len(met) == 1  # the other ranks wait there


def test_verify_refuses_an_empty_name(refusal: Refusal) -> None:
    assert refusal("data", "verify", "") == "DIR|URL='': must be a data folder, such as data/mine"


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


def test_build_of_one_file_tells_where_validation_begins(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (texts / "a.txt").write_text("ab" * 1000)
    assert cli.main(["data", "build", "a.txt", "--output", "data"]) == 0
    assert capsys.readouterr().err == (
        "data: train 1,900 bytes of 1 document, validation 100 bytes of 1 document; validation begins in a.txt, at "
        "byte 1,900\n"
    )


@pytest.mark.parametrize(
    ("sizes", "options", "share"),
    [
        ((10, 3000), ("a.txt", "b.txt"), "0.3%"),
        ((3000, 10), ("a.txt", "b.txt"), "99.7%"),
        ((10, 3000), ("rows.jsonl", "--field", "t"), "0.3%"),
        ((3000, 10), ("a.txt", "b.txt", "--hold-out-end"), None),
        ((3000, 10), ("a.txt", "b.txt", "--validation-fraction", "0"), None),
        ((100, 1900), ("a.txt", "b.txt"), None),
    ],
)
def test_build_tells_a_share_of_bytes_that_is_far_from_the_one_of_documents(
    texts: Path, sizes: tuple[int, int], options: tuple[str, ...], share: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the seed 0 it is the first one of the two files, or records, that is held out."""
    for name, size in zip(("a.txt", "b.txt"), sizes, strict=True):
        (texts / name).write_text("x" * size)
    (texts / "rows.jsonl").write_text("".join(f'{{"t": "{"x" * size}"}}\n' for size in sizes))
    assert cli.main(["data", "build", *options, "--output", "data"]) == 0
    _, *notices = capsys.readouterr().err.splitlines()
    what = "records" if "--field" in options else "files"
    assert notices == (
        [
            f"longstride: notice: validation has {share} of the bytes, held out as whole {what}; --hold-out-end holds "
            "out the last 5.0% of the bytes"
        ]
        if share
        else []
    )


def test_files_that_are_left_out_are_counted_by_suffix(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.rs", "b.rs", "c.png", "d.JPG", "e.mp3", "f.jsonl", "Makefile", ".hidden.rs", "g.\x1b[31m"):
        (texts / "texts" / name).write_text("x")
    assert cli.main(["data", "build", *LATER, "--exclude", "e.mp3"]) == 0
    first, made, *_ = capsys.readouterr().err.splitlines()
    assert first == (
        "longstride: left out 7 of 27 files: 2 .rs, 1 .?[31m, 1 .JPG, 1 .jsonl, 2 others; --all-files --raw "
        "takes them, --modality image takes pictures (2), --field NAME takes the records of JSON Lines and Parquet"
    )
    assert made.startswith("data: train ")
    assert cli.main(["data", "build", "texts", "--output", "rust", "--suffix", ".rs"]) == 0
    assert "--all-files" not in capsys.readouterr().err
    for name in ("c.png", "d.JPG"):
        (texts / "texts" / name).write_bytes(b"any bytes")
    assert cli.main(["data", "build", "texts", "--output", "all", "--all-files"]) == 0
    assert "left out" not in capsys.readouterr().err
