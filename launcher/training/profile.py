"""Where a step's time goes, by torch's profiler: `RUN/profile` gets a trace of some steps and their seconds by part.

The first rank alone is recorded, and the others go on alike: what it waits for them is in its collectives.
"""

from __future__ import annotations

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
from longstride.launcher.data import Run
from longstride.launcher.engine import StepPart
from longstride.launcher.models import DTYPES
from longstride.launcher.output import file_names
from longstride.launcher.ranks import Ranks
from longstride.sparse_model import ModelConfig, SparseTransformer

WARM_UP_STEPS = 5  # before the recorded ones: the first steps make plans, buffers and compiled code
_MARKS = {part.value: part.name.lower() for part in StepPart}
STEP, DATA, FORWARD, BACKWARD, OPTIMIZER = _MARKS.values()
COLLECTIVES, OTHER = "collectives", "other"
PARTS = (DATA, FORWARD, BACKWARD, COLLECTIVES, OPTIMIZER, OTHER)
ATTENTION, LINEAR, REST = "attention", "linear layers", "the rest"
_LINEAR_OPS = ("aten::linear", "aten::addmm", "aten::mm", "aten::bmm", "aten::matmul")
COMPUTES = "computes"


@dataclass(frozen=True, slots=True)
class Interval:
    """A stretch of the trace's clock, in microseconds, and what goes on in it."""

    start: float
    end: float
    what: str


class StepProfiler:
    """Records so many steps of a run on its first rank, a few steps after it has begun; on others it does nothing."""

    def __init__(self, run: Run, steps_left: int, device: torch.device, say: Callable[[str], None]) -> None:
        self._run, self._device, self._say = run, device, say
        self._profile: profile | None = None
        self._steps = min(run.profile_steps, steps_left) if run.ranks.is_first else 0
        self._first = 1 + min(WARM_UP_STEPS, steps_left - self._steps)
        self._taken = 0

    def before_step(self) -> None:
        """Begins or ends the recording where the next step says so."""
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
        """Writes and tells what was recorded, if anything was. A disk that is full is reported."""
        if self._profile is None:
            return
        recorded, self._profile = self._profile, None
        recorded.stop()
        times = step_times(intervals(recorded, self._device))
        if not times["steps"]:  # the run has ended in the first of them
            return
        try:
            folder = _new_folder(self._run.folder / file_names.PROFILE)
            recorded.export_chrome_trace(str(folder / "trace.json"))
            content = {"device": self._device.type, "processes": self._run.ranks.world_size, **times}
            (folder / "parts.json").write_text(json.dumps(content, indent=1) + "\n")
        except OSError as error:
            self._say(f"profile: {error_line(error, self._run.folder)}; the run goes on")
            return
        self._say(table(times, folder))


def intervals(recorded: profile, device: torch.device) -> list[Interval]:
    """What a profile says of a step's parts, of collectives and of what is computed meanwhile.

    On a GPU the last two are the times of its kernels; the marked parts wait for these at their ends.
    """
    found = []
    on_device = device.type == "cuda"
    for event in recorded.events() or ():
        start, end, name = event.time_range.start, event.time_range.end, event.name
        is_kernel = event.device_type != DeviceType.CPU
        if name in _MARKS:
            if not is_kernel:  # torch repeats a mark in the device's line of the trace
                found.append(Interval(start, end, _MARKS[name]))
        elif on_device:
            if is_kernel:
                found.append(Interval(start, end, COLLECTIVES if name.startswith("nccl") else COMPUTES))
        elif name.startswith(("gloo:", "c10d::")):
            found.append(Interval(start, end, COLLECTIVES))
        elif name.startswith("longstride::attention"):
            found += [Interval(start, end, ATTENTION), Interval(start, end, COMPUTES)]
        elif name in _LINEAR_OPS:
            found += [Interval(start, end, LINEAR), Interval(start, end, COMPUTES)]
        elif not event.cpu_children:
            found.append(Interval(start, end, COMPUTES))
    return found


def step_times(found: Iterable[Interval]) -> dict[str, Any]:
    """Mean seconds of a step, by parts that add up to it, and of forward and backward by kinds of operations.

    A moment belongs to the collectives where one is under way and nothing is computed: so waiting for other ranks
    counts, and what overlaps with other work does not.
    """
    edges = sorted((time, change, each.what) for each in found for time, change in ((each.start, 1), (each.end, -1)))
    going_on: Counter[str] = Counter()
    seconds: defaultdict[str, float] = defaultdict(float)
    work: dict[str, defaultdict[str, float]] = {part: defaultdict(float) for part in (FORWARD, BACKWARD)}
    before, steps = 0.0, 0
    for moment, change, what in edges:
        if going_on[STEP]:
            passed = (moment - before) / 1e6
            marked = next((part for part in (DATA, FORWARD, BACKWARD, OPTIMIZER) if going_on[part]), OTHER)
            waits = going_on[COLLECTIVES] and not going_on[COMPUTES]
            seconds[COLLECTIVES if waits else marked] += passed
            if marked in work and not waits:
                kind = ATTENTION if going_on[ATTENTION] else LINEAR if going_on[LINEAR] else REST
                work[marked][kind] += passed
        going_on[what] += change
        steps += what == STEP and change > 0
        before = moment
    whole = sum(seconds.values())

    def told(times: dict[str, float], names: tuple[str, ...]) -> dict[str, dict[str, float]]:
        return {name: {"seconds": times[name] / steps, "share": times[name] / whole} for name in names}

    if not steps:
        return {"steps": 0}
    kinds = {part: told(times, (ATTENTION, LINEAR, REST)) for part, times in work.items()}
    return {"steps": steps, "seconds": whole / steps, "parts": told(seconds, PARTS), "work": kinds}


def table(times: dict[str, Any], folder: Path) -> str:
    """The parts of a step as lines for the screen."""
    lines = [f"profile of {times['steps']} steps, {1e3 * times['seconds']:.1f} ms each; the whole of it in {folder}"]
    for name, part in times["parts"].items():
        lines.append(f"  {name:<19}{1e3 * part['seconds']:9.2f} ms {100 * part['share']:5.1f} %")
        for kind, piece in times["work"].get(name, {}).items():
            lines.append(f"    {kind:<17}{1e3 * piece['seconds']:9.2f} ms {100 * piece['share']:5.1f} %")
    return "\n".join(lines)


def _new_folder(path: Path) -> Path:
    """Makes a folder, or the first of path-2, path-3, … that does not exist: a run that goes on keeps its profiles."""
    folder, number = path, 1
    while folder.exists():
        number += 1
        folder = path.with_name(f"{path.name}-{number}")
    folder.mkdir()
    return folder


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
