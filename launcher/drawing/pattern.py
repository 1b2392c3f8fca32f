"""`longstride show pattern CONFIG`: draw attention patterns (Child et al. 2019, figure 3), for any context in seconds.

Each distinct pattern of a configuration has two panels. The upper one shows what one query reads of the picture, or of
the sequence folded into rows. The lower one is the matrix of queries and keys over a few strides. A colour is a kind
of keys (``kinds``).

Letters: N positions of the context.
"""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch, Rectangle
from torch import Tensor

from longstride.data_pipelines.plain_files import open_plain
from longstride.kernels import ConfigError, num_pairs
from longstride.kernels.patterns import Dense, Pattern, declares_causal
from longstride.launcher.config import find_config, load_content
from longstride.launcher.drawing.kinds import KINDS, kind_of, places_of, words_of
from longstride.launcher.output import file_names
from longstride.launcher.pictures import plt, styled
from longstride.sparse_model import ImageEmbedding, ModelConfig, SparseTransformer

SHOWN_PATTERNS = 8
COLUMNS = 4  # of panels
SHOWN_STRIDES = 4  # in a matrix
LEAST_POSITIONS, MOST_POSITIONS = 192, 4096  # of a matrix
MATRIX_CELLS = 192  # along an edge, as many as are distinguishable
VIEW_ROWS, VIEW_COLUMNS = 64, 128  # of a view, around its query
NOTHING, SELF, FUTURE = 0, len(KINDS) + 1, len(KINDS) + 2  # values of a cell; between them, 1 + the number of a kind
_SELF_COLOUR, _FUTURE_COLOUR, _FRAME = "#1f3b57", "#e3e6ea", "#c4262e"
SCALE: dict[str, Any] = {
    "cmap": ListedColormap(["white", *(kind.colour for kind in KINDS), _SELF_COLOUR, _FUTURE_COLOUR]),
    "vmin": NOTHING,
    "vmax": FUTURE,
}


class Grid(NamedTuple):
    """The positions as cells in rows: the pixels of a picture, or the sequence folded into rows."""

    rows: int
    columns: int
    channels: int  # positions per cell
    name: str  # of a cell


class ContentChoice:
    """The keys that a head chooses by content in one text; drawn as a pattern of one part.

    ``allowed`` takes queries (P,) and returns which of the text's ``length`` positions they read, (P, length) bool.
    """

    def __init__(self, allowed: Callable[[Tensor], Tensor], length: int) -> None:
        self.allowed, self.length = allowed, length

    def parts(self) -> tuple[Any, ...]:
        """Return itself."""
        return (self,)

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        """Return whether positions q (P, 1) read positions k, with broadcasting; nothing beyond the text is read."""
        rows = self.allowed(q.flatten().clamp_max(self.length - 1))
        read = rows[torch.arange(len(q))[:, None], k.clamp_max(self.length - 1)]
        return read & (q < self.length) & (k < self.length)

    def __str__(self) -> str:
        return "chosen by content"


@styled()
def draw_pattern(source: Path, query: int | None = None, text: Path | None = None, *, trusted: bool = False) -> Any:
    """Draw a configuration: a path, the bare name of a file in ds_configs/experiments, or a run's folder.

    Heads that choose keys by content read the first bytes of a ``text``, with the weights of the run's last checkpoint,
    or with the initial weights of a configuration.

    Raises:
        ConfigError: the configuration cannot be read, has no valid model, or has no such position; its heads choose by
            content, and there is no text; or the text does not fit.
    """
    config = model_config(source)
    model = None if text is None else model_of(source, config, trusted)
    if query is not None:
        check_number("--query", query, config.context, "a position")
    patterns, chosen = users_of(config)
    users: dict[Pattern | ContentChoice, list[tuple[int, int]]] = dict(patterns.items())
    if model is not None and text is not None:
        if not chosen:
            raise ConfigError(f"--text={text}: no head of {source} chooses its keys by content; leave it out")
        users = dict(_choices(model, text))
    elif not users:
        rule = why_unread(config) or "its heads choose their keys by content; give --text FILE"
        raise ConfigError(f"{source}: {rule}")
    shown = list(users.items())[:SHOWN_PATTERNS]
    size = matrix_size([pattern for pattern, _ in shown], config.context)
    grid = grid_of(config)
    position = default_query(grid, config.context) if query is None else query
    if query is None and model is not None:
        position = min(position, max(pattern.length for pattern in users if isinstance(pattern, ContentChoice)) - 1)
    columns = min(COLUMNS, len(shown))
    bands = -(-len(shown) // columns)
    height = 1.0 + view_inches(grid, 3.2)
    figure, axes = plt.subplots(
        2 * bands,
        columns,
        figsize=(max(6.0, 3.7 * columns), 0.6 + (height + 3.8) * bands),
        height_ratios=[height, 3.8] * bands,
        squeeze=False,
        layout="compressed",
    )
    for axis in axes.flat:
        axis.set_axis_off()
    for number, (drawn, places) in enumerate(shown):
        band, column = divmod(number, columns)
        draw_view(axes[2 * band, column], drawn, position, grid, config.context)
        lines = [textwrap.fill(words_of(drawn), 40), places_of(places, config.heads)]
        if not isinstance(drawn, ContentChoice):
            lines.append(f"{share_of_pairs(drawn, config.context):.3g} % of the pairs")
        axes[2 * band, column].set_title("\n".join(lines))
        draw_matrix(axes[2 * band + 1, column], drawn, size)
    num_hidden = len(users) - len(shown)
    hidden = f"; {num_hidden} more {'heads' if text else 'patterns'} are not shown" if num_hidden else ""
    if chosen and text is None:
        hidden += f"; {why_unread(config) or f'{chosen} heads choose by content: --text FILE'}"
    figure.suptitle(f"{name_of(source)}: what query {position:,} of {config.context:,} positions reads{hidden}")
    handles = legend_of(pattern for pattern, _ in shown)
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 3 * max(columns, 2)))
    return figure


