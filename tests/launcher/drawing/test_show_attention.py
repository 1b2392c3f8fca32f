"""Pictures of learned attention: what is shown of which layer, and what is refused."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from longstride.launcher import cli
from longstride.launcher.drawing.attention import (
    attention_rows,
    backdrop,
    by_cell,
    by_run,
    chosen_layers,
    default_queries,
    draw_attention,
    draw_matrices,
    draw_views,
    faded,
    overlay,
    spread,
)
from longstride.launcher.drawing.pattern import Grid
from longstride.sparse_model import ModelConfig
from tests.launcher.conftest import Refusal
from tests.sparse_model.test_transformer import awake

Trained = Callable[..., Path]
PICTURE = Grid(4, 5, 3, "pixel")


def small_run_pattern(run: Path) -> Any:
    """Of the last layer's first head."""
    return ModelConfig.model_validate(json.loads((run / "config.json").read_text())["model"]).layer_patterns()[-1][0]


def test_matrix_of_each_layer_holds_its_rows(trained: Trained) -> None:
    run = trained("alone", 1)
    figure = draw_attention(run, None, 2, None, None)
    panels = [axis for axis in figure.axes if axis.get_title()]
    assert [axis.get_title().splitlines()[0] for axis in panels] == ["layer 0", "layer 1"]
    assert panels[0].get_title().splitlines()[1].startswith("fixed: stride")
    assert "run, step 8, validation: context 2, 64 bytes; mean of all heads" in figure.get_suptitle()
    weights = panels[1].images[0].get_array()
    assert weights.shape == (64, 64) and np.allclose(weights.sum(1), 1)
    position = torch.arange(64)
    pattern = small_run_pattern(run)
    # What is not read is left out, and so told apart from a weight of zero.
    assert np.array_equal(~np.ma.getmaskarray(weights), pattern.mask(position[:, None], position).numpy())
    assert "like zero" in figure.axes[-1].get_ylabel()  # the colour bar's
    assert figure.legends[0].get_texts()[0].get_text() == "not read: outside the pattern"


