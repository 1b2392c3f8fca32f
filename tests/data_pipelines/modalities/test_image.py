"""Pictures: their bytes from the file to a context, and what is refused."""

import tarfile
from io import BytesIO
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from longstride.data_pipelines.building.build import build
from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.modalities import MODALITIES
from longstride.data_pipelines.modalities.image import grid, grid_size
from longstride.data_pipelines.order.evaluation import evaluation_contexts, split_bytes
from longstride.data_pipelines.shards.verify import verify
from tests.harness.data.streams import open_stream

IMAGE = MODALITIES["image"]


def pixels_of(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def write(path: Path, pixels: np.ndarray, **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **options)
    return path


def read(path: Path, asked: dict[str, int] | None = None) -> np.ndarray:
    """Read a picture that is a set of its own, (height, width, 3)."""
    with path.open("rb") as file:
        properties = IMAGE.settle(path, file, asked or {})
        size = IMAGE.measure(path, properties)
        content = IMAGE.open(path, file, properties).read(0, size)
    assert len(content) == size
    return np.frombuffer(content, dtype=np.uint8).reshape(properties["height"], properties["width"], 3)


def pictures(folder: Path) -> list[tuple[str, bytes]]:
    """Name and bytes of every member of a data folder, read by the standard library alone."""
    members = []
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path, "r:") as archive:
            members += [(member.name, archive.extractfile(member).read()) for member in archive]
    return members


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Build a data folder from 23 pictures of 6 x 4 in several lossless formats."""
    base = tmp_path_factory.mktemp("pictures")
    originals = [pixels_of(6, 4, seed) for seed in range(23)]
    for number, pixels in enumerate(originals):
        suffix = ("png", "bmp", "ppm", "webp")[number % 4]
        options = {"lossless": True} if suffix == "webp" else {}
        write(base / "source" / f"{number}.{suffix}", pixels, **options)
    manifest = build([base / "source"], base / "data", modality="image", shard_bytes=300, validation_fraction=0.2)
    return base / "data", manifest, {pixels.tobytes() for pixels in originals}


def test_image_build_keeps_every_pixel(built):
    folder, manifest, originals = built
    assert manifest.properties == {"height": 6, "width": 4, "channels": 3, "resized": 0}
    assert sum(split.documents for split in manifest.splits.values()) == 23
    assert verify(folder) == []
    found = set()
    for split in manifest.splits:
        content = b"".join(split_bytes(folder, split))
        found |= {content[start : start + 72] for start in range(0, len(content), 72)}
    assert found == originals


def test_image_members_open_as_pictures(built):
    folder, _, originals = built
    members = pictures(folder)
    assert all(name.endswith(".ppm") for name, _ in members)
    opened = [Image.open(BytesIO(content)) for _, content in members]
    assert {(picture.format, picture.mode, picture.size) for picture in opened} == {("PPM", "RGB", (4, 6))}
    assert {picture.tobytes() for picture in opened} == originals


def test_image_is_one_context_each(built):
    folder, manifest, originals = built
    stream = open_stream(folder, context=72, global_batch=4, seed=3)
    assert stream.lanes.total_units == manifest.splits["train"].documents
    steps = stream.lanes.steps_in(0)
    rows = torch.cat([batch.tokens for batch in islice(stream, steps)])
    assert len(set(map(bytes, rows.numpy())) & originals) == 4 * steps > 0
    scored = list(evaluation_contexts(folder, "validation", context=72, batch_size=2))
    rows = torch.cat([batch.tokens[batch.lengths == 72] for batch in scored])
    assert rows.numpy().tobytes() == b"".join(split_bytes(folder, "validation"))


@pytest.mark.parametrize("context", [71, 73, 144])
def test_image_context_of_another_size_is_refused(built, context):
    with pytest.raises(DataError, match=f"context={context}: must be 72, the bytes of every image of this set"):
        open_stream(built[0], context=context, global_batch=2)


@pytest.mark.parametrize(
    ("size", "kept"),
    [((8, 4), np.s_[2:6, :]), ((4, 9), np.s_[:, 2:6]), ((4, 4), np.s_[:, :])],
    ids=["tall", "wide", "as it is"],
)
def test_image_is_cropped_to_its_middle(tmp_path, size, kept):
    pixels = pixels_of(*size)
    assert np.array_equal(read(write(tmp_path / "a.png", pixels), {"height": 4, "width": 4}), pixels[kept])


def test_image_is_made_smaller_by_means(tmp_path):
    pixels = pixels_of(6, 12)
    found = read(write(tmp_path / "a.png", pixels), {"height": 2, "width": 4})
    means = pixels.reshape(2, 3, 4, 3, 3).mean((1, 3))
    assert np.abs(found - means).max() < 1 + 2**-7  # Pillow rounds rows and columns, each in fixed point


def test_image_is_made_larger(tmp_path):
    found = read(write(tmp_path / "a.png", np.full((2, 3, 3), 77, np.uint8)), {"height": 5, "width": 5})
    assert found.shape == (5, 5, 3) and (found == 77).all()


def test_image_set_may_mix_sizes_where_one_is_asked_for(tmp_path):
    for number in range(8):
        write(tmp_path / "source" / f"{number}.png", pixels_of(5 + number, 20 - number))
    asked = {"height": 4, "width": 6}
    manifest = build([tmp_path / "source"], tmp_path / "data", modality="image", properties=asked)
    assert manifest.properties == {**asked, "channels": 3, "resized": 1}
    assert {len(content) for _, content in pictures(tmp_path / "data")} == {len(b"P6\n6 4\n255\n") + 72}


def test_image_suffixes_are_taken_in_capitals(tmp_path):
    for suffix in ("JPG", "png"):
        write(tmp_path / "source" / f"a.{suffix}", pixels_of(4, 4))
    manifest = build([tmp_path / "source"], tmp_path / "data", modality="image")
    assert [split.documents for split in manifest.splits.values()] == [1, 1]


def test_image_grey_becomes_three_equal_channels(tmp_path):
    grey = pixels_of(3, 4)[..., 0]
    for number, pixels in enumerate([grey, grey.astype(np.uint16) << 8 | 0x7F, grey > 127]):
        expected = np.where(grey > 127, 255, 0) if pixels.dtype == bool else grey
        found = read(write(tmp_path / f"{number}.png", pixels))
        assert np.array_equal(found, np.repeat(expected[..., None], 3, axis=2)), pixels.dtype


@pytest.mark.parametrize("orientation", range(1, 9))
def test_image_orientation_is_applied(tmp_path, orientation):
    stored = pixels_of(2, 3)
    upright = {
        1: stored,
        2: stored[:, ::-1],
        3: stored[::-1, ::-1],
        4: stored[::-1],
        5: stored.transpose(1, 0, 2),
        6: np.rot90(stored, -1),
        7: np.rot90(stored, 2).transpose(1, 0, 2),
        8: np.rot90(stored, 1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    assert np.array_equal(read(write(tmp_path / "a.png", stored, exif=exif)), upright)


def test_image_animation_gives_its_first_frame(tmp_path):
    frames = [pixels_of(4, 4, seed) for seed in range(3)]
    rest = [Image.fromarray(frame) for frame in frames[1:]]
    path = write(tmp_path / "a.webp", frames[0], save_all=True, append_images=rest, lossless=True)
    assert np.array_equal(read(path), frames[0])


def test_image_of_another_size_is_refused(tmp_path):
    write(tmp_path / "source" / "a.png", pixels_of(4, 6))
    write(tmp_path / "source" / "b.png", pixels_of(6, 4))
    with pytest.raises(DataError, match=r"b\.png: is 6x4 .* first picture is 4x6 .*--image-size 4x6"):
        build([tmp_path / "source"], tmp_path / "data", modality="image")
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("asked", [{}, {"height": 2, "width": 2}], ids=["as it is", "resized"])
@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "bmp", "ppm"])
def test_image_damage_is_named(tmp_path, suffix, asked):
    whole = write(tmp_path / f"a.{suffix}", pixels_of(40, 40)).read_bytes()
    for number, content in enumerate([whole[:-200], whole[:20], b"\0" * len(whole), b"no picture\n"]):
        path = tmp_path / f"damaged{number}.{suffix}"
        path.write_bytes(content)
        with pytest.raises(DataError, match=f"damaged{number}.{suffix}: cannot be read as a picture") as raised:
            read(path, asked)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("size", [(10_000, 10_000), (30_000, 30_000), (2**31 - 1, 2**31 - 1)], ids=str)
@pytest.mark.parametrize("asked", [{}, {"height": 2, "width": 2}], ids=["as it is", "resized"])
def test_image_that_claims_too_much_is_refused(tmp_path, size, asked):
    (tmp_path / "a.ppm").write_bytes(b"P6\n%d %d\n255\n" % size + bytes(100))
    with pytest.raises(DataError, match=r"a\.ppm: claims more than 67,108,864 pixels"):
        read(tmp_path / "a.ppm", asked)


def test_image_text_that_unpacks_to_much_is_refused(tmp_path):
    info = PngInfo()
    info.add_text("comment", "0" * 100_000_000, zip=True)
    with pytest.raises(DataError, match=r"a\.png: cannot be read as a picture"):
        read(write(tmp_path / "a.png", pixels_of(2, 2), pnginfo=info))


def test_image_of_a_format_that_starts_programs_is_refused(tmp_path):
    (tmp_path / "a.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n")
    with pytest.raises(DataError, match=r"not one of PNG, JPEG, BMP, WEBP, PPM"):
        read(tmp_path / "a.png")


@pytest.mark.parametrize(
    "asked",
    [
        {"height": 4},
        {"width": 4},
        {"height": 0, "width": 4},
        {"height": -1, "width": -1},
        {"height": 2**20, "width": 65},
    ],
    ids=str,
)
def test_image_size_that_cannot_be_is_refused(tmp_path, asked):
    write(tmp_path / "source" / "a.png", pixels_of(4, 4))
    with pytest.raises(DataError, match=r"height=.*, width=.*: must both be set"):
        build([tmp_path / "source"], tmp_path / "data", modality="image", properties=asked, validation_fraction=0)


@pytest.mark.parametrize("count", [0, 71, 73])
def test_image_encode_refuses_what_is_no_picture(count):
    properties = {"height": 6, "width": 4, "channels": 3, "resized": 0}
    with pytest.raises(DataError, match=f"{count} tokens: a picture of 6x4 .* is 72"):
        IMAGE.encode(np.zeros(count, dtype=np.uint8), properties)


def test_image_grids_of_large_pictures_keep_their_pixels():
    pictures = [np.full((100, 50, 1), number, dtype=np.uint8) for number in range(3)]
    paper = grid([pictures[:2], pictures[2:]])
    assert paper.shape == (206, 106, 3)
    assert (paper[2:102, 2:52] == 0).all() and (paper[2:102, 54:104] == 1).all() and (paper[104:204, 2:52] == 2).all()
    with pytest.raises(DataError, match=r"--count: a grid of 9602 x 9602 pixels is too large; take fewer samples"):
        grid_size(100, 100, 94, 94)
