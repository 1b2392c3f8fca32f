"""What a step of a run computes, counted exactly from its patterns; what a run reads, and how long it is.

Letters: N positions, C width, D head width, P pairs of a query and a key.

A multiplication and an addition are two operations. Counted are the matrix products: a linear layer's 2 a weight and
position, and twice that in the backward pass; attention's 2·D a pair for the scores and as much for the sum of values,
and in the backward pass the scores once more and four products (5 products for 2, as FlashAttention counts them).
What the model computes again in the backward pass rather than keep belongs to it too: the logits, and of long contexts
the first half of feed-forward.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from longstride.data_pipelines.errors import DataError
from longstride.kernels import num_pairs
from longstride.launcher.config import RunConfig
from longstride.launcher.data import RunData, steps_of
from longstride.launcher.ranks import Ranks
from longstride.sparse_model import ModelConfig, SparseTransformer, feed_forward

PARTS = ("embedding", "attention", "feed-forward", "norms", "output")
# Bytes of the train splits that `longstride data build --dataset` makes.
PUBLISHED_TRAIN_BYTES = {
    "cifar10": 48_000 * 3_072,
    "enwik8": 90_000_000,
    "text8": 90_000_000,
    "imagenet64": 1_281_167 * 12_288,
}


@dataclass(frozen=True, slots=True)
class Work:
    """Operations of one pass over one context."""

    linear: int
    scores: int  # of attention: queries times keys
    values: int  # of attention: weights times values
    blocks: int  # the part of all three that lies in the residual blocks, and is recomputed
    again: int  # the part of ``linear`` that the backward pass computes again in any case

    @property
    def forward(self) -> int:
        """The forward pass."""
        return self.linear + self.scores + self.values

    @property
    def backward(self) -> int:
        """The backward pass: both factors of each product, and once more the scores and what is not kept."""
        return 2 * self.forward + self.scores + self.again


@dataclass(frozen=True, slots=True)
class Length:
    """How long a run is; None where it cannot be told here."""

    steps: int | None
    epochs: float | None
    contexts: int | None  # of the train split
    origin: str  # of the number of contexts, in words


def parameter_parts(config: ModelConfig) -> dict[str, int]:
    """Parameters by part of the model, without allocating it; layers are alike, so that two tell of all."""
    one, two = (_parts_of_layers(config, layers) for layers in (1, 2))
    return {part: one[part] + (config.layers - 1) * (two[part] - one[part]) for part in PARTS}


def layer_pairs(config: ModelConfig) -> list[int]:
    """Pairs that each layer's heads attend to, all heads together."""
    layers = config.layer_patterns()
    pairs = {pattern: num_pairs(pattern, config.context) for pattern in {each for heads in layers for each in heads}}
    return [sum(pairs[pattern] for pattern in heads) for heads in layers]


def dense_pairs(config: ModelConfig) -> int:
    """Pairs of a layer with dense causal attention, all heads together."""
    return config.heads * config.context * (config.context + 1) // 2


def work(config: ModelConfig, pairs: int, micro_batch: int = 1) -> Work:
    """Operations of a forward pass over one context of a micro-batch, with so many pairs in all layers together."""
    width = config.width
    per_block = width * (2 * config.query_key_width + width) + width * width + 2 * width * config.feed_forward_width
    blocks = 2 * config.context * config.layers * per_block
    logits = 2 * config.context * width * config.vocabulary
    expand = 2 * config.context * config.layers * width * config.feed_forward_width
    long = micro_batch * config.context > feed_forward.LONG_ROWS
    scores = 2 * pairs * (config.query_key_width // config.heads)
    values = 2 * pairs * (width // config.heads)
    again = logits + (expand if long else 0)
    return Work(blocks + logits, scores, values, blocks + scores + values, again)


def run_length(config: RunConfig, contexts: int | None) -> Length:
    """Steps and epochs of a run, one from the other where the size of its train split is known.

    Raises:
        ConfigError: the warm-up is longer than the run.
        DataError: the data is here, and does not fit the run.
    """
    train = config.train
    found, origin = (contexts, "as given by --contexts") if contexts else _contexts_of(config)
    if found is None:
        return Length(train.steps, train.epochs, None, origin)
    if train.steps is not None:
        return Length(train.steps, train.steps * train.global_batch / found, found, origin)
    assert train.epochs is not None
    steps = steps_of(train, found)
    return Length(steps, train.epochs, found, origin)


def _contexts_of(config: RunConfig) -> tuple[int | None, str]:
    """Contexts of the train split, from the data that is here or the published size of a set of that name."""
    location = config.data.path
    if Path(location).exists():
        lanes = RunData(config, Ranks()).stream().lanes
        return lanes.num_contexts, f"in {location}"
    data = config.data
    name = location.rstrip("/").rpartition("/")[2]
    usual = (data.train_split, data.packing, data.separator, data.hop) == ("train", None, None, None)
    if name in PUBLISHED_TRAIN_BYTES and usual:
        contexts = PUBLISHED_TRAIN_BYTES[name] // config.model.context
        if contexts == 0:
            raise DataError(f"model.context={config.model.context}: longer than the train split of {name}")
        return contexts, f"as published; {location} is not here"
    return None, f"{location} is not here; give --contexts N"


def _parts_of_layers(config: ModelConfig, layers: int) -> Counter[str]:
    """Parameters by part of the same model with so many layers."""
    with torch.device("meta"):
        model = SparseTransformer(config.model_copy(update={"layers": layers}))
    parts: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        parts[_part_of(name)] += parameter.numel()
    return parts


def _part_of(name: str) -> str:
    if "norm." in name:
        return "norms"
    if name.startswith("embedding."):
        return "embedding"
    if name.startswith("logits."):
        return "output"
    return "attention" if ".attention." in name else "feed-forward"