def test_keys_of_a_long_context_are_summed() -> None:
    changes = {"attention": {"type": "strided", "stride": 24}, "layers": 9, "heads": 2, "width": 16}
    model = awake(context=312, **changes)
    tokens = torch.arange(312).to(torch.uint8)
    figure = draw_matrices(model, tokens, 1, "a run")
    panels = [axis for axis in figure.axes if axis.get_title()]
    shown = "a run; layers 0, 1, 2, 3, 5, 6, 7, 8 of 9\n256 of 312 queries; weights are summed over 1.219 keys a cell"
    assert figure.get_suptitle() == shown
    found = panels[3].images[0].get_array().filled(0)
    exact = attention_rows(model, tokens, spread(312, 256), layers=[3], head=1)[3]
    pooled = np.add.reduceat(exact, np.arange(256) * 312 // 256, axis=1)
    assert len(panels) == 8 and np.allclose(found, pooled)


def test_views_of_a_picture_have_the_picture_and_a_panel_for_each_layer() -> None:
    model = awake(
        context=60, attention={"type": "strided", "stride": 15}, embedding={"type": "image", "height": 4, "width": 5}
    )
    tokens = torch.randint(256, (60,), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    figure = draw_views(model, tokens, [10, 59], None, PICTURE, "a run")
    titles = [axis.get_title() for axis in figure.axes]
    assert titles[:2] == ["the picture, query 10", "layer 0, query 10"]
    assert titles[4:6] == ["the picture, query 59", "layer 0, query 59"] and len(titles) == 9  # with the colour bar
    assert figure.axes[-1].get_ylabel().startswith("weight of a pixel (sum over its channels)")
    whole = figure.axes[4].images[0].get_array()
    assert np.allclose(whole, tokens.view(4, 5, 3).numpy() / 255)


def test_views_of_bytes_say_what_rows_columns_and_greys_are() -> None:
    model = awake(context=60, attention={"type": "strided", "stride": 15})
    figure = draw_views(model, torch.arange(60).to(torch.uint8), [10], None, Grid(4, 15, 1, "position"), "a run")
    assert (figure.axes[0].get_xlabel(), figure.axes[0].get_ylabel()) == ("column of 15", "row of 4")
    assert figure.legends[0].get_texts()[1].get_text() == "not read (lighter: a greater byte)"


def test_weights_of_a_pixel_are_summed_over_its_channels() -> None:
    weights = np.arange(2 * 60, dtype=float).reshape(2, 60)
    found = by_cell(weights, PICTURE)
    assert found.shape == (2, 20) and found[1, 7] == weights[1, 21:24].sum()
    folded = by_cell(np.ones((1, 10)), Grid(3, 4, 1, "position"))  # ragged: what is behind the end has none
    assert folded[0, :10].tolist() == [1] * 10 and np.isnan(folded[0, 10:]).all()
    partly = by_cell(np.array([[math.nan] * 3 + [math.nan, 0.25, 0.5] + [0.0] * 54]), PICTURE)
    assert np.isnan(partly[0, 0]) and partly[0, 1:3].tolist() == [0.75, 0.0]


def test_keys_that_are_not_read_are_no_zeros() -> None:
    weights = np.array([[math.nan, math.nan, 0.0, 0.5, math.nan, 0.5]])
    found = by_run(weights, np.array([0, 2, 4]))
    assert np.isnan(found[0, 0]) and found[0, 1:].tolist() == [0.5, 0.5]
    model = awake(attention={"type": "fixed", "stride": 8, "summary": 2}, layers=1)
    tokens = torch.arange(40).to(torch.uint8)
    rows = attention_rows(model, tokens, [0, 20, 39], layers=[0], unread=math.nan)[0]
    patterns, position = model.config.layer_patterns()[0], torch.arange(40)
    read = patterns[0].mask(torch.tensor([[0], [20], [39]]), position).numpy()
    assert np.array_equal(~np.isnan(rows), read) and np.allclose(np.nansum(rows, 1), 1)


def test_what_a_query_has_not_seen_is_faded() -> None:
    colours = backdrop(torch.arange(60).to(torch.uint8), PICTURE)
    shown = faded(colours, 7)
    assert np.array_equal(shown[:8], colours[:8]) and (shown[8:] >= 0.88).all()
    strength = np.full(20, math.nan)
    strength[3], strength[5] = 0.9, 0.0
    found = overlay(colours, strength, 7)
    without = overlay(colours, np.full(20, math.nan), 7)
    changed = (found != without).any(-1).nonzero()[0]
    assert changed.tolist() == [3, 5]  # zero has a colour, too: that of the lower end
    assert np.ptp(found[3]) > 0.3 and found[5].max() < 0.1 and (without[8:] >= 0.88).all()
    assert ((found >= 0) & (found <= 1)).all()


@pytest.mark.parametrize("most", [1, 6, 8])
def test_layers_are_spread_over_all(most: int) -> None:
    for layers in (1, 2, 8, 30, 128):
        chosen = chosen_layers(layers, max(most, 2))
        assert chosen == sorted(set(chosen)) and len(chosen) == min(layers, max(most, 2))
        assert chosen[0] == 0 and chosen[-1] == layers - 1


@pytest.mark.parametrize("grid", [PICTURE, Grid(64, 64, 3, "pixel"), Grid(1, 1, 1, "pixel"), Grid(2, 30, 3, "pixel")])
def test_default_queries_are_bytes_of_the_picture(grid: Grid) -> None:
    queries = default_queries(grid)
    assert all(0 <= query < grid.rows * grid.columns * grid.channels for query in queries)
    assert len(queries) == 4 or grid.rows < 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--query", "64"], "--query=64: must be from 0 to 63, a byte of the context; nearest 63"),
        (["--query", *"1234567"], "--query=7: one picture has room for 6 queries; leave some out"),
        (["--context-number", "-1"], "a context of the split; nearest 0"),
        (
            ["--text", "x", "--context-number", "1"],
            "--context-number=1: cannot be combined with --text; leave one of them out",
        ),
        (["--text", "x", "--data", "d"], "--data=d: cannot be combined with --text; leave one of them out"),
        (["--data", "nowhere"], "nowhere: no such folder; build one with `longstride data build`"),
    ],
)
def test_show_attention_refuses_in_one_line(
    trained: Trained, tmp_path: Path, options: list[str], message: str, refusal: Refusal
) -> None:
    words = ["show", "attention", trained("alone", 1), *options, "--output", tmp_path / "a.png"]
    assert refusal(*words).endswith(message)


def test_show_attention_writes_a_png_of_chosen_queries(trained: Trained, tmp_path: Path) -> None:
    output = tmp_path / "a.png"
    words = ["show", "attention", str(trained("alone", 1)), "--step", "4", "--query", "20", "50"]
    assert cli.main([*words, "--head", "1", "--weights", "ema", "--output", str(output)]) == 0
    assert output.read_bytes().startswith(b"\x89PNG")


def test_show_attention_takes_an_export_and_something_to_read(
    exported: Path, data: Path, tmp_path: Path, refusal: Refusal
) -> None:
    text, output = tmp_path / "text", tmp_path / "a.png"
    text.write_bytes(b"long strides over sparse bytes")
    words = ["show", "attention", str(exported), "--output", str(output)]
    for more in (["--text", str(text)], ["--data", str(data), "--context-number", "1"]):
        assert cli.main([*words, *more]) == 0
        assert output.read_bytes().startswith(b"\x89PNG")
        output.unlink()
    figure = draw_attention(exported, text=text)
    assert figure.get_suptitle() == "model: text, 30 bytes; mean of all heads"
    for more, message in (
        ([], f"{exported}: an exported model does not include data; give --data DIR or --text FILE"),
        (["--step", "3"], f"--step=3: {exported} is an export, which has its own weights; leave it out"),
        (["--weights", "ema"], f"--weights=ema: {exported} is an export, which has its own weights; leave it out"),
        (["--data", str(data), "--context-number", "999"], "a context of the split; nearest"),
    ):
        assert message in refusal(*words, *more)
