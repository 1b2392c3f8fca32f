"""Pictures that are damaged at any place are refused, or have the pixels that they had."""

from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.modalities.picture import picture_pixels
from tests.hostile.generators.media import png, png_chunk

_Y, _X = np.mgrid[:40, :40]
_NOISE = np.random.default_rng(0).integers(0, 40, (40, 40, 3))
PIXELS = (np.stack([_Y * 5, _X * 5, _Y + _X * 2], axis=2) + _NOISE).clip(0, 255).astype(np.uint8)
FORMS = {
    "PNG": ("PNG", {}),
    "JPEG": ("JPEG", {"quality": 85}),
    "progressive JPEG": ("JPEG", {"quality": 85, "progressive": True}),
    "restarted JPEG": ("JPEG", {"quality": 85, "restart_marker_blocks": 2}),
    "lossy WebP": ("WEBP", {"quality": 80}),
    "lossless WebP": ("WEBP", {"lossless": True}),
}


def saved(form: str, pixels: np.ndarray = PIXELS) -> bytes:
    file = BytesIO()
    kind, options = FORMS[form]
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


def pixels_of(content: bytes) -> np.ndarray | None:
    """Read the pixels; None if the file is rejected."""
    try:
        return picture_pixels(Path("a"), BytesIO(content), None)
    except DataError:
        return None


def is_silent(content: bytes, expected: np.ndarray) -> bool:
    pixels = pixels_of(content)
    return pixels is not None and not np.array_equal(pixels, expected)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("height, width", [(1, 1), (2, 3), (17, 5), (64, 33)])
def test_whole_picture_is_read(form, height, width):
    """Flat pictures are included, whose last bytes carry little."""
    noise = np.random.default_rng(1).integers(0, 256, (height, width, 3))
    half = np.where(np.arange(height)[:, None, None] < height // 2, noise, 7)
    for pixels in (noise, half, half[::-1], np.zeros_like(noise), np.full_like(noise, 255)):
        assert pixels_of(saved(form, pixels.astype(np.uint8))) is not None


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rest", ["cut", "zeros"])
def test_picture_without_its_end_is_refused_or_as_it_was(form, rest):
    """A WebP decoder may end near the last bytes by chance: docs/data/images.md covers 9 in 10."""
    whole = saved(form, PIXELS[:12, :12] if form == "PNG" else PIXELS)
    expected = pixels_of(whole)
    assert expected is not None
    end = len(whole) * 9 // 10 if "WebP" in form and rest == "zeros" else len(whole)
    places = range(1, end, max(1, end // 150))
    tails = [b"" if rest == "cut" else bytes(len(whole) - place) for place in places]
    assert not [place for place, tail in zip(places, tails, strict=True) if is_silent(whole[:place] + tail, expected)]


def test_png_with_any_changed_byte_is_refused_or_as_it_was():
    whole = saved("PNG", PIXELS[:12, :12])
    expected = pixels_of(whole)
    changed = (
        whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :] for place in range(len(whole))
    )
    assert not any(is_silent(content, expected) for content in changed)


@pytest.mark.parametrize("form", ["JPEG", "progressive JPEG", "restarted JPEG"])
def test_jpeg_with_a_block_of_zeros_is_refused_mostly(form):
    """Restart markers always reveal it; otherwise a decoder may find the right number of blocks by chance."""
    whole = saved(form, np.tile(PIXELS, (4, 4, 1)))
    expected = pixels_of(whole)
    assert expected is not None
    places = range(len(whole) // 4, len(whole) - 2000, len(whole) // 40)
    silent = [place for place in places if is_silent(whole[:place] + bytes(1024) + whole[place + 1024 :], expected)]
    assert len(places) > 10 and len(silent) < (len(places) / 2 if form != "restarted JPEG" else 1)


@pytest.mark.parametrize(
    "content",
    [
        b"P6 #" + b"x" * 10**6,
        b"P6 " + b" " * 10**6,
        b"P3 4 4 255\n" + b"#\n" * 2000 + b"1 " * 48,
        png(4, 4, *[png_chunk(b"teXt", b"")] * 40_000, rows=bytes(52)),
        png(4, 4, rows=bytes(52))[:-12] + png_chunk(b"IDAT", b"") * 2**17,
        b"\xff\xd8" + b"\xff\xfe\0\2" * 30_000,
    ],
    ids=["comment", "spaces", "comments in the rows", "chunks", "chunks of rows", "JPEG comments"],
)
def test_picture_in_too_many_parts_is_refused(content):
    with pytest.raises(DataError, match=r"too many parts|more than [\d,]+ (chunks|comments)"):
        picture_pixels(Path("a"), BytesIO(content), None)
