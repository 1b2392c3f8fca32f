"""Experts divided over ranks (`train.expert_parallel`): the run is that of ranks that hold all experts."""

from pathlib import Path
from typing import Any

import pytest

from longstride.launcher.checkpoints import master_weights, open_checkpoint
from tests.harness.runs import complete, metrics

# The first layer sends a row to two of four experts, the second to one of eight.
EXPERTS = 'model.feed_forward=[{"type": "experts", "count": 4}, {"type": "experts", "count": 8, "top": 1}]'
COMMON = (
    EXPERTS, "model.dropout=0", "train.steps=4", "train.warmup_steps=0", "train.schedule=constant",
    "train.micro_batch=1", "train.checkpoint_every=0", "train.evaluate_every=2", "train.evaluate_contexts=5",
    "deepspeed.gradient_clipping=0.5",
)  # fmt: skip


def lines_of(config_file: Path, run: Path, layout: str, size: int | None, *changes: str) -> list[dict[str, Any]]:
    """Train four steps on four ranks, of which ``size`` divide the experts."""
    parallel = () if size is None else (f"train.expert_parallel={size}",)
    complete(
        ["--config", str(config_file), f"train.output={run}", f"deepspeed=zero{layout}", *COMMON, *parallel, *changes],
        4,
    )
    return metrics(run)


def assert_equal_runs(run: Path, whole: Path, exact: bool) -> None:
    for one, other in zip(metrics(run), metrics(whole), strict=True):
        for key in ("loss_nats", "grad_norm"):
            assert one.get(key, 0.0) == pytest.approx(other.get(key, 0.0), rel=1e-5 if exact else 4e-3), (
                one["step"],
                key,
            )
    (trained, expected) = (master_weights(open_checkpoint(folder, 4), "trained") for folder in (run, whole))
    assert trained.keys() == expected.keys()
    if exact:
        for name, tensor in expected.items():
            assert (trained[name] - tensor).norm() <= 2**-10 * tensor.norm(), name


@pytest.mark.parametrize("layout", ["0_fp32", "3_bf16"])
def test_any_division_of_the_experts_trains_alike(config_file: Path, tmp_path: Path, layout: str) -> None:
    whole = tmp_path / "whole"
    lines_of(config_file, whole, layout, None)
    for size in (1, 2, 4):
        run = tmp_path / str(size)
        lines_of(config_file, run, layout, size)
        assert_equal_runs(run, whole, layout.endswith("fp32"))
