"""The model's configuration: what it accepts, refuses and derives."""

import typing
from itertools import cycle, islice
from typing import Any

import pytest

from longstride.kernels import ConfigError
from longstride.kernels.attention import BACKENDS
from longstride.kernels.patterns import PATTERNS, BigBird, Block, Column, Dense, Fixed, Local, LongNet, Strided, Summary
from longstride.sparse_model import ModelConfig, SparseTransformer
from longstride.sparse_model.mixers import MIXERS
from tests.harness.configs import ATTENTIONS, model_json, small


def test_text_and_audio_fold_the_sequence_alike() -> None:
    kinds = [small(embedding={"type": kind, "row_width": 16}).embedding for kind in ("text", "audio")]
    assert [kind.table_sizes(40) for kind in kinds] == [(3, 16)] * 2


LAYERS: dict[str, list[tuple[Any, ...]]] = {  # patterns of the heads, of layers in turn
    "strided merged": [(Strided(8),) * 4],
    "strided interleaved": [(Local(8),) * 4, (Column(8),) * 4],
    "fixed multihead": [(Block(8), Block(8), Summary(8, 2, 2, index=0), Summary(8, 2, 2, index=1))],
    "fixed merged": [tuple(Fixed(8, 2, 4, index=index) for index in range(4))],
    "longnet": [tuple(LongNet((4, 8), (1, 4), index=index) for index in range(4))],
    "bigbird": [tuple(BigBird(4, 2, 1, 1, index=index) for index in range(4))],
    "cycle": [(Column(8),) * 4, (Local(8),) * 4, (Dense(),) * 4],
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_and_heads_have_these_patterns(name: str) -> None:
    assert small(attention=ATTENTIONS[name], layers=5).layer_patterns() == tuple(islice(cycle(LAYERS[name]), 5))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"attention": {"type": "fixed", "stride": 12, "summary": 2}},
         "attention.stride=12: must divide context 40; nearest 10, 20"),
        ({"attention": [{"type": "dense"}, {"type": "column", "stride": 12}]},
         "attention[1].stride=12: must divide context 40; nearest 10, 20"),
        ({"attention": {"type": "dense", "combin": "merged"}},
         "attention.combin: unknown key for dense; nearest combine"),
        ({"attention": {"typ": "dense"}}, "attention.typ: unknown key; nearest type"),
        ({"attention": {"type": ["fixed"], "combine": {}}},
         "attention.combine={}: must be one of merged, interleaved, multihead"),
        ({"attention": [{"type": "column", "stride": 3}, {"type": "dense"}, {"typ": "dense"}]},
         "attention[0].stride=3: must divide context 40; nearest 2, 4\nattention[2].typ: unknown key; nearest type"),
        ({"attention": {"type": "fixed", "stride": 8, "summary": 2, "num_summaries": 2, "index": 1}},
         "attention.index=1: must be left out: it follows from the number of the head"),
        ({"attention": []}, "attention: must be a list of 1 to 10,000 objects, one for each layer; it has 0"),
        ({"attention": "dense"}, "attention: must be a pattern object, or a list of them"),
        ({"attention": {"type": "dense", "combine": "mixed"}},
         'attention.combine="mixed": must be one of merged, interleaved, multihead'),
        ({"attention": [{"type": "strided", "stride": 8, "combine": "interleaved"}]},
         'attention[0].combine="interleaved": the list is a cycle already; make each factor one of its entries'),
        ({"attention": {"type": "strided", "stride": 8, "combine": "multihead"}, "heads": 1},
         'attention.combine="multihead": strided splits over 2 factors: heads=1 must be a multiple of that'),
        ({"attention": {"type": "longnet", "segments": [4, 16], "dilations": [1, 2]}},
         "attention.segments=[4, 16]: the last must divide context 40; nearest [4, 20]"),
        ({"attention": {"type": "bigbird", "block": 4, "window": 2, "globals": 1, "random": 8}},
         "attention.random=8: window + globals + random must not exceed the 10 blocks of context 40; largest 7"),
        ({"heads": 5}, "width=64: 64 channels must divide into heads=5; nearest heads 4"),
        ({"heads": 7}, "width=64: 64 channels must divide into heads=7; nearest heads 8"),
        ({"query_key_ratio": 0.3},
         "query_key_ratio=0.3: times width 64 must be a whole number of channels; nearest 0.3125"),
        ({"query_key_ratio": 1e-9},
         "query_key_ratio=1e-09: times width 64 must be a whole number of channels; nearest 0.0625"),
        ({"query_key_ratio": 1.7e308}, "query_key_ratio=1.7e+308: must be less than or equal to 1073741824"),
        ({"query_key_ratio": 0.28125},
         "query_key_ratio=0.28125: 18 channels must divide into heads=4; nearest 0.25, or heads 2"),
        ({"feed_forward_ratio": 2.01},
         "feed_forward_ratio=2.01: times width 64 must be a whole number of channels; nearest 2.015625"),
        ({"heads": 5, "feed_forward_ratio": 2.01, "embedding": {"type": "text", "row_width": 41},
          "attention": {"type": "block", "stride": 3}},
         "width=64: 64 channels must divide into heads=5; nearest heads 4\n"
         "feed_forward_ratio=2.01: times width 64 must be a whole number of channels; nearest 2.015625\n"
         "embedding.row_width=41: must not exceed context 40\n"
         "attention.stride=3: must divide context 40; nearest 2, 4"),
        ({"embedding": {"type": "image", "height": 3, "width": 4}},
         "context=40: must be height x width x channels = 36"),
        ({"embedding": {"type": "text", "row_width": 41}}, "embedding.row_width=41: must not exceed context 40"),
        ({"width": 60, "rotary": {}},
         "rotary: rotates pairs of channels, but heads of queries have 15; use null, or heads 3"),
        ({"rotary": {"base": 1}}, "rotary.base=1: must be greater than 1"),
        ({"convolution": 1}, "convolution=1: must be greater than or equal to 2"),
        ({"feed_forward": {"activation": "relu"}},
         "feed_forward.activation=\"relu\": must be 'sigmoid_gelu', 'squared_relu' or 'gelu'"),
        ({"norm_position": "after", "reversible": True},
         'norm_position="after": has no inverse, so blocks cannot be reversible; set model.reversible to false'),
        ({"output": {"tide": True}}, "output.tide: unknown key; nearest tied"),
        ({"layrs": 3}, "layrs: unknown key; nearest layers"),
        ({"dropout": 1.0}, "dropout=1.0: must be less than 1"),
        ({"backend": "cuda"}, "backend=\"cuda\": must be 'auto', 'triton', 'cpu', 'reference' or 'flex'"),
    ],
)  # fmt: skip
def test_a_wrong_configuration_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        small(**changes)
    assert str(error.value) == message


