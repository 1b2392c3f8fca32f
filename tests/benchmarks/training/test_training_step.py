"""The benchmark of a training step, in the smallest sizes."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.training import training_step
from benchmarks.training.training_step import attention_replaced, main, model_of, read_options, variants
from longstride.sparse_model.mixers import attention

TINY = ["--device", "cpu", "--layers", "1", "--context", "32", "--stride", "8", "--summary", "2", "--repeats", "1"]


def test_one_command_measures_all_variants(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "found.json"
    assert main([*TINY, "--output", str(output)]) == 0
    found = json.loads(output.read_text())
    names = ["sparse", "dense torch", "our strided", "our dense"]
    assert [(row["variant"], row["checkpointing"]) for row in found["steps"]] == [
        (name, checkpointing) for checkpointing in (True, False) for name in names
    ]
    for row in found["steps"]:
        assert row["seconds"] > 0 and row["tokens_per_second"] > 0
        assert list(row["times_dense"]) == ["dense torch"]
    assert "times dense" in capsys.readouterr().out


def test_dense_attention_stands_in_the_models_place(tmp_path: Path) -> None:
    options = read_options([*TINY, "--output", str(tmp_path / "found.json")])
    device = torch.device("cpu")
    model = model_of(options, device).eval()
    for parameter in model.parameters():  # freshly initialised, every block would add nothing
        torch.nn.init.normal_(parameter, std=0.3)
    tokens = torch.randint(0, 256, (1, 32))
    original = attention.sparse_attention
    found = {}
    with torch.no_grad():
        for name, replacement in variants(options, device).items():
            with attention_replaced(replacement):
                found[name] = model(tokens)
    torch.testing.assert_close(found["dense torch"], found["our dense"])
    assert not torch.allclose(found["sparse"], found["our dense"])
    assert not torch.allclose(found["sparse"], found["our strided"])
    assert attention.sparse_attention is original


def test_a_peer_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_):
        raise RuntimeError("no such kernel")

    real = variants
    monkeypatch.setattr(training_step, "variants", lambda *a: {**real(*a), "dense torch": lambda *b, **c: fail()})
    output = tmp_path / "found.json"
    assert main([*TINY, "--output", str(output)]) == 0
    found = json.loads(output.read_text())
    assert {(one["variant"], one["reason"]) for one in found["failures"]} == {
        ("dense torch", "RuntimeError: no such kernel")
    }
    assert all(row["times_dense"] == {} for row in found["steps"])
