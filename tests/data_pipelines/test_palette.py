"""Palettes: exact nearest colours, k-means without random numbers, and data folders that are read by one."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from longstride.data_pipelines.building.build import build
from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.order import ByteStream, Cut, StreamSettings, evaluation_contexts, read_context
from longstride.data_pipelines.palette import Palette, make_palette
from longstride.data_pipelines.shards import DataFolder, verify
from tests.harness.data.builds import folder_bytes, outcome, start

EDGE = 6  # of the pictures


def random_colours(count: int, seed: int) -> np.ndarray:
    """Draw different colours, (count, 3) uint8, half of them close to each other."""
    random = np.random.default_rng(seed)
    numbers = np.unique(
        np.concatenate([random.integers(0, 1 << 24, 2 * count), random.integers(0, 1 << 14, 2 * count)])
    )
    numbers = random.permutation(numbers)[:count]
    return np.stack([numbers >> 16, numbers >> 8 & 255, numbers & 255], axis=1).astype(np.uint8)


def nearest(palette: Palette, pixels: np.ndarray) -> np.ndarray:
    """Find the nearest colours by the definition."""
    return ((pixels[:, None].astype(np.int64) - palette.colours.astype(np.int64)) ** 2).sum(-1).argmin(1)


def write_pictures(folder: Path, count: int) -> Path:
    folder.mkdir()
    random = np.random.default_rng(0)
    for number in range(count):
        pixels = random.integers(0, 256, (EDGE, EDGE, 3), dtype=np.uint8) // (1 + number % 3)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("pictures") / "source", 12)


@pytest.fixture(scope="module")
def folder(pictures: Path) -> Path:
    """Build a data folder with a palette of 300 colours, in several shards."""
    build([pictures], pictures.parent / "data", modality="image", palette=300, shard_bytes=400)
    return pictures.parent / "data"


@pytest.mark.parametrize(("count", "dtype"), [(2, "uint8"), (256, "uint8"), (257, "int16"), (40_000, "int32")])
def test_tokens_are_the_nearest_colours_exactly(count: int, dtype: str) -> None:
    palette = Palette(random_colours(count, 1))
    pixels = np.concatenate([random_colours(200, 2), palette.colours[:20], palette.colours[:20] ^ 1])
    tokens = palette.tokens(pixels.reshape(-1))
    assert tokens.dtype == palette.dtype == dtype
    assert np.array_equal(tokens, nearest(palette, pixels))
    assert np.array_equal(palette.content(tokens), palette.colours[tokens].reshape(-1))
    assert Palette.from_ppm(palette.to_ppm()) == palette == Palette.from_text(palette.to_text())
    assert pickle.loads(pickle.dumps(palette)) == palette


def test_of_two_colours_as_near_the_first_is_taken() -> None:
    palette = Palette(np.array([[0, 0, 12], [0, 0, 8]], dtype=np.uint8))
    assert palette.tokens(np.array([0, 0, 10, 0, 0, 9, 0, 0, 11], dtype=np.uint8)).tolist() == [0, 1, 0]


def test_k_means_finds_clusters_whatever_the_order_of_the_pixels() -> None:
    random = np.random.default_rng(0)
    centres = np.array([[20, 20, 20], [200, 40, 40], [40, 200, 40], [230, 230, 90]])
    pixels = (centres[random.integers(0, 4, 4000)] + random.integers(-8, 9, (4000, 3))).astype(np.uint8)
    palette = make_palette(pixels, 4)
    assert np.abs(palette.colours - centres[nearest(Palette(centres), palette.colours)].astype(int)).max() <= 1
    assert palette == make_palette(pixels[::-1], 4)


@pytest.mark.parametrize("count", [2, 7, 64, 500])
def test_k_means_leaves_each_colour_at_the_mean_of_its_pixels(count: int) -> None:
    """Except for rounding, and for the last rounds, which gain less than a thousandth."""
    pixels = random_colours(1000, 3)
    palette = make_palette(pixels, count)
    assert len(palette) == count
    members = nearest(palette, pixels)
    means = [pixels[members == number].mean(0) for number in range(count)]
    error = ((pixels - palette.colours[members].astype(float)) ** 2).sum()
    best = sum(((pixels[members == number] - mean) ** 2).sum() for number, mean in enumerate(means))
    assert best <= error <= 1.01 * best + 3 * 0.25 * len(pixels)


def test_as_many_colours_as_there_are_lose_nothing() -> None:
    pixels = random_colours(50, 4)
    assert np.array_equal(make_palette(np.repeat(pixels, 3, axis=0), 50).colours, np.unique(pixels, axis=0))
    with pytest.raises(
        DataError, match="palette=51: the pixels that were looked at have 50 different colours; at most"
    ):
        make_palette(pixels, 51)


@pytest.mark.parametrize("count", [-1, 0, 1, 65_537])
def test_counts_out_of_range_are_refused(count: int) -> None:
    with pytest.raises(DataError, match=f"palette={count}: must be 2 to 65,536 colours; nearest"):
        make_palette(random_colours(9, 0), count)


@pytest.mark.parametrize("content", [b"", b"P6\n2 1\n255\n123", b"P6\n1 2\n255\n123456", b"P6\n2 1\n255\n123123"])
def test_other_files_are_no_palettes(content: bytes) -> None:
    with pytest.raises(DataError):
        Palette.from_ppm(content)


@pytest.mark.parametrize("text", [None, 7, "", "123456", "123456,654321", "12345g 123456", "123456 123456"])
def test_other_texts_are_no_palettes(text: object) -> None:
    with pytest.raises(DataError):
        Palette.from_text(text)


def test_shards_are_those_of_a_build_without_a_palette(pictures: Path, folder: Path, tmp_path: Path) -> None:
    build([pictures], tmp_path / "plain", modality="image", shard_bytes=400)
    plain, data = folder_bytes(tmp_path / "plain"), folder_bytes(folder)
    assert {name: data.pop(name) for name in ("palette.ppm", "manifest.json")}.keys() - plain.keys() == {"palette.ppm"}
    assert data == {name: content for name, content in plain.items() if name != "manifest.json"}
    assert DataFolder(folder).manifest.fingerprint != DataFolder(tmp_path / "plain").manifest.fingerprint
    with Image.open(folder / "palette.ppm") as drawn:
        assert drawn.size == (300, 1)


def test_a_context_is_each_pixels_nearest_colour(pictures: Path, folder: Path) -> None:
    opened = DataFolder(folder)
    palette = opened.palette
    wanted = set()
    for path in pictures.iterdir():
        with Image.open(path) as image:
            wanted.add(tuple(nearest(palette, np.asarray(image).reshape(-1, 3)).tolist()))
    stream = iter(ByteStream(opened, StreamSettings(context=EDGE**2, global_batch=2, workers=0)))
    batches = [next(stream) for _ in range(5)]
    held_out = list(evaluation_contexts(opened, context=EDGE**2, batch_size=1))
    assert batches[0].tokens.dtype == held_out[0].tokens.dtype == torch.int16
    rows = torch.cat([each.tokens for each in [*batches, *held_out]])
    assert {tuple(row) for row in rows.tolist()} <= wanted
    assert len(torch.unique(rows, dim=0)) == 11  # ten of eleven train pictures, and the one that is held out
    assert torch.equal(read_context(opened, "validation", 0, context=EDGE**2), held_out[0].tokens[0])
    assert {each.lengths.tolist()[0] for each in batches} == {EDGE**2}


def test_contexts_of_other_sizes_are_refused(folder: Path) -> None:
    with pytest.raises(DataError, match="context=108: must be 36, the pixels of every image of this set"):
        ByteStream(folder, StreamSettings(context=108, global_batch=1))
    with pytest.raises(DataError, match="packing=true: pictures of a palette are not packed"):
        ByteStream(folder, StreamSettings(context=36, global_batch=1, cut=Cut(packing=True)))


def test_damage_of_the_palette_is_found(folder: Path, tmp_path: Path) -> None:
    spoilt = tmp_path / "data"
    spoilt.mkdir()
    for name, content in folder_bytes(folder).items():
        (spoilt / name).write_bytes(content)
    assert verify(spoilt) == []
    content = (spoilt / "palette.ppm").read_bytes()
    (spoilt / "palette.ppm").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert ["the palette is damaged" in line for line in verify(spoilt)] == [True]
    with pytest.raises(DataError, match="the palette is damaged"):
        ByteStream(spoilt, StreamSettings(context=36, global_batch=1))
    (spoilt / "palette.ppm").unlink()
    assert [str(spoilt / "palette.ppm") in line for line in verify(spoilt)] == [True]
    manifest = json.loads((spoilt / "manifest.json").read_text())
    manifest["palette"]["sha256"] = "0" * 64
    (spoilt / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="edited since it was built"):
        DataFolder(spoilt)


def test_another_folders_palette_is_taken(pictures: Path, folder: Path, tmp_path: Path) -> None:
    palette = DataFolder(folder).palette
    assert palette is not None
    others = write_pictures(tmp_path / "others", 4)
    for _ in range(2):  # the second time it is there already, and identical
        build([others], tmp_path / "data", modality="image", palette=palette)
    assert (tmp_path / "data/palette.ppm").read_bytes() == (folder / "palette.ppm").read_bytes()
    with pytest.raises(DataError, match="holds a data set made with other settings"):
        build([others], tmp_path / "data", modality="image", palette=9)


def test_two_ranks_make_the_palette_of_one(pictures: Path, folder: Path, tmp_path: Path) -> None:
    words = ["-m", "longstride.launcher.cli", "data", "build", str(pictures), "--output", str(tmp_path / "data")]
    options = ["--modality", "image", "--palette", "300", "--shard-bytes", "400"]
    code, _, errors = outcome(start([*words, *options], ranks=2))
    assert code == 0, errors
    assert folder_bytes(tmp_path / "data") == folder_bytes(folder)
