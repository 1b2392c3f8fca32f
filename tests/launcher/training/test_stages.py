"""Stages of growing contexts: `train.context_schedule`."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from longstride.kernels import ConfigError
from longstride.launcher.config import GuardsConfig, RunConfig, Stage, load_config
from longstride.launcher.data.run_data import TrainingData
from longstride.launcher.ranks.processes import Ranks
from longstride.launcher.training.guards import Guards
from longstride.launcher.training.loop import enter_stage
from longstride.sparse_model import ModelConfig, SparseTransformer
from tests.harness.runs import complete, configuration, metrics

BATCH = "train.global_batch=12"  # for 1, 2 and 3 ranks
DOCUMENTS = 'data.packing={"attend": "document"}'
DENSE = '"attention": {"type": "dense"}'
TABLES = 'model.ngrams={"orders": [2, 3], "rows": 997}'
ROUTING = 'model.attention={"type": "moba", "block": 8, "top": 2}'
# How the run is started, its ranks, and the step after which contexts grow. Runs are resumed at step 4.
RUNS: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "zero0": (1, 3, ("deepspeed=zero0_fp32",)),
    "zero1": (2, 4, ("deepspeed=zero1_bf16", ROUTING, "data.workers=2")),
    "zero2": (3, 5, ("deepspeed=zero2_fp32", TABLES)),
    "zero3": (2, 4, ("deepspeed=zero3_bf16", TABLES, DOCUMENTS, "train.activation_checkpointing=true")),
    "shared contexts": (2, 5, ("deepspeed=zero0_fp32", "train.sequence_parallel=2")),
}


def schedule(boundary: int, more: str = "") -> str:
    return f'train.context_schedule=[{{"context": 16, "steps": {boundary}, {DENSE}{more}}}, {{"context": 64}}]'


@pytest.mark.parametrize("name", RUNS)
def test_resumed_run_equals_the_uninterrupted_one(name: str, resumed: Callable[..., tuple[Path, Path]]) -> None:
    ranks, boundary, overrides = RUNS[name]
    runs = resumed(f"stages {name}", ranks, BATCH, schedule(boundary), *overrides)
    first, again = (metrics(run) for run in runs)
    assert again == first  # bit for bit
    contexts = {line["step"]: line["context"] for line in first if line["split"] == "train"}
    assert contexts == {step: 16 if step <= boundary else 64 for step in range(1, 9)}
    evaluated = {line["step"]: line["context"] for line in first if line["split"] == "validation"}
    assert evaluated == {4: 16 if boundary >= 4 else 64, 8: 64}


def test_the_bytes_of_a_step_do_not_depend_on_stages_or_ranks(
    resumed: Callable[..., tuple[Path, Path]], trained: Callable[..., Path]
) -> None:
    runs = [trained("without stages", 2, BATCH)]
    for name in ("zero0", "zero1", "zero2"):
        ranks, boundary, overrides = RUNS[name]
        runs += resumed(f"stages {name}", ranks, BATCH, schedule(boundary), *overrides)
    sums = [[line["sample_ids_crc32"] for line in metrics(run) if line["split"] == "train"] for run in runs]
    assert all(other == sums[0] for other in sums)
    tokens = [line["tokens"] for run in runs for line in metrics(run) if line["split"] == "train"]
    assert set(tokens) == {12 * 64}


def test_a_stage_of_larger_batches_reads_the_next_contexts_too(trained: Callable[..., Path]) -> None:
    """Two batches in each of the first two steps: the third step reads what a run without stages reads in its fifth."""
    plain = trained("without stages", 2, BATCH)
    larger = trained("stages of larger batches", 2, BATCH, schedule(2, ', "global_batch": 96'))
    sums, others = ([line for line in metrics(run) if line["split"] == "train"] for run in (plain, larger))
    assert [line["tokens"] for line in others] == [2 * 12 * 64] * 2 + [12 * 64] * 6
    assert [line["sample_ids_crc32"] for line in others[2:6]] == [line["sample_ids_crc32"] for line in sums[4:]]


def test_a_step_of_a_stage_computes_the_pieces_as_contexts_of_their_own(data: Path, tmp_path: Path) -> None:
    """The loss of the first step of a stage is the mean over pieces, each computed by a model of that context."""
    content = configuration(data, tmp_path / "run")
    content["train"] |= {"steps": 2, "context_schedule": [{"context": 16, "steps": 1, "attention": {"type": "dense"}}]}
    content["train"]["context_schedule"].append({"context": 64})
    content["model"]["embedding"] = {"type": "tokens"}  # no table has another size in a shorter context
    (tmp_path / "run.json").write_text(json.dumps(content))
    ended = complete(["--config", str(tmp_path / "run.json"), "model.dropout=0"], 1)
    config = load_config(tmp_path / "run.json", ["model.dropout=0"])
    torch.manual_seed(config.train.seed)
    model = SparseTransformer(config.model)
    short = SparseTransformer(Stage.after(0, config.stages()).config.model)
    short.load_state_dict(model.state_dict())
    batch = next(TrainingData(config, Ranks()).batches(None, 0, torch.device("cpu")))
    with torch.no_grad():
        nats = short(batch.part.tokens.view(-1, 16), return_nats=True)
    step = metrics(tmp_path / "run")[0]
    assert step["loss_nats"] == pytest.approx(nats.double().mean().item(), rel=1e-5)  # sums of 512 fp32 terms
    assert "stage 2 of 2, 8 contexts of 64 a step" in ended.stderr[0]


@pytest.mark.parametrize("taken, forgets", [(3, True), (4, False)])
def test_guards_forget_the_losses_of_another_stage_where_one_begins(taken: int, forgets: bool, tmp_path: Path) -> None:
    content = configuration(tmp_path, tmp_path / "run") | {"deepspeed": {}}
    content["train"]["context_schedule"] = [{"context": 16, "steps": 3}, {"context": 64}]
    stage = Stage.after(taken, RunConfig.model_validate(content).stages())
    settings = GuardsConfig.model_validate({"spike": {"window": 2, "policy": "stop"}})
    guards = Guards(settings, {"losses": [1.0, 1.0]})
    engine: Any = SimpleNamespace(module=SparseTransformer(stage.config.model), global_steps=taken)
    enter_stage(stage, engine, guards)
    assert (guards.judge_loss(5.0) is None) == forgets


@pytest.mark.parametrize(
    "stages, message",
    [
        ([], "train.context_schedule=[]: must have a stage"),
        ([{"context": 24, "steps": 2}, {"context": 64}], "[0].context=24: must divide model.context 64"),
        ([{"context": 16, "steps": 2}, {"context": 32}], "[1].context=32: must be model.context 64"),
        ([{"context": 32, "steps": 2}, {"context": 16, "steps": 2}, {"context": 64}], "must be at least that of"),
        ([{"context": 16}, {"context": 64}], "train.context_schedule[0].steps: required, and missing"),
        ([{"context": 16, "steps": 8}, {"context": 64}], "train.steps=8: the stages before the last have 8 steps"),
        ([{"context": 16, "steps": 2}, {"context": 64, "steps": 7}], "the stages have 9 steps, and train.steps is 8"),
        ([{"context": 16, "steps": 2, "global_batch": 40}, {"context": 64}], "[0].global_batch=40: must be a multiple"),
        ([{"context": 4, "steps": 2}, {"context": 64}], "train.context_schedule[0]: model.attention.stride=8"),
        (
            [{"context": 16, "steps": 2, "attention": {"type": "local", "window": 0}}, {"context": 64}],
            "train.context_schedule[0].attention.window=0",
        ),
        (
            [{"context": 16, "steps": 2, "attention": {"type": "lsh", "buckets": 2, "chunk": 4}}, {"context": 64}],
            "train.context_schedule[0].attention: lsh has other parameters than model.attention",
        ),
        (
            [{"context": 64, "steps": 2, "trained": "indexer"}, {"context": 64}],
            '[0].trained="indexer": must be a part with parameters that a stage can train alone: embedding, ',
        ),
    ],
)
def test_wrong_schedules_name_the_key(stages: list[dict[str, object]], message: str, tmp_path: Path) -> None:
    content = configuration(tmp_path, tmp_path / "run") | {"deepspeed": {}}
    content["train"]["context_schedule"] = stages
    with pytest.raises(ConfigError) as error:
        RunConfig.model_validate(content)
    assert message in str(error.value)
    assert all(line.startswith("train.") for line in str(error.value).splitlines())


def test_the_length_of_the_last_stage_follows_from_steps(tmp_path: Path) -> None:
    content = configuration(tmp_path, tmp_path / "run")
    del content["train"]["steps"]
    content["train"]["context_schedule"] = [{"context": 16, "steps": 5}, {"context": 64, "steps": 6}]
    (tmp_path / "run.json").write_text(json.dumps(content))
    for overrides, steps in (([], 11), (["train.steps=20"], 20)):
        config = load_config(tmp_path / "run.json", overrides)
        assert config.train.last_step == steps
        assert [stage.first for stage in config.stages()] == [0, 5]
        assert RunConfig.model_validate(config.to_json()) == config


@pytest.mark.parametrize("final", ["dense", "indexed", "match", "moba", "routing"])
def test_another_attention_shares_the_parameters(final: str) -> None:
    """The mixers of a stage give what a model of that attention gives with the same weights, and train them."""
    kinds = {
        "indexed": {"type": "indexed", "keys": 8, "block": 2, "local": {"heads": 1, "window": 3}},
        "moba": {"type": "moba", "block": 4, "top": 2},
        "match": {"type": "match", "window": 4},
        "routing": {"type": "routing", "clusters": 4, "window": 4},
    }
    content = {
        "context": 32, "layers": 2, "heads": 2, "width": 16, "embedding": {"type": "tokens"}, "rotary": {},
        "attention": kinds.get(final, {"type": "dense"}),
    }  # fmt: skip
    local = {"type": "local", "window": 3}
    dense = {**kinds["indexed"], "keys": 32}  # an indexer's warm-up
    short = ModelConfig.model_validate(content | {"attention": dense if final == "indexed" else local})
    model = SparseTransformer(ModelConfig.model_validate(content))
    names = [name for name, _ in model.named_parameters()]
    if final in ("indexed", "routing"):
        with pytest.raises(ConfigError, match="other parameters"):
            model.use_attention(ModelConfig.model_validate(content | {"attention": local}))
    if final == "routing":  # shares queries and keys
        return
    tokens = torch.randint(256, (2, 32))
    before = model(tokens)
    model.use_attention(short)
    other = SparseTransformer(short)
    other.load_state_dict(model.state_dict())
    assert torch.equal(model(tokens), other(tokens))
    assert [name for name, _ in model.named_parameters()] == names
    output = model(tokens, return_extras=True)
    (output.rows.sum() + (output.auxiliary_loss or 0.0)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert not model.eval().blocks[0].mixer.training
    model.use_attention(None)
    assert torch.equal(model(tokens), before)
