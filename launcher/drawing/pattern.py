"""`longstride show pattern CONFIG`: what reads what (Child et al. 2019, figure 3), for any context in seconds.

Each distinct pattern of a configuration has two panels. Above: one query's view of the picture, or of the sequence
folded into rows. Below: the matrix of queries and keys over a few strides.

Letters: N positions of the context.
"""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.colors import ListedColormap
from matplotlib.patches import Rectangle

from longstride.kernels import ConfigError
from longstride.kernels.patterns import Pattern
from longstride.launcher.config import find_config, load_json_object
from longstride.launcher.pictures import plt
from longstride.sparse_model import ImageEmbedding, ModelConfig

SHOWN_PATTERNS = 8
COLUMNS = 4  # of panels
SHOWN_STRIDES = 4  # that a matrix covers
LEAST_POSITIONS, MOST_POSITIONS = 192, 4096  # of a matrix
MATRIX_CELLS = 192  # along an edge, as many as can be told apart
VIEW_ROWS, VIEW_COLUMNS = 64, 128  # of a view, around its query
NOTHING, FIRST, LATER, SELF, FUTURE = range(5)  # what a cell shows
COLOURS = ListedColormap(["white", "#8fb8de", "#d9874b", "#1f3b57", "#dddddd"])
SCALE: dict[str, Any] = {"cmap": COLOURS, "vmin": NOTHING, "vmax": FUTURE}
LEGEND = "framed: the query, dark where it reads itself; blue: first part; orange: later parts; grey: still to come"


class Grid(NamedTuple):
    """The positions as cells in rows: the pixels of a picture, or the sequence folded into rows."""

    rows: int
    columns: int
    channels: int  # positions of a cell
    name: str  # of a cell


