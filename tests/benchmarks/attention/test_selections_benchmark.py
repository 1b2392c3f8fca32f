"""The benchmark of selections, from its command line to its file, in the smallest sizes."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.attention import selections
from benchmarks.attention.figures import PHASES
from benchmarks.attention.tables import selections_table


def test_one_command_measures_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, threads = tmp_path / "found.json", torch.get_num_threads()
    words = ["--contexts", "64", "128", "--heads", "1", "--head-width", "16", "--repeats", "1", "--dense-limit", "64"]
    try:
        assert selections.main([*words, "--output", str(output)]) == 0
    finally:
        torch.set_num_threads(threads)
    found = json.loads(output.read_text())
    names = ["routing", "two hash rounds"]
    assert [(row["context"], row["selection"]) for row in found["timings"]] == [
        (n, s) for n in (64, 128) for s in names
    ]
    for row in found["timings"]:
        assert all(row["seconds"][phase] > 0 for phase in PHASES) and 0 < row["pairs"] <= 128 * 2 * row["window"]
        for of_dense in row["ratio_to_dense"].values():
            assert all((of_dense[phase] is not None) == (row["context"] == 64) for phase in PHASES)
    assert set(found["growth"]) == set(names) and "× torch" in capsys.readouterr().out
    table = selections_table(found).splitlines()
    assert len(table) == 8 and len({line.count("|") for line in table[2:]}) == 1


def test_what_is_wrong_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(selections, "gate", lambda *_: {"routing": "off by 1"})
    threads = torch.get_num_threads()
    try:
        assert selections.main(["--output", str(tmp_path / "found.json")]) == 1
    finally:
        torch.set_num_threads(threads)
    assert capsys.readouterr().err == "routing: off by 1\n" and not list(tmp_path.iterdir())
