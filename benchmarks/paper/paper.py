"""The paper's tables in miniature: ``python -m benchmarks.paper.paper``.

Trains the same model with dense, fixed and strided attention, at equal parameters, data and steps, from several seeds.
The data are text (the Python standard library's sources, or --text DIR) and pictures (letters drawn from matplotlib's
fonts, or --images DIR). Writes bits per byte of held-out files and seconds a step (the paper's Table 2), and bits per
byte of the fixed text model by minimum context (Table 3). The three take turns by the step on the same batch, so that
other load on the machine affects all alike. Dense attention is torch's own, which is faster than ours with a dense
pattern. Results are written after every seed; benchmarks/tables.py makes tables and picture of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import platform
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.machine import about
from benchmarks.paper.cases import IMAGES, MINIMUM_CONTEXTS, PATTERNS, SIZES, TEXT, Case
from benchmarks.paper.pictures_from_fonts import draw_pictures
from benchmarks.paper.tables import plot, tables_of
from benchmarks.paper.training import Contestant, curve, spread_regions, train_in_turns
from benchmarks.report import check_output, new_parser, positive, rounded, write_json
from longstride.data_pipelines.building.build import build
from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.order.evaluation import evaluation_contexts, split_bytes
from longstride.data_pipelines.order.stream import ByteStream, StreamSettings
from longstride.data_pipelines.shards.reading import DataFolder
from longstride.kernels import ConfigError

SHUFFLE_BYTES = 2**26  # a lane's block: every epoch is shuffled as a whole
TABLE_3 = "fixed"  # the pattern that is scored by minimum context


@dataclass(frozen=True)
class Data:
    """A data set, built only for this run."""

    case: Case
    source: str
    folder: DataFolder


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; return 2 for invalid input."""
    began = time.monotonic()
    options = read_options(arguments)
    device = torch.device(options.device)
    try:
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            data = [build_data(case, Path(name), options) for case in options.cases]
            result = measure(data, options, device, began)
    except (DataError, ConfigError) as error:
        print(f"paper: {error}", file=sys.stderr)
        return 2
    print("", *tables_of(result), sep="\n")
    picture = options.output.with_suffix(".png")
    plot(result, picture)
    print(f"wrote {options.output} and {picture} after {time.monotonic() - began:.0f} s")
    return 0


def read_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = new_parser(__doc__)
    parser.add_argument("--size", choices=sorted(SIZES), default=None, help="real on a card, small on the CPU")
    parser.add_argument("--datasets", nargs="+", choices=(TEXT, IMAGES), default=[TEXT, IMAGES])
    parser.add_argument("--text", type=Path, default=None, metavar="DIR", help="folder of texts to learn from")
    parser.add_argument("--images", type=Path, default=None, metavar="DIR", help="folder of pictures to learn from")
    parser.add_argument("--seeds", type=positive(int), default=3, help="how many runs of each, from seeds 0, 1, …")
    parser.add_argument("--steps", type=positive(int), default=None, help="instead of the size's own number")
    parser.add_argument("--time-limit", type=float, default=math.inf, help="seconds: no seed that would end later")
    here = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    parser.add_argument("--device", choices=here, default=here[-1])
    parser.add_argument("--folder", type=Path, default=None, help="for the data (default: the system's temporary one)")
    options = parser.parse_args(arguments)
    for name in ("text", "images", "folder"):
        path = getattr(options, name)
        if path is not None and not path.is_dir():
            parser.error(f"--{name}={path}: must be a folder that exists")
    options.size = options.size or ("real" if options.device == "cuda" else "small")
    options.cases = [case for case in SIZES[options.size] if case.name in options.datasets]
    if options.steps is not None:
        options.cases = [dataclasses.replace(case, steps=options.steps) for case in options.cases]
    check_output(parser, options, "paper")
    return options


def build_data(case: Case, folder: Path, options: argparse.Namespace) -> Data:
    """Build the shards of a case in a temporary folder.

    Raises:
        DataError: the files are too few or unusable.
    """
    output, option = folder / case.name, getattr(options, case.name)
    path, source = option, f"{case.name} of a folder"
    settings: dict[str, Any] = {}  # of the build
    if case.name == TEXT and option is None:
        path, source = Path(sysconfig.get_paths()["stdlib"]), f"Python {platform.python_version()}'s sources"
        settings = {"suffixes": (".py",), "exclude": ("site-packages",)}
    elif case.name == IMAGES:
        settings = {"modality": "image", "properties": {"height": case.height, "width": case.height}}
        if option is None:
            path, source = folder / "pictures", "letters drawn from matplotlib's fonts"
            draw_pictures(path, case.pictures, case.height)
    try:
        build([path], output, validation_fraction=case.validation_fraction, **settings)
    except DataError as error:
        raise DataError(f"--{case.name}={error}" if option else str(error)) from None
    data = Data(case, source, DataFolder(output))
    held_out = sum(shard.content_bytes for shard in data.folder.split("validation").shards)
    least = 4 * case.context if case.regions else case.context
    if held_out < least:
        rule = f"{held_out:,} bytes were held out, and {least:,} at least are scored; give more files"
        raise DataError(f"--{case.name}={path}: {rule}")
    return data


