"""The benchmark of attention, from its command line to its files, in the smallest sizes."""

import json
from pathlib import Path

import pytest

from benchmarks import machine
from benchmarks.attention import attention, gate
from benchmarks.attention.cases import NAMES
from benchmarks.attention.figures import PHASES
from benchmarks.attention.tables import tables_of

TINY = ["--device", "cpu", "--contexts", "64", "128", "--head-widths", "16"]
TINY += ["--heads", "1", "--repeats", "1", "--no-flex"]


@pytest.fixture(autouse=True)
def small_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """How fast this machine copies and multiplies is of no interest here."""
    monkeypatch.setitem(machine.COPY_BYTES, "cpu", 2**20)
    monkeypatch.setitem(machine.MATMUL_EDGE, "cpu", 64)


def run(tmp_path: Path, *words: str) -> tuple[int, dict]:
    output = tmp_path / "found.json"
    code = attention.main([*TINY, "--output", str(output), *words])
    return code, json.loads(output.read_text())


def test_one_command_measures_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run(tmp_path, "--dense-limit", "64")
    assert code == 0 and found["failures"] == found["skipped"] == []
    assert [(row["context"], row["pattern"]) for row in found["timings"]] == [(n, p) for n in (64, 128) for p in NAMES]
    assert found["copy_bytes_per_second"] > 0 and found["matmul_flops_per_second"] > 0
    for row in found["timings"]:
        assert all(row["seconds"][phase] > 0 for phase in PHASES)
        measured = row["context"] == 64  # beyond the limit dense attention is not run
        assert all((row["ratio_to_dense"][phase] is not None) == measured for phase in PHASES)
        assert (row["fraction_of_ideal"]["both"] is not None) == measured
        assert row["dense_kernel"]["both"] == ("torch" if measured else None)
        assert row["flex_seconds"] == dict.fromkeys(PHASES) and "beyond" in row["flex_reason"]
    assert tables_of(found) == []  # another context than the README shows
    said = capsys.readouterr().out
    assert "gate: rounding explains how far all patterns are from fp64" in said and "– / – / –" in said


def test_a_time_limit_starts_nothing_more_and_writes(tmp_path: Path) -> None:
    code, found = run(tmp_path, "--time-limit", "0")
    assert code == 0 and found["timings"] == [] and len(found["skipped"]) == 2


def test_a_kill_loses_no_finished_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = attention.measure, []

    def measure(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(attention, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    assert {row["context"] for row in json.loads((tmp_path / "found.json").read_text())["timings"]} == {64}


def test_a_case_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.attention import measure

    def facts_of(one, inputs, group, device):
        if group.context == 64:
            raise RuntimeError("no room\nand more")
        return {"deterministic": None, "peak_bytes": None, "bytes_per_position": None}

    monkeypatch.setattr(measure, "facts_of", facts_of)
    code, found = run(tmp_path)
    assert code == 1
    assert {failure["reason"] for failure in found["failures"]} == {"RuntimeError: no room"}
    assert {row["context"] for row in found["timings"]} == {128}


def test_a_wrong_kernel_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = gate.ours

    def ours(pattern, backend):
        right = real(pattern, backend)
        return right if backend == "reference" else lambda q, k, v: right(q, k, v) * 1.01

    monkeypatch.setattr(gate, "ours", ours)
    output = tmp_path / "found.json"
    assert attention.main([*TINY, "--output", str(output)]) == 1
    assert not output.exists()


def test_flex_attention_that_cannot_run_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from benchmarks.attention import peers
    from benchmarks.attention.cases import Group
    from benchmarks.attention.timing import inputs_of
    from longstride.kernels.patterns import Local

    def fail(*_):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(peers, "_block_mask", fail)
    one = inputs_of(Group(64, 8, 16, "float32", 1), torch.device("cpu"))[0]
    assert peers.flex(Local(8), one, 64).reason == "RuntimeError: no compiler"
    assert peers.flex(Local(8), one, 32).reason == "beyond --flex-limit 32"
