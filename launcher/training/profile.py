"""Where a step's time goes, by torch's profiler: `RUN/profile` gets a trace of some steps and their seconds by part.

The first rank alone is recorded, and the others go on alike: what it waits for them is in its collectives.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from longstride.launcher.checkpoints import error_line
from longstride.launcher.data import Run
from longstride.launcher.engine import StepPart
from longstride.launcher.output import file_names

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
    for time, change, what in edges:
        if going_on[STEP]:
            passed = (time - before) / 1e6
            marked = next((part for part in (DATA, FORWARD, BACKWARD, OPTIMIZER) if going_on[part]), OTHER)
            waits = going_on[COLLECTIVES] and not going_on[COMPUTES]
            seconds[COLLECTIVES if waits else marked] += passed
            if marked in work and not waits:
                kind = ATTENTION if going_on[ATTENTION] else LINEAR if going_on[LINEAR] else REST
                work[marked][kind] += passed
        going_on[what] += change
        steps += what == STEP and change > 0
        before = time
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