def users_of(config: ModelConfig) -> tuple[dict[Pattern, list[tuple[int, int]]], int]:
    """Return the (layer, head) pairs of each distinct pattern, and the number of heads that choose by content."""
    users: dict[Pattern, list[tuple[int, int]]] = {}
    chosen = 0
    for layer, heads in enumerate(config.layer_patterns()):
        for head, pattern in enumerate(heads):
            users.setdefault(pattern, []).append((layer, head))
        chosen += config.heads - len(heads)
    return users, chosen


def why_unread(config: ModelConfig) -> str | None:
    """Name the mixers that have neither patterns nor a method ``reads``; None if a text can show what they read."""
    model, kinds = SparseTransformer.of_each_kind(config)
    without_patterns = (
        block.attention
        for block, kind in zip(model.blocks, kinds, strict=True)
        if kind.mixer is not None and len(kind.mixer.head_patterns(config)) < config.heads
    )
    names = dict.fromkeys(type(mixer).__name__ for mixer in without_patterns if mixer and not mixer.has_reads)
    if not names:
        return None
    return f"the mixer {', '.join(names)} has no method reads, so there is no picture of what it reads"


def share_of_pairs(pattern: Pattern, context: int) -> float:
    """Return the percentage of the pairs of dense attention, which is causal if the pattern is."""
    return 100 * num_pairs(pattern, context) / num_pairs(Dense(declares_causal(pattern)), context)


def legend_of(patterns: Iterable[Pattern | ContentChoice]) -> list[Patch]:
    """Return the legend of all colours in panels of patterns."""
    patterns = list(patterns)
    kinds = sorted({kind_of(part) for pattern in patterns for part in pattern.parts()})
    future = [Patch(facecolor=_FUTURE_COLOUR, label="still to come")] if any(map(declares_causal, patterns)) else []
    return [
        *(Patch(facecolor=KINDS[kind].colour, label=KINDS[kind].word) for kind in kinds),
        Patch(facecolor=_SELF_COLOUR, label="itself"),
        *future,
        Patch(facecolor="white", edgecolor="#8c959f", label="not read"),
        Patch(fill=False, edgecolor=_FRAME, label="the query"),
    ]


def name_of(source: Path) -> str:
    """Return the name of a source in a picture; that of a run is its folder, even if its configuration is named."""
    if source.is_dir():
        return source.resolve().name
    return source.resolve().parent.name if source.name == file_names.CONFIG else source.stem


def model_config(source: Path) -> ModelConfig:
    """Read the model of a configuration or a run's folder; raise ConfigError if there is no valid one."""
    path = source / file_names.CONFIG if source.is_dir() else find_config(source)
    if source.is_dir() and not path.exists():
        raise ConfigError(f"{source}: holds no run: it has no {file_names.CONFIG}; name a run's folder or a JSON file")
    content = load_content(path)
    if "model" not in content:
        raise ConfigError(f"{path}: has no model")
    try:
        return ModelConfig.model_validate(content["model"])
    except ConfigError as error:
        raise error.under("model") from None


