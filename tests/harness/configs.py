"""Small model configurations, one of every pattern and every way to combine factors."""

from collections.abc import Iterator
from typing import Any

from longstride.kernels.patterns import PATTERNS
from longstride.sparse_model import ModelConfig
from longstride.sparse_model.feed_forwards import FEED_FORWARDS
from longstride.sparse_model.mixers import MIXERS
from tests.harness.oracles import example_of


def types_in(value: Any) -> Iterator[str]:
    """Find every ``type`` in a configuration."""
    if isinstance(value, dict):
        yield from [value["type"]] if isinstance(value.get("type"), str) else []
        value = list(value.values())
    for item in value if isinstance(value, list) else []:
        yield from types_in(item)


ATTENTIONS: dict[str, Any] = {
    "dense": {"type": "dense"},
    "local": {"type": "local", "window": 5},
    "column": {"type": "column", "stride": 8},
    "block": {"type": "block", "stride": 8},
    "summary": {"type": "summary", "stride": 8, "summary": 2, "num_summaries": 2, "include_self": True},
    "strided merged": {"type": "strided", "stride": 8},
    "strided paper's span": {"type": "strided", "stride": 8, "span": "paper"},
    "strided interleaved": {"type": "strided", "stride": 8, "combine": "interleaved"},
    "strided aligned": {"type": "strided", "stride": 8, "align": "target", "combine": "interleaved"},
    "strided multihead": {"type": "strided", "stride": 8, "combine": "multihead"},
    "fixed merged": {"type": "fixed", "stride": 8, "summary": 2, "num_summaries": 4},
    "fixed interleaved": {"type": "fixed", "stride": 8, "summary": 2, "combine": "interleaved"},
    "fixed multihead": {"type": "fixed", "stride": 8, "summary": 2, "num_summaries": 2, "combine": "multihead"},
    "heads": {
        "heads": [
            {"count": 1, "type": "local", "window": 5},
            {"count": 1, "type": "fixed", "stride": 8, "summary": 2, "num_summaries": 2},
            {"count": 2, "type": "strided", "stride": 8, "combine": "multihead"},
        ]
    },
    "strided in three factors": {"type": "strided", "stride": 2, "num_factors": 3, "combine": "interleaved"},
    "longformer": {"type": "longformer", "window": 3, "dilation": 2},
    "longnet": {"type": "longnet", "segments": [4, 8], "dilations": [1, 4]},
    "bigbird": {"type": "bigbird", "block": 4, "window": 2, "globals": 1, "random": 1},
    "cycle": [{"type": "column", "stride": 8}, {"type": "local", "window": 8}, {"type": "dense"}],
}
ATTENTIONS |= {
    kind: example_of(kind, cls) for kind, cls in PATTERNS.items() if kind not in types_in(list(ATTENTIONS.values()))
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

# Models whose sub-layers are others than attention and a dense feed-forward in turn: each has to pass what all have in
# common (tests/sparse_model/test_systems.py).
SYSTEMS: dict[str, dict[str, Any]] = {
    "sandwich": {"layers": 4, "order": "s2 (sf)2 f2"},
    "mixers alone": {"layers": 2, "order": "s2"},
    "feed-forwards in turn": {
        "layers": 2,
        "feed_forward": [{"activation": "squared_relu"}, {"type": "dense"}],
        "attention": ATTENTIONS["heads"],
    },
    "random synthesizer, and attention that alone turns its queries": {
        "layers": 2,
        "convolution": 3,
        "rotary": {"base": 1000},
        "query_key_norm": True,
        "query_key_ratio": 0.5,
        "attention": [
            {
                "type": "synthesizer", "kind": "random",
                "pattern": {"type": "summary", "stride": 8, "summary": 2, "num_summaries": 2},
            },
            {"type": "local", "window": 9},
        ],
    },
    "products of a synthesizer": {
        "layers": 1,
        "rotary": {"base": 1000},
        "query_key_norm": True,
        "convolution": 3,
        "attention": {
            "type": "synthesizer", "kind": ["factorized_random", "dense", "attention"], "rank": 3, "hidden": 5,
            "pattern": {"type": "fixed", "stride": 8, "summary": 2, "num_summaries": 2},
        },
    },
    "factorized dense synthesizer, and all": {
        "layers": 2,
        "query_key_ratio": 0.5,
        "rotary": {"base": 1000},
        "attention": [
            {"type": "synthesizer", "kind": ["attention", "factorized_dense"], "blocks": 8, "hidden": 7},
            {
                "type": "synthesizer", "fixed": True, "pattern": {"type": "local", "window": 9},
                "kind": ["random", "factorized_random", "dense", "factorized_dense", "attention"],
            },
        ],
    },
    "hash rounds": {
        "layers": 2, "query_key_ratio": 0.5, "convolution": 3, "attention": [
            {"type": "lsh", "buckets": 4, "rounds": 3, "chunk": 2}, {"type": "lsh", "buckets": 1, "chunk": 6},
        ],
    },
    "hash rounds of turned queries": {
        "layers": 1, "rotary": {"base": 1000}, "attention": {"type": "lsh", "buckets": 6, "rounds": 2, "chunk": 3},
    },
    "reversible": {
        "layers": 2, "reversible": True, "feed_forward": [{"type": "experts", "count": 4}, {"type": "dense"}],
    },
    "reversible in another order": {"layers": 2, "reversible": True, "order": "s(sf)f", "norm": "rms"},
    "adaptive span": {
        "layers": 2,
        "rotary": {"base": 1000},
        "query_key_ratio": 0.5,
        "attention": [
            {"type": "adaptive_span", "ramp": 5, "penalty": 0.01, "initial": 9.5},
            {"type": "adaptive_span", "penalty": 0.0, "limit": 13},
        ],
    },
    "entmax": {
        "layers": 2,
        "convolution": 3,
        "attention": [
            {"type": "entmax", "pattern": {"type": "fixed", "stride": 8, "summary": 2, "num_summaries": 2}},
            {"type": "entmax", "pattern": {"type": "bigbird", "block": 4, "window": 2, "globals": 1, "random": 1}},
        ],
    },
    "chosen blocks": {
        "layers": 2,
        "rotary": {"base": 1000},
        "query_key_norm": True,
        "convolution": 3,
        "attention": [{"type": "moba", "block": 6, "top": 3}, {"type": "moba", "block": 5, "top": 2}],
    },
    "keys chosen by an indexer": {
        "layers": 2,
        "rotary": {"base": 1000},
        "query_key_norm": True,
        "output_gate": True,
        "convolution": 3,
        "attention": [
            {"type": "indexed", "keys": 9, "window": 3, "index_heads": 2, "index_width": 6},
            {
                "type": "indexed", "keys": 12, "block": 4, "window": 5, "index_heads": 3, "index_width": 4,
                "key_value_heads": 2, "local": {"heads": 2, "window": 6},
            },
        ],
    },
    "summaries of blocks": {
        "layers": 3,
        "convolution": 3,
        "rotary": {"base": 1000},
        "query_key_norm": True,
        "query_key_ratio": 0.5,
        "attention": [
            {"type": "compressed"},
            {"type": "local", "window": 5},
            {"type": "compressed", "block": 6, "distance": 2, "summary": "mlp", "key_value_heads": 2},
        ],
    },
    "native sparse attention": {
        "context": 40,  # in which there is a choice among blocks
        "layers": 2,
        "convolution": 3,
        "rotary": {"base": 1000},
        "query_key_norm": True,
        "query_key_ratio": 0.5,
        "attention": [
            {"type": "nsa", "block": 4, "distance": 2, "selected_block": 4, "selected": 5, "window": 3},
            {
                "type": "nsa", "block": 2, "distance": 2, "selected_block": 6, "selected": 4, "window": 7,
                "key_value_heads": 2,
            },
        ],
    },
    "matches": {
        "layers": 3,
        "vocabulary": 3,
        "convolution": 3,
        "rotary": {"base": 1000},
        "attention": [
            {"type": "match", "window": 4, "order": 2, "matches": 3},
            {"type": "local", "window": 5},
            {"type": "match", "window": 1, "order": 3, "matches": 50, "key_value_heads": 2},
        ],
    },
    "routing": {
        "layers": 1,
        "attention": {"type": "routing", "clusters": 5, "window": 6, "local": {"heads": 2, "window": 4}},
    },
    "routing in turn": {
        "context": 40,
        "layers": 3,
        "rotary": {"base": 1000},
        "query_key_norm": True,
        "convolution": 3,
        "query_key_ratio": 0.5,
        "bias": False,
        "attention": [
            {"type": "routing", "clusters": 4, "window": 3, "shared_query_key": False},
            {"type": "routing", "clusters": 7, "window": 50, "local": {"heads": 1, "window": 4}},
            {"type": "routing", "clusters": 4, "window": 5, "local": {"heads": 3, "window": 9}, "keys": "random"},
        ],
    },
    "gated attention": {
        "layers": 3,
        "output_gate": True,
        "convolution": 3,
        "attention": [
            {**ATTENTIONS["heads"], "key_value_heads": 2},
            {"type": "moba", "block": 6, "top": 3},
            {"type": "lsh", "buckets": 4, "rounds": 3, "chunk": 2},
        ],
    },
    "sinks": {
        "layers": 3,
        "sinks": True,
        "query_key_norm": True,
        "convolution": 3,
        "attention": [
            {**ATTENTIONS["heads"], "key_value_heads": 2},
            {"type": "fixed", "stride": 8, "summary": 2, "num_summaries": 2},
            {"type": "column", "stride": 8},
        ],
    },
    "recurrence, and attention with gates": {
        "layers": 2, "output_gate": True, "attention": [{"type": "recurrent"}, {"type": "local", "window": 9}],
    },
    "recurrence": {
        "layers": 3,
        "attention": [
            {"type": "recurrent", "width": 24, "stateful": True},
            {"type": "local", "window": 9},
            {"type": "recurrent", "cell": "brc"},
        ],
    },
    "delta rules": {
        "layers": 3,
        "bias": False,
        "attention": [
            {"type": "delta", "stateful": True},
            {"type": "delta", "correction": False, "heads": 2, "convolution": 3},
            {"type": "delta", "decay": False, "key_ratio": 0.5, "value_ratio": 1},
        ],
    },
    "keys and values that heads share": {
        "layers": 4,
        "rotary": {"base": 1000},
        "query_key_norm": True,
        "query_key_ratio": 0.5,
        "attention": [
            {**ATTENTIONS["heads"], "key_value_heads": 2},
            {"type": "moba", "block": 6, "top": 3, "key_value_heads": 2},
            {"type": "adaptive_span", "ramp": 5, "penalty": 0.01, "initial": 9.5, "key_value_heads": 2},
            {"type": "entmax", "pattern": {"type": "strided", "stride": 8}, "key_value_heads": 1},
        ],
    },
    "keys and values of one head": {
        "layers": 2,
        "convolution": 3,
        "attention": {"type": "strided", "stride": 8, "combine": "interleaved", "key_value_heads": 1},
    },
    "memory, relative positions": {
        "layers": 3,
        "norm_position": "after",
        "embedding": {"type": "tokens"},
        "attention": [
            {"type": "transformer_xl", "memory": 13},
            {"type": "transformer_xl", "memory": 0, "position_channels": 10, "untied": True},
            {"type": "transformer_xl", "memory": 30, "window": 9},
        ],
    },
    "compressed memory": {
        "layers": 2,
        "reversible": True,
        "attention": [
            {"type": "compressive", "memory": 13, "compressed": 7, "rate": 3, "compression": "mean"},
            {"type": "compressive", "memory": 40, "compressed": 9, "rate": 2, "compression": "max", "window": 11},
        ],
    },
    "product keys": {
        "layers": 2,
        "feed_forward": [
            {"type": "product_keys", "keys": 7, "top": 5, "heads": 3, "query_width": 10},
            {"type": "product_keys", "keys": 4, "top": 4, "heads": 1, "query_width": 6},
        ],
    },
    "experts every other layer": {"layers": 2, "feed_forward": [{"type": "dense"}, {"type": "experts", "count": 4}]},
    "norms after, as BERT": {
        "layers": 2, "norm_position": "after", "embedding_norm": True, "feed_forward": {"activation": "gelu"},
        "output": {"tied": True, "transform": True, "bias": True}, "convolution": 3,
    },
    "norms after in another order": {
        "layers": 2, "order": "s(sf)f", "norm_position": "after", "ngrams": {"orders": [2, 5], "rows": 61},
        "output": {"tied": True}, "attention": ATTENTIONS["heads"],
    },
    "one expert a row": {
        "layers": 1, "bias": False,
        "feed_forward": {"type": "experts", "count": 3, "top": 1, "activation": "squared_relu", "capacity": 1.25},
    },
    "experts by thresholds": {"feed_forward": {"type": "experts", "count": 4, "top": 1, "routing": "threshold"}},
    "zero experts": {
        "reversible": True,
        "context": 40,  # at 24, rounding to bf16 changes a choice
        "feed_forward": [
            {"type": "experts", "count": 3, "zero": 2}, {"type": "experts", "count": 2, "top": 1, "zero": 1},
        ],
    },
}  # fmt: skip

# Networks that read both sides, under the objective that needs them to.
MASKED: dict[str, Any] = {"type": "masked", "share": 0.3, "span": 3}
TWO_SIDED: dict[str, dict[str, Any]] = {
    "dense": {"attention": {"type": "dense", "causal": False}, "rotary": {"base": 1000}},
    "patterns": {
        "layers": 4,
        "attention": [
            {"type": "local", "window": 5, "causal": False},
            {"type": "longformer", "window": 4, "globals": 2, "causal": False},
            {"type": "bigbird", "block": 4, "window": 2, "globals": 1, "random": 1, "context": 40, "causal": False},
            {"type": "block", "stride": 8, "causal": False},
        ],
    },
    "linformer": {"attention": {"type": "linformer", "rows": 7}},
    "linformer, nothing shared": {"attention": {"type": "linformer", "rows": 5, "share": "nothing"}},
    "linformer, shared by layers": {"attention": {"type": "linformer", "rows": 5, "share": "layers"}},
    "relative bias": {
        "layers": 2, "attention": {"type": "dense", "causal": False, "key_value_heads": 2},
        "relative_bias": {"buckets": 12, "distance": 20},
    },
    "linformer, reversible": {"reversible": True, "attention": {"type": "linformer", "rows": 5, "share": "heads"}},
}  # fmt: skip

SYSTEMS |= {
    kind: {path: example_of(kind, cls)}
    for path, registry in (("attention", MIXERS), ("feed_forward", FEED_FORWARDS))
    for kind, cls in registry.items()
    if kind not in types_in([SYSTEMS, TWO_SIDED])
}


def model_json(**changes: Any) -> dict[str, Any]:
    """Return the `model` object of a small run, with some keys changed."""
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
    """Return a small model configuration, with some keys changed."""
    return ModelConfig.model_validate(model_json(**changes))
