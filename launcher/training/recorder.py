"""Report a training run: metrics.jsonl, DeepSpeed's monitors, and the progress.

On a terminal the progress is a bar. Elsewhere it is a line every ten seconds, for logs.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from deepspeed import DeepSpeedEngine
from tqdm import tqdm

from longstride.data_pipelines.durable import flush_folder, naming
from longstride.data_pipelines.plain_files import open_plain
from longstride.launcher.models import ModelData
from longstride.launcher.output import counting, file_names, metrics_file
from longstride.launcher.training.monitors import Monitors

_MOST_WAITING = 100_000  # lines of about 500 bytes
_WINDOW = 50  # steps over which rates are measured
_DECAY = 0.9  # per step, of the weights in the mean loss
_BAR_COLUMNS = 10


@dataclass
class Rates:
    """Rates and mean loss of the last steps of a start."""

    recent: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_WINDOW))  # lines of metrics.jsonl
    steps: int = 0
    start_time: float = field(default_factory=lambda: time.monotonic())
    in_steps: float = 0.0  # seconds
    unit: str = "bits per byte"
    sum: float = 0.0  # of losses, each weighed by _DECAY to the power of the steps since
    weight: float = 0.0  # the sum of these weights

    def add(self, line: dict[str, Any]) -> None:
        """Add a step's line of metrics.jsonl."""
        if self.steps == 1:  # the first step also compiled, allocated and measured
            self.recent.clear()
        self.steps += 1
        self.in_steps += line["seconds"]
        self.recent.append(line)
        self.unit, bits = metrics_file.bits_of(line)
        if bits is not None:
            self.sum, self.weight = _DECAY * self.sum + bits, _DECAY * self.weight + 1

    @property
    def loss(self) -> float | None:
        """The exponential moving average. Dividing by the sum of weights removes its bias."""
        return self.sum / self.weight if self.weight else None

    def seconds_left(self, steps: int) -> float:
        """Estimate the time of so many steps from the last ones, plus the mean time between steps so far."""
        seconds = sum(line["seconds"] for line in self.recent) / len(self.recent)
        overhead = max(0.0, time.monotonic() - self.start_time - self.in_steps) / self.steps
        return steps * (seconds + overhead)

    def words(self, line: dict[str, Any], steps_left: int, room: float = math.inf) -> str:
        """Describe a step in at most ``room`` characters, the most important figures first."""
        loss, seconds = self.loss, sum(step["seconds"] for step in self.recent)
        parts = ["no loss" if loss is None else f"{loss:.3f} {self.unit}"]
        if steps_left:
            parts.append(f" · {counting.duration(self.seconds_left(steps_left))} left")
        content, unit = sum(map(metrics_file.content_of, self.recent)), self.unit.split()[-1]
        rate = counting.amount(content / seconds)
        parts.append(f" · {rate}B/s" if unit == "byte" else f" · {rate.rstrip()} {unit}s/s")
        newest = self.recent[-1]
        mfu, as_dense = newest.get("mfu"), newest.get("mfu_dense_equivalent")
        if mfu is not None and as_dense is not None:
            # All steps have the same number of operations, so the mean MFU is that of the mean time.
            share = newest["seconds"] * len(self.recent) / seconds
            if mfu * share <= 1:  # otherwise the peak was measured on a busy machine
                parts += [
                    f" · MFU {counting.percent(mfu * share)}",
                    f", as dense {counting.percent(as_dense * share)}",
                ]
        if line.get("learning_rate") is not None:
            parts.append(f" · learning rate {line['learning_rate']:.2g}")
        ends = list(itertools.accumulate(len(part) for part in parts))
        return "".join(part for part, end in zip(parts, ends, strict=True) if end <= max(room, ends[0]))


class Progress:
    """The progress of a run: a tqdm bar on a terminal, and a line every few seconds elsewhere."""

    def __init__(self, steps: int, done: int, stream: TextIO) -> None:
        self._steps, self._stream = steps, stream
        self._last: float | None = None  # when a line was written
        self._rates = Rates()
        self._bar: tqdm | None = None
        if stream.isatty():
            size: dict[str, Any] = {"dynamic_ncols": True} if counting.terminal_size(stream) else counting.USUAL_SIZE
            form = f"step {{n_fmt}}/{{total_fmt}} {{bar:{_BAR_COLUMNS}}} {{desc}}"
            self._bar = tqdm(total=steps, initial=done, file=stream, bar_format=form, **size)

    def advance(self, line: dict[str, Any]) -> None:
        """Show the step of a line; without a terminal, only the first and last step and every few seconds between."""
        step = line["step"]
        self._rates.add(line)
        if self._bar is not None:
            size = counting.terminal_size(self._stream)
            columns = size.columns if size else counting.USUAL_SIZE["ncols"]
            room = columns - len(f"step {step}/{self._steps} ") - _BAR_COLUMNS - 1
            self._bar.set_description_str(self._rates.words(line, self._steps - step, room), refresh=False)
            self._bar.update(step - self._bar.n)
            return
        now = time.monotonic()
        if step == self._steps or self._last is None or now - self._last >= counting.LINE_SECONDS:
            self._last = now
            self.say(f"step {step}/{self._steps} · {self._rates.words(line, self._steps - step)}")

    def rewind(self, step: int, reason: str) -> None:
        """Return to a step and measure rates anew."""
        self._rates = Rates()
        if self._bar is not None:
            self._bar.set_description_str(reason, refresh=False)
            self._bar.update(step - self._bar.n)
        else:
            self._last = None

    def say(self, text: str) -> None:
        """Print a line at once, above the bar."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Close the bar; its last state stays on the screen."""
        if self._bar is not None:
            self._bar.close()


