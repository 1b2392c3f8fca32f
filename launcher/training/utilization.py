"""Model FLOP utilisation (Chowdhery et al. 2022, appendix B): what a run multiplies, of what its devices can.

A multiplication and an addition are two. Counted are the matrix products that the model's definition asks for, a third
of them forward and two thirds backward. What is computed again, to save memory, is no part of the count.
"""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch

from longstride.launcher.config import RunConfig
from longstride.launcher.models import DTYPES
from longstride.launcher.ranks import Ranks
from longstride.sparse_model import ModelConfig, SparseTransformer

# Dense products by tensor or matrix cores, TFLOP a second, of the makers' data sheets. The first name that a device's
# has in it counts. fp32 is that of IEEE products, which torch takes unless it is told otherwise.
_PEAKS: dict[str, dict[str, float]] = {
    "H100 PCIe": {"bf16": 756, "fp16": 756, "fp32": 51},
    "H100 NVL": {"bf16": 835, "fp16": 835, "fp32": 60},
    "H100": {"bf16": 989, "fp16": 989, "fp32": 67},
    "H200": {"bf16": 989, "fp16": 989, "fp32": 67},  # and GH200
    "A100": {"bf16": 312, "fp16": 312, "fp32": 19.5},
    "MI300A": {"bf16": 981, "fp16": 981, "fp32": 123},
    "MI300X": {"bf16": 1307, "fp16": 1307, "fp32": 163},
}
_EDGES = {"cpu": (128, 256, 512, 1024), "cuda": (1024, 2048, 4096, 8192)}  # of the matrices that are multiplied
_LONG_SECONDS = 0.004  # a product that takes so long is large enough
_ENOUGH_SECONDS = 0.1  # of products, after which no larger ones are tried
_TRIES, _FEWEST_TRIES = 5, 3  # the first of a process makes threads and loads code: it alone tells nothing


@dataclass(frozen=True, slots=True)
class StepWork:
    """Floating-point operations of one optimiser step, of all processes together."""

    visited: int  # attention over all pairs of the tiles that kernels visit
    dense: int  # had every layer dense causal attention

    @classmethod
    def of(cls, config: RunConfig, device: torch.device) -> StepWork:
        """Of a run whose kernels run on such a device, in its precision."""
        like = torch.empty(0, device=device, dtype=DTYPES[config.precision])
        model, contexts = config.model, config.train.global_batch
        with_dense = model.model_copy(update={"attention": {"type": "dense"}})
        return cls(contexts * context_work(model, like), contexts * context_work(with_dense))


def context_work(config: ModelConfig, like: torch.Tensor | None = None) -> int:
    """Operations of one context forward and backward: 3 × (linear layers + attention), and what chooses keys.

    ``like``: attention is counted over the pairs that kernels visit for tensors of its dtype and device; None: over the
    pairs of the patterns.
    """
    model: Any
    model, counts = SparseTransformer.of_each_kind(config)
    total = 3 * model.logits.work(config.context, 1).linear
    for block, count in zip(model.blocks, counts.values(), strict=True):
        work, attention = block.work(config.context, 1), 0
        if work.pairs:
            visited = work.pairs
            if like is not None:
                visited = block.attention.visited_pairs(config.context, like) or visited
            attention = (work.scores + work.values) * visited // work.pairs
        total += count * (3 * (work.linear + attention) + work.choosing)
    return total


class Utilization:
    """How busy the devices of a run are. All ranks must make it together: those of a CPU measure at the same time."""

    def __init__(self, config: RunConfig, ranks: Ranks, device: torch.device) -> None:
        self.work = StepWork.of(config, device)
        own = known_peak(device, config.precision)
        if own is None:
            ranks.barrier()  # processes that share the cores of a machine shall share them now
            own = measured_peak(device, DTYPES[config.precision])
        self.peak = sum(ranks.gather_objects(own))  # operations a second, of all devices

    def fields(self, seconds: float) -> dict[str, float]:
        """What a step of so many seconds has in metrics.jsonl."""
        whole = seconds * self.peak
        return {"mfu": self.work.visited / whole, "mfu_dense_equivalent": self.work.dense / whole}


def known_peak(device: torch.device, precision: str) -> float | None:
    """Operations a second of a card that the table has; None for another, and for a CPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((1e12 * peaks[precision] for known, peaks in _PEAKS.items() if known in name), None)


def measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of the quickest of some square matrix products, in a tenth of a second or so.

    No random number is drawn.
    """
    best = spent = 0.0
    for edge in _EDGES["cpu" if device.type == "cpu" else "cuda"]:
        matrix = torch.full((edge, edge), 1 / edge, device=device, dtype=dtype)
        shortest = float("inf")
        for tries in range(1, _TRIES + 1):
            begin = _settled(device)
            torch.mm(matrix, matrix)
            shortest = min(shortest, _settled(device) - begin)
            if tries >= _FEWEST_TRIES and shortest > 10 * _LONG_SECONDS:  # of arithmetic that the device only imitates
                break
        best = max(best, 2 * edge**3 / shortest)
        # A machine that does something else stretches short products too: these alone would tell a far lower rate.
        spent += tries * shortest
        if shortest > _LONG_SECONDS and spent > _ENOUGH_SECONDS:
            break
    return best


def _settled(device: torch.device) -> float:
    """The clock once the device has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def peak_memory_bytes(device: torch.device) -> int:
    """The most that torch has held on a card; of a process on a CPU, the most of its memory that was resident."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident if sys.platform == "darwin" else 1024 * resident
