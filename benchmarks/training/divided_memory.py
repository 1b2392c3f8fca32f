"""Memory of processes that share a context: ``python -m benchmarks.training.divided_memory``.

A forward and backward pass over one context of 65,536 bytes, by real processes over gloo: the network of music_65k in
width and attention, cut to a few layers, in fp32 and with every activation stored. The memory that `longstride plan`
predicts is compared with the tensors that a process held at the worst moment, counted as they are made and freed.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed

from benchmarks.machine import about, run_ranks
from benchmarks.report import new_parser, parse, write_result
from longstride.launcher.config import RunConfig, load_config
from longstride.launcher.planning.rehearsal import activations, count
from longstride.launcher.ranks.processes import Ranks, process_group
from longstride.sparse_model import SparseTransformer

RUN = "music_65k"
LAYERS, HEADS, WIDTH = 4, 4, 128
SHARED = ((1, "heads"), (2, "heads"), (2, "auto"), (4, "heads"), (4, "auto"))  # processes, and what is exchanged
TIME_OUT_SECONDS = 600


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = new_parser(__doc__)
    parser.add_argument("--context", type=int, default=65_536)
    parser.add_argument("changes", nargs="*", metavar="path.to.key=value", help="of the run")
    if "DIVIDED_RUN" in os.environ:  # one of the processes
        print(json.dumps(measure(RunConfig.model_validate(json.loads(os.environ["DIVIDED_RUN"])))))
        return 0
    options = parse(parser, arguments, "divided-memory")
    rows = []
    for size, exchange in SHARED:
        config = configuration(options.context, size, exchange, options.changes)
        planned = activations(config, config.train.activation_checkpointing, "cpu")
        rows.append({"processes": size, "exchange": exchange, "planned": asdict(planned), "found": together(config)})
        print(line(rows[-1]), flush=True)
    result = {**about(torch.device("cpu")), "run": RUN, "context": options.context, "layers": LAYERS, "heads": HEADS}
    write_result(options, {**result, "width": WIDTH, "changes": options.changes, "rows": rows})
    return 0


def configuration(context: int, size: int, exchange: str, changes: list[str]) -> RunConfig:
    """Return the run, with one context a step."""
    overrides = [
        f"model.context={context}",
        f"model.layers={LAYERS}",
        f"model.heads={HEADS}",
        f"model.width={WIDTH}",
        "model.backend=cpu",
        "train.global_batch=1",
        "train.activation_checkpointing=false",
        f"train.sequence_parallel={size}",
        f"train.sequence_exchange={exchange}",
        "deepspeed=zero0_fp32",
    ]
    return load_config(RUN, overrides + changes)


def together(config: RunConfig) -> list[dict[str, int]]:
    """Run the processes that share a context, and return each one's result."""
    variables = {"DIVIDED_RUN": json.dumps(config.to_json())}
    outputs = run_ranks("benchmarks.training.divided_memory", [], config.train.sequence_parallel or 1, **variables)
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def measure(config: RunConfig) -> dict[str, int]:
    """Measure the peak bytes of one forward and backward pass in this process."""
    ranks = Ranks.from_environment(os.environ)
    ranks = replace(ranks, sequence_parallel=ranks.world_size)
    with process_group(ranks, TIME_OUT_SECONDS):
        torch.manual_seed(0)
        model = SparseTransformer(config.model)
        model.divide(ranks.division(config.train.sequence_exchange))
        tokens = torch.randint(256, (1, config.model.context), dtype=torch.uint8)
        count(model, tokens)  # what is kept for later steps, such as plans, belongs to none of them
        tensors = count(model, tokens)
    return {"tensors": tensors.peak, "kept": tensors.kept}


def line(row: dict[str, Any]) -> str:
    """Format a measurement."""
    tensors = max(process["tensors"] for process in row["found"])
    return (
        f"{row['processes']} processes, {row['exchange']:<5}: planned {row['planned']['peak'] / 2**20:8.1f} MiB, "
        f"tensors {tensors / 2**20:8.1f}"
    )


if __name__ == "__main__":
    sys.exit(main())
