"""Where lines stand in DeepSpeed's monitors, and what becomes of a run whose monitors fail."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from longstride.launcher.training import monitors as module
from longstride.launcher.training.monitors import Monitors


class Engine:
    """At step 5 of contexts by eights, with a monitor that keeps events."""

    def __init__(self) -> None:
        self.global_steps, self.global_samples = 5, 40
        self.events: list[Any] = []
        self.monitor: Any = SimpleNamespace(
            enabled=True, tb_monitor=None, wandb_monitor=None, comet_monitor=None, monitor_config=None,
            write_events=self.events.append,
        )  # fmt: skip

    def train_batch_size(self) -> int:
        return 8


def test_numbers_of_a_line_are_one_event_at_the_contexts_so_far() -> None:
    engine = Engine()
    Monitors(engine, print).write({"step": 5, "split": "train", "loss_nats": 2, "grad_norm": None, "guard": "skip"})
    assert engine.events == [[("train/step", 5.0, 40), ("train/loss_nats", 2.0, 40)]]


def test_a_step_that_was_undone_stands_behind_the_last() -> None:
    engine = Engine()
    Monitors(engine, print).write({"step": 6, "split": "train"})
    assert engine.events == [[("train/step", 6.0, 48)]]


def test_monitors_that_cannot_begin_anew_end_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("no route to host")

    engine, said = Engine(), list[str]()
    monkeypatch.setattr(module, "MonitorMaster", fail)
    monitors = Monitors(engine, said.append)
    monitors.rewind(4)
    monitors.write({"step": 5, "split": "train"})
    monitors.close()
    reason = "no route to host; the run goes on without them"
    assert said == [f"step 4: the monitors could not begin anew: {reason}"]
    assert engine.events == [] and not engine.monitor.enabled


def test_a_full_disk_is_told_once() -> None:
    def fail(_: object) -> None:
        raise OSError(28, "No space left on device")

    engine, said = Engine(), list[str]()
    engine.monitor.write_events = fail
    monitors = Monitors(engine, said.append)
    for step in (5, 6):
        monitors.write({"step": step, "split": "train"})
    assert len(said) == 1 and said[0].startswith("step 5: a monitor of DeepSpeed's could not write: ")
