"""Pictures of patterns: what each cell says, and that any context is drawn in seconds."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib import pyplot as plt

from longstride.kernels.patterns import (
    BigBird,
    Column,
    Dense,
    Fixed,
    Local,
    Longformer,
    LongNet,
    Strided,
    Summary,
    declares_causal,
)
from longstride.launcher import cli
from longstride.launcher.drawing.kinds import KINDS, kind_of, places_of, ranges, words_of
from longstride.launcher.drawing.pattern import (
    FUTURE,
    NOTHING,
    SELF,
    ContentChoice,
    Grid,
    connectivity,
    default_query,
    draw_pattern,
    matrix_size,
    name_of,
    pooled_connectivity,
    view,
    window,
)
from tests.harness.runs import ROOT

VALUES = {kind.word: 1 + number for number, kind in enumerate(KINDS)}  # of cells, by what they show
BLOCK, SUMMARY, WINDOW, COLUMN = (VALUES[word] for word in ("block", "summary", "window", "column"))
EXPERIMENTS = sorted((ROOT / "ds_configs" / "experiments").glob("*.json"))
MUSIC = {
    "context": 2**20,
    "layers": 8,
    "heads": 4,
    "width": 64,
    "attention": {"type": "strided", "stride": 1024, "combine": "interleaved"},
    "embedding": {"type": "text", "row_width": 1024},
}
PICTURES = {
    "context": 12288,
    "layers": 4,
    "heads": 8,
    "width": 64,
    "attention": {"type": "strided", "stride": 192, "combine": "multihead"},
    "embedding": {"type": "image", "height": 64, "width": 64},
}


def written(tmp_path: Path, **model: Any) -> Path:
    (tmp_path / "model.json").write_text(json.dumps({"model": model}))
    return tmp_path / "model.json"


def test_connectivity_marks_self_and_kinds_of_keys() -> None:
    found = connectivity(Fixed(stride=4, summary=1), 8)
    assert found.tolist() == [
        [SELF, 0, 0, 0, 0, 0, 0, 0],
        [BLOCK, SELF, 0, 0, 0, 0, 0, 0],
        [BLOCK, BLOCK, SELF, 0, 0, 0, 0, 0],
        [BLOCK, BLOCK, BLOCK, SELF, 0, 0, 0, 0],
        [0, 0, 0, SUMMARY, SELF, 0, 0, 0],
        [0, 0, 0, SUMMARY, BLOCK, SELF, 0, 0],
        [0, 0, 0, SUMMARY, BLOCK, BLOCK, SELF, 0],
        [0, 0, 0, SUMMARY, BLOCK, BLOCK, BLOCK, SELF],
    ]
    found = connectivity(Fixed(stride=3, summary=1, causal=False), 6)
    assert found.tolist() == [
        [SELF, BLOCK, BLOCK, 0, 0, SUMMARY],
        [BLOCK, SELF, BLOCK, 0, 0, SUMMARY],
        [BLOCK, BLOCK, SELF, 0, 0, SUMMARY],
        [0, 0, SUMMARY, SELF, BLOCK, BLOCK],
        [0, 0, SUMMARY, BLOCK, SELF, BLOCK],
        [0, 0, SUMMARY, BLOCK, BLOCK, SELF],
    ]


@pytest.mark.parametrize(
    ("pattern", "words", "kinds"),
    [
        (Local(128), "local: window 128", ["window"]),
        (Local(8, dilation=4), "local: window 8, dilation 4", ["dilated window"]),
        (Column(12), "column: stride 12", ["column"]),
        (Fixed(2048, 8), "fixed: stride 2,048, summary 8", ["block", "summary"]),
        (Fixed(8, 2, 4, 1), "fixed: stride 8, summary 2, num summaries 4, index 1", ["block", "summary"]),
        (Strided(12, "paper"), "strided: stride 12, span paper", ["window", "column"]),
        (Dense(), "dense", ["all before it"]),
        (Dense(causal=False), "dense: causal False", ["all"]),
        (Column(12, causal=False), "column: stride 12, causal False", ["column"]),
        (Strided(12, causal=False), "strided: stride 12, causal False", ["window", "column", "column"]),
        (Local(8, 4, causal=False), "local: window 8, dilation 4, causal False", ["dilated window"]),
        (Longformer(8, causal=False), "longformer: window 8, causal False", ["window", "first positions"]),
        (Longformer(8, globals=2), "longformer: window 8, globals 2", ["window", "first positions"]),
        (LongNet((4, 8), (1, 2), 1), "longnet: segments 4 / 8, dilations 1 / 2, index 1", ["block", "outer segments"]),
        (
            BigBird(4, 1, 1, 1, index=3),
            "bigbird: block 4, window 1, globals 1, random 1, index 3",
            ["window", "first positions", "random blocks"],
        ),
    ],
    ids=str,
)
def test_patterns_and_their_keys_have_words(pattern: Any, words: str, kinds: list[str]) -> None:
    assert words_of(pattern).replace("\N{NO-BREAK SPACE}", " ") == words
    assert [KINDS[kind_of(part)].word for part in pattern.parts()] == kinds


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ([0], "0"),
        ([0, 1], "0, 1"),
        ([0, 1, 2, 3, 8], "0–3, 8"),
        ([1, 3, 5, 31], "1, 3 … 5, 31"),
        ([*range(0, 128, 4)], "0, 4 … 124"),
        ([n for n in range(128) if n % 4], "1 … 127 (96)"),
    ],
)
def test_ranges_are_short(numbers: list[int], words: str) -> None:
    assert ranges(numbers) == words


def test_places_tell_layers_and_heads() -> None:
    assert places_of([(0, 0), (0, 1), (2, 0), (2, 1)], 2) == "layers 0, 2, all heads"
    assert places_of([(3, 0)], 1) == "layer 3"
    assert places_of([(layer, head) for layer in range(4) for head in (0, 4)], 8) == "layers 0–3, heads 0, 4"
    assert places_of([(0, 0), (1, 1)], 2) == "layer.head 0.0, 1.1"


@pytest.mark.parametrize(("size", "cell"), [(12, 3), (13, 3), (50, 7), (24, 1), (5, 9)])
def test_pooled_connectivity_is_the_most_of_each_square(size: int, cell: int) -> None:
    for pattern in (Strided(6), Fixed(6, 2), Summary(6, 2)):
        whole = connectivity(pattern, size)
        places = [slice(start, start + cell) for start in range(0, size, cell)]
        assert pooled_connectivity(pattern, size, cell).tolist() == [
            [int(whole[rows, columns].max()) for columns in places] for rows in places
        ]


@pytest.mark.parametrize("grid", [Grid(4, 6, 3, "pixel"), Grid(9, 8, 1, "position")], ids=str)
@pytest.mark.parametrize(
    "pattern",
    [
        Strided(18),
        Strided(18, "paper"),
        Fixed(6, 2),
        Summary(6, 2),
        Strided(18, causal=False),
        Fixed(6, 2, causal=False),
    ],
    ids=str,
)
def test_view_is_the_union_over_channels(grid: Grid, pattern: Any) -> None:
    context = grid.rows * grid.columns * grid.channels
    position = torch.arange(context)
    reads = pattern.mask(position[:, None], position[None, :])
    for cell in (0, 7, 17, context // grid.channels - 1):
        own = reads[cell * grid.channels : (cell + 1) * grid.channels].any(0)
        cells = own.view(-1, grid.channels).any(-1).view(grid.rows, grid.columns).numpy()
        found = view(pattern, cell, grid, range(grid.rows), range(grid.columns), context)
        number = np.arange(grid.rows * grid.columns).reshape(cells.shape)
        assert np.array_equal(((found > NOTHING) & (found <= SELF)), cells)
        assert np.array_equal(found == FUTURE, (number > cell) & declares_causal(pattern))
        assert (found.flat[cell] == SELF) == bool(cells.flat[cell]) and (found == SELF).sum() <= 1
        part = view(pattern, cell, grid, range(1, 3), range(2, 5), context)
        assert np.array_equal(part, found[1:3, 2:5])


def test_view_behind_the_end_of_a_ragged_fold_reads_nothing() -> None:
    found = view(Strided(4), 9, Grid(3, 4, 1, "position"), range(3), range(4), 10)
    assert found[2].tolist() == [WINDOW, SELF, FUTURE, FUTURE]
    assert found[0].tolist() == [NOTHING, COLUMN, NOTHING, NOTHING]


def test_window_holds_its_place() -> None:
    for size in (1, 5, 64, 1000):
        for place in {0, size // 3, size - 1}:
            for shown in (1, 4, 64):
                found = window(place, size, shown, shown // 2)
                assert place in found and len(found) == min(size, shown) and found.start >= 0 and found.stop <= size


def test_matrix_shows_some_strides_and_never_all_of_a_long_context() -> None:
    assert matrix_size([Strided(128)], 12288) == 512
    assert matrix_size([Strided(1024)], 2**20) == matrix_size([Strided(2**15)], 2**20) == 4096
    assert matrix_size([Strided(8)], 64) == 64
    assert matrix_size([Strided(8, num_factors=4)], 12288) == matrix_size([Local(128, dilation=4)], 12288) == 2048
    assert matrix_size([LongNet((64, 256), (1, 4)), BigBird(64, 3, 1, 1)], 12288) == 1024


def test_picture_has_a_view_and_a_matrix_for_each_distinct_pattern(tmp_path: Path) -> None:
    figure = draw_pattern(written(tmp_path, **PICTURES))
    panels = [axis for axis in figure.axes if axis.axison]
    titles = [axis.get_title().splitlines() for axis in panels]
    assert titles[:2] == [
        ["local: window\N{NO-BREAK SPACE}192", "layers 0–3, heads 0–3", "3.1 % of the pairs"],
        ["column: stride\N{NO-BREAK SPACE}192", "layers 0–3, heads 4–7", "0.529 % of the pairs"],
    ]
    assert titles[2:] == [["the first 768 positions, 4 × 4 a cell"]] * 2
    column = panels[1].images[0].get_array()
    row, place = divmod(default_query(Grid(64, 64, 3, "pixel"), 12288) // 3, 64)
    assert (column[:row, place] == COLUMN).all() and column[row, place] == SELF
    assert (np.isin(column, (COLUMN, SELF)).sum()) == row + 1
    assert column[row + 1 :].min() == FUTURE
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["window", "column", "itself", "still to come", "not read", "the query"]


def test_a_run_is_called_by_its_folder(tmp_path: Path) -> None:
    run = tmp_path / "songs.2"
    run.mkdir()
    path = written(tmp_path, **PICTURES)
    (run / "config.json").write_bytes(path.read_bytes())
    assert [name_of(each) for each in (run, run / "config.json", path)] == ["songs.2", "songs.2", path.stem]
    assert draw_pattern(run).get_suptitle().startswith("songs.2: what query")


def test_a_million_positions_are_drawn_in_seconds(tmp_path: Path) -> None:
    start = time.process_time()
    figure = draw_pattern(written(tmp_path, **MUSIC), query=2**20 - 1)
    assert time.process_time() - start < 20
    local, column, *_ = (axis.images[0].get_array() for axis in figure.axes if axis.axison)
    assert local.shape == column.shape == (64, 128)
    assert (local[-1, :-1] == WINDOW).all() and (column[:-1, -1] == COLUMN).all()
    assert local[-1, -1] == column[-1, -1] == SELF


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.campaign)])
def test_every_experiment_is_drawn(step: int) -> None:
    """Every third one by default."""
    for path in EXPERIMENTS[::step]:
        if '"type": "match"' in path.read_text():  # needs a text
            continue
        figure = draw_pattern(Path(path.stem))
        assert figure.axes
        plt.close(figure)


ROUTING = {"type": "routing", "clusters": 3, "window": 5}
TINY = {"context": 64, "layers": 2, "heads": 2, "width": 32, "embedding": {"type": "text", "row_width": 8}}


def test_what_content_decides_is_drawn_for_a_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, picture = tmp_path / "text", tmp_path / "picture.png"
    text.write_bytes(b"long strides over sparse bytes, and not a byte beyond the context is read")
    match = {"type": "match", "window": 4, "order": 2}
    local = {"local": {"heads": 1, "window": 8}}
    indexed = {"type": "indexed", "keys": 8, "block": 2, **local}
    mixed = [{"type": "moba", "block": 8, "top": 2}, match, {**ROUTING, **local}, indexed]
    words = [
        "show",
        "pattern",
        str(written(tmp_path, **(TINY | {"layers": 4}), attention=mixed)),
        "--output",
        str(picture),
    ]
    figure = draw_pattern(Path(words[2]))
    assert "6 heads choose by content" in figure.get_suptitle()
    plt.close(figure)
    figure = draw_pattern(Path(words[2]), text=text)
    titles = [axis.get_title() for axis in figure.axes if "chosen" in axis.get_title()]
    places = [f"layer {layer}, head {head}" for layer in range(4) for head in (0, 1) if head or layer < 2]
    assert titles == [f"chosen by content\n{place}" for place in places]
    plt.close(figure)
    assert cli.main([*words, "--text", str(text), "--query", "9"]) == 0
    picture.unlink()
    capsys.readouterr()
    for changes, options, line in (
        ({"attention": ROUTING}, [], "its heads choose their keys by content; give --text FILE"),
        ({"attention": {"type": "dense"}}, ["--text", str(text)], "chooses its keys by content; leave it out"),
        ({"attention": ROUTING, "vocabulary": 100}, ["--text", str(text)], "at least two bytes, all below 100"),
    ):
        written(tmp_path, **TINY, **changes)
        assert cli.main([*words, *options]) == 2
        assert capsys.readouterr().err.endswith(f"{line}\n")


def test_a_choice_is_drawn_as_it_is() -> None:
    read = torch.rand(20, 20, generator=torch.Generator().manual_seed(0)).tril() > 0.4
    found = connectivity(ContentChoice(lambda queries: read[queries], 20), 24)  # type: ignore[arg-type]
    wanted = torch.zeros(24, 24, dtype=torch.int64)
    wanted[:20, :20] = read.long() * VALUES["chosen by content"]
    wanted[range(20), range(20)] = read.diagonal().long() * SELF
    assert found.tolist() == wanted.tolist()
