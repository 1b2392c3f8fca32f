"""Patterns on photographs at equal processor time: ``python -m benchmarks.photographs``.

Contexts are crops of 32 x 32 pixels of the colour photographs that scikit-image and scikit-learn install, which need
``pip install scikit-image scikit-learn``. The right eighth of each photograph is held out. The network is that of
`ds_configs/experiments/pictures_miniature.json`; only its attention differs. ``channel`` reads so many bytes of the
predicted byte's colour: those 3, 6, 9, ... bytes back. ``above`` reads its column: those 96, 192, ... back.

Rows are written to the result file as they finish. A second call continues the file: it trains only the missing rows.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from benchmarks.machine import about
from benchmarks.reach import TRAIN
from benchmarks.reach_tasks import Example, Task
from benchmarks.reach_training import Stage, best_device, score, trained
from benchmarks.recipe import preset
from benchmarks.report import append_row, has_row, markdown, new_parser, open_rows, rounded
from longstride.kernels import num_pairs

EDGE, ROW = 32, 96  # pixels and bytes of a row
HELD_OUT = 8  # one part of so many of a photograph's width
EVALUATED = 128  # held-out crops
ABOVE = {"type": "column", "stride": ROW, "align": "target"}
PATTERNS: dict[str, Any] = {
    **{f"window {size}": {"type": "local", "window": size} for size in (64, 96, 99, 128, 192, 288)},
    **{f"channel {size}": {"type": "local", "window": size, "dilation": 3, "align": "target"} for size in (33, 65, 97)},
    "channel 33, not aligned": {"type": "local", "window": 33, "dilation": 3},
    "strided 96, aligned": {"type": "strided", "stride": ROW, "align": "target"},
    "window 99, then above": [{"type": "local", "window": 99}, ABOVE],
    "heads: window 16 | above": {"heads": [{"count": 1, "type": "local", "window": 16}, {"count": 1, **ABOVE}]},
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = new_parser(__doc__)
    parser.add_argument("--patterns", nargs="+", choices=PATTERNS, default=list(PATTERNS), metavar="PATTERN")
    parser.add_argument("--seconds", type=float, default=60.0, help="of steps, for every training (default: 60)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    options = parser.parse_args(arguments)
    try:
        photographs()
    except ImportError as error:
        parser.error(f"{error}; pip install scikit-image scikit-learn")
    open_rows(options, "photographs", about(best_device()) | {"threads": 1})
    torch.set_num_threads(1)
    for seed in options.seeds:
        for name in options.patterns:
            row = {"pattern": name, "seconds": options.seconds, "seed": seed}
            if not has_row(options.output, row):
                append_row(options.output, row | measure(PATTERNS[name], options.seconds, seed))
    return 0


def measure(attention: Any, seconds: float, seed: int) -> dict[str, Any]:
    """Train a network with this attention for a time, and score it."""
    content = preset("pictures_miniature")
    model = content["model"] | {"attention": attention}
    stage = Stage(Task(crop, EDGE * ROW), model, content["train"]["micro_batch"], seconds)
    network, end = trained(stage, TRAIN, seed, seconds)
    return {
        "steps": end.steps,
        "seconds_per_step": rounded(end.seconds_per_step),
        "pairs": sum(num_pairs(head, EDGE * ROW) for heads in network.config.layer_patterns() for head in heads),
    } | score(stage.task, network, EVALUATED)


def crop(random: np.random.Generator, length: int, held_out: bool) -> Example:
    """Cut a crop of 32 pixels' width out of a photograph. All places are equally likely."""
    photos, rows = [part(photo, held_out) for photo in photographs()], length // ROW
    places = np.array([(photo.shape[0] - rows + 1) * (photo.shape[1] - EDGE + 1) for photo in photos])
    photo = photos[random.choice(len(photos), p=places / places.sum())]
    top, left = (int(random.integers(size - edge + 1)) for size, edge in zip(photo.shape, (rows, EDGE), strict=False))
    return Example(photo[top : top + rows, left : left + EDGE].reshape(-1), np.ones(length, dtype=bool))


def part(photo: np.ndarray, held_out: bool) -> np.ndarray:
    """Return the right part of a photograph, which is held out, or all left of it."""
    border = photo.shape[1] * (HELD_OUT - 1) // HELD_OUT
    return photo[:, border:] if held_out else photo[:, :border]


@cache
def photographs() -> list[np.ndarray]:
    """Return the photographs: each (height, width, 3) uint8."""
    from skimage import data
    from sklearn.datasets import load_sample_images

    photos = [data.astronaut(), data.chelsea(), data.coffee(), data.rocket(), data.stereo_motorcycle()[0]]
    return photos + load_sample_images().images


def table(result: dict[str, Any]) -> str:
    """Format one device's result, the best pattern first."""
    lines = []
    for name in PATTERNS:
        for seconds in sorted({row["seconds"] for row in result["rows"]}):
            runs = [row for row in result["rows"] if (row["pattern"], row["seconds"]) == (name, seconds)]
            if runs:
                lines.append((seconds, statistics.fmean(run["bits"] for run in runs), cells(name, runs)))
    text = f"{result['device']}, one thread, torch {result['torch']}, {result['date']}.\n\n"
    titles = ["seconds", "attention", "bits per byte", "seeds", "pairs", "ms a step", "steps"]
    return text + markdown(titles, [line for *_, line in sorted(lines)])


def cells(name: str, runs: Sequence[dict[str, Any]]) -> list[str]:
    """Format the runs of a pattern: bits with the least and the most of the seeds, and costs."""
    bits = [run["bits"] for run in runs]
    spread = f" ({min(bits):.3f}–{max(bits):.3f})" if len(bits) > 1 else ""
    step, steps = (statistics.fmean(run[key] for run in runs) for key in ("seconds_per_step", "steps"))
    return [
        f"{runs[0]['seconds']:.0f}",
        name,
        f"{statistics.fmean(bits):.3f}{spread}",
        str(len(runs)),
        f"{runs[0]['pairs'] / 1e6:.2f} M",
        f"{1_000 * step:.0f}",
        f"{steps:.0f}",
    ]


if __name__ == "__main__":
    sys.exit(main())
