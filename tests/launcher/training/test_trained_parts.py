"""Stages that train one part of the network and leave every bit of the others: a stage's `trained`."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from longstride.kernels import ConfigError
from longstride.launcher.checkpoints import SavedState, open_checkpoint
from longstride.launcher.config import RunConfig, load_config
from longstride.launcher.data.run_data import TrainingData
from longstride.launcher.engine import rate_change
from longstride.launcher.engine.optimizer import rate_factor
from longstride.launcher.models import AVERAGE
from longstride.launcher.ranks.processes import Ranks
from longstride.sparse_model import SparseTransformer
from tests.harness.runs import complete, configuration, metrics

ATTENTION = '{"type": "indexed", "keys": %d, "block": 4, "window": 4, "index_heads": 2, "index_width": 8}'
WARM_UP = f'"context": 64, "trained": "indexer", "learning_rate": 0.01, "attention": {ATTENTION % 64}'
FIRST = f'train.context_schedule=[{{{WARM_UP}, "steps": 4}}, {{"context": 64}}]'
MIDDLE = f'train.context_schedule=[{{"context": 64, "steps": 2}}, {{{WARM_UP}, "steps": 4}}, {{"context": 64}}]'
TABLES = 'model.ngrams={"orders": [2, 3], "rows": 997}'
EXPERTS = 'model.feed_forward={"type": "experts", "count": 4}'
COMMON = (f"model.attention={ATTENTION % 16}", "train.global_batch=12", "train.checkpoint_every=2")
RUNS: dict[str, tuple[int, tuple[str, ...]]] = {
    "zero0-bf16": (1, ("zero0_bf16", MIDDLE, "model.reversible=true", 'train.optimizer={"type": "adafactor"}')),
    "zero0-fp16": (2, ("zero0_fp16", MIDDLE, EXPERTS, "train.expert_parallel=2")),
    "zero1-bf16": (2, ("zero1_bf16", FIRST, 'train.optimizer={"type": "muon", "rates": {"matrices": 0.02}}')),
    "zero2-fp32": (3, ("zero2_fp32", MIDDLE, TABLES, "model.dropout=0")),
    "zero3-bf16": (2, ("zero3_bf16", MIDDLE, TABLES, "train.activation_checkpointing=true")),
}
Resumed = Callable[..., tuple[Path, Path]]


def arguments(name: str) -> list[str]:
    section, *overrides = RUNS[name][1]
    return [*COMMON, f"deepspeed={section}", *overrides]


@pytest.mark.parametrize("name", RUNS)
def test_a_stage_changes_its_part_alone_and_resumes(name: str, resumed: Resumed) -> None:
    whole, again = resumed(f"part-{name}", RUNS[name][0], *arguments(name))
    assert metrics(again) == metrics(whole)  # bit for bit, also after a stage of all gradients
    checkpoints = [open_checkpoint(whole, step) for step in ((2, 6) if MIDDLE in RUNS[name][1] else (2, 4))]
    before, after = (SavedState(checkpoint) for checkpoint in checkpoints)
    for parameter in before.model_shapes:
        is_kept = ".indexer." not in parameter
        kinds = before.kinds
        if parameter in before.shapes:
            kinds = tuple(kind for kind in kinds if before.has(parameter, kind))
            assert (before.moments_of(parameter) == after.moments_of(parameter)) or not is_kept
            if not before.has(parameter, AVERAGE):  # of a parameter that has never moved
                assert torch.equal(before.tensor(parameter, AVERAGE), before.tensor(parameter))
        equal = [torch.equal(before.tensor(parameter, kind), after.tensor(parameter, kind)) for kind in kinds]
        assert all(equal) if is_kept else not any(equal), parameter
    for table in before.tables.shapes:  # with their moments and counts
        for (_, one), (_, other) in zip(before.tables.shares(table), after.tables.shares(table), strict=True):
            assert all(torch.equal(one[kind], other[kind]) for kind in one)


@pytest.mark.parametrize("step, section, ranks", [(2, "zero3_fp32", 2), (4, "zero0_fp32", 1), (6, "zero1_fp32", 2)])
def test_a_run_resumes_around_the_stage_in_another_layout(
    step: int, section: str, ranks: int, trained: Callable[..., Path], tmp_path: Path
) -> None:
    """Losses and norms are those of ZeRO 2 on three ranks, but for the order of sums: see test_reshape.py."""
    whole = trained("part-zero2-fp32", RUNS["zero2-fp32"][0], *arguments("zero2-fp32"))
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    overrides = [*arguments("zero2-fp32"), f"deepspeed={section}", f"train.output={run}"]
    ended = complete(["--config", str(whole.parent / "run.json"), "--resume", str(step), *overrides], ranks)
    assert "moments start from zero" not in ended.stderr[0]
    for ours, theirs in zip(metrics(run), metrics(whole), strict=True):
        assert ours["loss_nats"] == pytest.approx(theirs["loss_nats"], rel=2**-15)
        if ours["split"] == "train":
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=2**-8)


def test_the_stage_differentiates_the_loss_of_its_part(data: Path, tmp_path: Path) -> None:
    """The norm is that of the indexers' gradients of their own loss; the loss that is reported is the network's."""
    (tmp_path / "run.json").write_text(json.dumps(configuration(data, tmp_path / "run")))
    overrides = [COMMON[0], FIRST, "model.dropout=0", "train.steps=5"]
    complete(["--config", str(tmp_path / "run.json"), *overrides], 1)
    config = load_config(tmp_path / "run.json", overrides)
    torch.manual_seed(config.train.seed)
    model = SparseTransformer(config.model)
    model.use_attention(config.stages()[0].attention)
    batch = next(TrainingData(config, Ranks()).batches(None, 0, torch.device("cpu")))
    output = model(batch.part.tokens, return_nats=True, return_extras=True)
    output.auxiliary_loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert set(gradients) == {f"blocks.{layer}.attention.indexer.projection.weight" for layer in range(2)}
    step = metrics(tmp_path / "run")[0]
    assert step["loss_nats"] == pytest.approx(output.rows.double().mean().item(), rel=1e-5)  # sums of 512 fp32 terms
    norm = torch.nn.utils.get_total_norm(gradients.values()).item()
    assert step["grad_norm"] == pytest.approx(norm, rel=1e-4)  # and of matrix products


def test_compiled_blocks_under_zero_3_are_refused(tmp_path: Path) -> None:
    content = configuration(tmp_path, tmp_path / "run")
    content["deepspeed"] = {"zero_optimization": {"stage": 3}}
    content["train"] |= {"compile": True, "context_schedule": [{"context": 64, "steps": 3, "trained": "norms"}]}
    content["train"]["context_schedule"].append({"context": 64})
    with pytest.raises(ConfigError, match=r"train\.compile=true: computes gradients of complete blocks under ZeRO 3"):
        RunConfig.model_validate(content)


def test_a_stage_has_its_own_highest_rate(tmp_path: Path) -> None:
    content = configuration(tmp_path, tmp_path / "run") | {"deepspeed": {}}
    content["train"] |= {"warmup_steps": 0, "final_learning_rate": 0.001, "learning_rate": 0.004}
    plain = RunConfig.model_validate(content).train
    content["train"]["context_schedule"] = [{"context": 64, "steps": 3, "learning_rate": 0.002}, {"context": 64}]
    config = RunConfig.model_validate(content)
    train = config.train
    assert [rate_factor(train, step) for step in range(3, 8)] == [rate_factor(plain, step) for step in range(3, 8)]
    share = (rate_factor(plain, 2) - 0.25) / 0.75  # of the way from the final rate to the highest
    assert train.learning_rate * rate_factor(train, 2) == pytest.approx(0.001 + 0.001 * share)
    line = rate_change(plain, train, 0)
    assert line and "train.context_schedule[0].learning_rate=0.002 (was null)" in line
    assert "trained" not in config.to_json()["train"]["context_schedule"][0]
