"""Image GPT in miniature: what a linear classifier reads in each layer, ``python -m benchmarks.probes``.

An autoregressive and a masked model, equal otherwise, learn pictures of turned digits by ``longstride train``, in one
process of one thread, for equally many steps, without their classes. ``longstride probe`` then fits a linear classifier
of the ten digits to the averaged features of each layer (Chen et al. 2020).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import string
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont

from benchmarks.machine import about
from benchmarks.paper.pictures_from_fonts import font_files
from benchmarks.recipe import changed, longstride, preset, run
from benchmarks.report import markdown, new_parser, parse, positive, rounded, write_result
from longstride.launcher.output import metrics_file

EDGE, SHADES = 14, 8
LARGEST_ANGLE, LARGEST_SHIFT = 20, 2  # degrees, pixels
HELD_OUT_CONTEXTS = 500
BASE: dict[str, Any] = {"model.context": EDGE * EDGE, "model.layers": 8, "model.vocabulary": SHADES}
BASE |= {"train.micro_batch": 16, "train.global_batch": 16, "deepspeed": "zero0_bf16"}
ROWS: dict[str, dict[str, Any]] = {
    "autoregressive": {},
    "masked": {
        "model.attention.causal": False,
        "model.objective": {"type": "masked", "share": 0.15, "random": 0.0, "unchanged": 0.0, "mask": "zero"},
    },
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = new_parser(__doc__)
    parser.add_argument("--steps", type=positive(int), default=1_500, help="of every training")
    parser.add_argument("--pictures", type=positive(int), default=12_000, help="a sixth of them to score")
    parser.add_argument("--seeds", type=positive(int), default=3)
    parser.add_argument("--parallel", type=positive(int), default=1, help="trainings at once, each on its own core")
    options = parse(parser, arguments, "probes")
    result = about(torch.device("cpu")) | {"threads": 1, "steps": options.steps, "pictures": options.pictures}
    with tempfile.TemporaryDirectory() as place:
        result["trainings"] = trainings(options, Path(place))
    write_result(options, result)
    return 0


def trainings(options: argparse.Namespace, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Train and probe every model from every seed; return its loss, and the accuracy of each layer."""
    pictures, data = folder / "pictures", folder / "data"
    draw_digits(pictures, options.pictures)
    words = ["--modality", "image", "--palette", SHADES, "--labels", "--validation-fraction", 1 / 6]
    longstride("data", "build", pictures, *words, "--output", data)
    base = changed(preset("image_gpt_miniature"), BASE)

    def train(name: str, seed: int) -> dict[str, Any]:
        output = folder / f"{name}-{seed}"
        probe = output.with_suffix(".probe")
        lines = run(changed(base, ROWS[name]), options.steps, seed, data, output, evaluate_contexts=HELD_OUT_CONTEXTS)
        longstride("probe", output, "--output", probe)
        _, bits = metrics_file.bits_of(lines[-1])
        layers = json.loads((probe / "probe.json").read_text())["layers"]
        result = {"seed": seed, "bits": rounded(bits), "accuracies": [rounded(row["accuracy"]) for row in layers]}
        print(name, result, flush=True)
        return result

    with ThreadPoolExecutor(options.parallel) as pool:
        jobs = {name: [pool.submit(train, name, seed) for seed in range(options.seeds)] for name in ROWS}
        return {name: [job.result() for job in seeds] for name, seeds in jobs.items()}


def draw_digits(folder: Path, count: int) -> None:
    """Write ``count`` grey pictures of EDGE x EDGE pixels, each with a file of its class; always the same ones."""
    folder.mkdir()
    fonts = [ImageFont.truetype(str(path), EDGE) for path in font_files()]
    for number in range(count):
        generator = random.Random(number)
        digit = generator.choice(string.digits)
        picture = Image.new("L", (EDGE, EDGE))
        shift = partial(generator.uniform, -LARGEST_SHIFT, LARGEST_SHIFT)
        middle = EDGE / 2 + shift(), EDGE / 2 + shift()
        ImageDraw.Draw(picture).text(middle, digit, fill=255, font=generator.choice(fonts), anchor="mm")
        angle = generator.uniform(-LARGEST_ANGLE, LARGEST_ANGLE)
        picture.rotate(angle, Image.Resampling.BILINEAR).convert("RGB").save(folder / f"{number:06}.png")
        (folder / f"{number:06}.cls").write_text(digit)


def table(result: dict[str, Any]) -> str:
    """Format one device's result."""
    rows = []
    for name, runs in result["trainings"].items():
        layers = list(zip(*(run["accuracies"] for run in runs), strict=True))
        spread = max(max(values) - min(values) for values in layers)
        rows.append(
            [name, *(f"{statistics.fmean(values):.0%}" for values in layers[::2]), f"{100 * spread:.0f} points"]
        )
    title = f"{result['device']}, one thread, torch {result['torch']}, {result['date']}. "
    title += f"After {result['steps']:,} steps, the mean of the seeds:\n\n"
    return title + markdown(["layer", *map(str, range(0, len(layers), 2)), "seeds differ by at most"], rows)


if __name__ == "__main__":
    sys.exit(main())
