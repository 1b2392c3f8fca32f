"""Progress for a person: a bar on a terminal, lines elsewhere."""

import fcntl
import io
import os
import pty
import struct
import termios
from typing import Any

import pytest

from longstride.launcher.output import counting
from longstride.launcher.training.recorder import Progress, Rates
from tests.launcher.conftest import Terminal


def line(step: int, bits: float | None = 4.0, seconds: float = 0.5) -> dict[str, Any]:
    return {
        "step": step, "split": "train", "bits_per_byte": bits, "tokens": 20_000, "seconds": seconds,
        "learning_rate": 0.00035, "mfu": 0.1 / seconds, "mfu_dense_equivalent": 0.3 / seconds,
    }  # fmt: skip


def test_log_gets_the_first_and_last_line_but_not_every_step(clock: list[float]) -> None:
    stream = io.StringIO()
    progress = Progress(1000, 0, stream)
    for step in range(1, 1001):
        progress.advance(line(step))
    progress.close()
    figures = "40.0 kB/s · MFU 20 %, as dense 60 % · learning rate 0.00035"
    assert stream.getvalue().splitlines() == [
        f"step 1/1000 · 4.000 bits per byte · 8 min 20 s left · {figures}",
        f"step 1000/1000 · 4.000 bits per byte · {figures}",
    ]


def test_log_gets_a_line_every_ten_seconds(clock: list[float]) -> None:
    stream = io.StringIO()
    progress = Progress(1000, 0, stream)
    for step in range(1, 101):
        clock[0] += 0.5
        progress.advance(line(step))
    assert [text.split("/")[0] for text in stream.getvalue().splitlines()] == [
        f"step {step}" for step in (1, 21, 41, 61, 81)
    ]


def test_terminal_gets_a_bar_that_begins_at_the_resumed_step() -> None:
    stream = Terminal()
    progress = Progress(10, 4, stream)
    progress.advance(line(10))
    progress.close()
    assert "step 4/10" in stream.getvalue()
    assert "step 10/10" in stream.getvalue()
    assert "4.000 bits per byte · 40.0 kB/s" in stream.getvalue()


@pytest.mark.parametrize("columns", [0, 30, 200])
def test_terminal_of_any_width_shows_the_step_and_the_loss(columns: int) -> None:
    near, far = pty.openpty()
    fcntl.ioctl(far, termios.TIOCSWINSZ, struct.pack("HHHH", 24 if columns else 0, columns, 0, 0))
    with os.fdopen(far, "w") as stream:
        progress = Progress(10, 0, stream)
        progress.advance(line(10))
        progress.close()
        stream.write("the end")
        stream.flush()
        shown = ""
        while "the end" not in shown:
            shown += os.read(near, 10_000).decode()
    os.close(near)
    assert "step 10/10" in shown
    if columns != 30:
        assert "4.000 bits per byte" in shown


@pytest.mark.parametrize("columns", [60, 80, 90, 110, 200])
def test_a_bar_shows_whole_figures_alone(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "terminal_size", lambda _: os.terminal_size((columns, 24)))
    whole = "4.000 bits per byte · 40.0 kB/s · MFU 20 %, as dense 60 % · learning rate 0.00035"
    stream = Terminal()
    progress = Progress(1000, 0, stream)
    progress._bar.ncols, progress._bar.dynamic_ncols = columns, None  # type: ignore[union-attr]
    progress.advance(line(1000))
    progress.close()
    shown = stream.getvalue().split("\r")[-1].rstrip()
    assert len(shown) <= columns
    _, _, _, figures_shown = shown.split(maxsplit=3)
    rest = whole.removeprefix(figures_shown)
    assert rest == "" if columns >= 110 else rest.startswith((" · ", ", as dense"))


def test_a_share_beyond_what_a_device_can_is_left_out(clock: list[float]) -> None:
    rates, busy = Rates(), line(1, seconds=0.09)
    rates.add(busy)
    assert "MFU" not in rates.words(busy, 3) and "learning rate" in rates.words(busy, 3)


def test_loss_is_an_exponential_mean_without_bias() -> None:
    rates = Rates()
    for step in range(1, 4):
        rates.add(line(step, bits=5.0))
    assert rates.loss == pytest.approx(5.0)  # without the correction it would be 1.4
    rates.add(line(4, bits=None))  # a loss that is no number counts as none
    rates.add(line(5, bits=1.0))
    weights = [0.9**3, 0.9**2, 0.9, 1.0]
    assert rates.loss == pytest.approx((5 * sum(weights[:3]) + 1) / sum(weights))
    assert "no loss" in Rates(steps=1, recent=rates.recent).words(line(6), 0)


def test_time_left_recovers_from_slow_first_steps(clock: list[float]) -> None:
    rates = Rates()
    for step in range(1, 11):
        seconds = 30.0 if step == 1 else 0.5
        clock[0] += seconds + 0.1  # and a tenth of a second between steps
        rates.add(line(step, seconds=seconds))
    assert rates.seconds_left(100) == pytest.approx(60.0)


def test_a_rewind_begins_the_rates_anew(clock: list[float]) -> None:
    stream = io.StringIO()
    progress = Progress(10, 0, stream)
    progress.advance(line(5, bits=9.0))
    progress.rewind(2, "rewound from step 5")
    progress.advance(line(3, bits=2.0))
    assert stream.getvalue().splitlines()[-1].startswith("step 3/10 · 2.000 bits per byte")


def test_numbers_are_short() -> None:
    assert [counting.amount(each) + "B" for each in (0, 7.2, 999.4, 999.6, 41_300, 2.5e6)] == [
        "0.00 B", "7.20 B", "999 B", "1.00 kB", "41.3 kB", "2.50 MB",
    ]  # fmt: skip
    assert [counting.percent(each) for each in (0.00123, 0.0474, 0.383, 1.2)] == ["0.12 %", "4.7 %", "38 %", "120 %"]


def test_pixels_are_no_bytes(clock: list[float]) -> None:
    rates, of_pixels = Rates(), line(1)
    of_pixels["bits_per_pixel"] = of_pixels.pop("bits_per_byte")
    rates.add(of_pixels)
    assert "4.000 bits per pixel" in rates.words(of_pixels, 3) and "40.0 k pixels/s" in rates.words(of_pixels, 3)
