"""Gradients of parameters that DeepSpeed does not hold count in the norm that it clips by, in every layout.

After two steps one of them overflows alone, which drops the step.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from longstride.launcher.config import load_config
from longstride.launcher.data import TrainingData
from longstride.launcher.ranks import Ranks
from longstride.sparse_model import SparseTransformer
from tests.harness.runs import complete, metrics
from tests.launcher.training.test_training import TABLES

CLIP = 0.05
# A tied output has gradients for all else from the first step on.
COMMON = (
    TABLES, 'model.output={"tied": true}', "model.dropout=0", "train.steps=4", "train.warmup_steps=0",
    "train.checkpoint_every=0", "train.evaluate_every=0", "train.guards.non_finite=skip",
    f"deepspeed.gradient_clipping={CLIP}",
)  # fmt: skip
LAYOUTS = ["0_fp32", "1_bf16", "2_fp16", "3_fp32"]
OTHERS = ["0_fp32", "0_fp16", "0_bf16", "2_fp32", "3_fp16"]


def steps_of(config_file: Path, run: Path, processes: int, layout: str) -> list[dict[str, Any]]:
    overrides = [*COMMON, f"train.output={run}", f"deepspeed=zero{layout}"]
    if layout.endswith("fp16"):
        overrides += ["deepspeed.fp16.initial_scale_power=4", "deepspeed.fp16.min_loss_scale=1"]
    complete(["--config", str(config_file), *overrides], processes, {"OVERFLOW_TABLES": "3"})
    return metrics(run)[:4]


@pytest.mark.parametrize("layouts", [LAYOUTS, pytest.param(OTHERS, marks=pytest.mark.campaign)])
def test_the_norm_and_the_clipped_steps_are_those_of_a_process_that_holds_everything(
    layouts: list[str], config_file: Path, tmp_path: Path
) -> None:
    config = load_config(config_file, list(COMMON))
    torch.manual_seed(config.train.seed)
    model = SparseTransformer(config.model)
    batch = next(TrainingData(config, Ranks()).batches(None, 0, torch.device("cpu")))
    (model(batch.part.tokens, return_nats=True).sum() / batch.num_tokens).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    expected = float(torch.nn.utils.get_total_norm(gradients.values()))
    without = float(torch.nn.utils.get_total_norm([g for name, g in gradients.items() if "ngrams" not in name]))
    assert expected > 1.01 * without > CLIP
    alone: list[float] = []
    for layout in layouts:
        lines = steps_of(config_file, tmp_path / layout, 1 if layout == layouts[0] else 2, layout)
        exact = layout.endswith("fp32")
        assert lines[0]["grad_norm"] == pytest.approx(expected, rel=1e-5 if exact else 4e-3), layout
        assert [line["grad_norm"] is None for line in lines] == [False, False, True, False], layout
        assert [line["skipped_steps"] for line in lines] == [0, 0, 1, 1], layout
        losses = [line["loss_nats"] for line in lines]
        alone = alone or losses
        assert losses == pytest.approx(alone, rel=1e-5 if exact else 4e-3), layout
