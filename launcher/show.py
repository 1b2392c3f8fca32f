"""`longstride show pattern CONFIG|loss RUN --output PNG`: what attends to what, and how a run went."""

from __future__ import annotations

import argparse
import json
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.colors import ListedColormap

from kernels.errors import ConfigError
from kernels.patterns.base import Pattern
from launcher.folders import METRICS
from launcher.json_file import load_json_object
from launcher.pictures import check_output, plt, write_picture
from sparse_model import ModelConfig

SHOWN_POSITIONS = 192  # of a pattern; more would not be told apart
SHOWN_PATTERNS = 8
MEAN_SHARE = 40  # the running mean of the training loss covers this part of the run
COLOURS = ListedColormap(["white", "#8fb8de", "#d9874b", "#1f3b57"])  # nothing, first part, later parts, self


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the verb."""
    parser.add_argument("what", choices=("pattern", "loss"))
    parser.add_argument("source", type=Path, metavar="CONFIG|RUN", help="a run's JSON for pattern, its folder for loss")
    parser.add_argument("--output", type=Path, required=True, metavar="PNG", help="picture to make")


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb; returns its exit code."""
    check_output(arguments.output)
    figure = draw_pattern(arguments.source) if arguments.what == "pattern" else draw_loss(arguments.source)
    write_picture(figure, arguments.output)
    return 0


def draw_pattern(path: Path) -> Any:
    """The connectivity of each distinct pattern of a configuration's layers and heads (Child et al. 2019, figure 3)."""
    content = load_json_object(path)
    if "model" not in content:
        raise ConfigError(f"{path}: has no model")
    try:
        config = ModelConfig.model_validate(content["model"])
    except ConfigError as error:
        raise error.under("model") from None
    users: dict[Pattern, list[str]] = {}
    for layer, heads in enumerate(config.layer_patterns()):
        for head, pattern in enumerate(heads):
            users.setdefault(pattern, []).append(f"{layer}.{head}")
    shown = list(users.items())[:SHOWN_PATTERNS]
    columns = min(4, len(shown))
    rows = -(-len(shown) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(max(4.8, 3.6 * columns), 0.6 + 4.1 * rows), squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    size = min(config.context, SHOWN_POSITIONS)
    for axis, (pattern, places) in zip(axes.flat, shown, strict=False):
        axis.set_axis_on()
        axis.imshow(connectivity(pattern, size), cmap=COLOURS, vmin=0, vmax=3, interpolation="nearest")
        axis.set_title(f"{textwrap.fill(str(pattern), 36)}\n{_places(places)}", fontsize=8)
        axis.set_xlabel("key position", fontsize=8)
        axis.set_ylabel("query position", fontsize=8)
        axis.tick_params(labelsize=7)
    left = len(users) - len(shown)
    more = f"\n{left} more patterns are not shown" if left else ""
    what = "dark: self; blue: first part; orange: later parts"
    figure.suptitle(f"{path.name}: the first {size} of {config.context} positions\n{what}{more}", fontsize=9)
    figure.tight_layout()
    return figure


def connectivity(pattern: Pattern, size: int) -> np.ndarray:
    """(size, size): 0 where query (row) does not read key (column), 1 first part, 2 later parts, 3 self."""
    position = torch.arange(size)
    picture = torch.zeros(size, size, dtype=torch.int64)
    for number, part in enumerate(pattern.parts()):
        picture[part.mask(position[:, None], position[None, :])] = min(number + 1, 2)
    own = pattern.mask(position, position)
    picture[position[own], position[own]] = 3
    return picture.numpy()


def draw_loss(run_folder: Path) -> Any:
    """Bits per byte over the steps of a run, training and held-out, from its metrics.jsonl."""
    lines = read_metrics(run_folder / METRICS)
    figure, axis = plt.subplots(figsize=(7, 4.2))
    for split in dict.fromkeys(line["split"] for line in lines):
        own = [line for line in lines if line["split"] == split]
        steps, bits = [line["step"] for line in own], [line["bits_per_byte"] for line in own]
        if split == "train":  # every step is a small batch: the curve is its mean, the batches stand behind it
            axis.plot(steps, bits, linewidth=0.6, alpha=0.3, color="C0")
            axis.plot(steps, running_mean(bits, len(bits) // MEAN_SHARE), color="C0", label="train, running mean")
        else:
            axis.plot(steps, bits, marker="o", markersize=4, color="C1", label=split)
    axis.set_xlabel("step")
    axis.set_ylabel("bits per byte")
    axis.set_title(f"{run_folder.name}: loss", fontsize=10)
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    return figure


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; a last one that a killed run left torn is passed over.

    Raises:
        ConfigError: the file cannot be read, holds no line yet, or one that is no measurement.
    """
    try:
        texts = path.read_text(errors="replace").splitlines(keepends=True)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    whole = [text for text in texts if text.endswith("\n")]
    lines = []
    for number, text in enumerate(whole, start=1):
        try:
            line = json.loads(text)
            lines.append({key: line[key] for key in ("step", "split", "bits_per_byte")})
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{path}: line {number}: must be an object with step, split, bits_per_byte") from None
    if not lines:
        raise ConfigError(f"{path}: holds no line yet; wait for the first step")
    return lines


def running_mean(values: list[float], window: int) -> list[float]:
    """The mean of each value and up to ``window - 1`` before it."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    last = np.arange(1, len(values) + 1)
    first = np.maximum(0, last - max(1, window))
    return ((total[last] - total[first]) / (last - first)).tolist()


def _places(places: list[str]) -> str:
    """Which layer.head use a pattern, shortened."""
    return "layer.head " + (", ".join(places) if len(places) <= 4 else f"{places[0]} … {places[-1]} ({len(places)})")
