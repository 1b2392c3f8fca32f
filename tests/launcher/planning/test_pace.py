"""`longstride plan` in hours: by a rate that is given, and by that of a run; and what it says of a run's length."""

import json
from pathlib import Path

import pytest

from longstride.launcher import cli
from longstride.launcher.config import load_config
from longstride.launcher.planning.pace import warn_of_length
from tests.harness.lines import step_line, write_metrics
from tests.launcher.conftest import Refusal
from tests.launcher.planning.conftest import Plan


def finished_run(folder: Path, seconds: list[float], world_size: int = 2) -> Path:
    """A run folder of a preset, with so many logged steps."""
    (folder / "checkpoints/step-00000004").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(load_config("paper_small").to_json()))
    (folder / "checkpoints/step-00000004/manifest.json").write_text(json.dumps({"world_size": world_size}))
    write_metrics(folder, (step_line(number, seconds=each) for number, each in enumerate(seconds, 1)))
    return folder


def test_hours_are_operations_over_the_rate(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    found = plan("enwik8_fixed", "--tflops", "40", "--processes", "1", "8")
    flops = sum(found["step"][f"{name}_flops"] for name in ("forward", "backward", "recompute"))
    for row, processes in zip(found["pace"]["rows"], (1, 8), strict=True):
        assert row["processes"] == processes
        assert row["step_seconds"] == pytest.approx(flops / 40e12 / processes)
        assert row["run_seconds"] == pytest.approx(73_240 * row["step_seconds"])
    assert cli.main(["plan", "enwik8_fixed", "--tflops", "40"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "hours  at 40 TFLOP/s a process, as given by --tflops" in lines
    assert "  8 processes: 367 ms a step, 7 h 28 min in all" in lines
    assert plan("enwik8_fixed")["pace"] is None


def test_a_run_of_unknown_length_is_told_by_the_step(plan: Plan) -> None:
    (row,) = plan("imagenet64_strided", "data.path=elsewhere", "--tflops", "1")["pace"]["rows"]
    assert row["run_seconds"] is None and row["step_seconds"] > 0


def test_rate_of_a_run_is_the_median_of_its_warm_steps(plan: Plan, tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run", [9.0, 9.0, 0.5, 0.25, 4.0])
    (row,) = plan("paper_small", "--rate-of", str(run))["pace"]["rows"]
    assert (row["processes"], row["step_seconds"]) == (2, pytest.approx(0.5))
    (row,) = plan("paper_small", "--rate-of", str(run), "--processes", "1")["pace"]["rows"]
    assert row["step_seconds"] == pytest.approx(1.0)


def test_length_is_judged_in_words(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a checkout has that data once the demo has run
    assert cli.main(["plan", "paper_small", "--contexts", "9600"]) == 0
    advice = "50% of the data is seen: take more steps, or a larger batch; epochs in place of steps see it all"
    assert f"  {advice}" in capsys.readouterr().out.splitlines()
    assert warn_of_length(44_444.2) == "the data is seen 44,444 times: take more data, or fewer steps"
    assert str(warn_of_length(0.001)).startswith("less than 1% of the data is seen: ")
    assert warn_of_length(10.0) is None is warn_of_length(None)


@pytest.mark.parametrize(
    "words, line",
    [
        (
            ["--rate-of", "short"],
            "--rate-of=short: has no logged step after its first 2; train longer, or give --tflops",
        ),
        (["--rate-of", "lone"], "--rate-of=lone: has no checkpoint, which would say how many processes it has; give"),
        (["--measure", "train.sequence_parallel=2"], "--measure: cannot time processes that share contexts by"),
        (["--measure", "model.reversible=true"], "--measure: cannot time blocks of model.reversible one by one;"),
    ],
)
def test_wrong_rate_is_refused_in_one_line(
    words: list[str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Refusal
) -> None:
    finished_run(tmp_path / "short", [1.0, 1.0])
    (finished_run(tmp_path / "lone", [1.0] * 5) / "checkpoints/step-00000004/manifest.json").unlink()
    monkeypatch.chdir(tmp_path)
    assert refusal("plan", "paper_small", *words).startswith(line)
