"""A context divided over processes: each has its rows of what one process computes, and a share of the same gradients.

In fp64 the two differ by the order of sums: of B·N rows, of a few hundred channels. Each such sum is off by less than
2⁻⁵² of its terms for each of them; ``BOUND`` leaves 2¹² such steps, relative to the largest number of a tensor.
"""

import copy
import functools
from typing import Any

import pytest
import torch

from longstride.kernels import ConfigError
from longstride.sparse_model import Division, SparseTransformer, division
from longstride.sparse_model.part import Part
from longstride.testing.threads import ThreadDivision, in_sections
from tests.harness.configs import ATTENTIONS, LATER, MASKED, SYSTEMS, TWO_SIDED, small
from tests.harness.divided import Pass, divided, joined, one_pass

BOUND = 2.0**-40
ON_GRID = 1e-9  # of reversible blocks: a last bit may move a stream by a step of its grid
LATER_PARTS = {**LATER, "initialization": "released", "ngrams": {"orders": [2, 4], "rows": 300}}
EVERY_MIXER: dict[str, Any] = {
    "layers": 7,
    "rotary": {"base": 1000},
    "convolution": 4,
    "attention": [
        {"type": "routing", "clusters": 4, "window": 5, "local": {"heads": 3, "window": 9}},
        {"type": "routing", "clusters": 4, "window": 5, "keys": "random", "shared_query_key": False},
        {"type": "lsh", "buckets": 4, "rounds": 2, "chunk": 3},
        {"type": "moba", "block": 6, "top": 3, "key_value_heads": 2},
        {"type": "adaptive_span", "ramp": 5, "penalty": 0.1, "limit": 13},
        {"type": "entmax", "pattern": ATTENTIONS["fixed merged"], "key_value_heads": 1},
        {
            "type": "synthesizer", "kind": ["random", "factorized_random", "dense", "factorized_dense", "attention"],
            "pattern": {"type": "summary", "stride": 8, "summary": 2, "num_summaries": 2},
        },
    ],
    "feed_forward": [{"type": "experts", "count": 4, "capacity": 1.25}, {"type": "dense"}],
}  # fmt: skip
SHARED_KEYS = {"attention": [{**ATTENTIONS["heads"], "key_value_heads": count} for count in (1, 2, 4)]}
IMAGE = {"embedding": {"type": "image", "height": 4, "width": 5, "channels": 2}}
LEARNED = {"embedding": {"type": "learned"}, "dropout": 0.3, "attention": ATTENTIONS["heads"]}
IN_TURN: dict[str, Any] = {
    "context": 64,
    "layers": 5,
    "dropout": 0.3,
    "rotary": {"base": 1000},
    "attention": [
        *(ATTENTIONS[name] for name in ("column", "local", "dense")), EVERY_MIXER["attention"][0], ATTENTIONS["column"],
    ],
    "feed_forward": [*4 * [{"type": "dense"}], EVERY_MIXER["feed_forward"][0]],
}  # fmt: skip
PASSES: dict[str, Pass] = {
    "every mixer": Pass(EVERY_MIXER),
    "keys that heads share, by heads": Pass(SHARED_KEYS),
    "keys that heads share, by keys": Pass(SHARED_KEYS, exchange="keys"),
    "heads that do not divide": Pass(
        {"heads": 3, "width": 48, "layers": 2, "attention": ATTENTIONS["strided interleaved"]}, exchange="keys"
    ),
    "later parts, documents apart, recomputed": Pass(LATER_PARTS, begins=(5, 10, 31), recompute=False),
    "dropout, recomputed, another batch": Pass(LEARNED, batch=3, recompute=True),
    "an exchange for each layer, with dropout, recomputed": Pass(IN_TURN, recompute=True, exchange="auto"),
    "columns aligned to the target": Pass(
        {**IN_TURN, "attention": ATTENTIONS["strided aligned"], "feed_forward": {"type": "dense"}}, exchange="auto"
    ),
    "padding": Pass(EVERY_MIXER, lengths=(29, 3)),
    "padding, an exchange for each layer, recomputed": Pass(
        {**IN_TURN, "feed_forward": {"type": "experts", "count": 4}, "ngrams": {"orders": [2], "rows": 300}},
        lengths=(64, 9), recompute=False, exchange="auto",
    ),
    "padding, reversible": Pass({**SYSTEMS["reversible"], **IMAGE}, lengths=(25, 40)),
    "reversible, with dropout": Pass({**SYSTEMS["reversible"], **IMAGE, "dropout": 0.3}),
    **{
        f"masked, {name}": Pass({"objective": MASKED, "dropout": 0.3, **of}, lengths=(29, 40), exchange="auto")
        for name, of in TWO_SIDED.items()
    },
}  # fmt: skip