def draw_pattern(source: Path, query: int | None = None) -> Any:
    """The figure of a configuration: a path, or the bare name of a file in ds_configs/experiments.

    ``query`` is the position whose view is shown, by default one below the middle.

    Raises:
        ConfigError: the configuration cannot be read, holds no model that fits, or has no such position.
    """
    path = find_config(source)
    content = load_json_object(path)
    if "model" not in content:
        raise ConfigError(f"{path}: has no model")
    try:
        config = ModelConfig.model_validate(content["model"])
    except ConfigError as error:
        raise error.under("model") from None
    if query is not None:
        check_number("--query", query, config.context, "a position")
    users: dict[Pattern, list[str]] = {}  # in the order of the layers
    for layer, heads in enumerate(config.layer_patterns()):
        for head, pattern in enumerate(heads):
            users.setdefault(pattern, []).append(f"{layer}.{head}")
    shown = list(users.items())[:SHOWN_PATTERNS]
    size = matrix_size([pattern for pattern, _ in shown], config.context)
    grid = grid_of(config)
    position = default_query(grid, config.context) if query is None else query
    columns = min(COLUMNS, len(shown))
    bands = -(-len(shown) // columns)
    # Inches of a view that is 3.4 inches wide, with its title.
    height = 0.7 + min(3.4 * min(grid.rows, VIEW_ROWS) / min(grid.columns, VIEW_COLUMNS), 3.6)
    figure, axes = plt.subplots(
        2 * bands,
        columns,
        figsize=(max(5.6, 3.6 * columns), 0.8 + (height + 4.0) * bands),
        height_ratios=[height, 4.0] * bands,
        squeeze=False,
        layout="constrained",
    )
    for axis in axes.flat:
        axis.set_axis_off()
    for number, (pattern, places) in enumerate(shown):
        band, column = divmod(number, columns)
        draw_view(axes[2 * band, column], pattern, position, grid, config.context)
        shown_places = ", ".join(places) if len(places) <= 4 else f"{places[0]} … {places[-1]} ({len(places)})"
        title = f"{textwrap.fill(str(pattern), 36)}\nlayer.head {shown_places}"
        axes[2 * band, column].set_title(title, fontsize=8)
        draw_matrix(axes[2 * band + 1, column], pattern, size)
    left = len(users) - len(shown)
    more = f"; {left} more patterns are not shown" if left else ""
    name = f"{source.stem}: {config.context:,} positions, query {position:,}{more}"
    figure.suptitle("\n".join([name, *textwrap.wrap(LEGEND, 34 * max(columns, 2))]), fontsize=9)
    return figure


def check_number(option: str, number: int, count: int, what: str) -> None:
    """Raise ConfigError where an option does not name one of 0 … count - 1."""
    if not 0 <= number < count:
        near = min(max(number, 0), count - 1)
        raise ConfigError(f"{option}={number}: must be from 0 to {count - 1}, {what}; nearest {near}")


def grid_of(config: ModelConfig) -> Grid:
    """The picture's pixels, or the sequence folded as the embedding has it."""
    embedding = config.embedding
    if isinstance(embedding, ImageEmbedding):
        return Grid(embedding.height, embedding.width, embedding.channels, "pixel")
    sizes = embedding.table_sizes(config.context)
    columns = sizes[-1] if len(sizes) > 1 else min(config.context, VIEW_COLUMNS)
    return Grid(-(-config.context // columns), columns, 1, "position")


def default_query(grid: Grid, context: int) -> int:
    """A cell below the middle, and near the end of rows too long to be shown whole, where summaries are."""
    row = min(grid.rows - 1, grid.rows * 5 // 8)
    column = grid.columns - min(grid.columns, VIEW_COLUMNS) + min(grid.columns, VIEW_COLUMNS) * 9 // 16
    return min((row * grid.columns + column) * grid.channels, context - 1)


def draw_view(axis: Any, pattern: Pattern, query: int, grid: Grid, context: int) -> None:
    """One query's view: which of the cells around it are read."""
    cell = query // grid.channels
    axis.set_axis_on()
    picture = functools.partial(view, pattern, cell, grid, context=context)
    draw_around(axis, cell, grid, "#c4262e", picture, **SCALE)
    axis.set_xlabel(f"column of {grid.columns:,}", fontsize=7)
    axis.set_ylabel(f"row of {grid.rows:,}", fontsize=7)
    axis.tick_params(labelsize=6)


def draw_around(
    axis: Any, cell: int, grid: Grid, edge: str, picture: Callable[[range, range], np.ndarray], **colours: Any
) -> None:
    """The ``picture`` of the rows and columns around a query's cell, which is framed."""
    row, column = divmod(cell, grid.columns)
    rows = window(row, grid.rows, VIEW_ROWS, VIEW_ROWS * 7 // 8)
    columns = window(column, grid.columns, VIEW_COLUMNS, VIEW_COLUMNS // 2)
    extent = (columns.start - 0.5, columns.stop - 0.5, rows.stop - 0.5, rows.start - 0.5)
    axis.imshow(picture(rows, columns), interpolation="nearest", extent=extent, **colours)
    axis.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor=edge, linewidth=1.2))


def window(place: int, size: int, shown: int, before: int) -> range:
    """At most ``shown`` of ``size`` places around one; ``before`` of them come before it where there are so many."""
    shown = min(size, shown)
    start = min(max(place - min(before, shown - 1), 0), size - shown)
    return range(start, start + shown)


def view(pattern: Pattern, cell: int, grid: Grid, rows: range, columns: range, context: int) -> np.ndarray:
    """(rows, columns): what a query's cell reads of each. A pixel reads another where any of its channels does."""
    row, column = np.meshgrid(np.array(rows), np.array(columns), indexing="ij")
    first = torch.from_numpy((row * grid.columns + column) * grid.channels)  # of each cell
    picture = np.full(first.shape, NOTHING)
    channel = torch.arange(grid.channels)
    queries = cell * grid.channels + channel
    keys = (first[..., None] + channel)[..., None, :]  # (rows, columns, 1, channels)
    for number, part in reversed(list(enumerate(pattern.parts()))):
        read = part.mask(queries[:, None], keys) & (keys < context)
        picture[read.flatten(2).any(-1).numpy()] = FIRST if number == 0 else LATER
    picture[(first > cell * grid.channels).numpy()] = FUTURE
    itself = (first == cell * grid.channels).numpy()
    picture[itself & (picture != NOTHING)] = SELF
    return picture


def matrix_size(patterns: list[Pattern], context: int) -> int:
    """Positions of a matrix that shows the longest stride, window or segment a few times, within limits."""
    sizes = [0]
    for pattern in patterns:
        of = functools.partial(getattr, pattern)
        sizes.append(of("stride", 0) ** (of("num_factors", 2) - 1))
        sizes.append(of("window", 0) * of("dilation", of("block", 1)))
        sizes += of("segments", ())
    return min(context, MOST_POSITIONS, max(LEAST_POSITIONS, SHOWN_STRIDES * max(sizes)))


def draw_matrix(axis: Any, pattern: Pattern, size: int) -> None:
    """The connectivity of the first ``size`` positions."""
    axis.set_axis_on()
    cell = -(-size // MATRIX_CELLS)
    picture = pooled_connectivity(pattern, size, cell)
    edge = len(picture) * cell - 0.5
    extent = (-0.5, edge, edge, -0.5)
    axis.imshow(picture, interpolation="nearest", extent=extent, **SCALE)
    axis.set_title(f"the first {size:,} positions" + (f", {cell} x {cell} a cell" if cell > 1 else ""), fontsize=7)
    axis.set_xlabel("key position", fontsize=7)
    axis.set_ylabel("query position", fontsize=7)
    axis.tick_params(labelsize=6)


def pooled_connectivity(pattern: Pattern, size: int, cell: int) -> np.ndarray:
    """``connectivity`` by squares of ``cell`` positions, the greatest value in each: (cells, cells).

    So a column or a summary narrower than a cell still shows. Rows are computed a cell at a time.
    """
    count = -(-size // cell)
    picture = np.zeros((count, count), dtype=np.int64)
    for row in range(count):
        block = connectivity(pattern, size, range(row * cell, min((row + 1) * cell, size)))
        picture[row] = np.maximum.reduceat(block.max(0), np.arange(count) * cell)
    return picture


def connectivity(pattern: Pattern, size: int, rows: range | None = None) -> np.ndarray:
    """(rows, size): 0 where query (row) does not read key (column), 1 first part, 2 later parts, 3 self."""
    rows = range(size) if rows is None else rows
    query, key = torch.tensor(rows)[:, None], torch.arange(size)
    picture = torch.zeros(len(rows), size, dtype=torch.int64)
    for number, part in enumerate(pattern.parts()):
        picture[part.mask(query, key)] = min(number + 1, LATER)
    picture[(query == key) & (picture > 0)] = SELF
    return picture.numpy()
