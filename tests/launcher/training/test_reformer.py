"""Reformer, hash rounds and reversible blocks, through training in every layout, checkpoints, export and sampling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from longstride.kernels import ConfigError
from longstride.launcher.cli import main
from longstride.launcher.config import load_config
from tests.harness.layouts import Leg, losses_of, train_through
from tests.launcher.training.test_training import LOW_SCALE

ATTENTION = [
    {"type": "lsh", "buckets": 4, "rounds": 2, "chunk": 8},
    {"type": "fixed", "stride": 8, "summary": 2},
]
EXPERTS = 'model.feed_forward=[{"type": "dense"}, {"type": "experts", "count": 3}]'
MODEL = (f"model.attention={json.dumps(ATTENTION)}", EXPERTS, "model.layers=3", "model.reversible=true")
MODEL += ("model.dropout=0", "model.backend=auto")
LEGS: list[Leg] = [  # of two steps
    (2, ("deepspeed=zero1_fp32",)),
    (2, ("deepspeed=zero3_fp32",)),
    (2, ("deepspeed=zero2_fp16", LOW_SCALE)),
    (2, ("deepspeed=zero3_bf16",)),
]
EXACT_LEGS = 2  # in fp32
ROTATIONS = "blocks.0.attention.rotations"


@pytest.mark.campaign  # test_buffers.py has the way for every run of the tests
def test_one_run_goes_through_every_layout(config_file: Path, tmp_path: Path, capsys: Any) -> None:
    moved = tmp_path / "moved"
    trained, drawn = train_through(config_file, moved, MODEL, LEGS, EXACT_LEGS)
    assert torch.equal(trained[ROTATIONS], drawn[ROTATIONS])  # as they were drawn, to the bit, through every layout
    assert main(["export", str(moved), "--output", str(tmp_path / "model"), "--dtype", "bf16"]) == 0, (
        capsys.readouterr()
    )
    sample = ["sample", str(tmp_path / "model"), "--bytes", "20", "--output", str(tmp_path / "sample.txt")]
    assert main(sample) == 0 and (tmp_path / "sample.txt").stat().st_size == 20
    # A likelihood without a leak is a code length: the decoder, which knows no future, finds the same bytes.
    file, packed, again = (tmp_path / name for name in ("file", "file.lsz", "again"))
    file.write_bytes(bytes(range(97)))
    assert main(["compress", str(file), "--model", str(tmp_path / "model"), "--output", str(packed)]) == 0
    assert main(["decompress", str(packed), "--model", str(tmp_path / "model"), "--output", str(again)]) == 0
    assert again.read_bytes() == file.read_bytes()
    assert main(["show", "attention", str(moved), "--output", str(tmp_path / "attention.png")]) == 0, (
        capsys.readouterr()
    )


@pytest.mark.campaign
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("stage", range(4))
def test_it_trains_in_every_stage_and_precision(stage: int, precision: str, config_file: Path, tmp_path: Path) -> None:
    more = (LOW_SCALE,) if precision == "fp16" else ()
    changes = (*MODEL, f"deepspeed=zero{stage}_{precision}", "model.dropout=0.1", *more)
    found = losses_of(config_file, tmp_path / "run", 8, 2, *changes)
    assert len(found) == 8 and found[-1] < found[0]


@pytest.mark.parametrize("name", ["activation_checkpointing", "compile"])
def test_what_recomputes_otherwise_is_refused(name: str, config_file: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^train\.{name}=true: .*model\.reversible.*; give false$"):
        load_config(config_file, ["model.reversible=true", f"train.{name}=true"])
