"""Progress for a person: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import io
import math

import pytest

from longstride.launcher.output.metrics_file import bits_per_byte
from longstride.launcher.training.recorder import Progress


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_bits_are_nats_over_log_two() -> None:
    assert bits_per_byte(math.log(256)) == pytest.approx(8.0)


def test_log_gets_the_first_and_last_line_but_not_every_step() -> None:
    stream = io.StringIO()
    progress = Progress(1000, 0, stream)
    for step in range(1, 1001):
        progress.advance(step, "4.000 bits per byte")
    progress.close()
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("step 1/1000 · 4.000 bits per byte · ")
    assert lines[-1] == "step 1000/1000 · 4.000 bits per byte · 0 s left"
    assert len(lines) == 2  # well within the seconds between two lines


def test_terminal_gets_a_bar_that_begins_at_the_resumed_step() -> None:
    stream = Terminal()
    progress = Progress(10, 4, stream)
    progress.advance(10, "4.000 bits per byte")
    progress.close()
    assert "4/10" in stream.getvalue()
    assert "10/10" in stream.getvalue()
    assert "4.000 bits per byte" in stream.getvalue()
