"""The benchmark of product keys: steps of both forms are measured, and the page has a row for each number of values."""

import pytest

from benchmarks.feed_forwards import product_keys


def test_steps_are_measured_and_have_their_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_keys, "SPENT", 0.0)
    monkeypatch.setattr(product_keys, "CONTEXT", 16)
    costs = [{"keys": 32, "held": held} | product_keys.cost(32, held) for held in (True, False)]
    assert costs[0]["parameters"] == costs[1]["parameters"] > 32**2 * 128
    text = product_keys.table({"device": "a card", "torch": "2", "date": "today", "costs": costs})
    assert f"| 1,024 | {costs[0]['parameters']:,} |" in text
