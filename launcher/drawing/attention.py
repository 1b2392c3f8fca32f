"""`longstride show attention RUN|MODEL`: draw the attention of a trained model by layer (Child et al. 2019, figure 2).

The weights come from the running model through hooks that change nothing: each head's softmax over a query's allowed
keys, from the model's own queries and keys.

Letters: N positions of the context, P shown queries.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.patches import Patch
from torch import Tensor

from longstride.data_pipelines.palette import Palette
from longstride.kernels import ConfigError
from longstride.launcher.checkpoints import master_weights, open_checkpoint
from longstride.launcher.drawing.kinds import words_of
from longstride.launcher.drawing.pattern import (
    VIEW_COLUMNS,
    VIEW_ROWS,
    Grid,
    check_number,
    draw_around,
    grid_of,
    label_cells,
    read_text,
    view_inches,
)
from longstride.launcher.evaluation import evaluate
from longstride.launcher.files import check_new
from longstride.launcher.identity import trained_on
from longstride.launcher.models import TRAINED, Exported, ModelData, is_export, load_model
from longstride.launcher.pictures import FAINT, plt, save_picture, styled
from longstride.launcher.ranks import Ranks
from longstride.sparse_model import SparseTransformer

MOST_QUERIES = 6  # rows of views
DEFAULT_QUERIES = 4
MOST_LAYERS = 6  # columns of views
MOST_MATRICES = 8
MATRIX_CELLS = 256  # along an edge of a matrix
_FRAME = "#19b8ff"
SCORES_IN_WORK = 1 << 24  # computed at once
DECADES = 3  # below the largest weight, which colours distinguish
HEAT = "inferno"  # from the least weight, nearly black, to the largest
Step = int | Literal["best"] | None
Reduce = Callable[[np.ndarray], np.ndarray]  # of some rows (p, N) float64, with NaN for keys that are not read


class Subject(NamedTuple):
    """A model and the context that it reads."""

    model: SparseTransformer  # on the CPU, in evaluation mode
    tokens: Tensor  # (N,) integers
    data: ModelData  # what they are
    name: str  # in a title


def run(arguments: argparse.Namespace) -> int:
    """Run the verb; return its exit code."""
    check_new(arguments.output, "--output", ".png")
    names = ("source", "step", "context_number", "head", "weights", "data", "text")
    options = {name: getattr(arguments, name) for name in names}
    figure = draw_attention(**options, queries=arguments.query, trusted=arguments.trust_checkpoint)
    save_picture(figure, arguments.output)
    print(arguments.output)
    return 0


@styled()
def draw_attention(
    source: Path,
    step: Step = None,
    context_number: int | None = None,
    head: int | None = None,
    queries: Sequence[int] | None = None,
    weights: str = TRAINED,
    *,
    data: str | None = None,
    text: Path | None = None,
    trusted: bool = False,
) -> Any:
    """Draw the attention of a run's checkpoint or of an exported model on one context.

    Pictures, and any data with ``queries``, show the view of each query by layer. Other data shows a matrix of queries
    and keys for each layer. The arguments are the options of the verb, and None is the default of each.

    Raises:
        ConfigError: no such checkpoint, head or query, a damaged checkpoint, or missing data.
        DataError: no such context, or data that cannot be read.
    """
    if text is not None and (data is not None or context_number is not None):
        option = f"--data={data}" if data is not None else f"--context-number={context_number}"
        raise ConfigError(f"{option}: cannot be combined with --text; leave one of them out")
    if is_export(source):
        for option, value in (("--step", step), ("--weights", None if weights == TRAINED else weights)):
            if value is not None:
                raise ConfigError(f"{option}={value}: {source} is an export, which has its own weights; leave it out")
    if text is None:
        options = argparse.Namespace(run=source, step=step, weights=weights, data=data, trust_checkpoint=trusted)
        model, tokens, read, name = _open_context(options, context_number or 0)
    else:
        model, tokens, read, name = _open_text(source, step, weights, text, trusted)
    palette, unit = read.palette, "byte" if read.palette is None else read.unit
    if head is not None:
        check_number("--head", head, model.config.heads, "a head of the model")
    for query in queries or ():
        check_number("--query", query, len(tokens), f"a {unit} of the context")
    if queries and len(queries) > MOST_QUERIES:
        raise ConfigError(f"--query={queries[-1]}: one picture has room for {MOST_QUERIES} queries; leave some out")
    heads = "mean of all heads" if head is None else f"head {head}"
    title = f"{name}, {len(tokens):,} {unit}s; {heads}{'' if weights == TRAINED else '; moving average of the weights'}"
    if model.config.embedding.type == "image" or queries:
        grid = grid_of(model.config)
        places = list(queries or [query for query in default_queries(grid) if query < len(tokens)] or [len(tokens) - 1])
        return draw_views(model, tokens, places, head, grid, title, palette)
    return draw_matrices(model, tokens, head, title, unit)


def _open_context(options: argparse.Namespace, number: int) -> Subject:
    """Open the model of the options of `evaluate`, and a context of the validation split.

    Raises:
        ConfigError: no such model, or no data that fits it.
        DataError: no such context, or data that cannot be read.
    """
    if options.data is None and is_export(options.run):
        raise ConfigError(f"{options.run}: an exported model does not include data; give --data DIR or --text FILE")
    opened = evaluate.open_subject(options, Ranks())
    split = opened.config.data.validation_split
    if not opened.data.has_split(split):
        rule = f"the data has no split {split!r}; name data that has it, or give --text FILE"
        raise ConfigError(f"--data={options.data or opened.config.data.path}: {rule}")
    tokens = opened.data.context(number)
    step, _, weights = opened.load()
    config = opened.config.model.model_copy(update={"backend": "auto"})
    model = evaluate.model_of(config, weights, "fp32", torch.device("cpu"))
    name = f"{options.run.resolve().name}, step {step}, {split}: context {number}"
    return Subject(model, tokens, opened.data.identity, name)


def _open_text(source: Path, step: Step, weights: str, text: Path, trusted: bool) -> Subject:
    """Open a run's checkpoint or an exported model, and the first bytes of a text.

    ConfigError: no such model, or the text does not fit it.
    """
    name = source.resolve().name
    if is_export(source):
        read = ModelData.of((exported := Exported(source, trust_code=trusted)).content, exported.config)
        model = load_model(source, dtype=torch.float32, trust_code=trusted)
    else:
        checkpoint = open_checkpoint(source, step, trusted=trusted)
        config = checkpoint.config.model.model_copy(update={"backend": "auto"})
        model = evaluate.model_of(config, master_weights(checkpoint, weights), "fp32", torch.device("cpu"))
        read = trained_on(checkpoint)
        name += f", step {checkpoint.manifest.step}"
    if read.modality.name != "text":
        raise ConfigError(f"--text={text}: the model reads {read.modality.words}; give --data DIR")
    tokens = read_text(text, model.config.context, model.config.vocabulary)
    return Subject(model, tokens, read, f"{name}: {text.name}")


def spread(length: int, count: int) -> list[int]:
    """Return at most ``count`` evenly spaced positions, none at an end."""
    return sorted({length * (2 * place + 1) // (2 * count) for place in range(count)})


def chosen_layers(layers: int, most: int) -> list[int]:
    """Return at most ``most`` layers, evenly spaced from the first to the last."""
    return np.linspace(0, layers - 1, min(layers, most)).round().astype(int).tolist()


def draw_views(
    model: SparseTransformer,
    tokens: Tensor,
    queries: Sequence[int],
    head: int | None,
    grid: Grid,
    title: str,
    palette: Palette | None = None,
) -> Any:
    """Draw a row per query and a column per layer: the weights on the picture or on the folded sequence."""
    layers, causal = chosen_layers(len(model.mixers), MOST_LAYERS), model.config.objective.causal
    rows = attention_rows(
        model, tokens, queries, layers=layers, head=head, keep=lambda weights: by_cell(weights, grid), unread=math.nan
    )  # a layer: (P, rows x columns)
    scale = _scale(rows)
    behind = backdrop(tokens, grid, palette)
    pictures = int(grid.name == "pixel")  # a row begins with the picture itself
    columns = pictures + len(layers)
    width = 2.5 if columns > 2 else 3.8
    shape = min(grid.rows, VIEW_ROWS) / min(grid.columns, VIEW_COLUMNS)
    height = max(width * shape, 0.7) if pictures else view_inches(grid, width)
    figure, axes = plt.subplots(
        len(queries),
        columns,
        figsize=(max(6.0, width * columns + 0.9), 1.2 + (0.55 + height) * len(queries)),
        squeeze=False,
        layout="compressed",
    )
    for line, query in enumerate(queries):
        cell = query // grid.channels
        last = cell if causal else None
        if pictures:
            draw_cells(axes[line, 0], faded(behind, last), cell, grid)
            axes[line, 0].set_title(f"the picture, query {query:,}")
        for axis, layer in zip(axes[line, pictures:], layers, strict=True):
            draw_cells(axis, overlay(behind, scale(rows[layer][line]), last), cell, grid)
            axis.set_title(f"layer {layer}, query {query:,}")
        if not pictures:
            for axis in axes[line]:
                label_cells(axis, grid)
    of_pixel = " (sum over its channels)" if grid.channels > 1 else ""
    _add_colour_bar(figure, axes, scale, f"weight of a {grid.name}{of_pixel}")
    figure.legend(
        handles=[
            Patch(fill=False, edgecolor=_FRAME, label="the query"),
            Patch(facecolor="0.5", label="not read" if pictures else "not read (lighter: a greater byte)"),
            *([Patch(facecolor="0.93", edgecolor=FAINT, label="still to come")] if causal else []),
        ],
        loc="outside lower center",
        ncols=3,
    )
    figure.suptitle(f"{title}{of_layers(layers, model)}")
    return figure


def _scale(rows: dict[int, np.ndarray]) -> LogNorm:
    """Return a logarithmic scale for all panels, up to the largest weight."""
    largest = max([float(np.nanmax(weights, initial=0.0)) for weights in rows.values()])
    largest = largest if largest > 0 else 1.0
    return LogNorm(largest / 10**DECADES, largest, clip=True)


def _add_colour_bar(figure: Any, axes: Any, scale: LogNorm, label: str) -> None:
    bar = figure.colorbar(ScalarMappable(scale, HEAT), ax=axes, fraction=0.05, pad=0.02, aspect=30, extend="min")
    bar.set_label(f"{label}; below {scale.vmin:.2g} like zero")


def default_queries(grid: Grid) -> list[int]:
    """Return queries in evenly spaced rows, and in different columns."""
    cells = [
        grid.rows * (2 * place + 1) // (2 * DEFAULT_QUERIES) * grid.columns + grid.columns * (3 + 5 * place % 8) // 12
        for place in range(DEFAULT_QUERIES)
    ]
    return [cell * grid.channels for cell in dict.fromkeys(cells)]


def by_cell(weights: np.ndarray, grid: Grid) -> np.ndarray:
    """Pool (P, N) weights to (P, cells): the sum over the channels of a pixel; NaN if none of them is read."""
    pooled = by_run(weights, np.arange(0, weights.shape[1], grid.channels))
    return np.pad(pooled, ((0, 0), (0, grid.rows * grid.columns - pooled.shape[1])), constant_values=math.nan)


def by_run(weights: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Pool (P, N) weights to (P, runs): the sum over the keys from each bound to the next; NaN if none is read."""
    read = np.logical_or.reduceat(~np.isnan(weights), bounds, axis=1)
    return np.where(read, np.add.reduceat(np.nan_to_num(weights), bounds, axis=1), math.nan)


