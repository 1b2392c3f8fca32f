"""Every registered pattern, mixer and feed-forward passes the conformance suite, which finds faults by name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from longstride.kernels.patterns import Column, Local, Pattern
from longstride.sparse_model import BlockContext, MixerOutput
from longstride.sparse_model.feed_forwards import FEED_FORWARDS
from longstride.sparse_model.mixers import MIXERS
from longstride.sparse_model.part import PLAIN, State
from longstride.testing import ConformanceError, check, patterns
from tests.harness.configs import ATTENTIONS, LATER, SYSTEMS, small
from tests.harness.oracles import all_patterns
from tests.harness.runs import ROOT, plain_environment
from tests.kernels.test_plan import WrongQueries
from tests.sparse_model.test_abilities import DoubleConfig, Mean, MeanConfig

NGRAMS = {"orders": [2, 4], "rows": 300}
# Each pattern is checked by itself: these differ in how layers and heads combine them, and in rows without keys.
COMBINED = ("cycle", "fixed interleaved", "summary", "strided aligned", "longnet", "bigbird")
# Combinations of what other models have: their orders, and layers in turn.
REPEATED = (
    "sandwich", "mixers alone", "feed-forwards in turn", "experts every other layer", "routing",
    "recurrence, and attention with gates",
)  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    # Layers that are alike are one.
    **{
        name: {"attention": ATTENTIONS[name], "layers": len(small(attention=ATTENTIONS[name]).mixers)}
        for name in COMBINED
    },
    **{name: changes for name, changes in SYSTEMS.items() if name not in REPEATED},
    "positions of sounds, the last row short": {"layers": 1, "embedding": {"type": "audio", "row_width": 12}},
    "all later parts": {**LATER, "layers": 2, "initialization": "released", "ngrams": NGRAMS},
    "n-grams, positions of pictures": {
        "context": 40, "layers": 1, "ngrams": NGRAMS,
        "embedding": {"type": "image", "height": 4, "width": 5, "channels": 2},
    },
    "n-grams, a position table, rotary": {
        "layers": 1, "embedding": {"type": "learned"}, "ngrams": NGRAMS, "rotary": {},
    },
    "feed-forwards alone too": {"layers": 2, "order": "f s2 f"},
    "reversible experts and clusters": {
        "layers": 2, "reversible": True, "attention": SYSTEMS["routing"]["attention"],
        "feed_forward": {"type": "experts", "count": 3, "top": 1, "balance": 3.0, "capacity": 0.75},
    },
}  # fmt: skip


# All remainders by the strides of 8 and 9 behind a block, and both sides of tiles.
FEW_LENGTHS = (1, 2, 3, 7, *range(8, 18), 25, 31, 32, 33, 64)
EVERY_LENGTH = pytest.param(patterns.SHORT, patterns.LONGEST, marks=pytest.mark.campaign)


@pytest.mark.parametrize(("lengths", "longest"), [(FEW_LENGTHS, 511), EVERY_LENGTH], ids=["few", "all"])
@pytest.mark.parametrize("pattern", all_patterns(), ids=str)
def test_every_pattern_conforms(
    pattern: Pattern, lengths: tuple[int, ...], longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patterns, "SHORT", lengths)
    monkeypatch.setattr(patterns, "LONGEST", longest)
    assert set(check(pattern).values()) == {"holds"}


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_every_model_conforms(changes: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Three blocks of most patterns are enough; every length of a context is computed."""
    results = check(small(**{"context": 24, **changes}))
    assert capsys.readouterr().out == "".join(f"{name:<16}{result}\n" for name, result in results.items())


OWN_PARTS = """
import sys
from longstride.kernels.patterns import pattern_from_json
from longstride.testing import check

sizes = {"context": 40, "layers": 1, "heads": 4, "width": 64, "embedding": {"type": "tokens"}}
recurrence = {"type": "own_parts.recurrence:GatedRecurrence"}
blocks = {"type": "own_parts.recent_blocks:RecentBlocks", "size": 8}
check({**sizes, "attention": recurrence, "feed_forward": {"type": "own_parts.gated_linear:GatedLinear"}})
check(pattern_from_json(blocks))
assert "pytest" not in sys.modules
"""


def test_parts_of_another_package_conform(tmp_path: Path) -> None:
    """The example package, in a program without a test framework."""
    environment = plain_environment() | {"PYTHONPATH": str(ROOT / "docs/examples/own_parts")}
    command = [sys.executable, "-c", OWN_PARTS]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert "documents       not declared by own_parts.recurrence:GatedRecurrence\n" in ended.stdout
    assert ended.stdout.count("lengths         holds\n") == 2


# What the suite finds


class ReadsTheNext(Local):
    """Each position reads one later position too."""

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q + 1) & (k > q - self.window)


