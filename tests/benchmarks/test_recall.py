"""The benchmark of remembered bytes: contexts are the task's, networks differ in the mixer, pages have all rows."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.memories import recall


def test_contexts_end_with_their_first_byte() -> None:
    contexts = recall.contexts(500, 7, torch.Generator().manual_seed(0))
    assert contexts.shape == (500, 9) and contexts.dtype == torch.uint8
    assert torch.equal(contexts[:, -1], contexts[:, 0]) and not torch.equal(contexts[:, 1], contexts[:, 0])
    assert set(contexts.flatten().tolist()) == set(range(recall.VALUES))


@pytest.mark.parametrize("name", recall.MIXERS)
def test_the_last_byte_depends_on_the_first(name: str) -> None:
    model, tokens = recall.network(recall.MIXERS[name], 7), torch.zeros(1, 9, dtype=torch.uint8)
    assert model.config.width == 100 and model.config.order == "s2"
    torch.nn.init.normal_(model.logits.weight)  # begins at 0
    before = recall.last_logits(model, tokens)
    tokens[0, 0] = 1
    assert not torch.equal(recall.last_logits(model, tokens), before)


def test_rows_are_written_and_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recall, "HELD_OUT", 200)
    output = tmp_path / "recall.json"
    words = ["--output", str(output), "--distances", "2", "--seconds", "0.01", "--mixers"]
    recall.main([*words, "BRC"])
    (row,) = json.loads(output.read_text())["rows"]
    recall.main([*words, "BRC", "dense attention"])
    result = json.loads(output.read_text())
    assert result["rows"][0] == row and [each["mixer"] for each in result["rows"]] == ["BRC", "dense attention"]
    assert row["steps"] >= 1 and 0 < row["bits"] < 6 and 0 <= row["accuracy"] <= 1
    text = recall.table(result)
    assert text.count("| 2 | 0 |") == 2 and "| BRC |" in text
