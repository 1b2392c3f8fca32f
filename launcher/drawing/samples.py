"""`longstride data show DIR|URL`: a few samples: texts are printed, pictures and waveforms are drawn."""

from __future__ import annotations

import argparse
import codecs
import math
import re
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.modalities import modality_named
from longstride.launcher.files import check_new

if TYPE_CHECKING:
    from longstride.data_pipelines.shards import Sample

SHOWN_BYTES = 2000  # of a text
# Numbers of samples: the default and the maximum, beyond which samples in a picture are too small.
_COUNTS = {"text": (3, None), "picture": (16, 100), "waveform": (4, 20)}
TILE_INCHES = 1.5
TILE_PIXELS = 180  # of a tile in the file; smaller pictures show their pixels as squares
FRAME = "#d0d7de"
KEY_POINTS = 6.5  # font size of a sample's key
WAVEFORM_COLUMNS = 1500  # a longer waveform is drawn as the range of each column
# Control characters except line ends and tabs, and characters that change the direction of writing.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def run(arguments: argparse.Namespace) -> int:
    """Run the verb; return its exit code."""
    from longstride.data_pipelines.shards import DataFolder, sample_documents
    from longstride.launcher.folders import check_location

    check_location(arguments.location)
    folder = DataFolder(arguments.location)
    name = folder.manifest.modality
    kind = modality_named(name).shown_as
    default, most = _COUNTS[kind]
    if most is None and arguments.output is not None:
        raise DataError(f"--output={arguments.output}: {name} is printed, not drawn; leave it out")
    if most is not None and arguments.output is None:
        raise DataError(f"--output: {name} is drawn into a file; name one, such as --output samples.png")
    if most is not None and arguments.count is not None and arguments.count > most:
        raise DataError(f"--count={arguments.count}: one picture has room for {most} of {name}")
    count = default if arguments.count is None else arguments.count
    samples = sample_documents(folder, arguments.split, count, arguments.seed)
    if kind != "text":
        from longstride.launcher.pictures import save_picture

        check_new(arguments.output, "--output", ".png")
        drawn = list(samples)
        palette = folder.palette
        if palette is not None:  # as a model sees them
            drawn = [sample._replace(content=palette.content(palette.tokens(sample.content))) for sample in drawn]
        num_samples = folder.manifest.splits[arguments.split].samples
        last = folder.store.location.rstrip("/").rpartition("/")[2]
        title = f"{last}, {arguments.split}: {len(drawn)} of {num_samples:,} samples"
        title += "" if palette is None else f", in {len(palette):,} colours"
        save_picture(draw_samples(drawn, name, title), arguments.output)
        print(arguments.output)
        for sample in drawn:
            if sample.source is not None:
                print(_UNSAFE.sub("?", f"{sample.key}: {sample.source}"))
        return 0
    print_texts(samples, sys.stdout)
    return 0


def print_texts(samples: Iterable[Sample], stream: TextIO) -> None:
    """Print for each sample a line with its member and shard, its text, and an empty line."""
    for _, content, _, place, source, label in samples:
        num_more = len(content) - SHOWN_BYTES
        origin = place if source is None else f"{place}, from {source}"
        origin += "" if label is None else f", class {label}"
        lines = [f"=== {_UNSAFE.sub('?', origin)}: {len(content):,} bytes ==="]
        lines.append(safe_text(content[:SHOWN_BYTES].tobytes(), final=num_more <= 0).removesuffix("\n"))
        lines += [f"=== {num_more:,} more bytes ==="] if num_more > 0 else []
        text = "\n".join(lines) + "\n\n"
        encoding = stream.encoding or "utf-8"
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()


def safe_text(content: bytes, *, final: bool = True) -> str:
    """Decode bytes as UTF-8, and escape invalid bytes and characters that control a terminal.

    If more bytes follow (not ``final``), an incomplete character at the end is left out.
    """
    text = codecs.getincrementaldecoder("utf-8")("backslashreplace").decode(content, final)
    return _UNSAFE.sub(lambda unsafe: unsafe[0].encode("unicode_escape").decode(), text)