def measure(data: Sequence[Data], options: argparse.Namespace, device: torch.device, began: float) -> dict[str, Any]:
    """Run all trainings, a seed of every data set before the next seed, so that a time limit leaves out whole seeds."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    result: dict[str, Any] = {
        **about(device),
        "size": options.size,
        "dtype": str(dtype).removeprefix("torch."),
        "cases": {
            dataset.case.name: {
                **dataclasses.asdict(dataset.case),
                "source": dataset.source,
                "data_fingerprint": dataset.folder.manifest.fingerprint,
            }
            for dataset in data
        },
        "runs": [],
        "minimum_contexts": [],
        "seconds": 0.0,
    }
    longest = 0.0
    for seed in range(options.seeds):
        for dataset in data:
            start = time.monotonic()
            if result["runs"] and start - began + longest > options.time_limit:
                say(f"{dataset.case.name}, seed {seed}: left out, as it would end beyond {options.time_limit:.0f} s")
                continue
            runs, minima = measure_seed(dataset, seed, device, dtype)
            result["runs"] += runs
            result["minimum_contexts"] += minima
            result["seconds"] = rounded(time.monotonic() - began)
            write_json(options.output, result)
            longest = max(longest, time.monotonic() - start)
            bits = ", ".join(f"{run['pattern']} {run['bits_per_byte']:.4f}" for run in runs)
            say(f"{dataset.case.name}, seed {seed}: held-out bits per byte: {bits}; {time.monotonic() - start:.0f} s")
    return result


def measure_seed(
    data: Data, seed: int, device: torch.device, dtype: torch.dtype
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Train one data set from one seed: a run for each pattern, and for text the scores by minimum context."""
    case = data.case
    learners = [Contestant(case, pattern, seed, device, dtype) for pattern in PATTERNS]
    settings = StreamSettings(context=case.context, global_batch=case.batch, seed=seed, shuffle_bytes=SHUFFLE_BYTES)
    stream = ByteStream(data.folder, settings)
    train_in_turns(learners, iter(stream), lambda text: say(f"{case.name}, seed {seed}: {text}"))
    runs, minima = [], []
    for learner in learners:
        bits, num_bytes = learner.score(
            evaluation_contexts(
                data.folder, context=case.context, batch_size=case.evaluation_batch, limit=case.held_out
            )
        )
        runs.append(
            {
                "dataset": case.name,
                "pattern": learner.pattern,
                "seed": seed,
                "bits_per_byte": rounded_bits(bits),
                "held_out_bytes": num_bytes,
                "seconds_per_step": rounded(learner.seconds_per_step()),
                "parameters": learner.parameters,
                "steps": learner.steps,
                "bytes_trained": learner.bytes_trained,
                "initial_weights_crc32": learner.initial_weights_crc32,
                "data_order_crc32": learner.data_order_crc32,
                "training_curve": [(step, rounded_bits(x)) for step, x in curve(learner.training_bits())],
            }
        )
        if case.regions and learner.pattern == TABLE_3:
            minima = score_minima(learner, data)
    return runs, minima


def score_minima(learner: Contestant, data: Data) -> list[dict[str, Any]]:
    """Score bits per byte by minimum context, on the same bytes."""
    case = data.case
    text = torch.from_numpy(np.frombuffer(b"".join(split_bytes(data.folder, "validation")), dtype=np.uint8).copy())
    regions = spread_regions(len(text), case.regions, case.context)
    rows = []
    for share in MINIMUM_CONTEXTS:
        minimum = int(share * case.context)
        bits, num_bytes = learner.score_at(text, regions, minimum)
        row = {"dataset": case.name, "pattern": learner.pattern, "seed": learner.seed}
        rows.append({**row, "minimum_context": minimum, "bits_per_byte": rounded_bits(bits), "bytes": num_bytes})
    return rows


def rounded_bits(bits: float) -> float:
    """Round to 5 decimals."""
    return round(bits, 5)


def say(text: str) -> None:
    """Print a line of progress."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
