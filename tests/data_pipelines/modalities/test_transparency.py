"""What is transparent in a picture becomes white, in every format, depth and kind of colour."""

import struct

import numpy as np
import pytest
from PIL import Image

from tests.data_pipelines.modalities.test_image import pixels_of, read, write
from tests.hostile.generators.media import png, png_chunk

GREY, RGB, PALETTE, GREY_ALPHA, RGBA = 0, 2, 3, 4, 6  # PNG's numbers
CHANNELS = {GREY: 1, RGB: 3, PALETTE: 1, GREY_ALPHA: 2, RGBA: 4}
DEPTHS = [(GREY, depth) for depth in (1, 2, 4, 8, 16)] + [(RGB, 8), (RGB, 16)]
ADAM7 = [(0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1)]


def png_of(samples: np.ndarray, depth: int, kind: int, *between: bytes, interlaced: bool = False) -> bytes:
    """Write integers of ``depth`` bits, (height, width, channels), as a PNG file."""
    height, width, _ = samples.shape
    parts = [samples[top::down, left::right] for top, left, down, right in ADAM7] if interlaced else [samples]
    rows = b""
    for part in parts:
        bits = (part[..., None] >> np.arange(depth)[::-1] & 1).astype(np.uint8)
        if bits.size:
            rows += b"".join(b"\0" + np.packbits(row.reshape(-1)).tobytes() for row in bits)
    return png(width, height, *between, rows=rows, depth=depth, kind=kind, interlaced=interlaced)


