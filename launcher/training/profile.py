"""Measure a run: the parts of a step by torch's profiler, and model FLOP utilisation (MFU).

`RUN/profile` gets a trace of some steps and their seconds by part. Only the first rank is recorded; its collectives
include the time for which it waits for others.

MFU (Chowdhery et al. 2022, appendix B) is the share of the devices' peak that a run's products use. A multiplication
and an addition count as two operations. Counted are the matrix products of the model's definition, a third of them
forward and two thirds backward. Recomputation for activation checkpointing does not count.
"""

from __future__ import annotations

import itertools
import json
import resource
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from longstride.launcher.checkpoints import error_line
from longstride.launcher.config import RunConfig
from longstride.launcher.data import RunSetup
from longstride.launcher.engine import StepPart
from longstride.launcher.models import DTYPES
from longstride.launcher.output import file_names
from longstride.launcher.ranks import Ranks
from longstride.sparse_model import ModelConfig, SparseTransformer

WARM_UP_STEPS = 5  # before the recorded ones; the first steps create plans, buffers and compiled code
_MARKS = {part.value: part.name.lower() for part in StepPart}
STEP, DATA, FORWARD, BACKWARD, OPTIMIZER = _MARKS.values()
COLLECTIVES, OTHER = "collectives", "other"
PARTS = (DATA, FORWARD, BACKWARD, COLLECTIVES, OPTIMIZER, OTHER)
ATTENTION, LINEAR, REST = "attention", "linear layers", "the rest"
_LINEAR_OPS = ("aten::linear", "aten::addmm", "aten::mm", "aten::bmm", "aten::matmul")
COMPUTES = "computes"


@dataclass(frozen=True, slots=True)
class Interval:
    """An interval of the trace, in microseconds, and the activity in it."""

    start: float
    end: float
    what: str


class StepProfiler:
    """Records ``run.profile_steps`` steps on the first rank, after a few warm-up steps; on others it does nothing."""

    def __init__(self, run: RunSetup, steps_left: int, device: torch.device, say: Callable[[str], None]) -> None:
        self._run, self._device, self._say = run, device, say
        self._profile: profile | None = None
        self._steps = min(run.profile_steps, steps_left) if run.ranks.is_first else 0
        self._first = 1 + min(WARM_UP_STEPS, steps_left - self._steps)
        self._taken = 0

    def before_step(self) -> None:
        """Begin or end the recording if it is due before the next step."""
        self._taken += 1
        if self._steps and self._taken == self._first:
            activities = [ProfilerActivity.CPU]
            if self._device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities, acc_events=True)
            self._profile.start()
        elif self._taken == self._first + self._steps:
            self.close()

    def close(self) -> None:
        """Write and report the recorded steps, if there are any. A full disk is reported and ends nothing."""
        if self._profile is None:
            return
        recorded, self._profile = self._profile, None
        recorded.stop()
        times = step_times(intervals(recorded, self._device))
        if not times["steps"]:  # the run ended within the first one
            return
        path = self._run.folder / file_names.PROFILE
        names = (path.with_name(f"{path.name}-{number}") if number > 1 else path for number in itertools.count(1))
        folder = next(name for name in names if not name.exists())  # a resumed run keeps its earlier profiles
        try:
            folder.mkdir()
            recorded.export_chrome_trace(str(folder / "trace.json"))
            content = {"device": self._device.type, "processes": self._run.ranks.world_size, **times}
            (folder / "parts.json").write_text(json.dumps(content, indent=1) + "\n")
        except OSError as error:
            self._say(f"profile: {error_line(error, self._run.folder)}; the run continues")
            return
        self._say(table(times, folder))


