"""Ranks whose steps are counted: ``python benchmarks/scaling/communication_worker.py CASES.json FOLDER``.

The environment's WORLD_SIZE is their number; they are forked from one process that has imported everything. For every
case they build the engine of a run and take its steps with the training loop's functions, on batches of noise. The last
step is counted. Each rank writes its counts to FOLDER/rank-R.json.

With FAKE_RANKS=W this process is rank 0 of W, and collectives do nothing (torch's fake process group). So the
collectives of DeepSpeed can be counted for any W, though not their results.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a program from a checkout that is not installed
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
import torch.distributed

from benchmarks.scaling.counted import Counted
from benchmarks.training.planned_memory import noise
from longstride.launcher.config import RunConfig
from longstride.launcher.data.run_data import global_batches
from longstride.launcher.engine.build import build_engine
from longstride.launcher.engine.device import prepare_accelerator
from longstride.launcher.ranks.processes import Ranks, process_group
from longstride.launcher.training.guards import Guards
from longstride.launcher.training.loop import train_step

WARM_MICRO_BATCHES = 2  # ZeRO 3 learns the order of the modules in them, and gathers otherwise


def main(arguments: list[str]) -> int:
    """Run the cases and return the exit code."""
    cases, folder = json.loads(Path(arguments[0]).read_text()), Path(arguments[1])
    fake = int(os.environ.get("FAKE_RANKS", "0"))
    children = [] if fake else _fork(int(os.environ["WORLD_SIZE"]))
    ranks = Ranks(0, 0, fake) if fake else Ranks.from_environment(os.environ)
    prepare_accelerator()
    if fake:
        _pretend(fake)
    with process_group(ranks, 120):
        counts = [step(case, ranks) for case in cases]
    (folder / f"rank-{ranks.rank}.json").write_text(json.dumps(counts))
    return max([0, *(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children)])


def _fork(ranks: int) -> list[int]:
    """Fork ranks 1 to W - 1 of this process, which is 0, and set their environment."""
    children = []
    for rank in range(1, ranks):
        child = os.fork()
        if child == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            return []
        children.append(child)
    return children


def step(case: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Count what a rank communicates in a step of a run, after warm-up."""
    config = RunConfig.model_validate(case["config"])
    ranks = replace(ranks, sequence_parallel=config.train.sequence_parallel or 1)
    prepare_accelerator(config)
    engine = build_engine(config, ranks)
    rows = config.train.global_batch // ranks.data_world_size
    micro_batches = rows // config.train.micro_batch
    warm = -(-WARM_MICRO_BATCHES // micro_batches)
    batches = global_batches(lambda: noise(config, rows), rows, ranks, engine.device)
    with Counted() as counted:
        for _ in range(warm + 1):
            counted.take()
            train_step(engine, next(batches), config.stages()[0], ranks, Guards(config.train.guards, None))
    counts = counted.take()
    engine.destroy()
    return counts


def _pretend(ranks: int) -> None:
    """Join W processes of which only this one exists; our own gathers return W copies."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks)}
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    gather = torch.distributed.all_gather

    def gather_copies(everyone: list[torch.Tensor], local: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        work = gather(everyone, local, *args, **kwargs)
        for copy in everyone:
            copy.copy_(local)
        return work

    setattr(torch.distributed, "all_gather", gather_copies)  # noqa: B010  its signature is another


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
