"""Attention to summaries of blocks. Letters: B batch, H heads, K heads of keys, N positions, D head width, l block."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from longstride.sparse_model import SparseTransformer
from longstride.sparse_model.mixers.memories.compressed import Grid
from longstride.sparse_model.part import BlockContext, places_of
from longstride.testing import check
from tests.harness.configs import small
from tests.harness.stochastic import with_gradients

OPTIONS: dict[str, Any] = {"rotary": {"base": 1000}, "query_key_norm": True, "query_key_ratio": 0.5}
SIZES = [(3, 3), (4, 2), (6, 2), (8, 8)]  # block, distance
LENGTHS = [*range(1, 65), 100, 257]


def mixer_of(block: int, distance: int, summary: str = "convolution", **changes: Any) -> Any:
    sizes = {"block": block, "distance": distance}
    return random_mixer({"type": "compressed", **sizes, "summary": summary, "key_value_heads": 2}, **changes)


def random_mixer(attention: dict[str, Any], **changes: Any) -> Any:
    """Return the mixer of a model in fp64, with random weights everywhere."""
    mixer: Any = SparseTransformer(small(layers=1, context=257, attention=attention, **changes)).double().mixers[0]
    torch.manual_seed(attention["block"])
    for parameter in mixer.parameters():
        nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    return mixer


def turned(mixer: Any, x: Tensor, place: int) -> Tensor:
    """Return one head's query or key (D,), normalised and rotated as the network says."""
    if mixer.normed:
        x = x / (x.square().mean() + 1e-6).sqrt()
    if mixer.rotary is None:
        return x
    cosines, sines = mixer.rotary.table(x.device)[place, 0].double().unbind(-1)
    a, b = x.view(-1, 2).unbind(-1)
    return torch.stack([a * cosines - b * sines, a * sines + b * cosines], -1).flatten()


def summary_of(part: Any, rows: Tensor) -> Tensor:
    """Return the summary (K, D) of one block's rows (l, K, D)."""
    if part.kind == "mean":
        return rows.sum(0) / len(rows)
    if part.kind == "convolution":
        (layer,) = part.layers
        by_place = layer.weight.unflatten(1, (len(rows), -1))  # (K D, l, K D)
        out = sum(by_place[:, place] @ rows[place].flatten() for place in range(len(rows)))
        return (out + (0 if layer.bias is None else layer.bias)).view(rows.shape[1:])
    heads = []
    for head in range(rows.shape[1]):
        first, second = part.layers
        flat = torch.cat([rows[place, head] + part.places[place] for place in range(len(rows))])
        heads.append(second(first(flat).clamp_min(0)))
    return torch.stack(heads)


def ends_before(position: int, begin: int, block: int, distance: int) -> list[int]:
    """Return the last positions of the blocks of a document from ``begin`` on that are over at a position."""
    firsts = range(begin, position + 1, distance)
    return [first + block - 1 for first in firsts if first + block - 1 <= position]


class Summaries:
    """The summaries of one context's keys and values (N, K, D), each computed once."""

    def __init__(self, mixer: Any, k: Tensor, v: Tensor) -> None:
        self.mixer, self.k, self.v = mixer, k, v
        self.known: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def before(self, position: int, begin: int) -> list[tuple[Tensor, Tensor]]:
        """Return key and value (K, D) of each block that is over, in the document that begins at ``begin``."""
        compression, found = self.mixer.compression, []
        for end in ends_before(position, begin, compression.block, compression.distance):
            if (begin, end) not in self.known:
                cut = slice(end - compression.block + 1, end + 1)
                key = [turned(self.mixer, each, end - begin) for each in summary_of(compression.keys, self.k[cut])]
                self.known[begin, end] = torch.stack(key), summary_of(compression.values, self.v[cut])
            found.append(self.known[begin, end])
        return found


def by_loops(mixer: Any, h: Tensor, begins: list[int]) -> Tensor:
    """Return the rows (N, C) of one context (N, C) whose documents begin at these positions, from the definition."""
    q, k, v = mixer.query_key_value(h).split(mixer.widths, -1)
    q, k, v = q.unflatten(1, (4, -1)), k.unflatten(1, (2, -1)), v.unflatten(1, (2, -1))
    summaries = Summaries(mixer, k, v)
    rows = []
    for i in range(len(h)):
        begin = max(start for start in begins if start <= i)
        pairs = [(mixer.null.key, mixer.null.value), *summaries.before(i, begin)]
        keys, values = (torch.stack(x) for x in zip(*pairs, strict=True))  # (M + 1, K, D)
        heads = []
        for head in range(4):
            query, shared = turned(mixer, q[i, head], i - begin), head // 2
            weights = torch.softmax(keys[:, shared] @ query / len(query) ** 0.5, 0)
            heads.append(weights @ values[:, shared])
        rows.append(mixer.projection(torch.cat(heads)))
    return torch.stack(rows)


