"""The benchmark of recurrences: every operation has its row, and memory that grows with the context."""

import pytest
import torch

from benchmarks.memories import recurrences


def test_times_and_memory_have_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    rows = recurrences.times(256, 1, cpu)
    assert [row["operation"] for row in rows] == list(recurrences.OPERATIONS)
    assert rows[-1]["dense_over_own"] == 1 and all(row["forward"] > 0 < row["backward"] for row in rows)
    memory = [{"context": context, "peak_bytes": recurrences.peak(context, cpu)} for context in (2_048, 4_096)]
    assert 1.2 < memory[1]["peak_bytes"] / memory[0]["peak_bytes"] < 2.1
    monkeypatch.setitem(recurrences.NETWORK, "context", 512)
    generation = recurrences.generation([700, 1_400], cpu)
    assert abs(generation[0]["cache_bytes"] - generation[1]["cache_bytes"]) < 100
    facts = {
        "device": "a card",
        "device_type": "cuda",
        "torch": "2",
        "date": "today",
        "context": 256,
        "generation": generation,
    }
    text = recurrences.table(facts | {"rows": rows, "memory": memory})
    assert "| dense attention |" in text and "1.0×" in text and "MiB of 2,048, 4,096" in text