def backdrop(tokens: Tensor, grid: Grid, palette: Palette | None = None) -> np.ndarray:
    """Return (cells, 3) from 0 to 1: the colours of a palette or of three channels, or the bytes in grey."""
    values = tokens[:, None].numpy() if palette is None else palette.colours[tokens.numpy()]
    padded = np.zeros((grid.rows * grid.columns * grid.channels, values.shape[1]))
    padded[: len(tokens)] = values / 255
    cells = padded.reshape(grid.rows * grid.columns, -1)
    return cells if cells.shape[1] == 3 else cells.mean(-1, keepdims=True).repeat(3, axis=1)


def faded(colours: np.ndarray, cell: int | None) -> np.ndarray:
    """Make the cells after that of a query nearly white, (cells, 3); None: a query reads both sides."""
    shown = colours.copy()
    if cell is None:
        return shown
    shown[cell + 1 :] = 0.88 + 0.12 * shown[cell + 1 :]
    return shown


def overlay(colours: np.ndarray, strength: np.ndarray, cell: int | None) -> np.ndarray:
    """Draw the weights of cells, (cells,) from 0 to 1, in colours over a grey version of the (cells, 3) colours.

    A cell that is not read, NaN, stays grey; one of weight 0 has the colour of the scale's lower end.
    """
    grey = colours.mean(-1, keepdims=True)
    spread_out = 0.35 + 0.35 * (grey - grey.min()) / max(float(np.ptp(grey)), 1e-9)
    shown = faded(spread_out.repeat(3, axis=1), cell)
    read = ~np.isnan(np.ma.filled(strength, math.nan))
    shown[read] = plt.get_cmap(HEAT)(np.asarray(strength)[read])[:, :3]
    return shown