def intervals(recorded: profile, device: torch.device) -> list[Interval]:
    """Extract the parts of steps, collectives and computations from a profile.

    On a GPU the last two are the times of its kernels. The marked parts end once their kernels have ended.
    """
    result = []
    on_device = device.type == "cuda"
    for event in recorded.events() or ():
        start, end, name = event.time_range.start, event.time_range.end, event.name
        is_kernel = event.device_type != DeviceType.CPU
        if name in _MARKS:
            if not is_kernel:  # torch repeats a mark among the device's events
                result.append(Interval(start, end, _MARKS[name]))
        elif on_device:
            if is_kernel:
                result.append(Interval(start, end, COLLECTIVES if name.startswith("nccl") else COMPUTES))
        elif name.startswith(("gloo:", "c10d::")):
            result.append(Interval(start, end, COLLECTIVES))
        elif name.startswith("longstride::attention"):
            result += [Interval(start, end, ATTENTION), Interval(start, end, COMPUTES)]
        elif name in _LINEAR_OPS:
            result += [Interval(start, end, LINEAR), Interval(start, end, COMPUTES)]
        elif not event.cpu_children:
            result.append(Interval(start, end, COMPUTES))
    return result


def step_times(recorded: Iterable[Interval]) -> dict[str, Any]:
    """Compute mean seconds of a step by parts that add up to it, and of forward and backward by kinds of operations.

    Time counts as collective while a collective runs and nothing is computed. This includes waiting for other ranks,
    and excludes communication that overlaps with computation.
    """
    edges = sorted((time, change, item.what) for item in recorded for time, change in ((item.start, 1), (item.end, -1)))
    running: Counter[str] = Counter()
    seconds: defaultdict[str, float] = defaultdict(float)
    work: dict[str, defaultdict[str, float]] = {part: defaultdict(float) for part in (FORWARD, BACKWARD)}
    before, steps = 0.0, 0
    for moment, change, what in edges:
        if running[STEP]:
            passed = (moment - before) / 1e6
            marked = next((part for part in (DATA, FORWARD, BACKWARD, OPTIMIZER) if running[part]), OTHER)
            waits = running[COLLECTIVES] and not running[COMPUTES]
            seconds[COLLECTIVES if waits else marked] += passed
            if marked in work and not waits:
                kind = ATTENTION if running[ATTENTION] else LINEAR if running[LINEAR] else REST
                work[marked][kind] += passed
        running[what] += change
        steps += what == STEP and change > 0
        before = moment
    total = sum(seconds.values())

    def means(times: dict[str, float], names: tuple[str, ...]) -> dict[str, dict[str, float]]:
        return {name: {"seconds": times[name] / steps, "share": times[name] / total} for name in names}

    if not steps:
        return {"steps": 0}
    kinds = {part: means(times, (ATTENTION, LINEAR, REST)) for part, times in work.items()}
    return {"steps": steps, "seconds": total / steps, "parts": means(seconds, PARTS), "work": kinds}


def table(times: dict[str, Any], folder: Path) -> str:
    """Format the parts of a step as lines for the terminal."""
    lines = [f"profile of {times['steps']} steps, {1e3 * times['seconds']:.1f} ms each; the whole of it in {folder}"]
    for name, part in times["parts"].items():
        lines.append(f"  {name:<19}{1e3 * part['seconds']:9.2f} ms {100 * part['share']:5.1f} %")
        for kind, piece in times["work"].get(name, {}).items():
            lines.append(f"    {kind:<17}{1e3 * piece['seconds']:9.2f} ms {100 * piece['share']:5.1f} %")
    return "\n".join(lines)


# TFLOP per second of dense products by tensor or matrix cores, from the vendors' data sheets. The first name that is
# part of the device's name counts. fp32 is for IEEE products, torch's default.
_PEAKS: dict[str, dict[str, float]] = {
    "H100 PCIe": {"bf16": 756, "fp16": 756, "fp32": 51},
    "H100 NVL": {"bf16": 835, "fp16": 835, "fp32": 60},
    "H100": {"bf16": 989, "fp16": 989, "fp32": 67},
    "H200": {"bf16": 989, "fp16": 989, "fp32": 67},  # and GH200
    "A100": {"bf16": 312, "fp16": 312, "fp32": 19.5},
    "MI300A": {"bf16": 981, "fp16": 981, "fp32": 123},
    "MI300X": {"bf16": 1307, "fp16": 1307, "fp32": 163},
}
_EDGES = {"cpu": (128, 256, 512, 1024), "cuda": (1024, 2048, 4096, 8192)}  # sizes of the measured matrices
_ENOUGH_SECONDS = 0.1  # of products, after which no others are tried
_TRIES = 5  # of each size


