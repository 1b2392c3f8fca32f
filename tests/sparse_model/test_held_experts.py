"""Experts that processes divide: rows that travel give what one process with all experts computes, in fp64."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from longstride.sparse_model.feed_forwards import dense
from tests.harness.divided import Pass, divided, one_pass

BOUND = 2.0**-40  # relative: sums of few hundred terms in another order
PASSES: dict[str, Pass] = {
    "two experts a row": Pass({"top": 2}),
    "one expert a row": Pass({"top": 1, "activation": "squared_relu"}),
    "recomputed": Pass({"top": 2}, recompute=False),
    "recomputed, reentrant": Pass({"top": 2}, recompute=True),
    "capacity": Pass({"top": 2, "capacity": 0.75}),
    "padding": Pass({"top": 2, "capacity": 1.25}, lengths=(40, 7, 1, 64)),
    "zero experts": Pass({"top": 2, "zero": 3}),
    "thresholds": Pass({"top": 2, "routing": "threshold"}),
    "unbiased": Pass({"top": 2, "network": {"bias": False}}),
    "reversible": Pass({"top": 2, "network": {"reversible": True}}),
    "more experts than rows": Pass({"top": 1, "count": 64, "network": {"context": 8}}),
}


def request_of(given: Pass) -> Pass:
    changes: dict[str, Any] = {"type": "experts", "count": 8, "balance": 0, **given.changes}
    if changes.get("routing") == "threshold":
        del changes["balance"]
    network = changes.pop("network", {})
    return replace(given, changes={"layers": 2, "dropout": 0, **network, "feed_forward": changes}, batch=4)


@pytest.mark.parametrize(
    ("name", "size"), [("two experts a row", 4), *((name, 4 if i % 2 else 2) for i, name in enumerate(PASSES))]
)
def test_held_experts_compute_what_one_process_computes(name: str, size: int) -> None:
    request = request_of(PASSES[name])
    whole, results = one_pass(request, None), divided(replace(request, by_experts=True), size)
    bound = 1e-9 if name == "reversible" else BOUND  # a last bit may move a stream by a step of its grid
    nats = torch.cat([result.nats for result in results])
    assert (nats - whole.nats).abs().max() <= bound * whole.nats.abs().max()
    for parameter, expected in whole.gradients.items():
        assert expected is not None
        total = torch.stack([share for result in results if (share := result.gradients[parameter]) is not None]).sum(0)
        assert (total - expected).abs().max() <= bound * expected.abs().max(), parameter
    for number, expected in enumerate(whole.statistics):
        assert torch.equal(torch.stack([result.statistics[number] for result in results]).sum(0), expected)


def test_long_inputs_are_computed_in_pieces_with_equal_bits_for_repeated_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dense, "LONG_ROWS", 20)
    monkeypatch.setattr(dense, "CHUNK_ROWS", 7)
    request = replace(request_of(PASSES["two experts a row"]), by_experts=True)
    whole, held = one_pass(replace(request, by_experts=False), None), one_pass(request, None)
    for parameter, expected in whole.gradients.items():
        gradient = held.gradients[parameter]
        assert expected is not None and gradient is not None
        assert (gradient - expected).abs().max() <= BOUND * expected.abs().max(), parameter
    for one, other in zip(*(divided(request, 4) for _ in range(2)), strict=True):
        assert all(torch.equal(x, other.gradients[name]) for name, x in one.gradients.items() if x is not None)
