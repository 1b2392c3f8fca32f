"""An index of others' tars: its splits, its pictures and sounds, webdataset's shards, and a resume in the middle."""

import io
import wave

import numpy as np
import pytest
from PIL import Image

from longstride.data_pipelines.building.build import build
from longstride.data_pipelines.order.evaluation import split_bytes
from longstride.data_pipelines.shards.indexing import index_tars
from longstride.data_pipelines.shards.reading import DataFolder
from longstride.data_pipelines.shards.verify import verify
from tests.data_pipelines.shards.test_indexing import ALL, documents, indexed, refusal, tars  # noqa: F401
from tests.harness.data.streams import open_stream
from tests.harness.data.tars import write_tar

# Splits and order.


@pytest.mark.parametrize(
    ("splits", "expected"),
    [
        ((), {"train": ["a/train-0.tar", "train-1.tar"], "validation": ["b/validation-0.tar"]}),
        (("dev=b/*", "train=*train*"), {"dev": ["b/validation-0.tar"], "train": ["a/train-0.tar", "train-1.tar"]}),
        (("validation=train-1.tar",), {"validation": ["train-1.tar"]}),
        (("all=*",), {"all": ["a/train-0.tar", "b/validation-0.tar", "c.tar", "train-1.tar"]}),
    ],
)
def test_splits_go_by_names_or_as_they_are_asked_for(tmp_path, splits, expected):
    for name in ("a/train-0.tar", "b/validation-0.tar", "c.tar", "train-1.tar"):
        write_tar(tmp_path / "tars" / name, [("x.txt", name.encode())])
    manifest = index_tars([str(tmp_path / "tars")], tmp_path / "index", splits=splits)
    assert {name: [shard.name for shard in split.shards] for name, split in manifest.splits.items()} == expected
    assert manifest.made["left_out"]["tars_of_no_split"] == 4 - sum(map(len, expected.values()))


def test_a_share_of_the_tars_is_held_out_where_none_is_named(tmp_path):
    for number in range(10):
        write_tar(tmp_path / "tars" / f"{number}.tar", [("x.txt", b"%d" % number)])
    sizes = []
    for fraction in (None, 0.3, 0.99, 0):
        manifest = index_tars([str(tmp_path / "tars")], tmp_path / f"index{fraction}", validation_fraction=fraction)
        sizes.append({name: len(split.shards) for name, split in manifest.splits.items()})
    assert sizes[0] == {"train": 9, "validation": 1} and sizes[3] == {"train": 10}
    assert sum(sizes[1].values()) == sum(sizes[2].values()) == 10 and sizes[2]["train"] >= 1
    line = refusal([tmp_path / "tars" / "0.tar"], tmp_path / "one", validation_fraction=0.1)
    assert line.startswith("validation_fraction=0.1: the only tar, 0.tar, cannot be in both splits")


def test_a_layout_with_several_fields_in_folders_is_read(tmp_path):
    """Read splits as folders, and keys with .json, .txt and a field of two dots, as data sets on a hub have them."""
    for split, count in (("train", 3), ("validation", 1), ("test", 1)):
        for number in range(count):
            members = [
                (f"{split}{number}{each}.{kind}", f"{kind} {split} {number} {each}".encode())
                for each in range(4)
                for kind in ("json", "seg.png", "txt")
            ]
            write_tar(tmp_path / "hub" / "data" / split / f"{number:05}-of-{count:05}.tar", members)
    manifest = index_tars([str(tmp_path / "hub")], tmp_path / "index")
    sizes = {name: len(split.shards) for name, split in manifest.splits.items()}
    assert sizes == {"train": 3, "validation": 1, "test": 1}
    assert manifest.made["left_out"]["tars_of_no_split"] == 0
    assert documents(tmp_path / "index", "validation") == [f"txt validation 0 {each}".encode() for each in range(4)]
    assert verify(tmp_path / "index") == []
    for extension in ("seg.png", ".SEG.png"):
        output = tmp_path / f"index-{extension}"
        index_tars([str(tmp_path / "hub")], output, extension=extension)
        assert documents(output, "validation") == [f"seg.png validation 0 {each}".encode() for each in range(4)]


