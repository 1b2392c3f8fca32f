"""`longstride show attention RUN`: what a trained model attends to, layer by layer (Child et al. 2019, figure 2).

The weights come from the running model by hooks that change nothing: each head's softmax over a query's allowed keys,
from the model's own queries and keys.

Letters: H heads, N positions of the context, P queries that are shown, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from longstride.data_pipelines.palette import Palette
from longstride.kernels import ConfigError
from longstride.launcher.checkpoints import master_weights, open_checkpoint
from longstride.launcher.config import RunConfig
from longstride.launcher.data import RunData
from longstride.launcher.drawing.pattern import VIEW_COLUMNS, VIEW_ROWS, Grid, check_number, draw_around, grid_of
from longstride.launcher.models import TRAINED
from longstride.launcher.pictures import plt
from longstride.launcher.ranks import Ranks
from longstride.sparse_model import SparseTransformer

MOST_QUERIES = 6  # one below the other
DEFAULT_QUERIES = 4
MOST_LAYERS = 6  # side by side, of views
MOST_MATRICES = 8
MATRIX_CELLS = 256  # along an edge of a matrix
SCORES_IN_WORK = 1 << 24  # at once: queries are taken so many at a time
Keep = Callable[[np.ndarray], np.ndarray]  # what is kept of some rows (p, N) float64
_SCALE = "colour: {} root of the weight, from 0 to the largest of each panel"


def draw_attention(
    run: Path,
    step: int | Literal["best"] | None,
    context_number: int,
    head: int | None,
    queries: Sequence[int] | None,
    weights: str = TRAINED,
    *,
    trusted: bool = False,
) -> Any:
    """The figure of a run's checkpoint on one context of its validation split.

    Pictures, and other data where ``queries`` are given: each query's view, over the layers. Other data without: a
    matrix of queries and keys for each layer.

    Raises:
        ConfigError: no such checkpoint, head or query, or a damaged one.
        DataError: no such context, or data that cannot be read.
    """
    checkpoint = open_checkpoint(run, step, trusted=trusted)
    config = checkpoint.config
    if head is not None:
        check_number("--head", head, config.model.heads, "a head of the model")
    data = RunData(config, Ranks())
    tokens, unit = data.context(context_number), "byte" if data.palette is None else data.unit
    for query in queries or ():
        check_number("--query", query, len(tokens), f"a {unit} of the context")
    if queries and len(queries) > MOST_QUERIES:
        raise ConfigError(f"--query={queries[-1]}: one picture has room for {MOST_QUERIES} queries; leave some out")
    # On the CPU, whatever trained it: only the model's queries and keys are taken, and the rows are computed here.
    state = master_weights(checkpoint, weights)
    model = SparseTransformer(config.model.model_copy(update={"backend": "auto"}))
    model.load_state_dict(state)
    name = f"{run.resolve().name}, step {checkpoint.manifest.step}, {config.data.validation_split}"
    who = "mean of all heads" if head is None else f"head {head}"
    who += "" if weights == TRAINED else "; moving average of the weights"
    title = f"{name}: context {context_number}, {len(tokens):,} {unit}s; {who}"
    if config.model.embedding.type == "image" or queries:
        grid = grid_of(config.model)
        places = list(queries or [query for query in default_queries(grid) if query < len(tokens)] or [len(tokens) - 1])
        return draw_views(model.eval(), tokens, places, head, grid, title, data.palette)
    return draw_matrices(model.eval(), tokens, head, title, config)


def spread(length: int, count: int) -> list[int]:
    """At most ``count`` positions, evenly apart, none at an end."""
    return sorted({length * (2 * place + 1) // (2 * count) for place in range(count)})


def chosen_layers(layers: int, most: int) -> list[int]:
    """At most ``most`` layers, evenly spread from the first to the last."""
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
    """A row for each query, a column for each layer: its weights on the picture or on the folded sequence."""
    layers = chosen_layers(len(model.mixers), MOST_LAYERS)
    rows = attention_rows(
        model, tokens, queries, layers=layers, head=head, keep=lambda weights: by_cell(weights, grid)
    )  # a layer: (P, rows x columns)
    shape = min(grid.rows, VIEW_ROWS) / min(grid.columns, VIEW_COLUMNS)
    behind = backdrop(tokens, grid, palette)
    pictures = int(grid.name == "pixel")  # the picture itself comes first in a row
    columns = pictures + len(layers)
    width = 2.4 if columns > 2 else 3.6
    figure, axes = plt.subplots(
        len(queries),
        columns,
        figsize=(max(6.0, width * columns), 0.6 + (0.35 + width * max(shape, 0.2)) * len(queries)),
        squeeze=False,
        layout="constrained",
    )
    for line, query in enumerate(queries):
        cell = query // grid.channels
        if pictures:
            draw_cells(axes[line, 0], faded(behind, cell), cell, grid)
            axes[line, 0].set_title(f"the picture, query {query:,}", fontsize=7)
        for axis, layer in zip(axes[line, pictures:], layers, strict=True):
            draw_cells(axis, overlay(behind, rows[layer][line], cell), cell, grid)
            axis.set_title(f"layer {layer}, query {query:,}", fontsize=7)
    what = "framed: the query; faded: what comes after it"
    figure.suptitle(f"{title}{of_layers(layers, model)}\n{what}; {_SCALE.format('square')}", fontsize=8)
    return figure


def default_queries(grid: Grid) -> list[int]:
    """Queries in rows evenly apart, and in different columns."""
    cells = [
        grid.rows * (2 * place + 1) // (2 * DEFAULT_QUERIES) * grid.columns + grid.columns * (3 + 5 * place % 8) // 12
        for place in range(DEFAULT_QUERIES)
    ]
    return [cell * grid.channels for cell in dict.fromkeys(cells)]


def by_cell(weights: np.ndarray, grid: Grid) -> np.ndarray:
    """(P, N) weights to (P, cells): a pixel's are the sum over its channels; cells beyond the context have 0."""
    whole = np.zeros((len(weights), grid.rows * grid.columns * grid.channels))
    whole[:, : weights.shape[1]] = weights
    return whole.reshape(len(weights), -1, grid.channels).sum(-1)


