"""A rank whose steps are counted: ``python -m benchmarks.scaling.communication_worker CASES.json``.

For every case it builds the engine of a run and takes its steps with the training loop's functions, on batches of
noise. The collectives of the last step are counted, however they are called: torch dispatches each as an operation of
``c10d``, and a dispatch mode sees those of DeepSpeed and ours. The last line of the output has the counts.

With FAKE_RANKS=W this process is rank 0 of W, and collectives do nothing (torch's fake process group). So the
collectives of DeepSpeed can be counted for any W, though not their results.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.scaling.collectives import DEEPSPEED, OURS
from benchmarks.training.planned_memory import noise
from longstride.launcher.config import RunConfig
from longstride.launcher.data.run_data import global_batches
from longstride.launcher.engine.build import build_engine
from longstride.launcher.engine.device import prepare_accelerator
from longstride.launcher.ranks.processes import Ranks, process_group
from longstride.launcher.training.guards import Guards
from longstride.launcher.training.loop import train_step

TIMEOUT_SECONDS = 120
WARM_MICRO_BATCHES = 2  # ZeRO 3 learns the order of the modules in them, and gathers otherwise

# By torch's operation: what it is here, and which argument holds S bytes (see collectives.py).
_OPERATIONS = {
    "allreduce_": ("all_reduce", 0),
    "allgather_": ("all_gather", 0),
    "_allgather_base_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "alltoall_base_": ("all_to_all", 1),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
}
_WITHOUT_BYTES = ("barrier",)


class Counted(TorchDispatchMode):
    """Bytes and calls of collectives by owner and operation."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes: dict[str, Counter[str]] = {owner: Counter() for owner in (DEEPSPEED, OURS)}
        self.calls: dict[str, Counter[str]] = {owner: Counter() for owner in (DEEPSPEED, OURS)}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count a collective, and run any operation."""
        name = func.__name__.partition(".")[0]
        if func.namespace == "c10d" and name not in _WITHOUT_BYTES:
            operation, place = _OPERATIONS[name]  # KeyError: one that nobody has thought of
            tensors = [tensor for tensor in tree_leaves(args[place]) if isinstance(tensor, Tensor)]
            owner = DEEPSPEED if _through_deepspeed() else OURS
            self.num_bytes[owner][operation] += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            self.calls[owner][operation] += 1
        return func(*args, **(kwargs or {}))


def _through_deepspeed() -> bool:
    """Whether DeepSpeed's wrapper of torch.distributed is among the callers."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "deepspeed.comm.comm":
            return True
        frame = frame.f_back
    return False


def main(arguments: list[str]) -> int:
    """Run the cases and return the exit code."""
    cases = json.loads(Path(arguments[0]).read_text())
    fake = int(os.environ.get("FAKE_RANKS", "0"))
    ranks = Ranks(0, 0, fake) if fake else Ranks.from_environment(os.environ)
    prepare_accelerator()
    if fake:
        _pretend(fake)
    with process_group(ranks, TIMEOUT_SECONDS):
        print(json.dumps([step(case, ranks) for case in cases]))
    return 0


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
    settings, guards = config.stages()[0], Guards(config.train.guards, None)
    for _ in range(warm):
        train_step(engine, next(batches), settings, ranks, guards)
    with Counted() as counted:
        train_step(engine, next(batches), settings, ranks, guards)
    engine.destroy()
    return {"bytes": counted.num_bytes, "calls": counted.calls}


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