@functools.cache
def undivided(name: str) -> Any:
    return one_pass(PASSES[name], Division())


@pytest.mark.parametrize(
    ("name", "size"),  # test_parts.py has two processes
    [
        *((name, 4) for name in PASSES),
        *(pytest.param(name, 2, marks=pytest.mark.campaign) for name in PASSES),
    ],
)
def test_processes_have_together_what_one_has(name: str, size: int) -> None:
    """Nats, auxiliary loss, statistics, every gradient, and what is drawn next."""
    asked = PASSES[name]
    found, wanted = joined(divided(asked, size)), undivided(name)
    bound = ON_GRID if asked.changes.get("reversible") else BOUND
    numbers = {"nats": (found.nats, wanted.nats)}
    if wanted.auxiliary is not None:
        numbers["auxiliary loss"] = found.auxiliary, wanted.auxiliary
    pairs = zip(found.statistics, wanted.statistics, strict=True)
    numbers |= {f"statistics {number}": pair for number, pair in enumerate(pairs)}
    numbers |= {name: (gradient, wanted.gradients[name]) for name, gradient in found.gradients.items()}
    for what, (given, other) in numbers.items():
        torch.testing.assert_close(given, other, rtol=0, atol=bound * float(other.abs().max()), msg=what)
    assert found.drawn == wanted.drawn


def test_layers_of_columns_have_their_rows_divided_by_columns() -> None:
    """Where that sends less, and nothing else of the block needs neighbours: an expert's capacity, a convolution."""
    cases: list[tuple[dict[str, Any], Any, list[int]]] = [
        ({}, "auto", [8, 0, 0, 0, 0]),  # the last layer's experts count arrivals
        ({"feed_forward": {"type": "dense"}}, "auto", [8, 0, 0, 0, 8]),
        ({"feed_forward": {"type": "dense"}}, "keys", [8, 0, 0, 0, 8]),
        ({}, "heads", [0, 0, 0, 0, 0]),
        ({"convolution": 3}, "auto", [0, 0, 0, 0, 0]),
        ({"reversible": True}, "auto", [0, 0, 0, 0, 0]),
        (
            {"attention": {"type": "column", "stride": 8, "align": "target"}, "feed_forward": {"type": "dense"}},
            "auto",
            [0, 0, 0, 0, 0],
        ),  # a query reads the next column
    ]
    for changes, exchange, strides in cases:
        model = SparseTransformer(small(**{**IN_TURN, **changes}))
        model.divide(Division(1, 4, None, exchange))
        assert [context.columns for context in model.block_contexts(torch.zeros(1, 64))] == strides


@pytest.mark.parametrize("size", [2, 4])
def test_losses_in_fp32_are_those_of_one_process(size: int) -> None:
    asked = Pass(LATER_PARTS, torch.float32)
    found, wanted = joined(divided(asked, size)).nats, one_pass(asked, None).nats
    assert abs(found.double().sum() / wanted.double().sum() - 1) < 1e-6


def test_parts_of_a_divided_model_are_those_of_an_undivided_one() -> None:
    """What is asked of a model that computes nothing: pairs and operations of whole contexts."""
    model, whole = SparseTransformer(small(**EVERY_MIXER)), SparseTransformer(small(**EVERY_MIXER))
    model.divide(Division(1, 4))
    for block, other in zip(model.blocks, whole.blocks, strict=True):
        assert block.work(40, 2) == other.work(40, 2)
    assert [mixer.copies for mixer in model.mixers[:6]] == [1, 1, 1, 2, 1, 4]


