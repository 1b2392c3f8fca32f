"""Samples of pictures and sounds in one figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from longstride.data_pipelines.modalities import mulaw_decode
from longstride.data_pipelines.shards import Sample
from longstride.launcher.pictures import plt

TILE_INCHES = 1.5
TILE_PIXELS = 180  # of a tile in the file; smaller pictures are shown with their pixels as squares
SOUND_COLUMNS = 1500  # of a waveform; a longer sound is drawn as the range of each column


def draw_pictures(samples: Sequence[Sample], title: str) -> Any:
    """A grid of pictures, each under its key."""
    properties = samples[0].properties
    shape = properties["height"], properties["width"], properties["channels"]
    columns = math.ceil(math.sqrt(len(samples)))
    rows = math.ceil(len(samples) / columns)
    tile = TILE_INCHES * min(2.0, max(0.5, shape[0] / shape[1]))
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(max(4.8, TILE_INCHES * columns), 0.5 + (tile + 0.13) * rows),
        squeeze=False,
        layout="constrained",
    )
    for axis in axes.flat:
        axis.set_axis_off()
    for axis, sample in zip(axes.flat, samples, strict=False):
        squares = max(shape[:2]) <= TILE_PIXELS
        axis.imshow(sample.content.reshape(shape), interpolation="nearest" if squares else "antialiased")
        axis.set_title(sample.key, fontsize=6, color="0.35", pad=2)
    figure.suptitle(f"{title}\n{shape[0]} x {shape[1]} pixels", fontsize=9)
    return figure


def draw_sounds(samples: Sequence[Sample], title: str) -> Any:
    """A waveform a row, over its seconds; full scale is the row's height."""
    rate = samples[0].properties["rate"]
    figure, axes = plt.subplots(
        len(samples), 1, figsize=(9, 0.8 + 1.25 * len(samples)), squeeze=False, layout="constrained"
    )
    for axis, sample in zip(axes.flat, samples, strict=True):
        seconds = len(sample.content) / rate
        low, high = envelope(mulaw_decode(sample.content) / 2**15, SOUND_COLUMNS)
        places = np.linspace(0, seconds, len(low), endpoint=False)
        axis.axhline(0, linewidth=0.4, color="0.8")
        if len(low) == len(sample.content):
            axis.plot(places, low, linewidth=0.7, color="C0")
        else:
            axis.fill_between(places, low, high, linewidth=0.3, color="C0")
        axis.set(xlim=(0, seconds), ylim=(-1, 1), yticks=[])
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.set_title(f"{sample.key}, {seconds:.4g} s", fontsize=7, color="0.35", loc="left", pad=2)
    axes[-1, 0].set_xlabel("seconds", fontsize=8)
    figure.suptitle(f"{title}\n8-bit mu-law at {rate:,} Hz; a row is full scale high", fontsize=9)
    return figure


def envelope(values: np.ndarray, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """(n,) -> the least and the greatest value of each of at most ``columns`` equal parts: (m,), (m,)."""
    if len(values) <= columns:
        return values, values
    starts = np.arange(columns) * len(values) // columns
    return np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
