"""Bars are met, missed or not measured by what result files hold, and by nothing else."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.attention.bars import CPU_BARS, GPU_BARS, main, tables

PHASES = ("forward", "backward", "both")
CARD = {"device": "A card", "device_type": "cuda", "copy_bytes_per_second": 3e12}


def timing(pattern: str, context: int = 64, stride: int = 8, ratio: float = 1.0, **others: Any) -> dict[str, Any]:
    seconds = dict.fromkeys(PHASES, 0.5)
    return {
        "pattern": pattern,
        "context": context,
        "stride": stride,
        "summary": 8,
        "head_width": 64,
        "dtype": "bfloat16",
        "heads": 8,
        "batch": 1,
        "seconds": seconds,
        "ratio_to_dense": dict.fromkeys(PHASES, ratio),
        "dense_kernel": dict.fromkeys(PHASES, "cudnn"),
        "dense_kernels": {"flash": dict.fromkeys(PHASES, 2 * ratio * 0.5)},
        "bound": dict.fromkeys(PHASES, "operations"),
        "gigabytes_per_second": {"forward": 2_400.0, "backward": 1_500.0},
        "tflops_on_visited": {"forward": 500.0, "backward": 300.0},
        "tflops_on_allowed": {"forward": 490.0, "backward": 290.0},
        "deterministic": True,
        "peak_bytes": 2**30,
        "bytes_per_position": 100.0,
        **others,
    }


def verdicts(*files: dict[str, Any]) -> dict[str, str]:
    """The line of each bar that was measured."""
    (table,) = tables(list(files))
    measured = [line for line in table.splitlines()[2:-1] if not line.endswith("not measured")]
    return {line.split(">=")[0].split("<=")[0].split("  ")[0].strip(): line for line in measured}


def test_without_files_nothing_is_measured() -> None:
    gpu, cpu = tables([])
    assert gpu.splitlines()[-1] == f"0 met, 0 missed, {len(GPU_BARS)} not measured"
    assert cpu.splitlines()[-1] == f"0 met, 0 missed, {len(CPU_BARS)} not measured"


def test_dense_flash_is_what_its_bars_are_on() -> None:
    found = verdicts({**CARD, "timings": [timing("column", 12_288, 128, 9.0), timing("column", 65_536, 256, 44.0)]})
    assert "18.0x (9.0x cudnn, the fastest)" in found["column, n = 12,288, l = 128, forward"]
    assert found["column, n = 12,288, l = 128, forward"].endswith("met")
    assert found["column, n = 65,536, l = 256, forward"].endswith("missed")


def test_a_peer_that_did_not_run_measures_nothing() -> None:
    row = timing("column", 12_288, 128, 9.0, dense_kernels={}, ratio_to_dense=dict.fromkeys(PHASES))
    assert "column, n = 12,288, l = 128, forward" not in verdicts({**CARD, "timings": [row]})


def test_the_published_window_is_by_visited_tiles() -> None:
    found = verdicts({**CARD, "timings": [timing("local", 32_768, 1_024, 9.0, head_width=128)]})
    assert found["local 1,024, n = 32,768, D = 128, forward, visited tiles"].endswith("met")
    assert found["local 1,024, n = 32,768, D = 128, backward, visited tiles"].endswith("missed")


def test_one_case_with_other_bits_misses() -> None:
    rows = [timing("local"), timing("column", deterministic=False)]
    assert "50% (1 of 2 cases)" in verdicts({**CARD, "timings": rows})["backward gives the same bits twice"]


def test_bandwidth_counts_the_least_of_the_heads_that_bytes_bind() -> None:
    bound = dict.fromkeys(PHASES, "bytes")
    rows = [
        timing("column", bound=bound),
        timing("local", bound=bound, gigabytes_per_second={"forward": 1_800.0, "backward": 2_000.0}),
        timing("block", gigabytes_per_second={"forward": 1.0, "backward": 1.0}),
    ]
    found = verdicts({**CARD, "timings": rows})
    assert "60% (the least of 2: local" in found["bound by bytes, one part, forward, of a copy"]
    assert "50% (the least of 2: column" in found["bound by bytes, one part, backward, of a copy"]
    assert not any("merged" in name for name in found)


def test_memory_is_compared_between_equal_heads() -> None:
    short = timing("strided merged", 262_144, 512, 1.0)
    long = timing("strided merged", 1_048_576, 1_024, 1.0, bytes_per_position=105.0, dense_kernels={})
    found = verdicts({**CARD, "timings": [short, long]})
    assert "1.050 (1.0 GiB at 1,048,576, 8 heads)" in found["strided merged, bytes a position, 1,048,576 over 262,144"]
    assert found["strided merged, n = 1,048,576, both"].endswith("met")
    other = {**CARD, "timings": [short, {**long, "heads": 4}]}
    assert "strided merged, bytes a position, 1,048,576 over 262,144" not in verdicts(other)


def test_a_training_step_counts_for_the_whole_model_alone() -> None:
    step = {"variant": "sparse", "checkpointing": True, "times_dense": {"dense flash": 1.6}, "tokens_per_second": 5e5}
    whole = {**CARD, "context": 12_288, "layers": 30, "stride": 128, "summary": 32, "batch": 4, "steps": [step]}
    (line,) = verdicts(whole).values()
    assert "1.6x (500,000 tokens/s)" in line and line.endswith("met")
    assert verdicts({**whole, "layers": 2}) == {}


def test_the_later_file_counts() -> None:
    files = [{**CARD, "timings": [timing("column", 12_288, 128, ratio)]} for ratio in (9.0, 1.0)]
    assert verdicts(*files)["column, n = 12,288, l = 128, forward"].endswith("missed")


def test_a_file_that_cannot_be_read_ends_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "attention-cpu.json").write_text("{")
    assert main(["--results", str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_devices_have_tables_of_their_own() -> None:
    cpu = {"device": "A CPU", "device_type": "cpu", "timings": []}
    assert [one.splitlines()[0] for one in tables([CARD, cpu])] == ["A card", "A CPU"]
    assert [one.splitlines()[0] for one in tables([CARD, cpu], "cpu")] == ["A CPU"]
