"""`longstride show pattern CONFIG|attention RUN|loss RUN --output PNG`: what attends to what, and how a run went."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from longstride.data_pipelines.plain_files import parse_json, read_plain
from longstride.kernels import ConfigError
from longstride.launcher.models import TRAINED
from longstride.launcher.options import TRUST_OPTION
from longstride.launcher.output import file_names, metrics_file

MOST_METRICS_BYTES = 1 << 29  # three million lines
MEAN_SHARE = 40  # the running mean of the training loss covers this part of the run
_PICTURES_WITH = {  # the options that not every picture has
    "query": ("pattern", "attention"),
    "text": ("pattern",),
    **dict.fromkeys(("step", "context_number", "head", "weights"), ("attention",)),
}


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb; returns its exit code."""
    from longstride.launcher.pictures import check_output, save_picture

    check_output(arguments.output)
    check_options(arguments)
    if arguments.what == "loss":
        figure = draw_loss(arguments.source)
    elif arguments.what == "pattern":
        from longstride.launcher.drawing.pattern import draw_pattern

        query = arguments.query[0] if arguments.query else None
        figure = draw_pattern(arguments.source, query, arguments.text, trusted=arguments.trust_checkpoint)
    else:
        from longstride.launcher.drawing.attention import draw_attention

        figure = draw_attention(
            arguments.source,
            arguments.step,
            arguments.context_number or 0,
            arguments.head,
            arguments.query,
            arguments.weights or TRAINED,
            trusted=arguments.trust_checkpoint,
        )
    save_picture(figure, arguments.output)
    print(arguments.output)
    return 0


def check_options(arguments: argparse.Namespace) -> None:
    """Raise ConfigError where an option is given that the picture does not have."""
    for name, pictures in _PICTURES_WITH.items():
        value = getattr(arguments, name)
        if value is not None and arguments.what not in pictures:
            given = value[0] if isinstance(value, list) else value
            option = f"--{name.replace('_', '-')}={given}"
            raise ConfigError(f"{option}: is of `show {'` and `show '.join(pictures)}` alone; leave it out")
    if arguments.trust_checkpoint and arguments.what != "attention" and not arguments.text:
        raise ConfigError(f"{TRUST_OPTION}: is of `show attention` alone; leave it out")
    if arguments.what == "pattern" and arguments.query is not None and len(arguments.query) > 1:
        raise ConfigError(f"--query={arguments.query[1]}: a pattern is shown for one query; give it once")


def draw_loss(run_folder: Path) -> Any:
    """Bits per byte over the steps of a run, training and held-out, from its metrics.jsonl."""
    from longstride.launcher.pictures import plt

    lines = read_metrics(run_folder / file_names.METRICS)
    figure, axis = plt.subplots(figsize=(7, 4.2))
    for split in dict.fromkeys(line["split"] for line in lines):
        # A step whose loss was no number has null there.
        points = [line for line in lines if line["split"] == split and line["bits"] is not None]
        steps, bits = [line["step"] for line in points], [line["bits"] for line in points]
        if split == "train":  # single batches are noisy: they stand pale behind their running mean
            axis.plot(steps, bits, linewidth=0.6, alpha=0.3, color="C0")
            axis.plot(steps, running_mean(bits, len(bits) // MEAN_SHARE), color="C0", label="train, running mean")
        else:
            axis.plot(steps, bits, marker="o", markersize=4, color="C1", label=split)
    axis.set_xlabel("step")
    axis.set_ylabel(lines[-1]["unit"])
    axis.set_title(f"{run_folder.name}: loss", fontsize=10)
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    return figure


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, without a last one that a killed run left incomplete.

    Raises:
        ConfigError: the file cannot be read, holds no line yet, or a line that is no measurement.
    """
    try:
        texts = read_plain(path, MOST_METRICS_BYTES).decode(errors="replace").splitlines(keepends=True)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    lines = []
    for number, text in enumerate((text for text in texts if text.endswith("\n")), start=1):
        try:
            if len(text) > metrics_file.MOST_LINE_BYTES:
                raise ValueError
            line = parse_json(text)
            unit, bits = metrics_file.bits_of(line)
            if not (type(line["step"]) is int and isinstance(line["split"], str)) or isinstance(bits, str | bool):
                raise TypeError
            bits = None if bits is None else float(bits)
            lines.append({"step": line["step"], "split": line["split"], "unit": unit, "bits": bits})
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