def model_of(source: Path, config: ModelConfig, trusted: bool) -> SparseTransformer:
    """Return the model with the weights of a run's last checkpoint, or with initial ones."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = SparseTransformer(config.model_copy(update={"backend": "auto"})).eval()
    if source.is_dir():
        from longstride.launcher.checkpoints import master_weights, open_checkpoint  # imports DeepSpeed

        model.load_state_dict(master_weights(open_checkpoint(source, None, trusted=trusted)))
    return model


def _choices(model: SparseTransformer, text: Path) -> list[tuple[ContentChoice, list[tuple[int, int]]]]:
    """Return the choice of each head that chooses by content in a text, with its (layer, head)."""
    tokens = read_text(text, model.config.context, model.config.vocabulary)
    choices: list[tuple[ContentChoice, list[tuple[int, int]]]] = []
    with ExitStack() as hooks, torch.no_grad():
        for layer, (mixer, heads) in enumerate(zip(model.mixers, model.config.layer_patterns(), strict=True)):

            def take(mixer: Any, inputs: tuple[Any, ...], layer: int = layer, first: int = len(heads)) -> None:
                for head in range(first, model.config.heads):
                    reads = mixer.reads(inputs[0], head, *inputs[1:])
                    choices.append((ContentChoice(reads, len(tokens)), [(layer, head)]))

            hooks.callback(mixer.register_forward_pre_hook(take).remove)
        model(tokens[None], return_nats=True)
    return choices


def read_text(text: Path, context: int, vocabulary: int) -> Tensor:
    """Read the first bytes of a file for a context, (N,) uint8; raise ConfigError if they do not fit the model."""
    try:
        with open_plain(text) as file:
            content = file.read(context)
    except OSError as error:
        raise ConfigError(f"--text={text}: cannot be read: {error.strerror}; name a text") from None
    if len(content) < 2 or max(content) >= vocabulary:
        raise ConfigError(f"--text={text}: must have at least two bytes, all below {vocabulary}")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def check_number(option: str, number: int, count: int, what: str) -> None:
    """Raise ConfigError unless an option is one of 0 … count - 1."""
    if not 0 <= number < count:
        near = min(max(number, 0), count - 1)
        raise ConfigError(f"{option}={number}: must be from 0 to {count - 1}, {what}; nearest {near}")


def grid_of(config: ModelConfig) -> Grid:
    """Return the pixels of the picture, or the sequence in rows as in the embedding."""
    embedding = config.embedding
    if isinstance(embedding, ImageEmbedding):
        return Grid(embedding.height, embedding.width, embedding.channels, "pixel")
    sizes = embedding.table_sizes(config.context)
    columns = sizes[-1] if len(sizes) > 1 else min(config.context, VIEW_COLUMNS)
    return Grid(-(-config.context // columns), columns, 1, "position")


def default_query(grid: Grid, context: int) -> int:
    """Return a query below the middle, and near the end of long rows, where summaries are."""
    row = min(grid.rows - 1, grid.rows * 5 // 8)
    column = grid.columns - min(grid.columns, VIEW_COLUMNS) + min(grid.columns, VIEW_COLUMNS) * 9 // 16
    return min((row * grid.columns + column) * grid.channels, context - 1)


def view_inches(grid: Grid, width: float) -> float:
    """Return the height of a view: pixels are square, rows of a sequence are high enough to be distinguished."""
    rows, columns = min(grid.rows, VIEW_ROWS), min(grid.columns, VIEW_COLUMNS)
    return min(width * rows / columns, 3.6) if grid.name == "pixel" else min(max(0.12 * rows, 0.8), 2.4)


def draw_view(axis: Any, pattern: Pattern | ContentChoice, query: int, grid: Grid, context: int) -> None:
    """Draw which of the cells around a query it reads."""
    cell = query // grid.channels
    axis.set_axis_on()
    picture = functools.partial(view, pattern, cell, grid, context=context)
    draw_around(axis, cell, grid, _FRAME, picture, **SCALE)
    label_cells(axis, grid)


def label_cells(axis: Any, grid: Grid) -> None:
    """Label the axes of a context in rows."""
    axis.set_xlabel(f"column of {grid.columns:,}")
    axis.set_ylabel(f"row of {grid.rows:,}")


def draw_around(
    axis: Any, cell: int, grid: Grid, edge: str, picture: Callable[[range, range], np.ndarray], **colours: Any
) -> None:
    """Draw the ``picture`` of the rows and columns around a query's cell, with a frame around it."""
    row, column = divmod(cell, grid.columns)
    rows = window(row, grid.rows, VIEW_ROWS, VIEW_ROWS * 7 // 8)
    columns = window(column, grid.columns, VIEW_COLUMNS, VIEW_COLUMNS // 2)
    extent = (columns.start - 0.5, columns.stop - 0.5, rows.stop - 0.5, rows.start - 0.5)
    aspect = "equal" if grid.name == "pixel" else "auto"
    axis.imshow(picture(rows, columns), interpolation="nearest", extent=extent, aspect=aspect, **colours)
    axis.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor=edge, linewidth=1.2))
    axis.yaxis.get_major_locator().set_params(integer=True)
    axis.xaxis.get_major_locator().set_params(integer=True)


