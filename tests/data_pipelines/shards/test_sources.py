"""The list of sources: which sample is of which file. The data are the same without it."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from longstride.data_pipelines.building import build
from longstride.data_pipelines.modalities import MODALITIES
from longstride.data_pipelines.shards import DataFolder, sample_documents, verify


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Write forty texts in two folders, one of them in several samples, and a name that is not UTF-8."""
    folder = tmp_path / "texts"
    for number in range(40):
        path = folder / "ab"[number % 2] / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{path.relative_to(folder)}\n" * (9_000 if number == 7 else 3))
    Path(os.fsdecode(os.fsencode(folder) + b"/a/\xff.txt")).write_text("a/\\xff.txt\n")
    return folder


def test_every_sample_of_files_has_its_source(texts: Path, tmp_path: Path) -> None:
    build([texts], tmp_path / "data", shard_bytes=50_000)
    folder = DataFolder(tmp_path / "data")
    lines = [json.loads(line) for line in (tmp_path / "data/sources.jsonl").read_text().splitlines()]
    assert [line["key"] for line in lines] == [
        shard.key(number) for shard in folder.manifest.shards() for number in range(shard.samples)
    ]
    for split in ("train", "validation"):
        for sample in sample_documents(folder, split, 1000):
            assert sample.source is not None
            assert sample.content.tobytes().decode().split("\n")[-2] == sample.source


def test_pictures_have_their_sources(tmp_path: Path) -> None:
    for number in range(6):
        path = tmp_path / "pictures" / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(np.full((4, 4, 3), number, np.uint8)).save(path)
    build([tmp_path / "pictures"], tmp_path / "data", modality="image")
    samples = [*sample_documents(tmp_path / "data", "train", 9), *sample_documents(tmp_path / "data", "validation", 9)]
    assert {sample.source: int(sample.content[0]) for sample in samples} == {f"{n}.png": n for n in range(6)}


def test_a_folder_without_the_list_is_the_same_data(texts: Path, tmp_path: Path) -> None:
    """Older folders have none."""
    made = build([texts], tmp_path / "data")
    (tmp_path / "data/sources.jsonl").unlink()
    assert verify(tmp_path / "data") == []
    assert [sample.source for sample in sample_documents(tmp_path / "data", "train", 5)] == [None] * 5
    assert build([texts], tmp_path / "data").fingerprint == made.fingerprint  # it is left as it is
    assert not (tmp_path / "data/sources.jsonl").exists()


def test_records_have_no_list(tmp_path: Path) -> None:
    """It would be as long as the data, and ``pieces.jsonl`` lists long ones."""
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"text": "row {number}"}}\n' for number in range(9)))
    build([tmp_path / "rows.jsonl"], tmp_path / "data", field="text")
    assert not (tmp_path / "data/sources.jsonl").exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-30],
        lambda content: content + b'{"key": "train-00000-9999999", "source": "more"}\n',
        lambda content: content.replace(
            b'{"key": "train-00000-0000003", "source"', b'{"key": "train-00000-0000003", "so'
        ),
        lambda content: b"\xff" * (1 << 20) + content,
    ],
    ids=["cut", "longer", "no source", "one long line"],
)
def test_a_damaged_list_is_told_and_harms_no_reader(damage, texts: Path, tmp_path: Path) -> None:
    build([texts], tmp_path / "data")
    path = tmp_path / "data/sources.jsonl"
    path.write_bytes(damage(path.read_bytes()))
    (finding,) = verify(tmp_path / "data")
    assert finding.startswith(f"{path}: the list of sources is damaged (at ")
    assert len(list(sample_documents(tmp_path / "data", "train", 9))) == 9


def test_what_was_not_asked_for_is_counted_before_anything_is_written(texts: Path, tmp_path: Path) -> None:
    for name in ("a.rst", "b.rst", "c.tar.gz", "Makefile", ".hidden.rst"):
        (texts / name).write_text("x")
    found = []
    build([texts], tmp_path / "data", suffixes=(".txt",), found=lambda left: found.append((left, tmp_path / "data")))
    ((left_out, output),) = found
    assert output.exists() and left_out.endings == {".rst": 2, ".gz": 1, "": 1}
    assert left_out.looked_at == 41 + 4
    assert all(suffix not in MODALITIES["text"].suffixes for suffix in (".gz", ""))