def draw_samples(samples: Sequence[Sample], modality: str, title: str) -> Any:
    """Draw samples of pictures or sounds."""
    kind = modality_named(modality)
    drawn = [kind.shown(sample.content, sample.properties) for sample in samples]
    keys = [sample.key if sample.label is None else f"{sample.key}, class {sample.label}" for sample in samples]
    if kind.shown_as == "picture":
        return _draw_pictures(drawn, keys, title)
    return _draw_waveforms(drawn, keys, samples[0].properties["rate"], title)


def _draw_pictures(pictures: Sequence[np.ndarray], keys: Sequence[str], title: str) -> Any:
    """Draw a grid of pictures (height, width, channels), each under its key."""
    from longstride.launcher.pictures import plt, styled

    height, width, _ = pictures[0].shape
    columns = math.ceil(math.sqrt(len(pictures)))
    rows = math.ceil(len(pictures) / columns)
    tile = TILE_INCHES * min(2.0, max(0.5, height / width))
    with styled():
        figure, axes = plt.subplots(
            rows,
            columns,
            figsize=(max(4.8, TILE_INCHES * columns), 0.5 + (tile + 0.13) * rows),
            squeeze=False,
            layout="compressed",
        )
        for axis in axes.flat:
            axis.set_axis_off()
        for axis, picture, key in zip(axes.flat, pictures, keys, strict=False):
            squares = max(height, width) <= TILE_PIXELS
            axis.imshow(picture, interpolation="nearest" if squares else "antialiased")
            axis.set_axis_on()
            axis.set(xticks=[], yticks=[])
            axis.spines[:].set(color=FRAME, linewidth=0.5)  # a picture may be white
            axis.set_title(key, fontsize=KEY_POINTS, pad=2)
        figure.suptitle(f"{title} of {height} × {width} pixels")
    return figure


def _draw_waveforms(waveforms: Sequence[np.ndarray], keys: Sequence[str], rate: int, title: str) -> Any:
    """Draw a waveform per row over its seconds, from -1 to 1; all rows share the axes."""
    from longstride.launcher.pictures import FAINT, LINES, plt, styled

    with styled():
        figure, axes = plt.subplots(
            len(waveforms),
            1,
            figsize=(7.5, 0.8 + 0.95 * len(waveforms)),
            squeeze=False,
            sharex=True,
            sharey=True,
            layout="constrained",
        )
        for axis, values, key in zip(axes.flat, waveforms, keys, strict=True):
            seconds = len(values) / rate
            low, high = envelope(values, WAVEFORM_COLUMNS)
            places = np.linspace(0, seconds, len(low), endpoint=False)
            axis.axhline(0, linewidth=0.5, color=FAINT)
            if len(low) == len(values):
                axis.plot(places, low, linewidth=0.7, color=LINES[0])
            else:
                axis.fill_between(places, low, high, linewidth=0.3, color=LINES[0])
            axis.set(ylim=(-1, 1), yticks=[-1, 0, 1])
            axis.tick_params(labelsize=KEY_POINTS)
            axis.spines[["top", "right"]].set_visible(False)
            axis.set_title(f"{key}, {seconds:.4g} s", fontsize=KEY_POINTS, loc="left", pad=2)
        axes[0, 0].set_xlim(0, max(map(len, waveforms)) / rate)
        axes[-1, 0].set_xlabel("seconds")
        figure.supylabel("amplitude, of full scale", fontsize=9)
        figure.suptitle(f"{title} at {rate:,} Hz")
    return figure


def envelope(values: np.ndarray, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the minimum and the maximum of each of at most ``columns`` equal parts of (n,) values: (m,), (m,)."""
    if len(values) <= columns:
        return values, values
    starts = np.arange(columns) * len(values) // columns
    return np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
