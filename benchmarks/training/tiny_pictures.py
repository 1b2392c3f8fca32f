"""Pictures of 16 x 16 pixels for trainings of minutes: a sky, a ground and a ball.

``python -m benchmarks.training.tiny_pictures FOLDER --count 600`` writes PNG files, the same for the same seed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

EDGE = 16
BALLS = ((250, 210, 60), (220, 50, 50), (240, 240, 240))


def picture(random: np.random.Generator) -> np.ndarray:
    """Draw one picture, (EDGE, EDGE, 3) uint8, with random sizes, places and colours."""
    down, across = np.mgrid[0:EDGE, 0:EDGE][..., None] / (EDGE - 1)
    sky, ground = random.uniform([60, 120, 180], [140, 200, 255]), random.uniform([30, 90, 20], [120, 170, 70])
    horizon = random.uniform(0.45, 0.8)
    pixels = np.where(down < horizon, sky * (0.6 + 0.4 * down / horizon), ground * (1.1 - 0.4 * down))
    (x, y), radius = random.uniform([0.15, 0.15], [0.85, 0.75]), random.uniform(0.1, 0.28)
    distance = np.hypot(across - x, down - y) / radius
    pixels = np.where(distance < 1, np.array(BALLS[random.integers(3)]) * (1 - 0.3 * distance), pixels)
    return np.clip(pixels + random.normal(0, 3, pixels.shape), 0, 255).astype(np.uint8)


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description="tiny pictures to learn from")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True)
    random = np.random.default_rng(arguments.seed)
    for number in range(arguments.count):
        Image.fromarray(picture(random)).save(arguments.folder / f"{number:04d}.png")


if __name__ == "__main__":
    main()
