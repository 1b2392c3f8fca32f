"""The end of the data as the validation split: of one document, and of several where it is asked for."""

import gzip
import json
import random
from pathlib import Path

import numpy as np
import pytest

from longstride.data_pipelines.building import shard_writer
from longstride.data_pipelines.building.build import build
from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.modalities import modality_named
from longstride.data_pipelines.shards import verify
from tests.harness.data.builds import OutOfOrder, folder_bytes, payloads_of, picture, sound, write_files

FRACTIONS = [0.05, 0.7]
COUNTS = [1, 2, 20]
LETTERS = "a\nßé日本😀"


def text(size: int, draw: random.Random) -> bytes:
    return "".join(draw.choices(LETTERS, k=size)).encode()


def noise(size: int, draw: random.Random) -> bytes:
    return sound(np.frombuffer(draw.randbytes(2 * size), dtype="<i2"))


def tile(size: int, draw: random.Random) -> bytes:
    return picture(np.frombuffer(draw.randbytes(48), dtype=np.uint8).reshape(4, 4, 3))


def sources(kind: str, count: int) -> tuple[dict[str, bytes], dict]:
    """Create files of a kind, the first of which has nearly all bytes, and the options of their build."""
    draw = random.Random(count)
    sizes = [900, *(draw.randint(1, 12) for _ in range(count - 1))]
    if kind == "records":
        lines = [json.dumps({"text": text(size, draw).decode()}) for size in sizes]
        files = {"a.jsonl": lines[::2], "b.jsonl": lines[1::2]} if count > 3 else {"a.jsonl": lines}
        return {name: "\n".join(each).encode() for name, each in files.items()}, {"field": "text"}
    make, suffix, asked = {
        "text": (text, ".txt", {}),
        "gzip": (lambda size, draw: gzip.compress(text(size, draw), mtime=0), ".gz", {"suffixes": [".gz"]}),
        "audio": (noise, ".wav", {"modality": "audio"}),
        "image": (tile, ".png", {"modality": "image"}),
    }[kind]
    return {f"{number}{suffix}": make(size, draw) for number, size in enumerate(sizes)}, asked


def stream(folder: Path, split: str, kind: str) -> bytes:
    """Concatenate the documents of a split, without headers."""
    contents = []
    for payload in payloads_of(folder, split):
        start, size = (payload.index(b"data") + 8, 4) if kind == "audio" else (0, 0)
        stop = start + int.from_bytes(payload[start - size : start], "little") if size else len(payload)
        contents.append(payload[-48:] if kind == "image" else payload[start:stop])
    return b"".join(contents)


@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize(
    ("kind", "count"),
    [
        (kind, count)
        for kind in ("text", "gzip", "records", "audio", "image")
        for count in COUNTS
        if (kind, count) != ("image", 1)  # is refused: see below
    ],
)
def test_end_of_the_data_is_held_out(tmp_path, monkeypatch, kind, count, fraction):
    """The split has about its share of the bytes, never all or none. Nothing is lost."""
    monkeypatch.setattr(shard_writer, "SAMPLE_BYTES", 64)
    files, asked = sources(kind, count)
    source = write_files(tmp_path / "source", files)
    asked |= {"shard_bytes": 300, **({"hold_out_end": True} if count > 1 else {})}
    build([source], tmp_path / "whole", **asked | {"validation_fraction": 0.0, "hold_out_end": False})
    manifest = build([source], tmp_path / "data", validation_fraction=fraction, **asked)
    whole = stream(tmp_path / "whole", "train", kind)
    train, validation = (stream(tmp_path / "data", split, kind) for split in ("train", "validation"))
    assert train + validation == whole and train and validation
    unit = 48 if kind == "image" else 1
    units = len(whole) // unit
    place = units - round(units * fraction)
    if kind == "image":
        place = min(max(place, 1), count - 1)
    elif kind != "audio":
        place = len(whole[:place].decode(errors="ignore").encode())  # before a character
    assert len(train) == place * unit
    # What the data folder says of it.
    begins = manifest.made.get("validation_begins")
    documents = sum(split.documents for split in manifest.splits.values())
    assert documents == count + (begins is not None)
    if count == 1:
        assert begins == {"source": f"{next(iter(files))}{':1' if kind == 'records' else ''}", "byte": place}
    assert verify(tmp_path / "data") == []
    # The same again, in any order; and of what is there.
    again = build([source], tmp_path / "again", validation_fraction=fraction, crew=OutOfOrder(), **asked)
    assert again.fingerprint == manifest.fingerprint
    assert folder_bytes(tmp_path / "again") == folder_bytes(tmp_path / "data")
    assert build([source], tmp_path / "data", validation_fraction=fraction, **asked) == manifest


