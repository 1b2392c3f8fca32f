"""Published datasets: read in every form in which they are distributed, whoever builds them."""

import hashlib
import json
import os
import shutil
import tracemalloc
import zipfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from longstride.data_pipelines.building.build import build_dataset
from longstride.data_pipelines.building.planning import DatasetSettings
from longstride.data_pipelines.datasets import DATASETS
from longstride.data_pipelines.datasets import dataset as dataset_module
from longstride.data_pipelines.datasets.byte_corpus import ENWIK8
from longstride.data_pipelines.datasets.cifar10 import CIFAR10
from longstride.data_pipelines.datasets.dataset import PublishedFile, excerpts
from longstride.data_pipelines.datasets.imagenet64 import IMAGENET64
from longstride.data_pipelines.documents import OpenInput
from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.order.evaluation import split_bytes
from longstride.data_pipelines.shards.manifest import DataManifest
from longstride.data_pipelines.shards.reading import DataFolder
from longstride.data_pipelines.shards.verify import verify
from tests.harness.data.builds import OutOfOrder, folder_bytes, stop_half_way, write_files
from tests.harness.data.published_files import (
    CIFAR_BATCHES,
    IMAGENET_BATCHES,
    cifar_binary,
    npz,
    pictures,
    python2_pickle,
    tarred,
    write_cifar,
    zipped,
)
from tests.hostile.generators.archives import npz_of

CIFAR = {name: pictures(20, 32, seed) for seed, name in enumerate(CIFAR_BATCHES)}
IMAGENET = {name: pictures(4 + seed, 64, seed) for seed, name in enumerate(IMAGENET_BATCHES)}
TEXT = np.random.default_rng(0).integers(97, 123, 400_020, dtype=np.uint8).tobytes()


def split(folder: Path, name: str) -> bytes:
    return b"".join(split_bytes(folder, name))


def made(name: str, given: Path, output: Path, **options) -> DataManifest:
    """Build a dataset, by default with ``unpublished``."""
    return build_dataset(name, given, output, **{"unpublished": True, **options})


# CIFAR-10


@pytest.fixture(scope="module")
def cifar(tmp_path_factory) -> dict[str, Path]:
    """Write the same pictures in every form."""
    base = tmp_path_factory.mktemp("cifar")
    binary = write_cifar(base / "b" / "cifar-10-batches-bin", CIFAR, "binary")
    python = write_cifar(base / "p" / "cifar-10-batches-py", CIFAR, "python2")
    (base / "archives").mkdir()
    return {
        "binary folder": binary,
        "folder above": binary.parent,
        "binary archive": tarred(base / "cifar-10-binary.tar.gz", binary),
        "folder of an archive": tarred(base / "archives" / "cifar-10-binary.tar.gz", binary).parent,
        "python folder": python,
        "python archive": tarred(base / "cifar-10-python.tar.gz", python),
        "python 3": write_cifar(base / "again", CIFAR, "python3"),
    }


