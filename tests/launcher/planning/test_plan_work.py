"""Planned operations against those that torch counts, pairs against masks, and the length of a run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from longstride.data_pipelines.errors import DataError
from longstride.kernels import ConfigError
from longstride.launcher.config import load_config
from longstride.launcher.planning.costs import dense_pairs, parameter_parts, work
from longstride.launcher.planning.plan import run_length
from longstride.sparse_model import SparseTransformer
from longstride.sparse_model.feed_forwards import dense
from tests.harness.configs import ATTENTIONS, LATER, small

SHARED = {"attention": {"type": "fixed", "stride": 8, "summary": 2, "key_value_heads": 2}, "rotary": {"base": 1000}}


@pytest.mark.parametrize("attention", ATTENTIONS.values(), ids=ATTENTIONS)
def test_pairs_of_every_layer_are_those_of_the_masks(attention: Any) -> None:
    config = small(attention=attention)
    position = torch.arange(config.context)
    wanted = [
        sum(int(head.mask(position[:, None], position[None, :]).sum()) for head in heads)
        for heads in config.layer_patterns()
    ]
    assert [layer.pairs for layer in work(config).layers] == wanted
    assert dense_pairs(config) == 4 * 40 * 41 // 2


@pytest.mark.parametrize("long_rows", [dense.LONG_ROWS, 39], ids=["short", "long"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"feed_forward_ratio": 2, "query_key_ratio": 0.5}, LATER | {"convolution": None}, SHARED],
    ids=["full", "half-size", "later parts", "shared keys and values"],
)
def test_linear_operations_are_those_that_torch_counts(
    changes: dict[str, Any], long_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's counter does not look into the attention's op: what it sees is the linear layers."""
    monkeypatch.setattr(dense, "LONG_ROWS", long_rows)
    config = small(**changes)
    model, tokens = SparseTransformer(config), torch.randint(256, (1, 40))
    with FlopCounterMode(display=False) as forward:
        nats = model(tokens, return_nats=True)
    with FlopCounterMode(display=False) as backward:
        nats.sum().backward()
    planned = work(config)
    whole = replace(planned.total, scores=0, values=0)
    assert forward.get_total_flops() == whole.linear == whole.forward
    assert backward.get_total_flops() == whole.backward
    assert planned.total.linear - planned.blocks.linear == 2 * 40 * 64 * 256  # only the logits are not recomputed


def test_attention_operations_are_those_of_its_products() -> None:
    """The reference computes every pair: as many as if each query read the whole context."""
    config = small(backend="reference", attention={"type": "dense", "key_value_heads": 2}, query_key_ratio=0.5)
    model, tokens = SparseTransformer(config), torch.randint(256, (1, 40))
    with FlopCounterMode(display=False) as forward:
        model(tokens, return_nats=True)
    planned = work(config).total
    assert planned.pairs == 3 * 4 * 40 * 41 // 2
    assert (planned.scores, planned.values) == (2 * planned.pairs * 8, 2 * planned.pairs * 16)
    beyond = 3 * 4 * 40 * 39 // 2  # pairs that are masked
    assert forward.get_total_flops() == planned.forward + 2 * beyond * (8 + 16)
    # Five products for two: the scores again, and both factors of each.
    without = replace(planned, scores=0, values=0)
    assert planned.backward - without.backward == 3 * planned.scores + 2 * planned.values


def test_a_convolution_is_counted_though_torch_does_not() -> None:
    """Two operations a weight and position: of three layers, three weights a channel."""
    with_it, without = (work(small(convolution=each)).total for each in (3, None))
    assert with_it.linear - without.linear == 3 * 2 * 40 * 3 * 64


@pytest.mark.parametrize("layers", [1, 2, 5])
@pytest.mark.parametrize(
    "changes",
    [{"embedding": {"type": "image", "height": 4, "width": 5, "channels": 2}}, LATER],
    ids=["picture", "later"],
)
def test_parts_are_all_parameters(changes: dict[str, Any], layers: int) -> None:
    config = small(layers=layers, **changes)
    parts = parameter_parts(config)
    assert sum(parts.values()) == SparseTransformer.num_parameters(config)
    assert {"embedding", "norms", "attention", "feed-forward", "output"} == parts.keys() - {"convolutions"}


def test_length_comes_from_the_data_that_is_here(config_file: Path) -> None:
    config = load_config(config_file, ["train.epochs=2"])
    length = run_length(config, None)
    assert length.contexts is not None and length.origin == f"in {config.data.path}"
    assert length.steps == 2 * length.contexts // 8
    by_steps = run_length(load_config(config_file), None)
    assert (by_steps.steps, by_steps.epochs) == (8, 8 * 8 / length.contexts)


@pytest.mark.parametrize(
    "name, steps, contexts",
    [
        ("cifar10_strided", 360_000, 48_000),
        ("enwik8_fixed", 73_240, 7_324),
        ("imagenet64_strided", 1_401_276, 1_281_167),
    ],
)
def test_length_of_a_published_run_is_known_without_its_data(
    name: str, steps: int, contexts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(name)
    length = run_length(config, None)
    assert (length.steps, length.contexts) == (steps, contexts)
    assert length.origin == f"as published; {config.data.path} is not here"
    assert f"{steps:,} steps" in config.notes
    assert run_length(config, 1_000_000).contexts == 1_000_000


def test_unknown_data_leaves_epochs_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    length = run_length(load_config("music_1m"), None)
    assert (length.steps, length.epochs, length.contexts) == (100_000, None, None)
    assert run_length(load_config("music_1m"), 500).epochs == 200


def test_length_that_cannot_be_is_told(config_file: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^train\.warmup_steps=5000: must be at most the 750 steps that 2 epochs are"
    ):
        run_length(load_config("cifar10_strided", ["train.epochs=2"]), 6_000)
    with pytest.raises(DataError):
        run_length(load_config(config_file, [f"data.path={tmp_path}"]), None)
