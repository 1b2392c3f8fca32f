"""Where lines stand in DeepSpeed's monitors, and what becomes of a run whose monitors fail."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from longstride.data_pipelines.modalities import MODALITIES
from longstride.launcher.models import ModelData
from longstride.launcher.training import monitors as module
from longstride.launcher.training.monitors import Monitors


class Engine:
    """At step 5 of contexts by eights, with a monitor that keeps events."""

    def __init__(self) -> None:
        self.global_steps, self.global_samples = 5, 40
        self.events: list[Any] = []
        self.monitor: Any = SimpleNamespace(
            enabled=True, tb_monitor=None, wandb_monitor=None, comet_monitor=None, monitor_config=None,
            csv_monitor=SimpleNamespace(write_events=self.events.append),
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
    class Csv:
        def write_events(self, _: object) -> None:
            raise OSError(28, "No space left on device")

    engine, said = Engine(), list[str]()
    engine.monitor.csv_monitor = Csv()
    monitors = Monitors(engine, said.append)
    for step in (5, 6):
        monitors.write({"step": step, "split": "train"})
    assert said == ["step 5: Csv could not write: [Errno 28] No space left on device; the run goes on"]


def test_a_service_that_is_gone_ends_no_step_of_deepspeeds_and_keeps_others_from_nothing() -> None:
    class Service:
        def write_events(self, _: object) -> None:
            raise RuntimeError("the service\nis gone")

    engine, said = Engine(), list[str]()
    engine.monitor.wandb_monitor = Service()
    Monitors(engine, said.append)
    engine.monitor.write_events([("Train/Samples/lr", 0.1, 40)])  # as DeepSpeed does in its step
    engine.monitor.write_events([("Train/Samples/lr", 0.1, 48)])
    assert said == ["step 5: Service could not write: the service is gone; the run goes on"]
    assert engine.events == [[("Train/Samples/lr", 0.1, 40)], [("Train/Samples/lr", 0.1, 48)]]


def test_wandb_gets_files_that_it_can_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = SimpleNamespace(
        Html=lambda text, inject: ("html", text), Image=lambda path: ("image", path), Audio=lambda path: ("audio", path)
    )
    monkeypatch.setitem(sys.modules, "wandb", made)
    (tmp_path / "a.txt").write_text("if a < b:")
    logged: list[Any] = []
    engine = Engine()
    engine.monitor.wandb_monitor = SimpleNamespace(log=lambda values, step: logged.append((values, step)))
    monitors, drawn = Monitors(engine, print), np.zeros((1, 4), dtype=np.uint8)
    monitors.samples(5, ModelData(MODALITIES["text"], {}), drawn, [tmp_path / "a.txt"])
    monitors.samples(5, ModelData(MODALITIES["image"], {}), drawn, [tmp_path / "a.png"])
    monitors.samples(5, ModelData(MODALITIES["audio"], {}), drawn, [tmp_path / "a.wav"])
    assert logged == [
        ({"samples": [("html", "<pre>if a &lt; b:</pre>")]}, 40),
        ({"samples": [("image", str(tmp_path / "a.png"))]}, 40),
        ({"samples": [("audio", str(tmp_path / "a.wav"))]}, 40),
    ]