def draw_cells(axis: Any, colours: np.ndarray, cell: int, grid: Grid) -> None:
    """Draw (cells, 3) colours around a query's cell, with a frame around it."""
    picture = colours.reshape(grid.rows, grid.columns, 3)
    draw_around(axis, cell, grid, _FRAME, lambda rows, columns: picture[np.ix_(rows, columns)])


def draw_matrices(model: SparseTransformer, tokens: Tensor, head: int | None, title: str, unit: str = "byte") -> Any:
    """Draw a matrix for each layer: evenly spaced queries as rows, sums over runs of keys as columns."""
    length = len(tokens)
    layers = chosen_layers(len(model.mixers), MOST_MATRICES)
    cells = min(length, MATRIX_CELLS)
    queries = spread(length, cells)
    bounds = np.arange(cells) * length // cells
    rows = attention_rows(
        model, tokens, queries, layers=layers, head=head, keep=lambda weights: by_run(weights, bounds), unread=math.nan
    )
    scale = _scale(rows)
    columns = min(4, len(layers))
    lines = -(-len(layers) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(max(6.0, 3.2 * columns + 1.0), 1.0 + 3.4 * lines), squeeze=False, layout="compressed"
    )
    for axis in axes.flat:
        axis.set_axis_off()
    patterns = model.config.layer_patterns()
    for axis, layer in zip(axes.flat, layers, strict=False):
        axis.set_axis_on()
        axis.patch.set(facecolor="#f0f2f4", edgecolor="#c9ced4", hatch="////")
        axis.imshow(rows[layer], cmap=HEAT, norm=scale, interpolation="nearest", extent=(0, length, length, 0))
        kinds = dict.fromkeys(words_of(pattern) for pattern in patterns[layer])
        if len(patterns[layer]) < model.config.heads:  # the other heads choose by content
            kinds[type(model.mixers[layer]).__name__] = None
        hidden = f" and {len(kinds) - 1} more" if len(kinds) > 1 else ""
        axis.set_title(f"layer {layer}\n{next(iter(kinds))}{hidden}")
        axis.set_xlabel("key position")
        axis.set_ylabel("query position")
        axis.locator_params(nbins=5)
    of_run = f"weight of {length / cells:.4g} keys" if length > cells else "weight of a key"
    _add_colour_bar(figure, axes, scale, of_run)
    handle = Patch(facecolor="#f0f2f4", edgecolor="#c9ced4", hatch="////", label="not read: outside the pattern")
    figure.legend(handles=[handle], loc="outside lower center")
    pooled = f"\n{cells} of {length:,} queries; weights are summed over {length / cells:.4g} keys a cell"
    figure.suptitle(f"{title}{of_layers(layers, model)}{pooled if length > cells else ''}")
    return figure