@pytest.mark.parametrize(
    ("files", "arguments", "rule"),
    [
        ({"a.txt": b"abc"}, {}, r"=0\.05: holds out none of 3 bytes;"),
        ({"a.txt": b"a"}, {}, r"=0\.05: holds out none of 1 byte;"),
        ({"a.txt": "😀".encode()}, {"validation_fraction": 0.5}, r"=0\.5: holds out all of 4 bytes;"),
        ({"a.txt": b"abc"}, {"validation_fraction": 0.9}, r"=0\.9: holds out all of 3 bytes;"),
        ({"a.txt": b"a", "b.txt": b"b"}, {"hold_out_end": True}, r"=0\.05: holds out none of 2 bytes;"),
        ({"a.jsonl": b'{"t": "ab"}'}, {"field": "t"}, r"=0\.05: holds out none of 2 bytes;"),
        ({"a.wav": noise(9, random.Random(0))}, {"modality": "audio"}, r"=0\.05: holds out none of 9 bytes;"),
        (
            {"a.png": tile(0, random.Random(0))},
            {"modality": "image"},
            r"=0\.05: the only file, a\.png, cannot be in",
        ),
    ],
    ids=lambda value: next(iter(value), "") if isinstance(value, dict) else "",
)
def test_no_empty_split_is_made(tmp_path, files, arguments, rule):
    source = write_files(tmp_path / "source", files)
    with pytest.raises(DataError, match=f"^validation_fraction{rule}.*set it to 0 to train without evaluations$"):
        build([source], tmp_path / "data", **arguments)
    assert not (tmp_path / "data").exists()
    manifest = build([source], tmp_path / "data", **arguments | {"validation_fraction": 0.0, "hold_out_end": False})
    assert list(manifest.splits) == ["train"]


def test_files_of_one_name_in_two_inputs_are_divided(tmp_path):
    """The hash of their common path would put both in one split."""
    inputs = [write_files(tmp_path / name, {"a.txt": name.encode() * 100}) for name in ("one", "two")]
    manifest = build(inputs, tmp_path / "data")
    train, validation = (b"".join(payloads_of(tmp_path / "data", split)) for split in ("train", "validation"))
    assert train + validation in (b"one" * 100 + b"two" * 100, b"two" * 100 + b"one" * 100)
    assert len(validation) == 30 and manifest.made["validation_begins"] == {"source": "a.txt", "byte": 270}


def test_whole_documents_are_held_out_where_there_are_two(tmp_path):
    """Whatever their share of the bytes: a document is only divided on request."""
    source = write_files(tmp_path / "source", {"a.txt": b"a" * 10, "b.txt": b"b" * 1000})
    manifest = build([source], tmp_path / "data")
    assert "validation_begins" not in manifest.made and "hold_out_end" not in manifest.made["settings"]
    assert [split.documents for split in manifest.splits.values()] == [1, 1]
    with pytest.raises(DataError, match="made with other settings"):
        build([source], tmp_path / "data", hold_out_end=True)


def test_only_one_document_in_pieces_is_named_in_each_split(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_writer, "SAMPLE_BYTES", 100)
    build(
        [write_files(tmp_path / "source", {"a.txt": b"0123456789" * 100})], tmp_path / "data", validation_fraction=0.4
    )
    lines = [json.loads(line) for line in (tmp_path / "data" / "pieces.jsonl").read_text().splitlines()]
    assert [(each["key"][:5], each["piece"], each["of"]) for each in lines] == [
        *(("train", number, 6) for number in range(1, 7)),
        *(("valid", number, 4) for number in range(1, 5)),
    ]
    listed = [json.loads(line) for line in (tmp_path / "data" / "sources.jsonl").read_text().splitlines()]
    assert {each["source"] for each in [*lines, *listed]} == {"a.txt"} and len(listed) == 10


def test_palette_is_made_of_the_documents_that_are_trained_on(tmp_path):
    """The sampled pictures are spread over a stretch."""
    files, asked = sources("image", 5)
    source = write_files(tmp_path / "source", files)
    manifest = build([source], tmp_path / "data", hold_out_end=True, palette=4, **asked)
    assert [split.documents for split in manifest.splits.values()] == [4, 1] and manifest.palette is not None
    assert modality_named(manifest.modality).has_palettes and verify(tmp_path / "data") == []
