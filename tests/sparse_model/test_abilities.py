"""What a part does not declare is refused by its name, before anything is computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from longstride.kernels import ConfigError
from longstride.kernels.patterns import Pattern
from longstride.launcher import cli
from longstride.launcher.drawing.attention import attention_rows
from longstride.launcher.drawing.pattern import draw_pattern
from longstride.sparse_model import ModelConfig, Session, SparseTransformer, StrictModel
from longstride.sparse_model.feed_forwards import FEED_FORWARDS
from longstride.sparse_model.mixers import MIXERS
from longstride.sparse_model.network import NetworkConfig
from longstride.sparse_model.part import (
    PLAIN,
    BlockContext,
    FeedForward,
    FeedForwardConfig,
    HeadWidths,
    Mixer,
    MixerConfig,
    MixerOutput,
    Work,
)
from longstride.sparse_model.rotary import Rotary
from tests.harness.configs import small


class MeanConfig(MixerConfig, StrictModel):
    """The least that a mixer's configuration says."""

    type: Literal["mean"]

    @property
    def has_queries(self) -> bool:
        return False

    def check(self, network: NetworkConfig, context: int) -> None:
        pass

    def head_patterns(self, network: NetworkConfig) -> tuple[Pattern, ...]:
        return ()

    def head_widths(self, network: NetworkConfig) -> HeadWidths:
        return HeadWidths(0, network.width // network.heads, in_kernels=False)

    def make(self, network: NetworkConfig, rotary: Rotary | None) -> Mean:
        return Mean()


class Mean(Mixer):
    """The mean of all rows so far."""

    def forward(self, h: Tensor, context: BlockContext = PLAIN) -> MixerOutput:
        return MixerOutput(h.cumsum(1) / torch.arange(1, h.shape[1] + 1)[:, None])

    def work(self, positions: int, batch: int) -> Work:
        return Work()


class DoubleConfig(FeedForwardConfig):
    """The least that a feed-forward's configuration says."""

    type: Literal["double"]

    def make(self, network: NetworkConfig) -> Double:
        return Double()


class Double(FeedForward):
    """Twice each row."""

    def forward(self, h: Tensor, context: BlockContext = PLAIN) -> MixerOutput:
        return MixerOutput(2 * h)

    def work(self, positions: int, batch: int) -> Work:
        return Work()


@pytest.fixture(params=["mean", "double"])
def config(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], str]:
    """A model with such a part, and how messages begin that name it."""
    monkeypatch.setitem(MIXERS, "mean", MeanConfig)
    monkeypatch.setitem(FEED_FORWARDS, "double", DoubleConfig)
    path = "attention" if request.param == "mean" else "feed_forward"
    return {path: {"type": request.param}}, f"^{path}: {request.param} "


def test_a_part_that_declares_nothing_trains(config: tuple[dict[str, Any], str]) -> None:
    model, tokens = SparseTransformer(small(**config[0])), torch.randint(256, (2, 40))
    model(tokens, return_nats=True).sum().backward()
    changed = tokens.clone()
    changed[:, 20:] = 7
    assert torch.equal(model(tokens)[:, :21], model(changed)[:, :21])


def test_what_a_part_does_not_declare_is_refused_by_its_name(config: tuple[dict[str, Any], str]) -> None:
    changes, name = config
    model, tokens = SparseTransformer(small(**changes)), torch.randint(256, (2, 40))
    with pytest.raises(ConfigError, match=f"{name}computes whole contexts"):
        model.config.check_division(2)
    with pytest.raises(ConfigError, match=f"{name}counts padding as if it were data"):
        model(tokens, real=torch.ones(2, 40, dtype=torch.bool))
    with pytest.raises(ConfigError, match=f"{name}cannot be computed again from its outputs"):
        small(**changes, reversible=True)


def test_what_a_mixer_does_not_declare_is_refused_by_its_name(config: tuple[dict[str, Any], str]) -> None:
    changes, name = config
    if "feed_forward" in changes:  # which sees one row at a time
        small(**changes, convolution=3).require("documents")
        return
    with pytest.raises(ConfigError, match=f"{name}does not apply model.convolution"):
        small(**changes, convolution=3)
    with pytest.raises(ConfigError, match=f"{name}reads whole contexts; take patterns, or data.packing"):
        SparseTransformer(small(**changes))(torch.zeros(1, 40).long(), begins=torch.ones(1, 40, dtype=torch.bool))
    with pytest.raises(ConfigError, match=r"^rotary: only applies to attention, and no layer uses attention"):
        small(**changes, rotary={"base": 1000})


def test_what_a_mixer_does_not_have_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MIXERS, "mean", MeanConfig)
    model, h = SparseTransformer(small(attention={"type": "mean"})).eval(), torch.zeros(1, 40, 64)
    with pytest.raises(ConfigError, match=r"^model\.attention: the mixer Mean has no method new_state, so it cannot"):
        Session(model)
    for ask in (lambda mixer: mixer.weights(h), lambda mixer: mixer.reads(h, 0)):
        with pytest.raises(ConfigError, match=r"^model\.attention: the mixer Mean has no method .* no picture of"):
            ask(model.mixers[0])
    assert model.mixers[0].traffic(model.division, 40) is None


@pytest.mark.parametrize("heads", [[], ["dense"]])
def test_pictures_name_a_mixer_that_shows_nothing(
    heads: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Alone, and beside layers that have patterns; by the command, and where attention is drawn."""
    monkeypatch.setitem(MIXERS, "mean", MeanConfig)
    config = small(attention=[{"type": "mean"}, *({"type": each} for each in heads)], layers=2)
    (tmp_path / "mine.json").write_text(json.dumps({"model": config.model_dump(mode="json")}))
    words, png = ["show", "pattern", str(tmp_path / "mine.json")], str(tmp_path / "a.png")
    line = "the mixer Mean has no method reads, so there is no picture of what it "
    for more in (
        ["--output", png],
        ["--html", str(tmp_path / "a.html")],
        ["--output", png + ".png", "--text", words[2]],
    ):
        assert cli.main([*words, *more]) == (0 if heads and "--text" not in more else 2)
        printed = capsys.readouterr()
        assert heads or line in printed.err
    if heads:
        assert line in draw_pattern(Path(words[2])).get_suptitle()
        assert line in (tmp_path / "a.html").read_text()
    with pytest.raises(ConfigError, match=r"^model.attention: the mixer Mean has no method weights, so there"):
        attention_rows(SparseTransformer(config).eval(), torch.zeros(40).long(), [3], layers=[0])


@pytest.mark.parametrize("model", [{"type": "mea"}, {"type": "mean", "hea": 1}])
def test_typing_errors_know_parts_of_others(monkeypatch: pytest.MonkeyPatch, model: dict[str, Any]) -> None:
    monkeypatch.setitem(MIXERS, "mean", MeanConfig)
    with pytest.raises(ConfigError, match=r"nearest mean|hea: unknown key"):
        ModelConfig.model_validate(small().model_dump() | {"attention": model})
