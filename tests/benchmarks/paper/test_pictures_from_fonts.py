"""Pictures drawn from fonts: the same ones from the same seed, and no two alike."""

from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.paper.pictures_from_fonts import INKS, draw_pictures, font_files


def pixels(folder: Path) -> list[np.ndarray]:
    return [np.asarray(Image.open(path)) for path in sorted(folder.iterdir())]


def test_a_seed_draws_the_same_pictures_however_many(tmp_path: Path) -> None:
    draw_pictures(tmp_path / "few", 3, 16)
    draw_pictures(tmp_path / "more", 8, 16)
    draw_pictures(tmp_path / "other", 8, 16, seed=1)
    few, more, other = (pixels(tmp_path / name) for name in ("few", "more", "other"))
    assert all(np.array_equal(a, b) for a, b in zip(few, more, strict=False))
    assert len({picture.tobytes() for picture in (*more, *other)}) == 16


def test_pictures_hold_letters_in_few_inks_on_white_paper(tmp_path: Path) -> None:
    draw_pictures(tmp_path / "drawn", 20, 32)
    drawn = pixels(tmp_path / "drawn")
    assert all(picture.shape == (32, 32, 3) and (picture == 255).any() for picture in drawn)
    assert all(picture.min() < 64 for picture in drawn)  # a letter of 16 pixels covers some pixel almost whole
    found = {tuple(colour) for picture in drawn for colour in picture.reshape(-1, 3).tolist()}
    assert {(255, 255, 255), *INKS} <= found
    assert len(font_files()) >= 10