def window(place: int, size: int, shown: int, before: int) -> range:
    """Return at most ``shown`` of ``size`` places around one, with ``before`` of them before it if possible."""
    shown = min(size, shown)
    start = min(max(place - min(before, shown - 1), 0), size - shown)
    return range(start, start + shown)


def view(
    pattern: Pattern | ContentChoice, cell: int, grid: Grid, rows: range, columns: range, context: int
) -> np.ndarray:
    """Return (rows, columns) of what a query's cell reads. A pixel reads another if any of its channels does."""
    row, column = np.meshgrid(np.array(rows), np.array(columns), indexing="ij")
    first = torch.from_numpy((row * grid.columns + column) * grid.channels)  # of each cell
    picture = np.full(first.shape, NOTHING)
    channel = torch.arange(grid.channels)
    queries = cell * grid.channels + channel
    keys = (first[..., None] + channel)[..., None, :]  # (rows, columns, 1, channels)
    for part in reversed(pattern.parts()):
        read = part.mask(queries[:, None], keys) & (keys < context)
        picture[read.flatten(2).any(-1).numpy()] = 1 + kind_of(part)
    if declares_causal(pattern):
        picture[(first > cell * grid.channels).numpy()] = FUTURE
    itself = (first == cell * grid.channels).numpy()
    picture[itself & (picture != NOTHING)] = SELF
    return picture


def matrix_size(patterns: Sequence[Pattern | ContentChoice], context: int) -> int:
    """Return the positions of a matrix that shows the longest stride, window or segment a few times, within limits."""
    sizes = [0]
    for pattern in patterns:
        if isinstance(pattern, ContentChoice):
            return min(pattern.length, MOST_POSITIONS)
        of = functools.partial(getattr, pattern)
        sizes.append(of("stride", 0) ** (of("num_factors", 2) - 1))
        sizes.append(of("window", 0) * of("dilation", of("block", 1)))
        sizes += of("segments", ())
    return min(context, MOST_POSITIONS, max(LEAST_POSITIONS, SHOWN_STRIDES * max(sizes)))


def draw_matrix(axis: Any, pattern: Pattern | ContentChoice, size: int) -> None:
    """Draw the connectivity of the first ``size`` positions."""
    axis.set_axis_on()
    cell = -(-size // MATRIX_CELLS)
    picture = pooled_connectivity(pattern, size, cell)
    edge = len(picture) * cell - 0.5
    extent = (-0.5, edge, edge, -0.5)
    axis.imshow(picture, interpolation="nearest", extent=extent, **SCALE)
    axis.set_title(f"the first {size:,} positions" + (f", {cell} × {cell} a cell" if cell > 1 else ""))
    axis.set_xlabel("key position")
    axis.set_ylabel("query position")
    axis.locator_params(nbins=5)


def pooled_connectivity(pattern: Pattern | ContentChoice, size: int, cell: int) -> np.ndarray:
    """Pool ``connectivity`` by squares of ``cell`` positions to the maximum of each: (cells, cells).

    So a column or a summary that is narrower than a cell is still visible. Rows are computed one cell at a time.
    """
    count = -(-size // cell)
    picture = np.zeros((count, count), dtype=np.int64)
    for row in range(count):
        block = connectivity(pattern, size, range(row * cell, min((row + 1) * cell, size)))
        picture[row] = np.maximum.reduceat(block.max(0), np.arange(count) * cell)
    return picture


def connectivity(pattern: Pattern | ContentChoice, size: int, rows: range | None = None) -> np.ndarray:
    """Return (rows, size): 0 if the query (row) does not read the key (column), 1 + the kind of key, or SELF."""
    rows = range(size) if rows is None else rows
    query, key = torch.tensor(rows)[:, None], torch.arange(size)
    picture = torch.zeros(len(rows), size, dtype=torch.int64)
    for part in pattern.parts():
        picture[part.mask(query, key)] = 1 + kind_of(part)
    picture[(query == key) & (picture > 0)] = SELF
    return picture.numpy()