class WrongLengths(Column):
    """Right only where the stride divides the context."""

    def parts(self) -> Any:
        return (WrongQueries(self.stride),)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (ReadsTheNext(3), "mask: position 0 reads the later position 1, in 2"),
        (WrongLengths(4), "parts: WrongQueries(stride=4"),
    ],
)
def test_a_wrong_pattern_is_found(pattern: Pattern, message: str) -> None:
    with pytest.raises(ConformanceError) as caught:
        check(pattern)
    assert str(caught.value).startswith(f"{pattern}: {message}")


Mix = Callable[["Faulty", Tensor, BlockContext], Tensor]


def mean(h: Tensor) -> Tensor:
    return h.cumsum(1) / torch.arange(1, h.shape[1] + 1, dtype=h.dtype)[:, None]


class Rows(State):
    """All rows so far."""

    def __init__(self) -> None:
        self.rows: list[Tensor] = []

    def take(self, source: Rows, order: Tensor, known: int, into: slice) -> None:
        self.rows = [row[order] for row in source.rows]

    def truncate(self, length: int) -> None:
        del self.rows[length:]


class Forgetful(Rows):
    def truncate(self, length: int) -> None:
        del self.rows[max(length - 1, 0) :]


class Shared(Rows):
    def take(self, source: Rows, order: Tensor, known: int, into: slice) -> None:
        self.rows = source.rows


class Faulty(Mean):
    """A mean of the rows so far, with a fault."""

    calls, state = 0, Rows
    mix: ClassVar[Mix | None] = None

    def forward(self, h: Tensor, context: BlockContext = PLAIN) -> MixerOutput:
        mix = type(self).mix
        if mix is not None:
            return MixerOutput(mix(self, h, context))
        if not isinstance(context.state, Rows):
            return MixerOutput(mean(h))
        context.state.rows[context.first :] = h.unbind(1)
        return MixerOutput(mean(torch.stack(context.state.rows, 1))[:, context.first :])

    def new_state(self, *room: Any) -> Any:
        return type(self).state()


class Halved(torch.autograd.Function):
    """Rows as they are; the gradient is halved."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / 2


def counted(mixer: Faulty, h: Tensor, context: BlockContext) -> Tensor:
    if not mixer.training:
        return mean(h)
    mixer.calls += 1
    return mean(h) * mixer.calls


class FaultyConfig(MeanConfig):
    def make(self, network: Any, rotary: Any) -> Mean:
        return Faulty()


@pytest.mark.parametrize(
    ("attributes", "supports", "message"),
    [
        ({"mix": lambda mixer, h, context: mean(h) + h.mean(1, keepdim=True)}, (), "future: row up to 0, when"),
        ({"mix": lambda mixer, h, context: mean(h) * h.shape[1]}, (), "lengths: a context of 1: differs"),
        ({"mix": lambda mixer, h, context: Halved.apply(mean(h))}, (), "gradients: "),
        ({"mix": counted}, (), "recomputation: "),
        ({"mix": lambda mixer, h, context: mean(h.bfloat16().to(h.dtype) if h.dtype == torch.float32 else h)}, (),
         "precision: output in torch.float32 is off by"),
        ({}, ("documents",), "documents: "),
        ({}, ("convolution",), "convolution: model.convolution adds no parameters"),
        ({}, ("sections",), "sections: nats: differs"),
        ({"has_queries": True}, (), "queries: model.rotary has no effect"),
        ({"mix": lambda mixer, h, context: mean(h)}, (), "cached steps: steps behind a beginning of 0: differs"),
        ({"state": Shared}, (), "copied caches: contexts [1, 1]: differs"),
        ({"state": Forgetful}, (), "truncation: "),
    ],
)  # fmt: skip
def test_a_faulty_mixer_is_found(
    attributes: dict[str, Any], supports: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MIXERS, "mean", FaultyConfig)
    monkeypatch.setattr(FaultyConfig, "supports", frozenset(supports))
    for name, value in attributes.items():
        monkeypatch.setattr(FaultyConfig if name == "has_queries" else Faulty, name, value)
    with pytest.raises(ConformanceError) as caught:
        check(small(attention={"type": "mean"}, layers=2, context=24))
    assert str(caught.value).startswith(f"mean, dense: {message}")


def test_what_a_part_does_not_declare_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A JSON object will do, the caller's random numbers stay, and no test framework is needed."""
    monkeypatch.setitem(MIXERS, "mean", MeanConfig)
    monkeypatch.setitem(FEED_FORWARDS, "double", DoubleConfig)
    state = torch.get_rng_state()
    results = check(small(attention={"type": "mean"}, feed_forward={"type": "double"}, layers=2).model_dump())
    assert torch.equal(torch.get_rng_state(), state)
    held = {name for name, result in results.items() if result == "holds"}
    assert held == {"configuration", "future", "lengths", "gradients", "recomputation", "precision", "resume"}
    assert results["padding"] == results["sections"] == "not declared by mean, double"
    assert results["documents"] == "not declared by mean"
    assert results["cached steps"] == results["weights"] == "not declared by Mean"
