"""The configurations of `longstride new`: the recipe of docs/recipes.md in three sizes, or a preset shrunk.

They are fitted to a data folder, and do not depend on the machine. Sizes follow the presets bytes_small and bytes_base,
and docs/recipes.md for pictures and sound; tiny takes minutes of two cores.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from longstride.data_pipelines.modalities import CHANNELS, MODALITIES
from longstride.data_pipelines.shards import DataFolder
from longstride.kernels import ConfigError

LEAST_CONTEXT = 64  # positions, for data that can be cut anywhere
LEAST_CONTEXTS = 16  # in a train split
MOST_EPOCHS = 20  # of small data, which more would memorise
LEAST_STEPS = 50
MOST_CONTEXT = 1 << 20


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a network and its training, before they are fitted."""

    layers: int
    heads: int
    width: int
    feed_forward_ratio: int
    text_context: int
    audio_context: int
    audio_stride: int
    window: int
    table_rows: int  # of each order of n-grams, at most
    step_bytes: int  # of a batch, at most
    steps: int
    rates: tuple[float, float, float]  # general, for matrices, for tables
    weight_decay: float
    evaluate_contexts: int


SIZES = {
    "tiny": Size(
        layers=2, heads=1, width=128, feed_forward_ratio=2, text_context=2_048, audio_context=4_096, audio_stride=64,
        window=128, table_rows=1 << 18, step_bytes=1 << 13, steps=860, rates=(0.01, 0.01, 0.015),
        weight_decay=0.01, evaluate_contexts=128,
    ),
    "small": Size(
        layers=12, heads=8, width=512, feed_forward_ratio=4, text_context=8_192, audio_context=16_384, audio_stride=128,
        window=256, table_rows=1 << 17, step_bytes=1 << 18, steps=4_000, rates=(0.003, 0.01, 0.02),
        weight_decay=0.1, evaluate_contexts=128,
    ),
    "base": Size(
        layers=24, heads=16, width=1_024, feed_forward_ratio=4, text_context=16_384, audio_context=65_536,
        audio_stride=256, window=512, table_rows=1 << 18, step_bytes=1 << 20, steps=20_000,
        rates=(0.002, 0.01, 0.01), weight_decay=0.1, evaluate_contexts=256,
    ),
}  # fmt: skip
ORDERS = (2, 3, 4, 6, 8, 12)
# A shrunk preset has fewer steps, because some mixers are slow. Its layers and heads suffice for alternating parts and
# for heads of two kinds. It keeps some keys of its training; AdamW has the rate of the preset paper_small.
SHRUNK = replace(SIZES["tiny"], steps=400)
LAYERS, HEADS = 4, 4
OPTIMIZATION = ("optimizer", "betas", "weight_decay", "schedule", "final_learning_rate")
ADAMW_RATE = 0.002
# Keys of attention and embedding that scale with the root of the context, to preserve the shape of rows and windows.
ROOTS_OF_CONTEXT = ("stride", "window", "summary", "row_width", "chunk", "ramp", "clusters", "buckets")


@dataclass(frozen=True, slots=True)
class Data:
    """The properties of a data folder."""

    location: str
    modality: str
    train_bytes: int  # or tokens, if these are pixels of a palette
    mean_document_bytes: int  # in the train split
    picture: tuple[int, int, int] | None  # height, width and channels for the model
    colours: int | None  # of a palette
    is_evaluated: bool  # whether there is a validation split

    @classmethod
    def read(cls, location: str) -> Data:
        """Read the properties from the manifest of a folder.

        Raises:
            DataError: no data folder, or no train split.
        """
        folder = DataFolder(location)
        manifest, palette = folder.manifest, folder.palette
        record, properties = folder.split("train").manifest.splits["train"], manifest.properties
        picture = None
        if {"height", "width", "channels"} <= set(properties):
            channels = 1 if palette is not None else properties["channels"]
            picture = properties["height"], properties["width"], channels
        num_bytes = record.content_bytes // (1 if palette is None else CHANNELS)  # a pixel of a palette is one token
        mean = num_bytes // max(1, record.documents)
        return cls(
            location,
            manifest.modality,
            num_bytes,
            mean,
            picture,
            len(palette) if palette is not None else None,
            "validation" in manifest.splits,
        )


