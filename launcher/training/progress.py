"""How far a run is, for a person: one line, on a terminal a bar and elsewhere, for logs, a line every ten seconds."""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TextIO

from tqdm import tqdm

from longstride.launcher.output import counting, metrics_file

_WINDOW = 50  # steps of which rates are taken
_KEPT = 0.9  # of the mean loss by a step: what lies 10 steps back counts a third of the newest
_BAR_COLUMNS = 10


class _Step(NamedTuple):
    seconds: float
    content: int
    mfu: float | None
    mfu_dense: float | None


@dataclass
class Rates:
    """What the last steps of a start come to."""

    recent: deque[_Step] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    steps: int = 0
    begun: float = field(default_factory=lambda: time.monotonic())
    in_steps: float = 0.0  # seconds
    unit: str = "bits per byte"
    sum: float = 0.0  # of losses, each weighed by _KEPT to the power of the steps since
    weight: float = 0.0  # the sum of these weights

    def add(self, line: dict[str, Any]) -> None:
        """Takes in a step's line for metrics.jsonl."""
        if self.steps == 1:  # by itself until now: it has compiled, allocated and measured
            self.recent.clear()
        self.steps += 1
        self.in_steps += line["seconds"]
        self.recent.append(
            _Step(line["seconds"], metrics_file.content_of(line), line.get("mfu"), line.get("mfu_dense_equivalent"))
        )
        self.unit, bits = metrics_file.bits_of(line)
        if bits is not None:
            self.sum, self.weight = _KEPT * self.sum + bits, _KEPT * self.weight + 1

    @property
    def loss(self) -> float | None:
        """The exponential mean: as all weights are divided by their sum, it has no bias to the first step or to 0."""
        return self.sum / self.weight if self.weight else None

    def seconds_left(self, steps: int) -> float:
        """For so many steps: at the pace of the last ones, and with as much beside them as there has been."""
        step = sum(each.seconds for each in self.recent) / len(self.recent)
        beside = max(0.0, time.monotonic() - self.begun - self.in_steps) / self.steps
        return steps * (step + beside)

    def words(self, line: dict[str, Any], left: int, room: float = math.inf) -> str:
        """The line's figures after a step with so many to go, what matters most first: those that fit the room."""
        loss, seconds = self.loss, sum(each.seconds for each in self.recent)
        parts = ["no loss" if loss is None else f"{loss:.3f} {self.unit}"]
        if left:
            parts.append(f" · {counting.duration(self.seconds_left(left))} left")
        content, unit = sum(each.content for each in self.recent), self.unit.removeprefix("bits per ")
        parts.append(f" · {counting.amount(content / seconds)}{'B' if unit == 'byte' else f' {unit}s'}/s")
        newest = self.recent[-1]
        if newest.mfu is not None and newest.mfu_dense is not None:
            # Each step has as many operations: the mean over time is that of the mean time.
            share = newest.seconds * len(self.recent) / seconds
            if newest.mfu * share <= 1:  # else the peak was measured while the machine did something else
                parts += [
                    f" · MFU {counting.percent(newest.mfu * share)}",
                    f", as dense {counting.percent(newest.mfu_dense * share)}",
                ]
        if line.get("learning_rate") is not None:
            parts.append(f" · learning rate {line['learning_rate']:.2g}")
        ends = list(itertools.accumulate(len(part) for part in parts))
        return "".join(part for part, end in zip(parts, ends, strict=True) if end <= max(room, ends[0]))


class Progress:
    """How far a run is: a tqdm bar on a terminal, and a line now and then elsewhere."""

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
        """Moves to the step of a line. Lines are for the first and last step, and every few seconds between."""
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
        """Goes back to a step; what came before counts no more."""
        self._rates = Rates()
        if self._bar is not None:
            self._bar.set_description_str(reason, refresh=False)
            self._bar.update(step - self._bar.n)
        else:
            self._last = None

    def say(self, text: str) -> None:
        """A line at once, above the bar."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Ends the bar; its last state stays on the screen."""
        if self._bar is not None:
            self._bar.close()