# Pictures and sounds.


def test_pictures_that_lie_as_we_write_them_are_read(tmp_path):
    pixels = [np.random.default_rng(number).integers(0, 256, (4, 6, 3), dtype=np.uint8) for number in range(5)]
    members = []
    for number, picture in enumerate(pixels):
        file = io.BytesIO()
        Image.fromarray(picture).save(file, "ppm")
        members += [(f"{number}.cls", b"7"), (f"{number}.ppm", file.getvalue())]
    write_tar(tmp_path / "tars" / "train.tar", members)
    index_tars([str(tmp_path / "tars")], tmp_path / "index", modality="image", **ALL)
    assert verify(tmp_path / "index") == []
    batch = next(iter(open_stream(tmp_path / "index", context=72, global_batch=5, shuffle_bytes=0)))
    assert [row.tobytes() for row in batch.tokens.numpy()] == [picture.tobytes() for picture in pixels]
    assert dict(DataFolder(tmp_path / "index").manifest.properties)["height"] == 4


def test_pictures_that_must_be_decoded_or_are_of_two_sizes_are_refused(tmp_path):
    for kind, size in (("jpeg", (6, 4)), ("ppm", (6, 5))):
        members = []
        for name, each in (("a", (6, 4)), ("b", size)):
            file = io.BytesIO()
            Image.new("RGB", each).save(file, kind)
            members.append((f"{name}.{kind}", file.getvalue()))
        write_tar(tmp_path / kind / "train.tar", members)
    line = refusal([tmp_path / "jpeg"], tmp_path / "index", modality="image", extension="jpeg")
    assert "train.tar: member a.jpeg is not a .ppm file in the form that" in line
    assert line.endswith("unpack the tars, and make a data folder with `longstride data build --modality image`")
    assert "member b.ppm is not" in refusal([tmp_path / "ppm"], tmp_path / "index", modality="image")
    assert "members are .jpeg; name" in refusal([tmp_path / "jpeg"], tmp_path / "index", modality="image")


def test_sounds_that_lie_as_we_write_them_are_read(tmp_path):
    (tmp_path / "source").mkdir()
    for number in range(3):
        with wave.open(str(tmp_path / "source" / f"{number}.wav"), "wb") as file:
            file.setparams((1, 2, 1000, 0, "NONE", ""))
            file.writeframes(np.random.default_rng(number).integers(-9000, 9000, 70_000).astype("<i2").tobytes())
    build([tmp_path / "source"], tmp_path / "data", modality="audio", validation_fraction=0)
    index_tars([str(tmp_path / "data")], tmp_path / "index", modality="audio", **ALL)
    assert verify(tmp_path / "index") == []
    assert b"".join(split_bytes(tmp_path / "index", "train")) == b"".join(split_bytes(tmp_path / "data", "train"))
    # 16-bit PCM as most programs write it, pieces of 32,768 frames, gives the same bytes.
    sounds = [(f"{number}.wav", (tmp_path / "source" / f"{number}.wav").read_bytes()) for number in range(3)]
    write_tar(tmp_path / "pcm" / "train.tar", sounds)
    assert sorted(indexed(tmp_path / "pcm", tmp_path / "other", modality="audio")) == sorted(
        documents(tmp_path / "data")
    )
    assert DataFolder(tmp_path / "other").manifest.properties == {"rate": 1000, "pcm_bits": 16}
    for name, sound in (("odd", sounds[1][1][:-1]), ("wide", sounds[1][1].replace(b"\1\0\1\0", b"\1\0\2\0", 1))):
        write_tar(tmp_path / name / "train.tar", [sounds[0], ("1.wav", sound)])
        line = refusal([tmp_path / name], tmp_path / f"{name}-index", modality="audio")
        assert "member 1.wav is not a .wav file in the form that" in line