def context_work(config: ModelConfig, like: torch.Tensor | None = None, passes: int = 3) -> int:
    """Count the operations of one context: ``passes`` × (linear layers + attention) + the selection of keys.

    Attention counts the pairs that kernels visit for tensors like ``like``, or without it the pairs of the patterns.
    A backward pass counts as two.
    """
    model: Any
    model, counts = SparseTransformer.of_each_kind(config)
    total = passes * model.logits.work(config.objective.num_predicted(config.context), 1).linear
    for block, count in zip(model.blocks, counts.values(), strict=True):
        work, attention = model.block_work(block, 1), 0
        if work.pairs:
            visited = work.pairs
            if like is not None and config.objective.in_order:
                visited = block.attention.visited_pairs(config.context, like) or visited
            attention = (work.scores + work.values) * visited // work.pairs
        total += count * (passes * (work.linear + attention) + work.choosing)
    return total


class Utilization:
    """The MFU of a run. All ranks must construct it together, as those on a CPU measure at the same time."""

    def __init__(self, config: RunConfig, ranks: Ranks, device: torch.device) -> None:
        self._device = device
        self.begin(config)
        local_peak = listed_peak(device, config.precision)
        if local_peak is None:
            ranks.barrier()  # processes that share the cores of a machine must measure together
            local_peak = measure_peak(device, DTYPES[config.precision])
        self.peak = sum(ranks.gather_objects(local_peak))  # operations per second of all devices

    def begin(self, config: RunConfig, has_backward: bool = True) -> None:
        """Count the floating-point operations of a step by all processes together, for the steps of a stage.

        Without ``has_backward`` no gradient runs through the network.
        """
        like = torch.empty(0, device=self._device, dtype=DTYPES[config.precision])
        model, contexts, passes = config.model, config.train.global_batch, 3 if has_backward else 1
        dense = model.model_copy(update={"attention": model.objective.dense})
        self.visited = contexts * context_work(model, like, passes)  # all pairs in the tiles that kernels visit
        self.dense = contexts * context_work(dense, passes=passes)

    def fields(self, seconds: float) -> dict[str, float]:
        """Return the fields of metrics.jsonl for a step of so many seconds."""
        most = seconds * self.peak
        return {"mfu": self.visited / most, "mfu_dense_equivalent": self.dense / most}


def listed_peak(device: torch.device, precision: str) -> float | None:
    """Return the peak of a GPU in the table, in operations per second; None for others and for CPUs."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((1e12 * peaks[precision] for model, peaks in _PEAKS.items() if model in name), None)


def measure_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the peak by square matrix products of several sizes, in operations per second.

    It takes about a tenth of a second and draws no random number.
    """
    best = spent = 0.0
    for edge in _EDGES["cpu" if device.type == "cpu" else "cuda"]:
        matrix = torch.full((edge, edge), 1 / edge, device=device, dtype=dtype)
        torch.mm(matrix, matrix)  # the first product of a process starts threads and loads code
        for _ in range(_TRIES):
            begin = device_seconds(device)
            torch.mm(matrix, matrix)
            seconds = device_seconds(device) - begin
            best, spent = max(best, 2 * edge**3 / seconds), spent + seconds
            if spent > _ENOUGH_SECONDS:  # a busy machine, or arithmetic that the device emulates
                return best
    return best


def device_seconds(device: torch.device) -> float:
    """Return the clock once the device has finished its queued work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory that torch has allocated on a GPU; on a CPU, the peak resident memory of the process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident if sys.platform == "darwin" else 1024 * resident
