"""What parts keep beside weights, through training, checkpoints of every layout, exports and averages."""

from pathlib import Path
from typing import Any

import pytest
import torch

from longstride.launcher.checkpoints import SavedState, master_weights, open_checkpoint
from longstride.launcher.cli import main
from longstride.launcher.models import AVERAGE, Exported, load_model
from longstride.sparse_model.feed_forwards import FEED_FORWARDS
from tests.harness import counting
from tests.harness.runs import complete, metrics
from tests.launcher.training.test_training import HIGH_SCALE, TABLES

ROWS = 8 * 64  # of a step of all ranks
COUNTING = 'model.feed_forward=[{"type": "dense"}, {"type": "counting"}]'
SEEN = "blocks.1.feed_forward.seen"
ROUTING = (
    'model.attention={"type": "routing", "clusters": 4, "window": 8, "local": {"heads": 1, "window": 8}, "decay": 0.9}'
)
THRESHOLD = '{"type": "experts", "count": 4, "top": 1, "routing": "threshold"}'
LEARNED = [*(f"blocks.{layer}.attention.centroids" for layer in (0, 1)), "blocks.0.feed_forward.thresholds"]


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FEED_FORWARDS, counting.NAME, counting.CountingConfig)


def seen(run: Path, step: int) -> list[float]:
    return SavedState(open_checkpoint(run, step)).buffers[SEEN].tolist()


LEGS: list[tuple[int, int, str, tuple[str, ...]]] = [  # processes, ZeRO stage, precision, and more
    (2, 1, "bf16", ("train.micro_batch=1",)),
    (2, 1, "bf16", ()),  # in the same layout
    (4, 3, "fp32", ("train.activation_checkpointing=true", "train.sequence_parallel=2")),  # two share a context
    (1, 2, "fp32", ("train.activation_checkpointing=true",)),
]


def dumped(folder: Path, processes: int) -> list[dict[str, torch.Tensor]]:
    """What buffers were before the first step and after every one, to the bit the same on all ranks."""
    first, *others = (torch.load(folder / f"rank-{rank}.pt") for rank in range(processes))
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            assert list(mine) == list(theirs) and all(torch.equal(mine[name], theirs[name]) for name in mine)
    return first


def test_a_buffer_goes_through_every_layout(config_file: Path, tmp_path: Path, capsys: Any) -> None:
    """Once for each taken step: with accumulation, recomputation, and whatever ranks there are."""
    run = tmp_path / "run"
    common = [
        COUNTING.replace('{"type": "dense"}', THRESHOLD),
        ROUTING,
        f"train.output={run}",
        "train.checkpoint_every=1",
        "train.evaluate_every=0",
    ]
    common += ["train.schedule=constant", "train.warmup_steps=0"]
    learned: dict[str, torch.Tensor] = {}
    for step, (processes, stage, precision, more) in enumerate(LEGS, 1):
        arguments = ["--config", str(config_file), "--resume", "auto", *common, f"deepspeed=zero{stage}_{precision}"]
        watched = {"COUNTING": "1", "DUMP_BUFFERS": str(tmp_path)}
        complete([*arguments, f"train.steps={step}", *more], processes, watched)
        assert seen(run, step) == [step * ROWS, step]
        before, after = dumped(tmp_path, processes)
        saved = SavedState(open_checkpoint(run, step)).buffers
        for name in LEARNED:  # which go on from the same bits, in whatever layout, and are fp32 in any precision
            assert after[name].dtype == torch.float32 and torch.equal(after[name], saved[name])
            assert step == 1 or torch.equal(before[name], learned[name])
            assert not torch.equal(before[name], after[name])
        learned = after
    weights = master_weights(open_checkpoint(run, len(LEGS)), AVERAGE)
    assert weights[SEEN].tolist() == [len(LEGS) * ROWS, len(LEGS)]
    assert main(["export", str(run), "--output", str(tmp_path / "model"), "--dtype", "bf16"]) == 0, capsys.readouterr()
    exported = Exported(tmp_path / "model")
    assert exported.dtype == torch.bfloat16 and exported.tensor(SEEN).dtype == torch.float32
    assert exported.fingerprint() == exported.content["fingerprint"]
    for dtype in (None, torch.float32):
        buffers = dict(load_model(tmp_path / "model", dtype=dtype).named_buffers())
        assert buffers[SEEN].tolist() == [len(LEGS) * ROWS, len(LEGS)] and buffers[SEEN].dtype == torch.float32
        assert all(torch.equal(buffers[name], learned[name]) for name in LEARNED)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param((), marks=pytest.mark.campaign),
        ("train.activation_checkpointing=true", "deepspeed=zero3_fp32"),
        ("train.sequence_parallel=2",),
    ],
)
def test_padding_changes_nothing_that_a_run_keeps(more: tuple[str, ...], config_file: Path, tmp_path: Path) -> None:
    """Whatever byte stands there: metrics, weights, n-gram tables with their moments, averages, and what parts see."""
    kept = []
    experts = '{"type": "experts", "count": 4, "zero": 1, "balance": 1.0, "capacity": 1.0}'
    for byte in (0, 200):
        run = tmp_path / f"run-{byte}"
        feed_forwards = COUNTING.replace('{"type": "dense"}', experts).replace("]", f", {THRESHOLD}]")
        arguments = [feed_forwards, "model.layers=3", ROUTING, TABLES, "train.steps=2", "train.warmup_steps=1", *more]
        arguments += ["data.packing=false", "data.hop=48", f"train.output={run}"]
        complete(["--config", str(config_file), *arguments], 2, {"COUNTING": "1", "FILL_PADDING": str(byte)})
        lines = [line for line in metrics(run) if line["split"] == "train"]
        assert any(line["tokens"] < ROWS for line in lines)
        assert seen(run, 2) == [sum(line["tokens"] for line in lines), 2]
        checkpoint = open_checkpoint(run, 2)
        kept.append((lines, master_weights(checkpoint) | master_weights(checkpoint, AVERAGE)))
    assert kept[0][0] == kept[1][0]
    assert all(torch.equal(tensor, kept[1][1][name]) for name, tensor in kept[0][1].items())


def test_a_step_that_is_not_taken_is_not_observed(config_file: Path, tmp_path: Path) -> None:
    """In fp16 the loss scale falls at first: steps overflow, and change nothing."""
    run = tmp_path / "run"
    arguments = ["--config", str(config_file), COUNTING, f"train.output={run}", "deepspeed=zero1_fp16", HIGH_SCALE]
    complete(arguments, 2, {"COUNTING": "1"})
    skipped = open_checkpoint(run, 8)
    taken = 8 - SavedState(skipped).numbers["skipped_steps"]
    assert 0 < taken < 8
    assert seen(run, 8) == [taken * ROWS, taken]
