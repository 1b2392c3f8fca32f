"""Pictures: what they show, and what is refused."""

from pathlib import Path

import numpy as np
import pytest

from longstride.kernels import ConfigError
from longstride.launcher.reporting.charts import smoothed
from longstride.launcher.reporting.loss import draw_loss
from longstride.launcher.reporting.records import Series
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
