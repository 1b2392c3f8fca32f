"""Pictures: what they show, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from longstride.kernels import ConfigError
from longstride.launcher import cli
from longstride.launcher.drawing.show import Series, draw_loss, smoothed
from tests.harness.lines import evaluation_line, step_line, write_metrics
from tests.harness.runs import ROOT

DEMO = ROOT / "ds_configs" / "experiments" / "demo.json"


def test_loss_picture_has_a_line_for_each_split(tmp_path: Path) -> None:
    write_metrics(tmp_path, [*(step_line(s, 9.0 - s) for s in range(1, 5)), evaluation_line(3, 5.5)])
    axis = draw_loss(tmp_path).axes[0]
    train, validation = axis.lines  # of so few steps there is no running mean
    assert np.array_equal(train.get_ydata(), [8.0, 7.0, 6.0, 5.0])
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["train", "validation"]
    assert (validation.get_label(), list(validation.get_xdata())) == ("validation", [3])
    assert axis.get_title() == f"{tmp_path.name} · validation 5.500 at step 3" and axis.get_yscale() == "linear"


def test_loss_of_many_steps_has_a_running_mean_that_the_legend_tells(tmp_path: Path) -> None:
    write_metrics(tmp_path, (step_line(s + 1, 8.0 / (1 + s)) for s in range(160)))
    axis = draw_loss(tmp_path).axes[0]
    _, mean = axis.lines
    assert mean.get_label() == "train, mean of 4 lines" and axis.get_yscale() == "log"
    assert mean.get_ydata()[5] == pytest.approx(sum(8.0 / (1 + s) for s in range(2, 6)) / 4)


def test_running_mean_covers_what_there_is() -> None:
    series = Series(np.arange(4), np.array([4.0, 2.0, 0.0, 2.0]))
    assert smoothed(series, 2).values.tolist() == [4.0, 3.0, 1.0, 1.0]
    assert smoothed(series, 0).values.tolist() == [4.0, 2.0, 0.0, 2.0]


@pytest.mark.parametrize("text", ["", "{}\n", "7\n"])
def test_loss_of_no_metrics_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(ConfigError, match="is empty; wait"):
        draw_loss(tmp_path)


def test_loss_is_drawn_of_long_lines(tmp_path: Path) -> None:
    write_metrics(tmp_path, [step_line(1, 7.0, substitutions=["shard-000001.tar, sample 3"] * 5000)])
    assert list(draw_loss(tmp_path).axes[0].lines[0].get_ydata()) == [7.0]


def test_show_writes_a_png_and_never_over_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "pattern.png"
    assert cli.main(["show", "pattern", str(DEMO), "--output", str(output)]) == 0
    assert output.read_bytes().startswith(b"\x89PNG")
    made = output.stat()
    assert cli.main(["show", "pattern", str(DEMO), "--output", str(output)]) == 2
    assert "already exists and is not overwritten" in capsys.readouterr().err
    assert output.stat().st_mtime_ns == made.st_mtime_ns


@pytest.mark.parametrize(
    "what, source, output, message",
    [
        ("pattern", "nowhere.json", "a.png", "nowhere.json: "),
        ("loss", "nowhere", "a.png", "nowhere: no such folder; such as runs/demo"),
        ("loss", "nowhere", "a.pdf", "a.pdf: must be a .png in a folder that exists"),
        ("loss", "nowhere", "no/where/a.png", "a.png: must be a .png in a folder that exists"),
    ],
)
def test_show_refuses_in_one_line(
    tmp_path: Path, what: str, source: str, output: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["show", what, str(tmp_path / source), "--output", str(tmp_path / output)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("longstride: error: ") and message in line
    assert not list(tmp_path.iterdir())
