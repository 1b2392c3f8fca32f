"""Synthetic pictures to learn from: up to three letters of matplotlib's own fonts on white paper.

Inks are few, so that a short training learns more than the colours.
"""

from __future__ import annotations

import random
import string
from pathlib import Path

import matplotlib
from PIL import Image, ImageDraw, ImageFont

# Those of matplotlib's fonts that draw letters; the others hold mathematical signs.
FAMILIES = ("DejaVuSans", "DejaVuSerif", "STIXGeneral")
INKS = (0, 0, 0), (192, 0, 0), (0, 128, 0), (0, 0, 192)  # red, green, blue
MOST_LETTERS = 3
LETTERS = string.ascii_letters + string.digits
SMALLEST, LARGEST = 0.5, 1.1  # a letter's size, of the picture's edge
MIDDLE = 0.25, 0.75  # where a letter's own middle may lie, of the picture's edge
LARGEST_ANGLE = 30  # degrees


def draw_pictures(folder: Path, count: int, edge: int, seed: int = 0) -> None:
    """Write ``count`` PNG files of ``edge`` x ``edge`` pixels to a new folder; a seed always draws the same ones."""
    folder.mkdir()
    fonts = font_files()
    for number in range(count):
        generator = random.Random(f"{seed}/{number}")  # a picture does not depend on how many there are
        draw_picture(generator, edge, fonts).save(folder / f"{number:06}.png")


def font_files() -> list[Path]:
    """List the font files to draw with, sorted by name."""
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    names = sorted(path for path in folder.glob("*.ttf") if path.stem.startswith(FAMILIES))
    return [path for path in names if not path.stem.endswith("Display")]  # these hold a dozen signs


def draw_picture(generator: random.Random, edge: int, fonts: list[Path]) -> Image.Image:
    """Draw one picture, ``edge`` x ``edge`` pixels in red, green and blue."""
    picture = Image.new("RGB", (edge, edge), "white")
    for _ in range(generator.randint(1, MOST_LETTERS)):
        size = max(4, round(edge * generator.uniform(SMALLEST, LARGEST)))
        font = ImageFont.truetype(str(generator.choice(fonts)), size)
        mask = Image.new("L", (edge, edge))
        place = edge * generator.uniform(*MIDDLE), edge * generator.uniform(*MIDDLE)
        ImageDraw.Draw(mask).text(place, generator.choice(LETTERS), fill=255, font=font, anchor="mm")
        angle = generator.uniform(-LARGEST_ANGLE, LARGEST_ANGLE)
        mask = mask.rotate(angle, Image.Resampling.BILINEAR, center=place)
        picture.paste(generator.choice(INKS), (0, 0), mask)
    return picture
