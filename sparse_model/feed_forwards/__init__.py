"""Feed-forwards, which compute each row independently: the letter f of an order, and `model.feed_forward` in JSON.

To add one: a file with its configuration (a ``FeedForwardConfig``) and its module, and a line in ``FEED_FORWARDS``. In
another package, the configuration is an entry point of the group ``longstride.feed_forwards``, or has the `type`
"package.module:Class".
"""

from __future__ import annotations

from typing import Any

from longstride.kernels import ConfigError, Problem, nearest
from longstride.kernels.registry import class_named, foreign_schema, import_path, registered_names
from longstride.sparse_model.feed_forwards import dense
from longstride.sparse_model.feed_forwards.dense import DenseConfig
from longstride.sparse_model.feed_forwards.experts import ExpertsConfig
from longstride.sparse_model.feed_forwards.product_keys import ProductKeysConfig
from longstride.sparse_model.network import MOST_SUBLAYERS
from longstride.sparse_model.part import FeedForwardConfig
from longstride.sparse_model.strict import parse_entries

FEED_FORWARDS: dict[str, type[FeedForwardConfig]] = {
    "dense": DenseConfig,
    "experts": ExpertsConfig,
    "product_keys": ProductKeysConfig,
}
GROUP = "longstride.feed_forwards"  # of entry points


def feed_forwards_from_json(value: Any) -> tuple[FeedForwardConfig, ...]:
    """Parse `model.feed_forward`: an object, or a list that the feed-forwards of a model take in turn.

    An object without a type is dense.

    Raises:
        ConfigError: paths are relative to the model, as ``feed_forward.activation`` or ``feed_forward[1].count``.
    """
    return parse_entries("feed_forward", value, _from_entry, MOST_SUBLAYERS, "feed-forward")


def _from_entry(entry: Any) -> tuple[FeedForwardConfig]:
    if not isinstance(entry, dict):
        raise ConfigError(Problem("", "must be an object, or a list of them", entry))
    kind = entry.get("type", "dense")
    config = class_named(kind, FEED_FORWARDS, GROUP) if isinstance(kind, str) else None
    if config is None:
        near = nearest(str(kind), [*FEED_FORWARDS, *registered_names(GROUP)])
        raise ConfigError.at("type", kind, f"is not known; {near}")
    if not issubclass(config, FeedForwardConfig):
        raise ConfigError.at("type", kind, f"must name a FeedForwardConfig, and {import_path(config)} is none")
    return (config.model_validate(entry),)


def feed_forward_schema() -> dict[str, Any]:
    """Return the JSON schema of `model.feed_forward`."""
    choices = [*(config.model_json_schema() for config in FEED_FORWARDS.values()), foreign_schema(GROUP)]
    return {"anyOf": [*choices, {"type": "array", "items": {"anyOf": choices}, "minItems": 1}]}
