"""Compiled residual blocks in training: the same run but for rounding, resumed bit for bit, and what they need."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from longstride.launcher.engine.device import compile_blocks
from longstride.sparse_model import ModelConfig, SparseTransformer
from tests.harness.runs import metrics
from tests.launcher.training.test_buffers import ROUTING
from tests.launcher.training.test_stages import schedule
from tests.launcher.training.test_training import EXPERTS

Resumed = Callable[..., tuple[Path, Path]]
COMPILED = ("train.compile=true", "model.backend=auto")
RUNS = {f"zero{stage}_{precision}": () for stage in range(4) for precision in ("fp32", "bf16", "fp16")}
RUNS |= {f"zero{stage}_bf16-recomputed": ("train.activation_checkpointing=true",) for stage in range(4)}
RUNS |= {f"{name}-experts": (EXPERTS, *RUNS[name]) for name in ("zero0_fp32", "zero1_bf16", "zero3_bf16-recomputed")}
THRESHOLD, ZERO = (
    '{"type": "experts", "count": 4, "routing": "threshold"}',
    '{"type": "experts", "count": 3, "zero": 1}',
)
RUNS["zero1_bf16-thresholds"] = (f"model.feed_forward=[{THRESHOLD}, {ZERO}]",)
RUNS["zero1_bf16-stages"] = (schedule(4),)
RUNS["zero0_fp32-padded"] = (EXPERTS, ROUTING, "data.packing=false", "data.hop=48")
IN_SHORT = "zero3_bf16-recomputed"  # the stage that gathers parameters block by block, forward and backward
CASES = [(IN_SHORT, 1), *(pytest.param(name, 2, marks=pytest.mark.campaign) for name in RUNS)]


@pytest.mark.parametrize("name, world_size", CASES)
def test_compiled_run_is_the_uncompiled_one_but_for_rounding(
    name: str, world_size: int, resumed: Resumed, trained: Callable
) -> None:
    """Dropout's masks included. Tolerance: eight roundings of the loss, as many as there are steps."""
    overrides = (f"deepspeed={name.partition('-')[0]}", *RUNS[name])
    plain = metrics(trained(f"{name}-plain-{world_size}", world_size, *overrides, "model.backend=auto"))
    runs = resumed(f"{name}-compiled-{world_size}", world_size, *overrides, *COMPILED)
    whole, again = map(metrics, runs)
    assert again == whole  # bit for bit after a resume
    rounding = 2**-21 if "fp32" in name else 2**-8
    for one, other in zip(plain, whole, strict=True):
        assert other["loss_nats"] == pytest.approx(one["loss_nats"], rel=8 * rounding)


def test_a_missing_compiler_is_refused_in_one_line(
    refused: Callable[..., list[str]], config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    line = "needs a C++ compiler, and there is no no-such-compiler; install it, name another by CXX, or give false"
    assert refused("--config", str(config_file), "train.compile=true") == [f"train.compile=true: {line}"]


@pytest.mark.campaign
@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_each_stage_of_a_run_compiles_each_kind_of_block_once() -> None:
    content = {"context": 64, "layers": 4, "heads": 2, "width": 16, "embedding": {"type": "tokens"}}
    kinds = [{"type": "local", "window": 5}, {"type": "moba", "block": 8, "top": 2}]
    kinds.append({"type": "match", "window": 5, "order": 2})
    config, dense = (ModelConfig.model_validate(content | {"attention": kind}) for kind in (kinds, {"type": "dense"}))
    model = SparseTransformer(config).train()
    compile_blocks(model)
    torch._dynamo.utils.counters.clear()
    counts, tokens = [], torch.randint(256, (2, 64))
    for attention, positions in ((dense, 16), (dense, 16), (None, 64), (None, 64)):
        model.use_attention(attention)
        model(tokens[:, :positions]).sum().backward()
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert counts == [1, 1, 4, 4]