def backdrop(tokens: Tensor, grid: Grid, palette: Palette | None = None) -> np.ndarray:
    """(cells, 3) from 0 to 1: the colours of a palette or of three channels; of anything else the bytes in grey."""
    if palette is not None:
        coloured = np.zeros((grid.rows * grid.columns, 3))
        coloured[: len(tokens)] = palette.colours[tokens.numpy()] / 255
        return coloured
    whole = np.zeros(grid.rows * grid.columns * grid.channels)
    whole[: len(tokens)] = tokens.numpy() / 255
    cells = whole.reshape(-1, grid.channels)
    return cells if grid.channels == 3 else cells.mean(-1, keepdims=True).repeat(3, axis=1)


def faded(colours: np.ndarray, cell: int) -> np.ndarray:
    """(cells, 3): the cells after a query's nearly white."""
    shown = colours.copy()
    shown[cell + 1 :] = 0.88 + 0.12 * shown[cell + 1 :]
    return shown


def overlay(colours: np.ndarray, weights: np.ndarray, cell: int) -> np.ndarray:
    """(cells, 3): a query's weights (cells,) in colour, over the colours as grey of medium contrast."""
    grey = colours.mean(-1, keepdims=True)
    spread_out = 0.3 + 0.4 * (grey - grey.min()) / max(float(np.ptp(grey)), 1e-9)
    shown = faded(spread_out.repeat(3, axis=1), cell)
    strength = np.sqrt(weights / max(float(weights.max()), 1e-300))[:, None]
    opacity = np.where(weights[:, None] > 0, 0.25 + 0.75 * strength, 0.0)
    heat = plt.get_cmap("inferno")(0.3 + 0.65 * strength[:, 0])[:, :3]
    return (1 - opacity) * shown + opacity * heat


def draw_cells(axis: Any, colours: np.ndarray, cell: int, grid: Grid) -> None:
    """(cells, 3) colours around a query's cell, which is framed."""
    picture = colours.reshape(grid.rows, grid.columns, 3)
    draw_around(axis, cell, grid, "#19b8ff", lambda rows, columns: picture[np.ix_(rows, columns)])
    axis.tick_params(labelsize=5)


