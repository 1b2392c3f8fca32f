"""Systems in miniature: that every one of a comparison sees the same, from every seed, and is shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.paper import systems

ROOT = Path(__file__).resolve().parents[3]


def test_one_command_compares_at_equal_data_and_adds_seeds(tmp_path: Path, capsys: Any) -> None:
    output = tmp_path / "found.json"
    words = ["synthesizer", "--size", "tiny", "--text", str(ROOT / "docs"), "--output", str(output), "--seeds", "1"]
    assert systems.main(words) == 0
    assert systems.main([*words, "--first", "1"]) == 0
    found = json.loads(output.read_text())
    names = list(systems.SYSTEMS["synthesizer"])
    assert [(run["system"], run["seed"]) for run in found["runs"]] == [
        (name, seed) for seed in (0, 1) for name in names
    ]
    for seed in (0, 1):
        some = [run for run in found["runs"] if run["seed"] == seed]
        for field in ("data_order_crc32", "steps", "bytes_trained", "held_out_bytes"):
            assert len({run[field] for run in some}) == 1
        assert len({run["bits_per_byte"] for run in some}) == len(names)
    shown = capsys.readouterr().out
    assert all(f"| {name} | " in shown for name in names) and "| 2 |" in shown
