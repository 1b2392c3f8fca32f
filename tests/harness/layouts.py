"""A run that continues in other layouts, compared with one that stays on a single process."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from longstride.launcher.checkpoints import master_weights, open_checkpoint
from longstride.sparse_model import SparseTransformer
from tests.harness.runs import complete, metrics

Leg = tuple[int, tuple[str, ...]]  # processes, and what they change in the configuration


def losses_of(config_file: Path, run: Path, steps: int, processes: int, *changes: str) -> list[float]:
    """Begin or resume a run up to ``steps`` steps; return the losses of all of them."""
    common = ["train.schedule=constant", "train.warmup_steps=0", "train.checkpoint_every=2", "train.evaluate_every=0"]
    arguments = ["--config", str(config_file), "--resume", "auto", f"train.output={run}", f"train.steps={steps}"]
    complete([*arguments, *common, *changes], processes)
    return [line["loss_nats"] for line in metrics(run) if "grad_norm" in line]


def train_through(
    config_file: Path, run: Path, model: Sequence[str], legs: Sequence[Leg], exact: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Train two steps in each leg; assert that it learns, and that the first ``exact`` legs match one process in fp32.

    Returns:
        The last weights and buffers, and the initial ones.
    """
    expected = losses_of(config_file, run.with_name("whole"), 2 * exact, 1, *model, "deepspeed=zero0_fp32")
    losses: list[float] = []
    for number, (processes, layout) in enumerate(legs, 1):
        losses = losses_of(config_file, run, 2 * number, processes, *model, *layout)
    assert len(expected) == 2 * exact and losses[: len(expected)] == pytest.approx(expected, rel=1e-5)
    assert len(losses) == 2 * len(legs) and all(loss < losses[0] for loss in losses[-2:])
    checkpoint = open_checkpoint(run, 2 * len(legs))
    torch.manual_seed(checkpoint.config.train.seed)
    drawn = SparseTransformer(checkpoint.config.model).state_dict()
    return master_weights(checkpoint, "trained"), drawn