def assert_equals_loops(
    mixer: Any,
    length: int,
    begins: list[int],
    context: BlockContext,
    loops: Callable[[Any, Tensor, list[int]], Tensor] = by_loops,
    unit: float = 1e-12,
) -> None:
    """Compare outputs with loops within a unit, and all gradients, which leave out the epsilon of normalised heads."""
    torch.manual_seed(length)
    h = torch.randn(1, length, 64, dtype=torch.float64, requires_grad=True)
    parameters = tuple(mixer.parameters())

    def computed(h: Tensor, *_: Tensor) -> Tensor:
        return mixer(h, context).rows

    def expected(h: Tensor, *_: Tensor) -> Tensor:
        rows = loops(mixer, h[0], begins)[None]
        return rows + 0 * sum(parameter.sum() for parameter in parameters)  # none is left without a gradient

    if mixer.normed:
        torch.testing.assert_close(computed(h), expected(h), rtol=unit, atol=unit / 10)
        return
    results = (with_gradients(function, (h, *parameters)) for function in (computed, expected))
    torch.testing.assert_close(*results, rtol=100 * unit, atol=10 * unit)


@pytest.mark.parametrize(
    ("block", "distance", "lengths"),
    [
        *((*sizes, [*range(1, 3 * sizes[0] + 1), 33]) for sizes in SIZES),
        pytest.param(*SIZES[0], LENGTHS, marks=pytest.mark.campaign),
    ],
)
def test_attention_equals_its_definition(block: int, distance: int, lengths: list[int]) -> None:
    mixer = mixer_of(block, distance)
    for length in lengths:
        assert_equals_loops(mixer, length, [0], BlockContext())


@pytest.mark.parametrize("changes", [{}, OPTIONS, {"bias": False, "rotary": {}}], ids=["plain", "normed", "rotary"])
@pytest.mark.parametrize("summary", ["convolution", "mlp", "mean"])
def test_every_summary_equals_its_definition_within_documents(summary: str, changes: dict[str, Any]) -> None:
    begins = [0, 1, 3, 10, 14, 27]
    is_begin = torch.zeros(1, 31, dtype=torch.bool)
    is_begin[:, begins] = True
    mixer = mixer_of(4, 2, summary, **changes)
    assert_equals_loops(mixer, 31, begins, BlockContext(places=places_of(is_begin)))
    assert_equals_loops(mixer, 31, [0], BlockContext())


@pytest.mark.parametrize(("block", "distance"), [*SIZES, (2, 2), (5, 5), (6, 3)])
def test_a_query_reads_the_blocks_that_are_over_and_no_other(block: int, distance: int) -> None:
    """At every remainder, with and without documents: blocks by their last positions."""
    length = 4 * block + 3
    for begin in range(block + 2):
        is_begin = torch.zeros(1, length, dtype=torch.bool)
        is_begin[:, begin] = True
        for places, start in ((None, 0), (places_of(is_begin), begin)):
            grid = Grid.of(length, block, distance, places, torch.device("cpu"))
            grid.selection(1, 2, null=True).check(length)
            grid.selection(1, 2, null=False).check(length)
            for i in range(length):
                reads = grid.ends[0, grid.low[0, i] : grid.high[0, i]].tolist()
                assert reads == ends_before(i, start if i >= start else 0, block, distance)


@pytest.mark.parametrize("summary", ["convolution", "mlp", "mean"])
def test_no_row_depends_on_a_later_position(summary: str) -> None:
    """Exactly, at every remainder of block and distance."""
    mixer, length = mixer_of(6, 3, summary), 20
    h = torch.randn(1, length, 64, dtype=torch.float64)
    jacobian: Any = torch.autograd.functional.jacobian(lambda x: mixer(x).rows.sum((0, 2)), h)
    depends = jacobian[:, 0].any(-1)  # (N, N)
    assert not depends.triu(1).any()
    reads = mixer.reads(h, 0)(torch.arange(length))
    itself = torch.eye(length, dtype=torch.bool)
    assert torch.equal(depends | itself, reads | itself)


def test_the_conformance_suite_holds_for_means() -> None:
    """Of other summaries, and with all options: a system of tests/harness/configs.py."""
    attention = {"type": "compressed", "block": 4, "distance": 2, "summary": "mean"}
    results = check(small(layers=1, context=24, attention=attention))
    assert [title for title, result in results.items() if result != "holds"] == ["sections", "keys", "weights"]
