"""Experts divided over ranks (`train.expert_parallel`): the run is that of ranks that hold all experts."""

from pathlib import Path
from typing import Any

import pytest

from longstride.launcher.checkpoints import master_weights, open_checkpoint
from tests.harness.layouts import train_through
from tests.harness.runs import complete, metrics
from tests.launcher.training.test_training import MUON

# The first layer sends a row to two of four experts, the second to one of eight.
EXPERTS = 'model.feed_forward=[{"type": "experts", "count": 4}, {"type": "experts", "count": 8, "top": 1}]'
COMMON = (
    EXPERTS, "model.dropout=0", "train.steps=2", "train.warmup_steps=0", "train.schedule=constant",
    "train.micro_batch=1", "train.checkpoint_every=0", "train.evaluate_every=2", "train.evaluate_contexts=5",
    "deepspeed.gradient_clipping=0.5",
)  # fmt: skip


def lines_of(config_file: Path, run: Path, layout: str, size: int | None, *changes: str) -> list[dict[str, Any]]:
    """Train two steps on four ranks, of which ``size`` divide the experts."""
    parallel = () if size is None else (f"train.expert_parallel={size}",)
    complete(
        ["--config", str(config_file), f"train.output={run}", f"deepspeed=zero{layout}", *COMMON, *parallel, *changes],
        4,
    )
    return metrics(run)


def assert_equal_runs(run: Path, whole: Path, exact: bool) -> None:
    for one, other in zip(metrics(run), metrics(whole), strict=True):
        for key in ("loss_nats", "grad_norm"):  # a step that overflows has no norm
            figures = one.get(key), other.get(key)
            assert figures == (None, None) or figures[0] == pytest.approx(figures[1], rel=1e-5 if exact else 4e-3), key
    (trained, expected) = (master_weights(open_checkpoint(folder, 2), "trained") for folder in (run, whole))
    assert trained.keys() == expected.keys()
    if exact:
        for name, tensor in expected.items():
            assert (trained[name] - tensor).norm() <= 2**-10 * tensor.norm(), name


ALL_LAYOUTS = [f"{stage}_{precision}" for stage in range(4) for precision in ("fp32", "bf16", "fp16")]
CASES = [(layout, size) for layout in ALL_LAYOUTS for size in (1, 2, 4)]
SHARED = (MUON, "train.sequence_parallel=2", "model.heads=4", "train.activation_checkpointing=true")
SETTINGS: dict[str, tuple[str, tuple[str, ...]]] = {
    "shared contexts": ("3_fp32", SHARED),
    "sampled": ("1_fp32", ("train.samples_every=2", 'train.samples={"bytes": 16, "temperature": 0}')),
    "reversible": ("2_fp32", ("model.reversible=true", "train.micro_batch=2", "data.packing=false")),
    "tables": ("2_fp16", ('model.ngrams={"orders": [2, 4], "rows": 97}', "deepspeed.fp16.initial_scale_power=18")),
}


@pytest.mark.parametrize(
    ("layout", "size"),
    [pytest.param(*case, marks=() if case == ("0_fp32", 2) else pytest.mark.campaign) for case in CASES],
)
def test_divided_experts_train_as_undivided_ones(config_file: Path, tmp_path: Path, layout: str, size: int) -> None:
    for run, number in (("whole", None), ("divided", size)):
        lines_of(config_file, tmp_path / run, layout, number)
    assert_equal_runs(tmp_path / "divided", tmp_path / "whole", layout.endswith("fp32"))
    files = {name for name in open_checkpoint(tmp_path / "divided", 2).manifest.files if "experts" in name}
    assert files == {f"experts-{rank:05d}.safetensors" for rank in range(size)}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "shared contexts" else pytest.mark.campaign) for name in SETTINGS]
)
def test_divided_experts_go_with_other_settings(config_file: Path, tmp_path: Path, name: str) -> None:
    layout, changes = SETTINGS[name]
    for run, number in (("whole", None), ("divided", 4)):
        lines_of(config_file, tmp_path / run, layout, number, *changes)
    assert_equal_runs(tmp_path / "divided", tmp_path / "whole", layout.endswith("fp32"))
    if name == "sampled":
        assert len({path.read_bytes() for path in tmp_path.glob("*/samples/step-00000002.txt")}) == 1


def test_a_run_goes_on_with_other_divisions(config_file: Path, tmp_path: Path) -> None:
    legs = (
        (4, ("deepspeed=zero1_fp32", "train.expert_parallel=4")),
        (1, ("deepspeed=zero0_fp32", "train.expert_parallel=null")),
        (2, ("deepspeed=zero3_fp32", "train.expert_parallel=2")),
    )
    train_through(config_file, tmp_path / "moved", (EXPERTS, "model.dropout=0"), legs, 3)
