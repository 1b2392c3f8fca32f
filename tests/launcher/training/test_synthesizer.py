"""Synthesizers, learned spans and entmax through training in every layout, checkpoints, export, sampling, pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from longstride.launcher.cli import main
from longstride.launcher.config import load_config
from longstride.launcher.planning.plan import make_plan
from longstride.sparse_model import SparseTransformer
from tests.harness.layouts import Leg, losses_of, train_through
from tests.launcher.training.test_training import LOW_SCALE, MUON

ATTENTION = [
    {"type": "synthesizer", "kind": ["random", "dense", "attention"], "fixed": True},
    {
        "type": "synthesizer", "kind": ["factorized_random", "factorized_dense"], "rank": 4,
        "pattern": {"type": "fixed", "stride": 8, "summary": 2},
    },
    {"type": "synthesizer", "kind": "factorized_random", "pattern": {"type": "strided", "stride": 8}},
    {"type": "adaptive_span", "ramp": 4, "penalty": 0.001, "initial": 5.5},
    {"type": "entmax", "pattern": {"type": "strided", "stride": 8}},
]  # fmt: skip
MODEL = (f"model.attention={json.dumps(ATTENTION)}", "model.layers=5", "model.dropout=0", "model.backend=auto")
MODEL += (MUON,)
RECOMPUTED = "train.activation_checkpointing=true"
LEGS: list[Leg] = [  # of two steps
    (2, ("deepspeed=zero1_fp32",)),
    (4, ("deepspeed=zero3_fp32", RECOMPUTED)),
    (1, ("deepspeed=zero2_fp32",)),
    (2, ("deepspeed=zero2_fp16", LOW_SCALE)),
    (2, ("deepspeed=zero3_bf16",)),
]
EXACT_LEGS = 3  # in fp32


@pytest.mark.campaign  # test_buffers.py has the way for every run of the tests
def test_one_run_goes_through_every_layout(config_file: Path, tmp_path: Path, capsys: Any) -> None:
    moved = tmp_path / "moved"
    trained, drawn = train_through(config_file, moved, MODEL, LEGS, EXACT_LEGS)
    # Weights are saved, and what is fixed is as it was drawn, to the bit.
    table = "blocks.0.attention.random"
    assert torch.equal(trained[table], drawn[table])
    learned = ("0.attention.dense_keys", "1.attention.mixing", "2.attention.random_keys", "3.attention.spans")
    for name in (*learned, "4.attention.excess_logits"):
        assert not torch.equal(trained[f"blocks.{name}"], drawn[f"blocks.{name}"]), name
    assert main(["export", str(moved), "--output", str(tmp_path / "model"), "--dtype", "bf16"]) == 0, (
        capsys.readouterr()
    )
    sample = ["sample", str(tmp_path / "model"), "--bytes", "20", "--output", str(tmp_path / "sample.txt")]
    assert main(sample) == 0 and (tmp_path / "sample.txt").stat().st_size == 20
    for what, source in (("attention", str(moved)), ("pattern", str(moved / "config.json"))):
        assert main(["show", what, source, "--output", str(tmp_path / f"{what}.png")]) == 0, capsys.readouterr()
    config = load_config(moved / "config.json", [])
    plan = make_plan(config, [2], contexts=100)
    assert plan["parameters"]["total"] == sum(each.numel() for each in SparseTransformer(config.model).parameters())


@pytest.mark.campaign
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("stage", range(4))
def test_it_trains_in_every_stage_and_precision(stage: int, precision: str, config_file: Path, tmp_path: Path) -> None:
    more = (LOW_SCALE,) if precision == "fp16" else ()
    changes = (*MODEL, f"deepspeed=zero{stage}_{precision}", *more)
    found = losses_of(config_file, tmp_path / "run", 8, 2, *changes)
    assert len(found) == 8 and found[-1] < found[0]