class Recorder:
    """Records a run on rank 0; on the other ranks every call does nothing. A full disk is reported and ends nothing."""

    def __init__(self, run: Path, engine: DeepSpeedEngine, is_first: bool, steps: int) -> None:
        self._run, self._is_first = run, is_first
        if is_first:
            self._lines = LineFile(run / file_names.METRICS, self.say)
            self._progress = Progress(steps, engine.global_steps, sys.stderr)
            self._monitors = Monitors(engine, self.say)

    def write(self, line: dict[str, Any]) -> None:
        """Append a line and write its numbers to DeepSpeed's monitors."""
        if not self._is_first:
            return
        self._lines.append(json.dumps(line), f"step {line['step']}")
        self._monitors.write(line)

    def samples(self, step: int, data: ModelData, drawn: np.ndarray, files: Sequence[Path]) -> None:
        """Write samples of a step, (S, bytes) uint8, which are in files, to DeepSpeed's monitors."""
        if self._is_first:
            self._monitors.samples(step, data, drawn, files)

    def flush(self) -> None:
        """Flush all lines to the disk, so that a checkpoint that survives a power cut has its lines.

        An error is reported and does not prevent the checkpoint.
        """
        if self._is_first:
            try:
                self._lines.flush()
            except OSError as error:
                self.say(f"{error.filename}: {error.strerror}; a power cut now may cost lines")

    def advance(self, line: dict[str, Any]) -> None:
        """Show the progress after the step of a line."""
        self._show(lambda: self._progress.advance(line))

    def go_back(self, step: int, reason: str) -> None:
        """Show that the run goes on from an earlier step."""
        self._show(lambda: self._progress.rewind(step, reason))

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._show(lambda: self._progress.say(text))

    def _show(self, write: Callable[[], None]) -> None:
        if self._is_first:
            with contextlib.suppress(OSError):  # stderr may be a file on a full disk
                write()

    def rewind(self, step: int, line: dict[str, Any]) -> Path | None:
        """Cut the lines after a step, to which the run rewinds from that of ``line``; return the path of a full copy.

        OSError means that there is no room for the copy. Then nothing has changed, and waiting lines still wait.
        """
        if not self._is_first:
            return None
        self._lines.settle()
        copy = metrics_file.cut_metrics(self._run, step, "rewind", f"{json.dumps(line)}\n")
        self._lines.close()
        self._lines = LineFile(self._run / file_names.METRICS, self.say)
        self._monitors.write(line)
        self._monitors.rewind(step)
        return copy

    def close(self) -> None:
        """Close the file, the monitors and the bar."""
        if self._is_first:
            self._lines.close()
            self._monitors.close()
            self._show(self._progress.close)


class LineFile:
    """A file to which complete lines are appended. A line that cannot be written waits for the next attempt."""

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self._path, self._say = path, say
        self._file = open_plain(path, "ab", follow_links=False)
        self._waiting: list[bytes] = []
        self._first = ""  # the subject of the oldest waiting line
        self._dropped = 0

    def append(self, text: str, about: str) -> None:
        """Write a line after the waiting ones; ``about`` names it in messages."""
        waited = len(self._waiting)
        self._first = self._first if waited else about
        self._waiting.append(f"{text}\n".encode())
        if waited == _MOST_WAITING:
            self._waiting.pop(0)
            self._dropped += 1
        try:
            self._write(waited)
        except OSError as error:
            if not waited:
                self._say(f"{self._path}: {error.strerror}; lines from {about} on wait in memory until there is room")

    def settle(self) -> None:
        """Write the waiting lines. Raises OSError on failure; then they still wait."""
        try:
            self._write(len(self._waiting))
        except OSError as error:
            rule = f"{error.strerror}, and lines from {self._first} on wait"
            raise OSError(errno.ENOSPC, rule, str(self._path)) from None

    def flush(self) -> None:
        """Flush all lines and the file's name to the disk. Raises OSError on failure."""
        self.settle()
        with naming(self._path):
            os.fsync(self._file.fileno())
        flush_folder(self._path.parent)

    def close(self) -> None:
        """Write the waiting lines, or report that they are lost, and close the file."""
        try:
            self._write(0)
        except OSError:
            count = len(self._waiting) + self._dropped
            self._say(f"{self._path}: {count} line{'s' if count > 1 else ''} from {self._first} on are lost")
        with contextlib.suppress(OSError):
            self._file.close()

    def _write(self, waited: int) -> None:
        """Write all waiting lines or none, and report those that ``waited``. Raises OSError on failure."""
        if not self._waiting:
            return
        text, before = b"".join(self._waiting), self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(text) < len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            self._file.truncate(before)
            raise
        self._waiting.clear()
        if waited:
            lost = f"; {self._dropped} more are lost" if self._dropped else ""
            self._say(f"{self._path}: {waited} lines from {self._first} on have been made up for{lost}")
            self._dropped = 0