def of_layers(layers: Sequence[int], model: SparseTransformer) -> str:
    """Name the shown layers, unless all are shown."""
    count = len(model.mixers)
    return "" if len(layers) == count else f"; layers {', '.join(map(str, layers))} of {count}"


def attention_rows(
    model: SparseTransformer,
    tokens: Tensor,
    queries: Sequence[int],
    *,
    layers: Sequence[int],
    head: int | None = None,
    keep: Reduce = np.asarray,
    unread: float = 0.0,
) -> dict[int, np.ndarray]:
    """Return the weights of some queries in some layers, while the model reads one context.

    Args:
        model: in evaluation mode.
        tokens: (N,) bytes of the context.
        queries: P positions.
        layers: which layers, by number.
        head: one head; None is the mean over all that have a key for the query.
        keep: reduces rows, for example to sums over bins of keys, because all (P, N) weights may not fit in memory.
        unread: weight of a key that no head may read.

    Returns:
        The reduced rows of each layer, (P, …) float64. A row sums to 1, or to 0 if a query has no key.
    """
    rows_by_layer: dict[int, np.ndarray] = {}
    heads = range(model.config.heads) if head is None else [head]
    patterns = model.config.layer_patterns()
    position = torch.arange(len(tokens))
    with ExitStack() as hooks, torch.no_grad():
        for layer in layers:

            def take(mixer: Any, inputs: tuple[Any, ...], layer: int = layer) -> None:
                weights_of, rows = mixer.weights(*inputs), []
                count = max(1, SCORES_IN_WORK // len(tokens))
                for start in range(0, len(queries), count):
                    chunk = torch.tensor(queries[start : start + count])
                    total = torch.zeros(len(chunk), len(tokens), dtype=torch.float64)
                    counted = torch.zeros(len(chunk), 1)  # heads that have a key for the query
                    for index in heads:
                        weights = weights_of(chunk, index)
                        total += weights
                        counted += weights.any(-1, keepdim=True)
                    mean = total / counted.clamp_min(1)
                    if not math.isclose(unread, 0.0):
                        read = torch.zeros_like(mean, dtype=torch.bool)
                        for index in heads:
                            if index < len(patterns[layer]):
                                read |= patterns[layer][index].mask(chunk[:, None], position)
                            else:  # content decides
                                read |= mixer.reads(inputs[0], index, *inputs[1:])(chunk)
                        mean[~read] = unread
                    rows.append(keep(mean.numpy()))
                rows_by_layer[layer] = np.concatenate(rows)

            hooks.callback(model.mixers[layer].register_forward_pre_hook(take).remove)
        model(tokens[None], return_nats=True)  # does not store the logits of all positions
    return rows_by_layer