def test_what_a_mixer_sends_is_what_it_says() -> None:
    """Calls, and numbers of each process, of the others: for all contexts of a batch."""
    model = SparseTransformer(small(**{**EVERY_MIXER, "convolution": None})).train()
    rows = torch.randn(2, 40, 64)
    for mixer in model.mixers:
        parts = [part for part in mixer.modules() if isinstance(part, Part)]

        def sent(place: ThreadDivision, mixer: Any = mixer, parts: list[Any] = parts) -> tuple[int, int]:
            own = copy.deepcopy(mixer)
            own.division = place
            assert len(parts) == 1
            with torch.no_grad():
                own(rows[:, place.section(40)])
            return place.calls, place.sent_bytes

        told = mixer.traffic(Division(0, 4), 40)
        assert told.exchange == "heads"
        assert in_sections(4, sent) == [(told.calls, 2 * 4 * numbers) for numbers in told.sent], type(mixer)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_is_dropped_goes_by_positions(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """However many are drawn together."""
    monkeypatch.setattr(division, "WORDS", 200)
    rows = torch.randn(3, 120, 33).to(dtype)
    dropped = {}
    for size in (1, 2, 3, 4, 8):
        sections = []
        for rank in range(size):
            torch.manual_seed(0)
            place = Division(rank, size)
            sections.append(place.drop(rows[:, place.section(120)], 0.3125))
        dropped[size] = torch.cat(sections, 1)
    whole = dropped.pop(1)
    assert all(torch.equal(whole, other) for other in dropped.values())
    torch.manual_seed(0)
    monkeypatch.setattr(division, "WORDS", 1 << 16)
    mask = Division().dropped(rows, 0.3125)
    torch.testing.assert_close(whole, (rows / 0.6875).masked_fill(mask, 0.0))
    assert not torch.equal(mask, Division().dropped(rows, 0.3125))  # the next draw


def test_as_much_is_dropped_as_is_asked_for() -> None:
    """Five deviations of so many numbers, of each context and channel."""
    torch.manual_seed(0)
    for share in (0.0, 1e-3, 0.1, 0.5, 0.999):
        mask = Division().dropped(torch.empty(2, 20_000, 16), share).double()
        for axes in ((0, 1, 2), (1, 2), (0, 1)):
            numbers = mask.numel() / mask.mean(axes).numel()
            deviation = (share * (1 - share) / numbers) ** 0.5
            assert (mask.mean(axes) - share).abs().max() <= 5 * deviation + 2**-17
    both = Division().dropped(torch.empty(2, 20_000, 16), 0.5).double() - 0.5
    assert abs(both[0] * both[1]).mean() == 0.25 and abs((both[0] * both[1]).mean()) < 5 * 0.25 / 320_000**0.5
    rows = torch.ones(1, 20_000, 16, requires_grad=True)
    out = Division().drop(rows, 0.999)
    out.sum().backward()
    assert rows.grad is not None and torch.equal(rows.grad, out)  # ones that are dropped or grow
    assert torch.equal(Division().drop(rows, 0.0), rows)


KEYS = 'exchanges heads, and sequence_exchange asks for keys; give "auto"'
LINES: dict[str, tuple[dict[str, Any], int, dict[str, Any], list[str]]] = {
    "context": (
        {"context": 50, "attention": ATTENTIONS["local"]}, 4, {},
        ["context=50: {rule}; nearest 48 or 52, or 2 or 5 processes"],
    ),
    "heads of a mixer": (
        {"attention": SYSTEMS["hash rounds"]["attention"]}, 8, {},
        ["heads=4: {rule}, as lsh exchanges them; nearest 4 processes"],
    ),
    "heads that are asked for": (
        {}, 5, {"exchange": "heads"},
        ["heads=4: {rule}, as sequence_exchange asks for heads; nearest 4 processes"],
    ),
    "documents": (
        {}, 5, {"documents": True},
        ["heads=4: {rule}, as attention within documents exchanges them; nearest 4 processes"],
    ),
    "keys": (
        {"attention": [*EVERY_MIXER["attention"][4:6], {"type": "dense"}]}, 2, {"exchange": "keys"},
        [f"attention: adaptive_span {KEYS}", f"attention: entmax {KEYS}"],
    ),
    "convolution": (
        {"convolution": 12}, 4, {},
        [
            "convolution=12: reads 11 rows before each section, but with 4 processes a section has 10; at most 11, "
            "or 2 processes"
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LINES.values(), ids=LINES)
def test_what_cannot_be_divided_is_told(case: tuple[dict[str, Any], int, dict[str, Any], list[str]]) -> None:
    changes, size, more, lines = case
    with pytest.raises(ConfigError) as told:
        small(**changes).check_division(size, **more)
    rule = f"must be a multiple of the {size} processes that share each context"
    assert str(told.value).splitlines() == [line.format(rule=rule) for line in lines]


def test_what_can_be_divided_is_taken() -> None:
    small().check_division(1, "keys", documents=True)
    small().check_division(8)  # more than heads: keys travel
    small(**EVERY_MIXER).check_division(4)
    small(convolution=11).check_division(4, documents=True)
    with pytest.raises(ValueError, match="50 positions must divide by the 4 processes"):
        Division(0, 4).section(50)
    with pytest.raises(ValueError, match="11 rows before a section of 10"):
        Division(0, 4).before(torch.zeros(1, 10, 1), 11)