def draw_matrices(model: SparseTransformer, tokens: Tensor, head: int | None, title: str, config: RunConfig) -> Any:
    """A matrix for each layer: rows are queries evenly apart, columns the sums over runs of keys."""
    length = len(tokens)
    layers = chosen_layers(len(model.mixers), MOST_MATRICES)
    cells = min(length, MATRIX_CELLS)
    queries = spread(length, cells)
    bounds = np.arange(cells) * length // cells
    rows = attention_rows(
        model, tokens, queries, layers=layers, head=head, keep=lambda weights: np.add.reduceat(weights, bounds, axis=1)
    )
    columns = min(4, len(layers))
    lines = -(-len(layers) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(max(6.0, 3.4 * columns), 0.9 + 3.5 * lines), squeeze=False, layout="constrained"
    )
    for axis in axes.flat:
        axis.set_axis_off()
    patterns = config.model.layer_patterns()
    for axis, layer in zip(axes.flat, layers, strict=False):
        axis.set_axis_on()
        strength = np.cbrt(rows[layer] / max(float(rows[layer].max()), 1e-300))
        axis.imshow(strength, cmap="magma", vmin=0, vmax=1, interpolation="nearest", extent=(0, length, length, 0))
        kinds = dict.fromkeys(type(pattern).__name__ for pattern in patterns[layer])
        if len(patterns[layer]) < model.config.heads:  # the others choose by content
            kinds[type(model.mixers[layer]).__name__] = None
        axis.set_title(f"layer {layer}: {', '.join(kinds)}", fontsize=8)
        axis.set_xlabel("key position", fontsize=7)
        axis.set_ylabel("query position", fontsize=7)
        axis.tick_params(labelsize=6)
    pooled = f"{cells} queries; keys summed by {length / cells:.4g}; " if length > cells else ""
    figure.suptitle(f"{title}{of_layers(layers, model)}\n{pooled}{_SCALE.format('cube')}", fontsize=8)
    return figure


def of_layers(layers: Sequence[int], model: SparseTransformer) -> str:
    """Which layers are shown, unless all are."""
    count = len(model.mixers)
    return "" if len(layers) == count else f"; layers {', '.join(map(str, layers))} of {count}"


def attention_rows(
    model: SparseTransformer,
    tokens: Tensor,
    queries: Sequence[int],
    *,
    layers: Sequence[int],
    head: int | None = None,
    keep: Keep = np.asarray,
) -> dict[int, np.ndarray]:
    """The weights of some queries in some layers, while the model reads one context.

    Args:
        model: in evaluation mode.
        tokens: (N,) bytes of the context.
        queries: P positions.
        layers: which layers, by number.
        head: one head; None is the mean over all that have a key for the query.
        keep: what is kept of each row, such as its sums over bins of keys: all (P, N) are never held at once.

    Returns:
        What was kept of each layer's rows, (P, …) float64. A row sums to 1, or to 0 where a query has no key.
    """
    kept: dict[int, np.ndarray] = {}
    heads = range(model.config.heads) if head is None else [head]
    with ExitStack() as hooks, torch.no_grad():
        for layer in layers:

            def take(mixer: Any, inputs: tuple[Any, ...], layer: int = layer) -> None:
                kept[layer] = _rows_of(mixer.weights(inputs[0]), inputs[0].shape[1], heads, queries, keep)

            hooks.callback(model.mixers[layer].register_forward_pre_hook(take).remove)
        model(tokens[None], return_nats=True)  # without the logits of the whole context
    return kept


def _rows_of(
    weights_of: Callable[[Tensor, int], Tensor], length: int, heads: Sequence[int], queries: Sequence[int], keep: Keep
) -> np.ndarray:
    """What is kept of a layer's rows over ``length`` positions, from a mixer's ``weights``."""
    count = max(1, SCORES_IN_WORK // length)
    kept = []
    for start in range(0, len(queries), count):
        rows = torch.tensor(queries[start : start + count])
        total = torch.zeros(len(rows), length, dtype=torch.float64)
        counted = torch.zeros(len(rows), 1)  # heads that have a key for the query
        for head in heads:
            weights = weights_of(rows, head)
            total += weights
            counted += weights.any(-1, keepdim=True)
        kept.append(keep((total / counted.clamp_min(1)).numpy()))
    return np.concatenate(kept)