@pytest.fixture(scope="module")
def cifar_built(cifar, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("built") / "data"
    made("cifar10", cifar["binary folder"], folder, shard_bytes=20_000)
    return folder


def test_cifar10_splits_are_those_of_the_paper(cifar_built):
    """The last 25th of the training pictures validates: 2,000 of 50,000. The order is rows, columns, channels."""
    training = np.concatenate([CIFAR[name] for name in CIFAR_BATCHES[:-1]])
    assert split(cifar_built, "train") == training[:96].tobytes()
    assert split(cifar_built, "validation") == training[96:].tobytes()
    assert split(cifar_built, "test") == CIFAR["test_batch"].tobytes()
    assert verify(cifar_built) == []
    manifest = json.loads((cifar_built / "manifest.json").read_text())
    assert (manifest["modality"], manifest["properties"]["channels"]) == ("image", 3)
    assert manifest["made"]["settings"]["dataset"] == "cifar10" and manifest["made"]["settings"]["unpublished"] is True


def test_a_dataset_of_pictures_takes_a_palette(cifar, cifar_built, tmp_path):
    made("cifar10", cifar["binary folder"], tmp_path / "data", shard_bytes=20_000, palette=64)
    assert len(DataFolder(tmp_path / "data").palette) == 64
    assert split(tmp_path / "data", "train") == split(cifar_built, "train")
    assert verify(tmp_path / "data") == []


@pytest.mark.parametrize(
    "form", ["folder above", "binary archive", "folder of an archive", "python folder", "python archive", "python 3"]
)
def test_cifar10_is_the_same_in_every_form(cifar, cifar_built, tmp_path, form):
    made("cifar10", cifar[form], tmp_path / "data", shard_bytes=20_000)
    assert folder_bytes(tmp_path / "data") == folder_bytes(cifar_built)


def known(content: bytes, algorithm: str = "md5") -> PublishedFile:
    return PublishedFile(len(content), algorithm, hashlib.new(algorithm, content).hexdigest())


def test_cifar10_takes_the_published_files_alone(cifar, tmp_path, monkeypatch):
    """The checksums of the batches decide, in any archive; here those of a small set."""
    batches = {f"{name}.bin": known(cifar_binary(batch), "sha1") for name, batch in CIFAR.items()}
    batches |= {name: known(python2_pickle(batch)) for name, batch in CIFAR.items()}
    monkeypatch.setitem(DATASETS, "cifar10", replace(CIFAR10, batches=batches))
    for number, form in enumerate(("binary archive", "python archive", "python folder")):
        manifest = made("cifar10", cifar[form], tmp_path / f"{number}", unpublished=False)
        assert manifest.made["settings"]["unpublished"] is False
    assert folder_bytes(tmp_path / "0") == folder_bytes(tmp_path / "2")
    wrong = batches | {"test_batch.bin": known(bytes(20 * 3073))}
    monkeypatch.setitem(DATASETS, "cifar10", replace(CIFAR10, batches=wrong))
    with pytest.raises(DataError, match=r"test_batch\.bin\): its MD5 is \w+, but the published one is .*--unpub"):
        made("cifar10", cifar["binary archive"], tmp_path / "data", unpublished=False)


def test_cifar10_with_a_batch_missing_is_refused(cifar, tmp_path):
    part = {f"data_batch_{number}.bin": cifar_binary(CIFAR["data_batch_1"]) for number in (1, 2, 4, 5)}
    source = write_files(tmp_path / "source", part)
    with pytest.raises(DataError, match=r"source: lacks data_batch_3\.bin, test_batch\.bin; .*--unpublished"):
        made("cifar10", source, tmp_path / "data", unpublished=False)
    assert list(made("cifar10", source, tmp_path / "data").splits) == ["train", "validation"]


@pytest.mark.parametrize(
    ("files", "rule"),
    [
        ({}, "holds no batch of CIFAR-10"),
        ({"train.bin": b"0" * 3074}, "holds no batch of CIFAR-10"),
        ({"data_batch_1.bin": b"\0" * 3074}, r"data_batch_1\.bin: 3,074 bytes are not a multiple of 3,073"),
        ({"data_batch_1.bin": b""}, "0 bytes are not a multiple"),
        ({"data_batch_1.bin": b"\x0a" * 3073 * 30}, r"data_batch_1\.bin: a label is 10; must be less than 10"),
        ({"test_batch.bin": b"\0" * 3073}, "holds no picture to train on"),
        ({"data_batch_1": b"\0" * 3073}, r"data_batch_1: cannot be read as a pickle \(.*\); fetch it again"),
        ({"a.tar.gz": b"\x1f\x8b" + b"\0" * 99}, r"a\.tar\.gz: is compressed by gzip, and damaged or cut short"),
    ],
    ids=["empty", "CIFAR-100", "rows", "nothing", "label", "test alone", "no pickle", "no archive"],
)
def test_cifar10_refuses_in_one_line(tmp_path, files, rule):
    refuses_in_one_line("cifar10", tmp_path, files, rule)


def refuses_in_one_line(name, folder, files, rule):
    source = write_files(folder / "source", files)
    source.mkdir(exist_ok=True)
    with pytest.raises(DataError, match=rule) as caught:
        made(name, source, folder / "data")
    assert "\n" not in str(caught.value) and not (folder / "data").exists()


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_archive_that_is_cut_short_is_refused(cifar, tmp_path, share):
    whole = cifar["binary archive"].read_bytes()
    (tmp_path / "cut.tar.gz").write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(DataError, match=r"cut\.tar\.gz: is compressed by gzip, and damaged or cut short"):
        made("cifar10", tmp_path / "cut.tar.gz", tmp_path / "data")
    assert [path.name for path in tmp_path.iterdir()] == ["cut.tar.gz"]


def test_unrelated_archives_beside_a_dataset_are_passed_over(cifar, cifar_built, tmp_path, monkeypatch):
    """An unreadable archive is ignored, unless it was named or its name is published. Needless ones are not opened."""
    source = tmp_path / "source"
    write_files(source, {"a.tar.gz": b"\x1f\x8bxxxx", "notes.zip": b"PK\3\4xxxx"})
    mine = source / "mine.tar.gz"
    shutil.copy(cifar["binary archive"], mine)
    made("cifar10", source, tmp_path / "data", shard_bytes=20_000)
    assert folder_bytes(tmp_path / "data") == folder_bytes(cifar_built)
    mine.rename(source / "cifar-10-binary.tar.gz")
    opened = []
    members = dataset_module.members_of
    monkeypatch.setattr(dataset_module, "members_of", lambda path: opened.append(path.name) or members(path))
    made("cifar10", source, tmp_path / "again", shard_bytes=20_000)
    assert opened == ["cifar-10-binary.tar.gz"]
    with pytest.raises(DataError, match=r"a\.tar\.gz: is compressed by gzip, and damaged or cut short"):
        made("cifar10", source / "a.tar.gz", tmp_path / "other")
    (source / "cifar-10-python.tar.gz").write_bytes(b"\x1f\x8bxxxx")
    (source / "cifar-10-binary.tar.gz").rename(mine)
    with pytest.raises(DataError, match=r"cifar-10-python\.tar\.gz: is compressed by gzip, and damaged or cut short"):
        made("cifar10", source, tmp_path / "other")


# ImageNet


def imagenet_zips(folder: Path, deflated: bool) -> Path:
    """Write the three archives, as they are distributed."""
    folder.mkdir()
    members = {name: npz(batch, deflated) for name, batch in IMAGENET.items()}
    for part, names in (("train_part1", range(5)), ("train_part2", range(5, 10)), ("val", [10])):
        stem = f"Imagenet64_{part}_npz"
        held = {f"{stem}/{IMAGENET_BATCHES[number]}": members[IMAGENET_BATCHES[number]] for number in names}
        zipped(folder / f"{stem}.zip", held)
    return folder


@pytest.fixture(scope="module")
def imagenet_built(tmp_path_factory) -> Path:
    base = tmp_path_factory.mktemp("imagenet")
    source = write_files(base / "source", {name: npz(batch) for name, batch in IMAGENET.items()})
    made("imagenet64", source, base / "data", shard_bytes=100_000)
    return base / "data"


def test_imagenet64_batches_are_read_in_their_order(imagenet_built):
    """Batch 10 comes last, not after batch 1."""
    training = np.concatenate([IMAGENET[name] for name in IMAGENET_BATCHES[:-1]])
    assert split(imagenet_built, "train") == training.tobytes()
    assert split(imagenet_built, "validation") == IMAGENET["val_data.npz"].tobytes()
    assert verify(imagenet_built) == []


@pytest.mark.parametrize("deflated", [False, True], ids=["stored", "deflated"])
def test_imagenet64_is_the_same_from_its_zips(imagenet_built, tmp_path, deflated):
    made("imagenet64", imagenet_zips(tmp_path / "zips", deflated), tmp_path / "data", shard_bytes=100_000)
    assert folder_bytes(tmp_path / "data") == folder_bytes(imagenet_built)


def test_imagenet64_lies_in_several_folders(imagenet_built, tmp_path):
    """The nearer of two files with one name is read; at the same distance, the unpacked one."""
    source = tmp_path / "source"
    part = IMAGENET_BATCHES[5:8]
    held = {name: npz(batch) for name, batch in IMAGENET.items()}
    other = npz(pictures(3, 64, 99))
    write_files(source, {IMAGENET_BATCHES[0]: held[IMAGENET_BATCHES[0]], "z.zip": b"PK\3\4 and no archive"})
    write_files(source / "a", {name: held[name] for name in IMAGENET_BATCHES[1:5]} | {IMAGENET_BATCHES[0]: other})
    write_files(source / "c", {name: held[name] for name in IMAGENET_BATCHES[8:]})
    (source / "b").mkdir()
    zipped(source / "a" / "a.zip", dict.fromkeys(IMAGENET_BATCHES[8:], other))
    zipped(source / "b" / "b.zip", {f"train/{name}": held[name] for name in part})
    made("imagenet64", source, tmp_path / "data", shard_bytes=100_000)
    assert folder_bytes(tmp_path / "data") == folder_bytes(imagenet_built)


def test_imagenet64_takes_the_published_counts_and_archives_alone(tmp_path, monkeypatch):
    source = imagenet_zips(tmp_path / "zips", False)
    counts = (sum(map(len, IMAGENET.values())) - 14, 14)
    archives = {path.name: known(path.read_bytes(), "sha256") for path in source.iterdir()}
    mine = replace(IMAGENET64, archives=archives, counts=(counts,))
    monkeypatch.setitem(DATASETS, "imagenet64", mine)
    made("imagenet64", source, tmp_path / "data", unpublished=False)
    monkeypatch.setitem(DATASETS, "imagenet64", replace(mine, counts=((1_281_167, 50_000),)))
    with pytest.raises(DataError, match=r"85 pictures to train on and 14 to validate .* 1,281,167 and 50,000; "):
        made("imagenet64", source, tmp_path / "other", unpublished=False)
    wrong = archives | {"Imagenet64_val_npz.zip": replace(archives["Imagenet64_val_npz.zip"], digest="0" * 64)}
    monkeypatch.setitem(DATASETS, "imagenet64", replace(mine, archives=wrong))
    with pytest.raises(DataError, match=r"val_npz\.zip: its SHA256 is \w+, but the published one is 0000"):
        made("imagenet64", source, tmp_path / "other", unpublished=False)
    monkeypatch.setitem(DATASETS, "imagenet64", IMAGENET64)
    with pytest.raises(DataError, match=r"zip: [\d,]+ bytes, but the published archives have 6,783,426,789, "):
        made("imagenet64", source, tmp_path / "other", unpublished=False)


@pytest.mark.parametrize("validation", ["valid", "val", "validation"])
def test_imagenet64_reads_folders_of_pictures(tmp_path, validation):
    source = tmp_path / "source"
    for name, number in (("train/n01", 0), ("train/n02", 1), (validation, 2)):
        (source / name).mkdir(parents=True)
        for place, pixels in enumerate(pictures(5, 64, number)):
            Image.fromarray(pixels).save(source / name / f"{place}.png")
    made("imagenet64", source, tmp_path / "data")
    held = split(tmp_path / "data", "train")
    expected = {pixels.tobytes() for number in (0, 1) for pixels in pictures(5, 64, number)}
    found = [held[start : start + 12_288] for start in range(0, len(held), 12_288)]
    assert len(found) == 10 and set(found) == expected
    second = {pixels.tobytes() for pixels in pictures(5, 64, 1)}
    classes = [one in second for one in found]
    assert sum(left != right for left, right in pairwise(classes)) > 1  # mixed, and not one class after the other


@pytest.mark.parametrize(
    ("files", "rule"),
    [
        ({}, r"holds neither npz batches .* nor a folder of pictures named train or train_64x64; log in at https"),
        ({"val_data.npz": npz(pictures(2, 64))}, r"holds no picture to train on; fetch it again"),
        ({"train_data_batch_1.npz": npz(pictures(2, 32))}, r"an array of 2x3072; must be pictures x 12,288"),
        ({"train_data_batch_1.npz": b"PK\x03\x04" + b"0" * 99}, r"train_data_batch_1\.npz: is damaged or cut short"),
        ({"train_data_batch_1.npz": npz(pictures(2, 64))[:9000]}, "is damaged or cut short"),
        ({"train_data_batch_1.npz": npz_of("(((")}, r"data\.npy\): cannot be read as an array \(.*\); fetch it again"),
        ({"train_data_batch_1.npz": npz_of("{[]: 1}")}, r"data\.npy\): cannot be read as an array \(.*\); fetch it"),
    ],
    ids=["empty", "validation alone", "32 pixels", "no zip", "cut short", "brackets", "no key"],
)
def test_imagenet64_refuses_in_one_line(tmp_path, files, rule):
    refuses_in_one_line("imagenet64", tmp_path, files, rule)


def test_imagenet64_in_pickles_and_in_other_sizes_is_refused(tmp_path):
    zipped(tmp_path / "Imagenet64_val.zip", {"val_data": b"\x80\x02."})
    with pytest.raises(DataError, match=r"Imagenet64_val\.zip: holds pickled batches, which are not supported"):
        made("imagenet64", tmp_path / "Imagenet64_val.zip", tmp_path / "data")
    (tmp_path / "small" / "train").mkdir(parents=True)
    Image.fromarray(pictures(1, 32)[0]).save(tmp_path / "small" / "train" / "0.png")
    with pytest.raises(DataError, match=r"small/train: its pictures are 32x32 pixels, but imagenet64 has 64x64"):
        made("imagenet64", tmp_path / "small", tmp_path / "data")


def test_batch_is_never_held_whole(tmp_path):
    """12 MB of pictures, compressed twice, need far less memory."""
    batch = np.zeros((1000, 64, 64, 3), dtype=np.uint8)
    batch[:, 0, 0, 0] = np.arange(1000) % 256
    source = zipped(tmp_path / "a.zip", {"train_data_batch_1.npz": npz(batch, deflated=True)})
    tracemalloc.start()
    made("imagenet64", source, tmp_path / "data", shard_bytes=2**18)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert split(tmp_path / "data", "train") == batch.tobytes()
    assert peak < 4 * 2**20


def test_documents_of_a_million_pictures_take_a_hundred_megabytes():
    tracemalloc.start()
    parts = excerpts(("batch", 1), 10_000, 12_288)
    assert len(parts) == 10_000 and parts[-1].start == 9_999 * 12_288
    assert tracemalloc.get_traced_memory()[1] < 10_000 * 100
    tracemalloc.stop()


# enwik8 and text8


@pytest.mark.parametrize("name", ["enwik8", "text8"])
@pytest.mark.parametrize("form", ["zip", "raw", "folder of the zip", "folder of the file"])
def test_text_is_split_by_bytes(tmp_path, name, form):
    """The splits have 90, 5 and 5 percent, and the last one also the remainder."""
    source = tmp_path / "source"
    source.mkdir()
    zip_path, raw = source / f"{name}.zip", source / name
    if "zip" in form:
        zipped(zip_path, {name: TEXT})
    else:
        raw.write_bytes(TEXT)
    given = source if "folder" in form else zip_path if form == "zip" else raw
    manifest = made(name, given, tmp_path / "data", shard_bytes=150_000)
    assert split(tmp_path / "data", "train") == TEXT[:360_018]
    assert split(tmp_path / "data", "validation") == TEXT[360_018:380_019]
    assert split(tmp_path / "data", "test") == TEXT[380_019:]
    assert manifest.modality == "text" and [one.documents for one in manifest.splits.values()] == [1, 1, 1]


def test_text_takes_the_published_file_alone(tmp_path, monkeypatch):
    given = zipped(tmp_path / "a.zip", {"enwik8": TEXT})
    with pytest.raises(DataError, match=r"a\.zip \(enwik8\): 400,020 bytes, but the published file has 100,000,000; "):
        made("enwik8", given, tmp_path / "data", unpublished=False)
    monkeypatch.setitem(DATASETS, "enwik8", replace(ENWIK8, content=known(TEXT)))
    made("enwik8", given, tmp_path / "data", unpublished=False)
    flipped = bytes([TEXT[0] ^ 1]) + TEXT[1:]
    (tmp_path / "enwik8").write_bytes(flipped)
    with pytest.raises(DataError, match=r"enwik8: its MD5 is \w+, but the published one is \w+; .*--unpublished"):
        made("enwik8", tmp_path / "enwik8", tmp_path / "other", unpublished=False)


@pytest.mark.parametrize(
    ("members", "rule"),
    [
        ({"a": b"1", "b": b"2"}, "holds a, b instead of only enwik8; fetch http"),
        ({}, "holds nothing instead of only enwik8"),
        ({"enwik8": b"12"}, "2 bytes are too few for three splits"),
    ],
)
def test_text_in_another_archive_is_refused(tmp_path, members, rule):
    given = zipped(tmp_path / "a.zip", members)
    with pytest.raises(DataError, match=rule):
        made("enwik8", given, tmp_path / "data")


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_damage_in_a_deflated_member_is_told_in_one_line(tmp_path, method):
    with zipfile.ZipFile(tmp_path / "a.zip", "w", method) as archive:
        archive.writestr("enwik8", TEXT)
    content = bytearray((tmp_path / "a.zip").read_bytes())
    content[60:90] = b"\xff" * 30
    (tmp_path / "a.zip").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.zip \(enwik8\): is damaged or cut short"):
        made("enwik8", tmp_path / "a.zip", tmp_path / "data")


def test_names_in_an_archive_reach_no_terminal_as_they_are(tmp_path):
    """These are line ends, control characters of terminals, and marks that reverse the order of letters."""
    given = zipped(tmp_path / "a.zip", {"a\nb\x1b[31m": b"1", "c\x9b31m\u202e": b"2"})
    with pytest.raises(DataError) as caught:
        made("enwik8", given, tmp_path / "data")
    assert r"holds a\nb\x1b[31m, c\x9b31m\u202e instead of only enwik8" in str(caught.value)


# Builds


def test_dataset_goes_on_after_a_stop(cifar, cifar_built, tmp_path):
    options = {"shard_bytes": 20_000}
    stop_half_way(made, "cifar10", cifar["python archive"], tmp_path / "data", **options)
    kept = {path.name: path.stat().st_mtime_ns for path in (tmp_path / ".data.unfinished" / "data").glob("*.tar")}
    assert kept
    made("cifar10", cifar["python archive"], tmp_path / "data", **options)
    assert folder_bytes(tmp_path / "data") == folder_bytes(cifar_built)
    assert kept.items() <= {path.name: path.stat().st_mtime_ns for path in (tmp_path / "data").iterdir()}.items()


@pytest.mark.parametrize("form", ["binary archive", "python archive"])
def test_dataset_is_the_same_whoever_makes_which_shard(cifar, cifar_built, tmp_path, form):
    """Reading backwards in an archive, or skipping other ranks' batches, changes no byte."""
    made("cifar10", cifar[form], tmp_path / "data", shard_bytes=20_000, crew=OutOfOrder())
    assert folder_bytes(tmp_path / "data") == folder_bytes(cifar_built)


def test_archive_that_changes_meanwhile_is_noticed(tmp_path, monkeypatch):
    given = zipped(tmp_path / "enwik8.zip", {"enwik8": TEXT})
    make = DatasetSettings.plan

    def make_then_change(*arguments):
        plan = make(*arguments)
        os.utime(given, ns=(1, 1))
        return plan

    monkeypatch.setattr(DatasetSettings, "plan", make_then_change)
    with pytest.raises(DataError, match=r"enwik8\.zip: changed since the build began"):
        made("enwik8", given, tmp_path / "data")


def test_open_input_holds_one_thing_at_a_time():
    closed = []
    open_input = OpenInput()
    for key in ("a", "a", "b", "a"):
        assert open_input.get(key, lambda stack, key=key: stack.callback(closed.append, key) and key) == key
    assert closed == ["a", "b"]
    open_input.close()
    assert closed == ["a", "b", "a"]
