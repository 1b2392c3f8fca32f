"""What a run says at its end."""

from dataclasses import replace
from pathlib import Path

import pytest

from longstride.launcher.config import load_config
from longstride.launcher.data import RunSetup, TrainingData
from longstride.launcher.ranks import Ranks
from longstride.launcher.training.loop import summary
from tests.harness.lines import evaluation_line, write_metrics


@pytest.fixture
def run(config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunSetup:
    """Eight steps of 8 contexts of 64 bytes, whose best evaluation was the first; this folder is where it was begun."""
    monkeypatch.chdir(tmp_path)
    config = load_config(config_file, ["train.output=run", "train.steps=8"])
    Path("run").mkdir()
    write_metrics(Path("run"), [evaluation_line(4, 2.5), evaluation_line(8, 3.0)])
    return RunSetup(config, Ranks(), TrainingData(config, Ranks()))


@pytest.mark.parametrize(("first", "took"), [(0, "in 1 min 30 s"), (6, "the last 2 in 1 min 30 s")])
def test_summary_has_what_was_done_and_what_came_of_it(run: RunSetup, first: int, took: str) -> None:
    assert summary(run, 8, first, 90, 8 * 8 * 64)[0] == (
        f"done: 8 steps of 8 contexts of 64 bytes, 4.10 kB, {took}; "
        "best 2.5000 bits per byte on validation, at step 4; in run"
    )


@pytest.mark.parametrize(
    ("overrides", "counted", "words"),
    [
        ((), 4096, "64 bytes, 4.10 kB"),
        ((), None, "64 bytes, 4.10 kB"),
        (("data.packing=false",), 160, "up to 64 bytes, 160 B"),
        (("data.packing=false",), None, "up to 64 bytes, up to 4.10 kB"),
        (("data.separator=10",), 2931, "up to 64 bytes, 2.93 kB"),
        (("data.separator=10",), None, "up to 64 bytes, up to 4.10 kB"),
    ],
)
def test_summary_counts_bytes_of_the_data(
    run: RunSetup, config_file: Path, overrides: tuple[str, ...], counted: int | None, words: str
) -> None:
    """Neither padding nor separators; positions at most, where a checkpoint of older code did not count."""
    config = load_config(config_file, ["train.output=run", "train.steps=8", *overrides])
    changed = replace(run, config=config, data=TrainingData(config, Ranks()))
    assert summary(changed, 8, 0, 90, counted)[0].startswith(f"done: 8 steps of 8 contexts of {words}, in 1 min 30 s; ")


def test_next_commands_write_over_nothing(run: RunSetup) -> None:
    def export() -> str:
        evaluate, export, report = summary(run, 8, 0, 90, None)[1:]
        assert evaluate == "next: longstride evaluate run"
        assert report == "      longstride report run --output report.html"
        return export.strip()

    assert export() == "longstride export run --output model"
    Path("model").mkdir()
    assert export() == "longstride export run --output run-model"
    Path("run-model").mkdir()
    assert export() == "longstride export run --output run-model-8"