@pytest.mark.parametrize("width, channels", [(100, 230), (96, 29), (1000, 1), (7, 3)])
def test_ratios_that_binary_floats_miss_are_exact(width: int, channels: int) -> None:
    config = small(width=width, heads=1, feed_forward_ratio=channels / width, query_key_ratio=channels / width)
    assert config.feed_forward_width == config.query_key_width == channels


def test_a_decimal_ratio_is_exact() -> None:
    assert small(width=100, heads=1, feed_forward_ratio=2.3).feed_forward_width == 230


def test_the_schema_lists_every_pattern() -> None:
    *patterns, by_head, _, listed = ModelConfig.model_json_schema()["properties"]["attention"]["anyOf"]
    patterns, others = patterns[: len(PATTERNS)], patterns[len(PATTERNS) :]
    assert [each["properties"]["type"]["const"] for each in patterns] == list(PATTERNS)
    assert [each["properties"]["type"]["const"] for each in others] == list(MIXERS)
    assert by_head["required"] == ["heads"] and listed["type"] == "array"
    (longnet,) = (each for each in patterns if each["properties"]["type"]["const"] == "longnet")
    segments = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
    assert longnet["properties"]["segments"] == segments | {"description": "positions; each divides the next"}
    assert longnet["required"] == ["type", "segments", "dilations"]
    assert not any("index" in each["properties"] for each in patterns)
    assert model_json().keys() <= ModelConfig.model_json_schema()["properties"].keys()


def test_every_backend_may_be_named() -> None:
    assert set(typing.get_args(ModelConfig.model_fields["backend"].annotation)) == {"auto", *BACKENDS}


def test_a_model_of_many_layers_is_made_of_one_block_of_each_kind() -> None:
    model, kinds = SparseTransformer.of_each_kind(small(layers=10_000))
    assert len(model.blocks) == 1 and list(kinds.values()) == [10_000]
    with pytest.raises(ConfigError, match="is larger than any machine can hold; give smaller sizes"):
        SparseTransformer.of_each_kind(
            small(context=2**30, embedding={"type": "tokens"}, attention={"type": "synthesizer", "kind": "random"})
        )
