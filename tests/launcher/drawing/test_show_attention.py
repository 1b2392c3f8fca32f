"""Pictures of learned attention: what is shown of which layer, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from longstride.launcher import cli
from longstride.launcher.drawing.attention import (
    attention_rows,
    backdrop,
    by_cell,
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
from longstride.sparse_model import SparseTransformer
from tests.harness.configs import small
from tests.harness.runs import files_under

Trained = Callable[..., Path]
PICTURE = Grid(4, 5, 3, "pixel")


def random_model(**changes: object) -> SparseTransformer:
    torch.manual_seed(0)
    model = SparseTransformer(small(**changes))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def test_matrix_of_each_layer_holds_its_rows(trained: Trained) -> None:
    run = trained("alone", 1)
    panels = [axis for axis in draw_attention(run, None, 2, None, None).axes if axis.axison]
    assert [axis.get_title() for axis in panels] == ["layer 0: Fixed", "layer 1: Fixed"]
    title = panels[0].figure.get_suptitle()
    assert "run, step 8, validation: context 2, 64 bytes; mean of all heads" in title
    weights = panels[1].images[0].get_array() ** 3  # shown by the cube root
    ratio = weights.sum(1) / weights.sum(1)[0]  # rows sum to 1
    assert weights.shape == (64, 64) and np.allclose(ratio, 1) and not np.triu(weights, 1).any()


def test_keys_of_a_long_context_are_summed() -> None:
    changes = {"attention": {"type": "strided", "stride": 24}, "layers": 9, "heads": 2, "width": 16}
    model = random_model(context=312, **changes)
    tokens = torch.arange(312).to(torch.uint8)
    figure = draw_matrices(model, tokens, 1, "a run", SimpleNamespace(model=model.config))
    panels = [axis for axis in figure.axes if axis.axison]
    shown = "a run; layers 0, 1, 2, 3, 5, 6, 7, 8 of 9\n256 queries; keys summed by 1.219; "
    assert figure.get_suptitle().startswith(shown)
    found = panels[3].images[0].get_array() ** 3
    exact = attention_rows(model, tokens, spread(312, 256), layers=[3], head=1)[3]
    pooled = np.add.reduceat(exact, np.arange(256) * 312 // 256, axis=1)
    assert len(panels) == 8 and np.allclose(found, pooled / pooled.max())


def test_views_of_a_picture_have_the_picture_and_a_panel_for_each_layer() -> None:
    model = random_model(
        context=60, attention={"type": "strided", "stride": 15}, embedding={"type": "image", "height": 4, "width": 5}
    )
    tokens = torch.randint(256, (60,), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    figure = draw_views(model, tokens, [10, 59], None, PICTURE, "a run")
    titles = [axis.get_title() for axis in figure.axes]
    assert titles[:2] == ["the picture, query 10", "layer 0, query 10"]
    assert titles[4:6] == ["the picture, query 59", "layer 0, query 59"] and len(titles) == 8
    whole = figure.axes[4].images[0].get_array()
    assert np.allclose(whole, tokens.view(4, 5, 3).numpy() / 255)


def test_weights_of_a_pixel_are_summed_over_its_channels() -> None:
    weights = np.arange(2 * 60, dtype=float).reshape(2, 60)
    found = by_cell(weights, PICTURE)
    assert found.shape == (2, 20) and found[1, 7] == weights[1, 21:24].sum()
    folded = by_cell(np.ones((1, 10)), Grid(3, 4, 1, "position"))  # ragged: what is behind the end has none
    assert folded[0].tolist() == [1] * 10 + [0] * 2


def test_what_a_query_has_not_seen_is_faded() -> None:
    colours = backdrop(torch.arange(60).to(torch.uint8), PICTURE)
    shown = faded(colours, 7)
    assert np.array_equal(shown[:8], colours[:8]) and (shown[8:] >= 0.88).all()
    weights = np.zeros(20)
    weights[3], weights[5] = 0.9, 0.1
    found = overlay(colours, weights, 7)
    without = overlay(colours, np.zeros(20), 7)
    changed = (found != without).any(-1).nonzero()[0]
    assert changed.tolist() == [3, 5] and np.ptp(found[3]) > 0 and (without[8:] >= 0.88).all()
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
        (["--head", "2"], "--head=2: must be from 0 to 1, a head of the model; nearest 1"),
        (["--head", "-1"], "--head=-1: must be from 0 to 1, a head of the model; nearest 0"),
        (["--query", "64"], "--query=64: must be from 0 to 63, a byte of the context; nearest 63"),
        (["--query", "1"] * 7, "--query=1: one picture has room for 6 queries; leave some out"),
        (["--step", "5"], "checkpoints: no checkpoint of step 5; whole ones: 4, 8"),
        (["--context-number", "-1"], "a context of the split; nearest 0"),
    ],
)
def test_show_attention_refuses_in_one_line(
    trained: Trained, tmp_path: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained("alone", 1)
    capsys.readouterr()
    assert cli.main(["show", "attention", str(run), *options, "--output", str(tmp_path / "a.png")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("longstride: error: ") and line.endswith(message)
    assert not files_under(tmp_path)


def test_show_attention_writes_a_png_of_chosen_queries(trained: Trained, tmp_path: Path) -> None:
    output = tmp_path / "a.png"
    words = ["show", "attention", str(trained("alone", 1)), "--step", "4", "--query", "20", "--query", "50"]
    assert cli.main([*words, "--head", "1", "--weights", "ema", "--output", str(output)]) == 0
    assert output.read_bytes().startswith(b"\x89PNG")
