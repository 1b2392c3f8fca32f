"""The benchmark of scaling: what it prints and writes of a run, and what it says of shared contexts."""

import json

import pytest

from benchmarks.scaling import scaling
from benchmarks.scaling.scaling import main, modelled_seconds, read_options, scale
from longstride.launcher.config import load_config


def test_a_run_is_scaled_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper_small", "train.global_batch=8", "--cards", "1", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(
        "paper_small: 864,128 parameters, 256 bytes a context, 1 × 1 of them a card and step, fp32"
    )
    rows = [line.split() for line in lines[2:10]]
    assert [row[:2] for row in rows] == [[cards, stage] for cards in "14" for stage in "0123"]
    # 2·P·4 bytes · 3/4, and half as much again for the updated weights
    assert [row[2] for row in rows] == ["0.0"] * 4 + ["5.2", "7.8", "7.8", "5.2"]
    assert float(rows[7][5]) < float(rows[3][5])  # a card of four holds less than one alone


def test_what_a_person_gets_wrong_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demmo"]) == 2
    assert "demmo: no such file" in capsys.readouterr().err
    assert main(["paper_small", "deepspeed=zero3_bf16", "deepspeed.zero_optimization.zero_hpz_partition_size=8"]) == 2
    assert "not modelled" in capsys.readouterr().err
    for wrong in (["--micro-batches", "0"], ["--cards", "0"], ["--cards", "two"], ["--between", "-1"]):
        with pytest.raises(SystemExit):
            read_options(["paper_small", *wrong])


def test_contexts_are_shared_by_what_divides_heads_and_positions() -> None:
    attention = 'model.attention={"type": "strided", "stride": 32, "combine": "interleaved"}'
    config = load_config("paper_small", ["model.layers=3", "model.context=1024", attention])
    found = scale("paper_small", config, [1, 2], 1)
    assert [row["ranks"] for row in found["divided"]] == [1, 2, 4]
    alone, *shared = found["divided"]
    assert alone["heads_sent"] == alone["sent"] == alone["calls"] == 0
    # 3 layers · (forward + backward) · (q, k, v, out) of 1024/U positions of 128 fp32 values
    assert [row["heads_sent"] for row in shared] == [3 * 2 * 4 * 1024 // u * 128 * 4 * (u - 1) / u for u in (2, 4)]
    assert all(row["sent"] < row["heads_sent"] for row in shared)
    peaks = [row["activations"]["peak"] for row in found["divided"]]
    assert peaks[0] > 1.9 * peaks[1] > 3.5 * peaks[2]  # windows and columns, of which little is received


def test_a_ring_is_as_slow_as_its_slowest_link() -> None:
    options = read_options(["paper_small", "--within", "100", "--between", "10", "--cards-per-host", "8"])
    assert [modelled_seconds(1000, cards, options) for cards in (8, 9)] == [10, 100]


def test_result_files_hold_what_was_found(monkeypatch, tmp_path) -> None:
    path = tmp_path / "scaling.json"
    monkeypatch.setattr(scaling, "RUNS", (("paper_small", "paper_small", ("train.global_batch=8",)),))
    assert main(["--output", str(path), "--cards", "1", "2", "8"]) == 0
    found = json.loads(path.read_text())
    assert [row["cards"] for row in found["runs"][0]["cards"]] == [1] * 4 + [2] * 4 + [8] * 4
