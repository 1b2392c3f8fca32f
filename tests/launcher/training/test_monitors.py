"""Where lines stand in DeepSpeed's monitors, and what becomes of a run whose monitors fail."""

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from deepspeed.monitor import csv_monitor

from longstride.data_pipelines.modalities import MODALITIES
from longstride.launcher.config import load_config
from longstride.launcher.models import ModelData
from longstride.launcher.training import monitors as module
from longstride.launcher.training.monitors import Monitors, claim_folders
from tests.harness.lines import step_line

NAMED = ("tensorboard", "csv_monitor")  # whose folders are named by the run


class Engine:
    """At step 5 of contexts by eights, with a monitor that keeps events."""

    def __init__(self) -> None:
        self.global_steps, self.global_samples = 5, 40
        self.events: list[Any] = []
        self.monitor: Any = SimpleNamespace(
            enabled=True, tb_monitor=None, wandb_monitor=None, comet_monitor=None, monitor_config=None,
            csv_monitor=SimpleNamespace(write_events=self.events.append, log_dir="nowhere", filenames=[]),
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
    reason = "no route to host; the run continues without them"
    assert said == [f"step 4: the monitors could not restart: {reason}"]
    assert engine.events == [] and not engine.monitor.enabled


def start_of(folder: Path, output: str, *, begun: bool, **settings: str) -> dict[str, Path]:
    """Where TensorBoard and CSV of a run write to at a start, and then do."""
    run = folder / output
    run.mkdir(parents=True, exist_ok=True)
    if begun:
        (run / "config.json").touch()
    config = load_config("demo", [f"train.output={run}", "deepspeed=zero0_fp32"])
    asked = {"enabled": True, "output_path": str(folder / "boards")} | settings
    section = config.deepspeed | {"tensorboard": asked, "csv_monitor": asked | {"output_path": str(folder / "tables")}}
    section = claim_folders(config.model_copy(update={"deepspeed": section})).deepspeed
    places = {name: Path(section[name]["output_path"], section[name]["job_name"]) for name in NAMED}
    for place in places.values():
        (place / "content").touch()
    return {name: place.relative_to(folder) for name, place in places.items()}


def both(name: str) -> dict[str, Path]:
    return {"tensorboard": Path("boards", name), "csv_monitor": Path("tables", name)}


@pytest.mark.parametrize("settings", [{}, {"job_name": "one"}], ids=["named by the run", "named by the user"])
def test_runs_of_one_name_have_folders_of_their_own_over_every_start(
    settings: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start_of(tmp_path, "a/one", begun=False, **settings) == both("one") and not capsys.readouterr().err
    assert start_of(tmp_path, "b/one", begun=False, **settings) == both("one-2")
    line = "longstride: deepspeed.{0}: {1}/one already contains files; this run writes to {1}/one-2"
    told = [
        line.format(name, tmp_path / place) for name, place in (("tensorboard", "boards"), ("csv_monitor", "tables"))
    ]
    assert capsys.readouterr().err.splitlines() == told
    assert start_of(tmp_path, "a/one", begun=True, **settings) == both("one") and not capsys.readouterr().err
    assert start_of(tmp_path, "b/one", begun=True, **settings) == both("one-2")
    shutil.rmtree(tmp_path / "b")
    assert start_of(tmp_path, "b/one", begun=False, **settings) == both("one-3")  # what was deleted is no part of it
    assert start_of(tmp_path, "b/one", begun=True, **settings) == both("one-3")
    (tmp_path / "c").mkdir()
    (tmp_path / "a/one").rename(tmp_path / "c/one")
    assert start_of(tmp_path, "c/one", begun=True, **settings) == both("one")  # where it was moved
    assert start_of(tmp_path, "d/one", begun=True, **settings) == both("one-4")  # begun without monitors


@pytest.mark.parametrize(("begun", "name"), [(True, "one"), (False, "one-2")])
def test_folders_of_earlier_versions_are_gone_on_with_by_a_resume_alone(begun: bool, name: str, tmp_path: Path) -> None:
    for place in both("one").values():
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "content").touch()
        (tmp_path / place / ".run").symlink_to(tmp_path / "precious")  # no mark, and nothing to write through
    (tmp_path / "precious").write_text("precious")
    assert start_of(tmp_path, "one", begun=begun) == both(name)
    assert (tmp_path / "precious").read_text() == "precious"


def test_monitors_share_a_folder_and_may_have_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config("demo", ["train.output=one", "deepspeed=zero0_fp32"])
    for settings, place in (({"output_path": "logs"}, "logs/one"), ({}, "one")):
        section = config.deepspeed | dict.fromkeys(NAMED, {"enabled": True} | settings)
        section = claim_folders(config.model_copy(update={"deepspeed": section})).deepspeed
        assert {str(Path(section[name]["output_path"], section[name]["job_name"])) for name in NAMED} == {place}
    assert claim_folders(config) == config and not Path("one").exists()


def test_a_table_has_one_heading_over_resumes_and_rewinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_monitor.dist, "get_rank", lambda: 0)
    settings: Any = SimpleNamespace(enabled=True, output_path=str(tmp_path), job_name="one")
    monkeypatch.setattr(module, "MonitorMaster", lambda _: SimpleNamespace(**master()))

    def master() -> dict[str, Any]:
        parts = dict.fromkeys(("tb_monitor", "wandb_monitor", "comet_monitor", "monitor_config"))
        return parts | {"enabled": True, "csv_monitor": csv_monitor.csvMonitor(settings)}

    for step in (5, 6, 7):
        engine = Engine()
        engine.monitor = SimpleNamespace(**master())
        monitors = Monitors(engine, print)
        monitors.write(step_line(step))
        monitors.rewind(4)
        monitors.write(step_line(step, split="my.split"))
    for split in ("train", "my.split"):
        rows = (tmp_path / f"one/{split}_loss_nats.csv").read_text().splitlines()
        assert [row.split(",")[0] for row in rows] == ["step", "40", "48", "56"]


def test_a_full_disk_is_told_once() -> None:
    class Csv(SimpleNamespace):
        def write_events(self, _: object) -> None:
            raise OSError(28, "No space left on device")

    engine, said = Engine(), list[str]()
    engine.monitor.csv_monitor = Csv(log_dir="nowhere", filenames=[])
    monitors = Monitors(engine, said.append)
    for step in (5, 6):
        monitors.write({"step": step, "split": "train"})
    assert said == ["step 5: Csv could not write: [Errno 28] No space left on device; the run continues"]


def test_a_service_that_is_gone_ends_no_step_of_deepspeeds_and_keeps_others_from_nothing() -> None:
    class Service:
        def write_events(self, _: object) -> None:
            raise RuntimeError("the service\nis gone")

    engine, said = Engine(), list[str]()
    engine.monitor.wandb_monitor = Service()
    Monitors(engine, said.append)
    engine.monitor.write_events([("Train/Samples/lr", 0.1, 40)])  # as DeepSpeed does in its step
    engine.monitor.write_events([("Train/Samples/lr", 0.1, 48)])
    assert said == ["step 5: Service could not write: the service is gone; the run continues"]
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