def in_8_bits(samples: np.ndarray, depth: int) -> np.ndarray:
    """Convert pixels of any depth, (height, width, 1 or 3), to 8 bits, (height, width, 3)."""
    return np.broadcast_to(samples >> 8 if depth == 16 else samples * 255 // (2**depth - 1), (*samples.shape[:2], 3))


def keyed(samples: np.ndarray, key: list[int], depth: int, kind: int, interlaced: bool) -> bytes:
    chunk = png_chunk(b"tRNS", b"".join(value.to_bytes(2, "big") for value in key))
    return png_of(samples, depth, kind, chunk, interlaced=interlaced)


@pytest.mark.parametrize("interlaced", [False, True], ids=["plain", "interlaced"])
@pytest.mark.parametrize(("kind", "depth"), DEPTHS)
@pytest.mark.parametrize("place", ["lowest", "highest", "between"])
def test_the_key_s_colour_is_white_and_its_neighbours_stay(tmp_path, kind, depth, interlaced, place):
    """Neighbours differ from the key in one bit of one channel."""
    channels, top = CHANNELS[kind], 2**depth - 1
    generator = np.random.default_rng(depth)
    keys = {"lowest": [0], "highest": [top], "between": generator.integers(1, max(2, top), channels)}
    key = np.broadcast_to(keys[place], channels).tolist()
    bits = [1 << bit for bit in range(depth)]
    neighbours = np.concatenate([key ^ bit * np.eye(channels, dtype=int) for bit in bits])
    samples = generator.integers(0, top + 1, (99, channels))
    samples[::2], samples[1 : 2 * len(neighbours) : 2] = key, neighbours
    samples = samples.reshape(9, 11, channels)
    is_key = (samples == key).all(axis=2)
    assert is_key.any() and not is_key.all()
    expected = np.where(is_key[..., None], 255, in_8_bits(samples, depth))
    (tmp_path / "a.png").write_bytes(keyed(samples, key, depth, kind, interlaced))
    assert np.array_equal(read(tmp_path / "a.png"), expected)


@pytest.mark.parametrize(("kind", "depth"), [(kind, depth) for kind, depth in DEPTHS if 1 < depth < 16])
def test_bits_of_a_key_above_the_depth_do_not_count(tmp_path, kind, depth):
    samples = np.arange(12).reshape(2, 2, 3)[..., : CHANNELS[kind]] % 2**depth
    key = samples[1, 0].tolist()
    (tmp_path / "a.png").write_bytes(keyed(samples, [value | 0x7000 for value in key], depth, kind, False))
    expected = np.where((samples == key).all(axis=2)[..., None], 255, in_8_bits(samples, depth))
    assert np.array_equal(read(tmp_path / "a.png"), expected)


@pytest.mark.parametrize("interlaced", [False, True], ids=["plain", "interlaced"])
@pytest.mark.parametrize("depth", [1, 2, 4, 8])
@pytest.mark.parametrize("alphas", [[255, 0], [0], [51, 204]], ids=str)
def test_transparent_colours_of_a_palette_are_white(tmp_path, depth, alphas, interlaced):
    """Colours that the chunk does not list are opaque."""
    colours = np.random.default_rng(depth).integers(0, 255, (2**depth, 3), dtype=np.uint8)
    samples = np.arange(99).reshape(9, 11, 1) % 2**depth
    chunks = png_chunk(b"PLTE", colours.tobytes()), png_chunk(b"tRNS", bytes(alphas))
    (tmp_path / "a.png").write_bytes(png_of(samples, depth, PALETTE, *chunks, interlaced=interlaced))
    alpha = np.array(alphas + [255] * 256)[samples] / 255
    assert np.abs(read(tmp_path / "a.png") - (colours[samples[..., 0]] * alpha + 255 * (1 - alpha))).max() <= 1


@pytest.mark.parametrize("has_key", [False, True], ids=["alone", "with a key"])
@pytest.mark.parametrize("interlaced", [False, True], ids=["plain", "interlaced"])
@pytest.mark.parametrize("depth", [8, 16])
@pytest.mark.parametrize("kind", [GREY_ALPHA, RGBA])
def test_an_alpha_channel_lies_on_white(tmp_path, kind, depth, interlaced, has_key):
    """An additional key, which PNG forbids, changes nothing."""
    samples = np.random.default_rng(depth).integers(0, 2**depth, (9, 11, CHANNELS[kind]))
    samples[::2, ::2, -1], samples[1::2, ::2, -1] = 0, 2**depth - 1
    chunks = [png_chunk(b"tRNS", bytes(6))] if has_key else []
    (tmp_path / "a.png").write_bytes(png_of(samples, depth, kind, *chunks, interlaced=interlaced))
    alpha = (samples[..., -1:] >> depth - 8) / 255
    expected = in_8_bits(samples[..., :-1], depth) * alpha + 255 * (1 - alpha)
    found = read(tmp_path / "a.png")
    assert np.abs(found - expected).max() <= 1
    assert (found[::2, ::2] == 255).all() and np.array_equal(
        found[1::2, ::2], in_8_bits(samples[..., :-1], depth)[1::2, ::2]
    )


def bmp_of(pixels: np.ndarray) -> bytes:
    """Write pixels, (height, width, 4) uint8, as a BMP file whose header (version 4) has a mask for alpha."""
    height, width, _ = pixels.shape
    masks = (0xFF0000, 0xFF00, 0xFF, 0xFF000000)
    head = struct.pack("<IiiHHIIiiII4I52x", 108, width, height, 1, 32, 3, 0, 0, 0, 0, 0, *masks)
    return b"BM" + struct.pack("<III", 122 + pixels.size, 0, 122) + head + pixels[::-1, :, [2, 1, 0, 3]].tobytes()


@pytest.mark.parametrize("name", ["a.webp", "a.bmp", "a.png"])
def test_an_alpha_channel_of_any_format_lies_on_white(tmp_path, name):
    pixels = np.concatenate([pixels_of(6, 4), pixels_of(6, 4, 1)[..., :1]], axis=2)
    pixels[:3, :, 3] = [0, 255, 0, 255]
    path = tmp_path / name
    if name == "a.bmp":
        path.write_bytes(bmp_of(pixels))
    else:
        write(path, pixels, **({"lossless": True, "exact": True} if name == "a.webp" else {}))
    alpha = pixels[..., 3:] / 255
    assert np.abs(read(path) - (pixels[..., :3] * alpha + 255 * (1 - alpha))).max() <= 1


def test_a_key_is_white_in_a_picture_that_is_turned_and_resized(tmp_path):
    """The key is compared with the file's own samples, before orientation and means."""
    samples = np.full((4, 8, 1), 0x1234)
    samples[:, :4] = 0x1235
    exif = Image.Exif()
    exif[0x0112] = 6
    chunks = png_chunk(b"eXIf", exif.tobytes()[6:]), png_chunk(b"tRNS", b"\x12\x34")
    (tmp_path / "a.png").write_bytes(png_of(samples, 16, GREY, *chunks))
    found = read(tmp_path / "a.png", {"height": 4, "width": 2})
    assert np.array_equal(found[..., 0], np.repeat([0x12, 255], [2, 2])[:, None].repeat(2, axis=1))