def model_of(size: Size, data: Data) -> dict[str, Any]:
    """Return the `model` object of a run.

    Raises:
        ConfigError: the data is too short for any context, or its pictures are too large.
    """
    shape = _shape(size, data)
    context = shape["context"]
    model: dict[str, Any] = {
        "context": context,
        "layers": size.layers,
        "heads": size.heads,
        "width": size.width,
        **{name: value for name, value in shape.items() if name != "context"},
    }
    if data.colours is not None:
        model["vocabulary"] = data.colours
    return model | {
        "ngrams": _tables(size, data, context),
        "norm": "rms",
        "bias": False,
        "feed_forward_ratio": size.feed_forward_ratio,
        "query_key_norm": True,
        "convolution": 3,
        "feed_forward": {"activation": "squared_relu"},
        "initialization": "zero_outputs",
    }


def model_like(name: str, preset: Mapping[str, Any], size: Size, data: Data) -> dict[str, Any]:
    """Return the `model` object of a shrunk preset: the same kinds of parts in the same order, without dropout.

    Raises:
        ConfigError: the preset reads another kind of data, or as ``model_of``.
    """
    kind = preset["embedding"]["type"]
    has_palette = "vocabulary" in preset
    modality = kind if kind in MODALITIES and kind != "text" else "image" if has_palette else "text"
    if modality != data.modality or (has_palette and data.colours is None):
        palette = f" --palette {preset['vocabulary']}" if has_palette else ""
        what = f"{modality}{' in colours of a palette' if has_palette else ''}"
        rule = f"the preset reads {what}, and {data.location} holds {data.modality}{' in bytes' if has_palette else ''}"
        suggestion = f"`longstride data build … --modality {modality}{palette}`"
        raise ConfigError(f"--like={name}: {rule}; name a folder of {suggestion} with --data")
    shape = _shape(size, data)
    context = shape["context"]
    if data.picture is None:
        context = min(context, preset["context"])
    width, heads, layers = preset["width"], preset["heads"], min(LAYERS, preset["layers"])
    while width > size.width:
        width //= 2
    while heads > HEADS:
        heads //= 2

    def shrink(key: str, value: Any) -> Any:
        """Shrink lengths and numbers of heads in the value of a key of attention or embedding."""
        if isinstance(value, dict):
            return {inner: shrink(inner, item) for inner, item in value.items()}
        if isinstance(value, list):
            return [shrink(key, item) for item in value]
        if key == "context":
            return context
        if key in ROOTS_OF_CONTEXT:  # the largest divisor of the context that is at most the scaled value
            most = max(1, math.isqrt(value**2 * context // preset["context"]))
            return next(number for number in range(most, 0, -1) if context % number == 0)
        return max(1, value * heads // preset["heads"]) if key in ("heads", "count") else value

    attention = shrink("attention", preset["attention"])
    if isinstance(attention, list) and len(attention) > layers:  # from the first kind to the last
        attention = [attention[number * (len(attention) - 1) // (layers - 1)] for number in range(layers)]
    model = dict(preset) | {"context": context, "layers": layers, "heads": heads, "width": width, "dropout": 0.0}
    model |= {"attention": attention, "embedding": shrink("embedding", preset["embedding"])}
    if preset["embedding"]["type"] == "image":
        model["embedding"] = shape["embedding"]
    if data.colours is not None:
        model["vocabulary"] = data.colours
    if "order" in preset:
        model["order"] = re.sub(
            r"\d+", lambda n: str(max(1, round(int(n[0]) * layers / preset["layers"]))), preset["order"]
        )
    if "ngrams" in preset:
        model["ngrams"] = _tables(size, data, context)
    return model


def _tables(size: Size, data: Data, context: int) -> dict[str, Any]:
    """Return n-gram tables that are small enough for the data."""
    rows = _power_of_two(max(1 << 12, data.train_bytes // 64))
    return {"orders": [order for order in ORDERS if order < context], "rows": min(size.table_rows, rows)}


def _shape(size: Size, data: Data) -> dict[str, Any]:
    """Choose context, attention and position embedding for the kind of data."""
    if data.picture is not None:
        height, width, channels = data.picture
        context = math.prod(data.picture)
        if context > MOST_CONTEXT:
            rule = (
                f"pictures of {height} x {width} are {context:,} positions; build them smaller, by --image-size 64x64"
            )
            raise ConfigError(f"--data={data.location}: {rule}")
        return {
            "context": context,
            "attention": {"type": "strided", "stride": min(width * channels, context)},
            "embedding": {"type": "image", "height": height, "width": width, "channels": channels},
        }
    if data.modality == "audio":
        context = _fitting(size.audio_context, min(data.train_bytes // LEAST_CONTEXTS, data.mean_document_bytes), data)
        stride = min(size.audio_stride, context // 4)
        return {
            "context": context,
            "attention": {"type": "strided", "stride": stride},
            "embedding": {"type": "audio", "row_width": stride},
        }
    context = _fitting(size.text_context, data.train_bytes // LEAST_CONTEXTS, data)
    window = min(size.window, context // 4)
    return {
        "context": context,
        "attention": [{"type": "local", "window": window}, {"type": "match", "window": window}],
        "embedding": {"type": "tokens"},
        "rotary": {"base": 100_000} if context > 8_192 else {},
    }


def _fitting(usual: int, most: int, data: Data) -> int:
    """Return the usual context, or the largest power of two up to ``most``."""
    context = min(usual, _power_of_two(most)) if most else 0
    if context < LEAST_CONTEXT:
        rule = f"has {data.train_bytes:,} bytes to train on"
        if data.mean_document_bytes < LEAST_CONTEXT <= data.train_bytes // LEAST_CONTEXTS:
            rule += f", in sounds of {data.mean_document_bytes:,} bytes on average"
        need = f"a context takes at least {LEAST_CONTEXT}, and a run at least {LEAST_CONTEXTS} of them"
        raise ConfigError(f"--data={data.location}: {rule}; {need}; add data")
    return context


def _power_of_two(number: int) -> int:
    """Return the largest power of two up to a number."""
    return 1 << (number.bit_length() - 1)


def most_bytes(data: Data, model: Mapping[str, Any]) -> int:
    """Return how many bytes a run should read at most. N-gram tables memorise text that they read twice."""
    return data.train_bytes * (1 if data.modality == "text" and "ngrams" in model else MOST_EPOCHS)


def train_of(size: Size, data: Data, model: Mapping[str, Any], global_batch: int) -> dict[str, Any]:
    """Return the `train` object of a run without its batches: its length, and what follows from that."""
    steps = max(LEAST_STEPS, min(size.steps, most_bytes(data, model) // (global_batch * model["context"])))
    rate, matrices, tables = size.rates
    interval = max(1, steps // 10)
    return {
        "steps": steps,
        "learning_rate": rate,
        "optimizer": {"type": "muon", "rates": {"matrices": matrices, "tables": tables}},
        "betas": [0.9, 0.95],
        "weight_decay": size.weight_decay,
        "warmup_steps": max(1, round(0.03 * steps)),
        "schedule": {"type": "wsd", "decay_fraction": 0.5},
        "log_every": max(1, min(10, steps // 50)),
        "evaluate_every": interval if data.is_evaluated else None,
        **({"evaluate_contexts": size.evaluate_contexts} if data.is_evaluated else {}),
        "checkpoint_every": interval,
        "keep_last": 2,
    }


def train_like(preset: Mapping[str, Any], train: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `train` object of a shrunk preset: the recipe with the preset's optimiser and schedule."""
    content = {key: value for key, value in train.items() if key not in OPTIMIZATION}
    content |= {key: preset[key] for key in OPTIMIZATION if key in preset}
    return content if "optimizer" in preset else content | {"learning_rate": ADAMW_RATE}
