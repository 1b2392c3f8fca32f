"""The benchmark of sampling runs, writes what it measured, and keeps what is there."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import sampling
from longstride.sparse_model import Session


def test_a_small_run_writes_a_row_a_pattern_and_context(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "GATE_CONTEXT", 64)
    output = tmp_path / "sampling.json"
    arguments = ["--contexts", "256", "1024", "--calls", "2", "--repeats", "1", "--device", "cpu"]
    assert sampling.main([*arguments, "--output", str(output)]) == 0
    found = json.loads(output.read_text())
    assert {"device", "torch", "date", "threads"} <= set(found)
    assert len(found["timings"]) == 2 * len(sampling.attentions_of(16))
    dense = [row for row in found["timings"] if row["pattern"] == "dense"]
    assert [row["keys_read"] for row in dense] == [4 * 4 * 256, 4 * 4 * 1024]
    assert all(row["times_dense"] == 1 for row in dense)
    assert found["growth"]["dense"]["keys_read"] == 1.0 and found["growth"]["own key"]["keys_read"] == 0.0
    assert abs(found["growth"]["strided"]["keys_read"] - 0.5) < 0.02
    assert "n = 1,024" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        sampling.read_options(["--output", str(output)])


def test_the_gate_finds_wrong_logits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sampling, "GATE_CONTEXT", 64)
    right = Session.logits.fget
    assert right is not None

    def wrong(session: Session) -> Tensor:
        return right(session) + (0.001 if session.position == 50 else 0)

    monkeypatch.setattr(Session, "logits", property(wrong))
    assert sampling.main(["--device", "cpu", "--output", str(tmp_path / "none.json")]) == 1
    assert not (tmp_path / "none.json").exists()


def test_variants_have_the_same_weights(tmp_path: Path) -> None:
    options = sampling.read_options(["--contexts", "256", "--device", "cpu", "--output", str(tmp_path / "none.json")])
    states = [sampling.model_of(name, 256, options).state_dict() for name in sampling.attentions_of(16)]
    assert all(torch.equal(tensor, other[name]) for other in states[1:] for name, tensor in states[0].items())


@pytest.mark.parametrize("context", ["100", "32"])
def test_contexts_that_cannot_be_measured_are_refused(
    context: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        sampling.read_options(["--contexts", context, "--device", "cpu", "--output", str(tmp_path / "none.json")])
    assert f"--contexts={context}: must be above --calls and a multiple of " in capsys.readouterr().err
