"""What parts keep beside weights, through training, checkpoints of every layout, exports and averages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from longstride.launcher.checkpoints import SavedState, master_weights, open_checkpoint
from longstride.launcher.cli import main
from longstride.launcher.models import AVERAGE, Exported, load_model
from longstride.sparse_model.feed_forwards import FEED_FORWARDS
from tests.harness import counting
from tests.harness.runs import spawn
from tests.launcher.training.test_training import HIGH_SCALE

ROWS = 8 * 64  # of a step of all ranks
COUNTING = 'model.feed_forward=[{"type": "dense"}, {"type": "counting"}]'
SEEN = "blocks.1.feed_forward.seen"


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FEED_FORWARDS, counting.NAME, counting.CountingConfig)


def seen(run: Path, step: int) -> list[float]:
    return SavedState(open_checkpoint(run, step)).buffers[SEEN].tolist()


LEGS: list[tuple[int, int, str, tuple[str, ...]]] = [  # processes, ZeRO stage, precision, and more
    (2, 1, "bf16", ("train.micro_batch=1",)),
    (2, 1, "bf16", ()),  # in the same layout
    (4, 3, "fp32", ("train.activation_checkpointing=true",)),
    (4, 3, "fp32", ()),
    (1, 2, "fp32", ()),
    (1, 0, "fp32", ("train.activation_checkpointing=true",)),
]


def test_a_buffer_goes_through_every_layout(config_file: Path, tmp_path: Path, capsys: Any) -> None:
    """Once for each taken step: with accumulation, recomputation, and whatever ranks there are."""
    run = tmp_path / "run"
    common = [COUNTING, f"train.output={run}", "train.checkpoint_every=1", "train.evaluate_every=0"]
    common += ["train.schedule=constant", "train.warmup_steps=0"]
    for step, (processes, stage, precision, more) in enumerate(LEGS, 1):
        arguments = ["--config", str(config_file), "--resume", "auto", *common, f"deepspeed=zero{stage}_{precision}"]
        ended = spawn([*arguments, f"train.steps={step}", *more], processes, {"COUNTING": "1"})
        assert ended.codes == [0] * processes, ended.stderr
        assert seen(run, step) == [step * ROWS, step]
    weights = master_weights(open_checkpoint(run, len(LEGS)), AVERAGE)
    assert weights[SEEN].tolist() == [len(LEGS) * ROWS, len(LEGS)]
    assert main(["export", str(run), "--output", str(tmp_path / "model"), "--dtype", "bf16"]) == 0, capsys.readouterr()
    exported = Exported(tmp_path / "model")
    assert exported.dtype == torch.bfloat16 and exported.tensor(SEEN).dtype == torch.float32
    assert exported.fingerprint() == exported.content["fingerprint"]
    for dtype in (None, torch.float32):
        buffers = dict(load_model(tmp_path / "model", dtype=dtype).named_buffers())
        assert buffers[SEEN].tolist() == [len(LEGS) * ROWS, len(LEGS)] and buffers[SEEN].dtype == torch.float32


def test_a_step_that_is_not_taken_is_not_observed(config_file: Path, tmp_path: Path) -> None:
    """In fp16 the loss scale falls at first: steps overflow, and change nothing."""
    run = tmp_path / "run"
    arguments = ["--config", str(config_file), COUNTING, f"train.output={run}", "deepspeed=zero1_fp16", HIGH_SCALE]
    ended = spawn(arguments, 2, {"COUNTING": "1"})
    assert ended.codes == [0, 0], ended.stderr
    skipped = open_checkpoint(run, 8)
    taken = 8 - SavedState(skipped).numbers["skipped_steps"]
    assert 0 < taken < 8
    assert seen(run, 8) == [taken * ROWS, taken]
