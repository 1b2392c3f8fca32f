"""Small model configurations, one of every pattern and every way to combine factors."""

from __future__ import annotations

from typing import Any

from longstride.sparse_model import ModelConfig

ATTENTIONS: dict[str, Any] = {
    "dense": {"type": "dense"},
    "local": {"type": "local", "window": 5},
    "column": {"type": "column", "stride": 8},
    "block": {"type": "block", "stride": 8},
    "summary": {"type": "summary", "stride": 8, "summary": 2, "num_summaries": 2, "include_self": True},
    "strided merged": {"type": "strided", "stride": 8},
    "strided paper's span": {"type": "strided", "stride": 8, "span": "paper"},
    "strided interleaved": {"type": "strided", "stride": 8, "combine": "interleaved"},
    "strided multihead": {"type": "strided", "stride": 8, "combine": "multihead"},
    "fixed merged": {"type": "fixed", "stride": 8, "summary": 2, "num_summaries": 4},
    "fixed interleaved": {"type": "fixed", "stride": 8, "summary": 2, "combine": "interleaved"},
    "fixed multihead": {"type": "fixed", "stride": 8, "summary": 2, "num_summaries": 2, "combine": "multihead"},
    "strided in three factors": {"type": "strided", "stride": 2, "num_factors": 3, "combine": "interleaved"},
    "longformer": {"type": "longformer", "window": 3, "dilation": 2},
    "longnet": {"type": "longnet", "segments": [4, 8], "dilations": [1, 4]},
    "bigbird": {"type": "bigbird", "block": 4, "window": 2, "globals": 1, "random": 1},
    "cycle": [{"type": "column", "stride": 8}, {"type": "local", "window": 8}, {"type": "dense"}],
}

# Every part that came later than the paper.
LATER: dict[str, Any] = {
    "embedding": {"type": "tokens"},
    "norm": "rms",
    "bias": False,
    "rotary": {"base": 1000},
    "query_key_norm": True,
    "convolution": 3,
    "feed_forward": {"type": "dense", "activation": "squared_relu"},
    "initialization": "zero_outputs",
}


def model_json(**changes: Any) -> dict[str, Any]:
    """The `model` object of a small run, with some keys changed."""
    return {
        "context": 40,
        "layers": 3,
        "heads": 4,
        "width": 64,
        "attention": {"type": "fixed", "stride": 8, "summary": 2},
        "embedding": {"type": "text", "row_width": 8},
        **changes,
    }


def small(**changes: Any) -> ModelConfig:
    """A small model configuration, with some keys changed."""
    return ModelConfig.model_validate(model_json(**changes))
