"""Other systems against attention, in miniature: ``python benchmarks/paper/systems.py synthesizer``.

Trains models that differ in some keys of `model` on the same text (the Python standard library's sources, or --text
DIR), from several seeds, in the manner of paper.py: equal data, order and steps; all take each step on the same batch
before any takes the next. It writes bits per byte of held-out files, seconds a step and parameters, which systems may
differ in. Results are written after every seed. With --first a later call adds seeds to the file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a program from a checkout that is not installed
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

from benchmarks.machine import about, slug
from benchmarks.paper.cases import TEXT, Case
from benchmarks.paper.paper import SHUFFLE_BYTES, build_data, rounded_bits, say
from benchmarks.paper.training import Learner, curve, train_in_turns
from benchmarks.report import add_output_arguments, check_output, rounded, write_json
from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.order.evaluation import evaluation_contexts
from longstride.data_pipelines.order.loading import StreamSettings
from longstride.data_pipelines.order.stream import ByteStream
from longstride.kernels import ConfigError
from longstride.sparse_model import ModelConfig


def synthesizer(*kinds: str, **more: Any) -> dict[str, Any]:
    """`model.attention` of these kinds of scores."""
    return {"attention": {"type": "synthesizer", "kind": list(kinds), **more}}


# What is compared, by name: models as changes to a vanilla one.
SYSTEMS: dict[str, dict[str, dict[str, Any]]] = {
    "synthesizer": {
        "vanilla": {},
        "dense + vanilla": synthesizer("dense", "attention"),
        "random + vanilla": synthesizer("random", "attention"),
        "dense": synthesizer("dense"),
        "random": synthesizer("random"),
        "factorized random": synthesizer("factorized_random"),
    },
}


@dataclass(frozen=True)
class SystemCase(Case):
    """A case whose models differ in what is compared."""

    compared: str = "synthesizer"

    def model_config(self, pattern: str) -> ModelConfig:
        """The model of one system, by its name."""
        sizes = {name: getattr(self, name) for name in ("context", "layers", "heads", "width", "feed_forward_ratio")}
        embedding = {"type": "text", "row_width": self.stride}
        vanilla = {**sizes, "attention": {"type": "dense"}, "embedding": embedding}
        return ModelConfig.model_validate(vanilla | SYSTEMS[self.compared][pattern])


SIZES = {
    "tiny": SystemCase(TEXT, 64, 16, 4, 2, 2, 16, 4, 2, 0.01, held_out=5, evaluation_batch=2),
    # One core, about four minutes a seed.
    "small": SystemCase(
        TEXT, 256, 16, 4, 3, 4, 64, 600, 8, 0.005, held_out=384, evaluation_batch=16, feed_forward_ratio=2.0
    ),
}


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 2 for what a person got wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("compared", choices=sorted(SYSTEMS))
    parser.add_argument("--size", choices=sorted(SIZES), default="small")
    parser.add_argument("--text", type=Path, default=None, metavar="DIR", help="folder of texts to learn from")
    parser.add_argument("--first", type=int, default=0, help="the first seed; above 0: go on with the file")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    add_output_arguments(parser)
    options = parser.parse_args(arguments)
    if options.seeds < 1 or options.first < 0:
        parser.error(
            f"--first={options.first} --seeds={options.seeds}: from seed 0 on, and at least 1; such as 0 and 3"
        )
    device = torch.device("cpu")
    options.overwrite = options.overwrite or options.first > 0
    check_output(parser, options, f"{options.compared}-{slug(device)}.json")
    case = SystemCase(**{**asdict(SIZES[options.size]), "compared": options.compared})
    found: dict[str, Any] = {**about(device), "size": options.size, "case": asdict(case), "runs": []}
    if options.first:
        found = json.loads(options.output.read_text())
    try:
        with tempfile.TemporaryDirectory() as folder:
            data = build_data(case, Path(folder), options)
            for seed in range(options.first, options.first + options.seeds):
                found["source"] = data.source
                found["runs"] = [run for run in found["runs"] if run["seed"] != seed]
                found["runs"] += measure_seed(case, data.folder, seed, device)
                write_json(options.output, found)
    except (DataError, ConfigError) as error:
        print(f"systems: {error}", file=sys.stderr)
        return 2
    print(table(found))
    return 0


def measure_seed(case: SystemCase, folder: Any, seed: int, device: torch.device) -> list[dict[str, Any]]:
    """A row a system: all of them trained in turns on the same batches."""
    began = time.monotonic()
    learners = [Learner(case, name, seed, device, torch.float32) for name in SYSTEMS[case.compared]]
    asked = StreamSettings(context=case.context, global_batch=case.batch, seed=seed, shuffle_bytes=SHUFFLE_BYTES)
    train_in_turns(learners, iter(ByteStream(folder, asked)), lambda text: say(f"seed {seed}: {text}"))
    assert len({(one.data_order_crc32, one.steps) for one in learners}) == 1
    runs = []
    for one in learners:
        held_out = evaluation_contexts(
            folder, context=case.context, batch_size=case.evaluation_batch, limit=case.held_out
        )
        bits, num_bytes = one.score(held_out)
        runs.append(
            {
                "system": one.pattern,
                "seed": seed,
                "bits_per_byte": rounded_bits(bits),
                "held_out_bytes": num_bytes,
                "parameters": one.parameters,
                "steps": one.steps,
                "bytes_trained": one.bytes_trained,
                "seconds_per_step": rounded(one.seconds_per_step()),
                "data_order_crc32": one.data_order_crc32,
                "training_curve": [(step, rounded_bits(x)) for step, x in curve(one.training_bits())],
            }
        )
    say(f"seed {seed}: {time.monotonic() - began:.0f} s")
    return runs


def table(found: dict[str, Any]) -> str:
    """Mean, least and most bits per byte over the seeds of each system, as Markdown."""
    lines = ["| system | parameters | bits per byte | seeds | seconds a step |", "|---|---|---|---|---|"]
    for name in dict.fromkeys(run["system"] for run in found["runs"]):
        runs = [run for run in found["runs"] if run["system"] == name]
        bits = [run["bits_per_byte"] for run in runs]
        seconds = statistics.median(run["seconds_per_step"] for run in runs)
        spread = f"{statistics.fmean(bits):.3f} ({min(bits):.3f}–{max(bits):.3f})"
        lines.append(f"| {name} | {runs[0]['parameters']:,} | {spread} | {len(bits)} | {seconds:.3f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
