"""The recipe on pictures and speech, and patterns that read far: ``python benchmarks/recipe_elsewhere.py``.

All trainings take the same time on one thread, as in `benchmarks/recipe.py`. The paper's block is compared with the
recipe on letters drawn from matplotlib's fonts and, with ``--speech DIR``, on a folder of WAV files at 8 kHz. On
Python's sources in contexts of 4,096, a window of 128 is compared with patterns that read farther, with the loss by
position.
"""

from __future__ import annotations

import json
import statistics
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a program from a checkout that is not installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from benchmarks.machine import about
from benchmarks.paper.pictures_from_fonts import draw_pictures
from benchmarks.recipe import changed, longstride, pilot, recipe, run
from benchmarks.report import new_parser, parse, rounded, write_json
from longstride.launcher.output import metrics_file

EDGE, PICTURES = 32, 4_000
STEP_BYTES = 12_288  # four pictures, or three contexts of 4,096
WINDOW: dict[str, Any] = {"type": "local", "window": 128}
HELD_OUT_CONTEXTS = 96
PAPERS = {"learning_rate": 0.002, "betas": [0.9, 0.95], "weight_decay": 0.01}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = new_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="of steps, for every training (default: 120)")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--parallel", type=int, default=1, help="trainings at once, each on a core of its own")
    parser.add_argument("--speech", type=Path, metavar="DIR", help="a folder of WAV files")
    options = parse(parser, arguments, "elsewhere")
    result: dict[str, Any] = about(torch.device("cpu")) | {"threads": 1, "seconds": options.seconds, "rows": {}}
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(options.parallel) as pool:
        folder = Path(name)
        jobs = [
            (case, pool.submit(measure, content, data, seed, options.seconds, folder / f"{number}-{seed}"))
            for number, (case, content, data) in enumerate(cases(folder, options.speech))
            for seed in range(options.seeds)
        ]
        for case, job in jobs:
            result["rows"].setdefault(case, []).append(job.result())
            print(f"{case}: {json.dumps(job.result())}", flush=True)
            write_json(options.output, result)
    return 0


def cases(folder: Path, speech: Path | None) -> Iterator[tuple[str, dict[str, Any], Path]]:
    """Yield name, configuration and data folder of every row."""
    draw_pictures(folder / "letters", PICTURES, EDGE)
    longstride("data", "build", folder / "letters", "--modality", "image", "--output", folder / "pictures")
    context = EDGE * EDGE * 3
    image = {"type": "image", "height": EDGE, "width": EDGE, "channels": 3}
    shape = {
        "model.context": context, "model.embedding": image, "model.attention": {"type": "strided", "stride": 3 * EDGE},
    }  # fmt: skip
    yield from both("pictures", shape, {"model.rotary": None}, folder / "pictures")
    if speech is not None:
        longstride("data", "build", speech, "--modality", "audio", "--rate", 8_000, "--output", folder / "speech")
        folded = {"type": "audio", "row_width": 64}
        shape = {"model.context": 4_096, "model.attention": {"type": "strided", "stride": 64}}
        yield from both("speech", shape | {"model.embedding": folded}, {"model.rotary": None}, folder / "speech")
    sources = sysconfig.get_paths()["stdlib"]
    longstride("data", "build", sources, "--exclude", "site-packages", "--output", folder / "text")
    patterns = {
        "window of 128": WINDOW,
        "window, then fixed with 8 of 128": [WINDOW, {"type": "fixed", "stride": 128, "summary": 8}],
        "window, then strided": [WINDOW, {"type": "strided", "stride": 128}],
        "window, then dense": [WINDOW, {"type": "dense"}],
    }
    for name, attention in patterns.items():
        changes = {"model.context": 4_096, "model.attention": attention}
        yield f"text at 4,096: {name}", changed(recipe(), changes), folder / "text"


def both(
    name: str, shape: dict[str, Any], unlike: dict[str, Any], data: Path
) -> Iterator[tuple[str, dict[str, Any], Path]]:
    """Yield the paper's block and the recipe in one shape; ``unlike`` are changes of the recipe."""
    plain = {key: recipe()["model"][key] for key in ("layers", "heads", "width", "feed_forward_ratio")}
    yield (
        f"{name}: the paper's block",
        changed({"model": plain, "train": PAPERS, "deepspeed": "zero0_fp32"}, shape),
        data,
    )
    yield f"{name}: the recipe", changed(recipe(), shape | unlike), data


def measure(content: dict[str, Any], data: Path, seed: int, seconds: float, folder: Path) -> dict[str, Any]:
    """Train for this many seconds of steps.

    Returns:
        Bits per byte, bytes seen, and the loss by eighths of the context.
    """
    folder.mkdir()
    batch = STEP_BYTES // content["model"]["context"]
    content = changed(content, {"train.global_batch": batch, "train.micro_batch": batch})
    steps = max(1, int(seconds / pilot(content, data, folder)))
    lines = run(content, steps, seed, data, folder / "run", evaluate_contexts=HELD_OUT_CONTEXTS)
    positions = folder / "positions.png"
    longstride("evaluate", folder / "run", "--batch", 3, "--positions", positions)
    columns = json.loads(positions.with_suffix(".json").read_text())["positions"]
    eighth = columns["end"][-1] / 8
    by_eighth = [
        [(n, bits) for first, n, bits in zip(columns["first"], columns["bytes"], columns["bits_per_byte"], strict=True)
         if place * eighth <= first < (place + 1) * eighth]
        for place in range(8)
    ]  # fmt: skip
    means = [sum(n * bits for n, bits in some) / sum(n for n, _ in some) for some in by_eighth]
    return {
        "seed": seed,
        "bits_per_byte": rounded(statistics.fmean(means)),
        "by_eighth": [rounded(mean) for mean in means],
        "bytes": sum(line["tokens"] for line in lines if metrics_file.is_step(line)),
        "steps": steps,
    }


if __name__ == "__main__":
    sys.exit(main())
