"""Going on with another number of processes, ZeRO stage or precision."""

import json
import re
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from longstride.launcher.checkpoints.checkpoint import Checkpoint, open_checkpoint, seed_generators
from longstride.launcher.checkpoints.manifest import read_manifest
from longstride.launcher.checkpoints.restoring import load_state
from longstride.launcher.checkpoints.saved_state import MASTER, SavedState
from longstride.launcher.config import RunConfig, load_config
from longstride.launcher.engine import states
from longstride.launcher.models import AVERAGE
from longstride.launcher.ranks.processes import Ranks
from longstride.sparse_model import ModelConfig, SparseTransformer
from tests.harness.runs import Run, configuration, files_under, metrics, spawn, spawn_series
from tests.launcher.training.test_training import ADAFACTOR, EXPERTS, LOW_SCALE, MONITORED, MUON, TABLES

Trained = Callable[..., Path]
FIRST_LOSS = {"fp32": 1e-6, "fp16": 1e-3, "bf16": 1e-3}  # relative, after a change


class Leg(NamedTuple):
    """A part of a run: processes, ZeRO stage, precision, and other settings."""

    processes: int
    stage: int
    precision: str
    others: tuple[str, ...] = ()


def assert_states_close(one: SavedState, other: SavedState, half: bool) -> None:
    """Whether two checkpoints, one step behind one and the same, hold the same but for rounding.

    In half precision the sign of a gradient near zero is rounding, and Adam then goes the other way: weights that
    began at zero are off by a good part of themselves, but on average by little of a step. What was lost, moments or an
    average, is off by all of itself, or by most of a step.
    """
    assert one.model_shapes == other.model_shapes
    assert (one.kinds, one.adam_step, one.numbers) == (other.kinds, other.adam_step, other.numbers)
    rate = configuration(Path(), Path())["train"]["learning_rate"]
    for kind in one.kinds:
        names = {name for name in one.shapes if one.has(name, kind)}  # the order is that of the layout
        assert names == {name for name in other.shapes if other.has(name, kind)}
        tables = one.model_shapes.keys() - one.shapes.keys() if kind in (MASTER, AVERAGE) else set()
        for name in (*names, *tables):
            ours, theirs = one.tensor(name, kind), other.tensor(name, kind)
            if half and kind in (MASTER, AVERAGE):
                assert (ours - theirs).abs().mean() <= 0.2 * rate, (kind, name)
            else:
                assert (ours - theirs).norm() <= 2 ** (-3 if half else -10) * theirs.norm(), (kind, name)


@pytest.mark.parametrize("optimizer", [(), (MUON, EXPERTS)])
def test_run_goes_on_with_other_processes_and_stage(
    optimizer: tuple[str, ...], trained: Trained, tmp_path: Path
) -> None:
    """ZeRO 0 alone, and from step 4 on ZeRO 3 with two processes: losses, state and data are the undisturbed run's.

    Tolerances: the first loss is of the same weights. Later ones have gradients summed in another order, 2^-23 a term,
    where Adam's first steps divide by their own size.
    """
    whole = (
        trained("no-dropout-muon-experts", 1, "model.dropout=0", *optimizer)
        if optimizer
        else trained("no-dropout", 1, *MONITORED)
    )
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    config = json.loads((whole / "config.json").read_text())
    config["deepspeed"] = "zero3_fp32"
    config["train"]["output"] = str(run)
    (tmp_path / "run.json").write_text(json.dumps(config))
    ended = spawn(["--config", str(tmp_path / "run.json"), "--resume", "4"], 2)
    assert ended.codes == [0, 0], ended.stderr
    line = r"longstride: step 4 was saved by 1 process in ZeRO 0, fp32; converted for 2 processes in ZeRO 3 \(\d+ s\)"
    assert re.search(line, ended.stderr[0])
    for one, other in zip(metrics(run), metrics(whole), strict=True):
        same = {key: one.get(key) for key in ("step", "split", "sample_ids_crc32", "learning_rate", "epoch")}
        assert same == {key: other.get(key) for key in same}
        tolerance = 0 if one["step"] <= 4 else FIRST_LOSS["fp32"] if one["step"] == 5 else 2**-15
        assert one["loss_nats"] == pytest.approx(other["loss_nats"], rel=tolerance)
    saved, undisturbed = (SavedState(open_checkpoint(folder, 8)) for folder in (run, whole))
    assert saved.kinds == (MASTER, *states.MOMENTS[0], *(states.MOMENTS[1] if optimizer else ()), AVERAGE)
    assert_states_close(saved, undisturbed, half=False)
    assert not list(run.glob("checkpoints/.*"))


GRID = {
    f"{precision}-{'-'.join(map(str, stages))}": [
        Leg(processes, stage, precision) for processes, stage in zip((4, 2, 3, 1, 4), stages, strict=True)
    ]
    for precision in ("fp32", "fp16", "bf16")
    for stages in ((1, 2, 3, 1, 2), (3, 0, 1, 2, 3))
}
SMALL_GROUPS = ("deepspeed.zero_optimization.sub_group_size=3000",)
ALIGNED = tuple(f"deepspeed.zero_optimization.{key}=true" for key in ("parameter_alignment", "round_robin_gradients"))
CHAINED = (
    "model.dropout=0",
    "train.global_batch=12",
    "train.micro_batch=1",
    "train.checkpoint_every=1",
    "train.evaluate_every=0",
    "train.schedule=constant",
    "train.timeout_seconds=300",
    TABLES,
)
GRID["precisions"] = [Leg(2, 2, "fp32"), Leg(2, 2, "bf16"), Leg(1, 3, "fp16"), Leg(3, 1, "fp32"), Leg(2, 0, "bf16")]
GRID["layouts"] = [
    Leg(2, 3, "fp32", SMALL_GROUPS),
    Leg(2, 3, "fp32"),
    Leg(2, 2, "fp16", ALIGNED),
    Leg(3, 1, "bf16", ("deepspeed.data_types.grad_accum_dtype=bf16",)),
    Leg(3, 1, "bf16"),
    Leg(2, 2, "bf16", ("deepspeed.zero_optimization.offload_optimizer.device=cpu", *ALIGNED)),
    Leg(3, 3, "fp32", SMALL_GROUPS),
]
GRID |= {f"muon-{name}": [leg._replace(others=(*leg.others, MUON)) for leg in legs] for name, legs in GRID.items()}
GRID |= {
    f"experts-{precision}": [Leg(*each, precision, (MUON, EXPERTS)) for each in ((2, 1), (3, 3), (1, 0), (2, 2))]
    for precision in ("fp32", "fp16", "bf16")
}
FOUR_EXPERTS = EXPERTS.replace("3", "4")


def dividing(processes: int, size: int | None, stage: int, precision: str, *others: str) -> Leg:
    """A leg of so many processes, of which so many divide the experts."""
    size_of_group = f"train.expert_parallel={size or 'null'}"
    return Leg(processes, stage, precision, (FOUR_EXPERTS, size_of_group, *others))


GRID |= {
    f"divided-experts-{precision}{''.join(f'-{name}' for name in more)}": [
        dividing(processes, size, stage, precision, *more.values())
        for (processes, size), stage in zip(
            ((1, None), (2, 2), (4, 2), (4, 4), (2, None), (4, 1), (1, 1)), (0, 1, 2, 3, 3, 0, 2), strict=True
        )
    ]
    for precision in ("fp32", "fp16", "bf16")
    for more in ({}, {"muon": MUON})
}
GRID["divided-experts-precisions"] = [
    dividing(2, 2, 3, "fp32"),
    dividing(4, 4, 0, "bf16"),
    dividing(4, 2, 1, "fp16"),
    dividing(1, None, 2, "fp32"),
]
FOUR_HEADS = "model.heads=4"


def in_groups(processes: int, shared: int | None, stage: int, precision: str, *others: str) -> Leg:
    """A leg of so many processes, of which so many share each context."""
    return Leg(processes, stage, precision, (f"train.sequence_parallel={shared or 'null'}", FOUR_HEADS, *others))


GRID |= {
    f"groups-{precision}{''.join(f'-{name}' for name in more)}": [
        in_groups(processes, shared, stage, precision, *more.values())
        for (processes, shared), stage in zip(
            ((1, None), (2, 2), (4, 2), (4, 4), (2, 1), (4, 2), (4, None)), (0, 1, 2, 2, 3, 3, 0), strict=True
        )
    ]
    for precision in ("fp32", "fp16", "bf16")
    for more in ({}, {"muon": MUON})
}
GRID["groups-precisions"] = [
    in_groups(2, 2, 3, "fp32"),
    in_groups(4, 4, 0, "bf16", "train.sequence_exchange=keys"),
    in_groups(4, 2, 1, "fp16"),
    in_groups(1, None, 2, "fp32"),
]
GRID["adafactor"] = [
    Leg(2, 0, "fp32", (ADAFACTOR, EXPERTS)),
    Leg(1, 0, "bf16", (ADAFACTOR, EXPERTS)),
    Leg(3, 0, "fp16", (ADAFACTOR, EXPERTS, LOW_SCALE)),  # the usual scale overflows in its first step
]


def test_groups_of_other_sizes_go_on_with_the_same_dropout(data: Path, tmp_path: Path) -> None:
    """One, two and four processes to a context, the same losses; and at last two groups, whose dropout is another."""
    whole, run, config_file = tmp_path / "whole", tmp_path / "run", tmp_path / "run.json"
    config_file.write_text(json.dumps(configuration(data, run)))
    arguments = ["--config", str(config_file), FOUR_HEADS, "train.steps=8"]
    every = ["train.checkpoint_every=2", "train.evaluate_every=2", "train.schedule=constant", TABLES]
    alone = spawn([*arguments, *every, f"train.output={whole}", "train.sequence_parallel=1"], 1)
    assert alone.codes == [0], alone.stderr
    shutil.copytree(whole, run)
    told, changes = [], ((2, 2, 1), (4, 4, 1), (4, 2, 1))
    for step, (processes, shared, stage) in zip((2, 4, 6), changes, strict=True):
        more = [f"train.sequence_parallel={shared}", f"deepspeed=zero{stage}_fp32", f"train.steps={step + 2}"]
        ended = spawn([*arguments, *every, *more, "--resume", str(step)], processes)
        assert ended.codes == [0] * processes, ended.stderr
        told += [line for line in ended.stderr[0].splitlines() if " was saved by " in line]
    saved = "longstride: step {} was saved by {} to a context) in ZeRO {}, fp32; {} to a context)"
    for line, parts in zip(
        told,
        (
            (2, "1 process (1", 0, "converted for 2 processes (2"),
            (4, "2 processes (2", 1, "converted for 4 processes (4"),
            (6, "4 processes (4", 1, "continues with 4 processes (2"),
        ),
        strict=True,
    ):
        assert line.startswith(saved.format(*parts)), line
    assert [line["step"] for line in metrics(run)] == [line["step"] for line in metrics(whole)]
    for one, other in zip(metrics(run), metrics(whole), strict=True):
        assert one.get("sample_ids_crc32") == other.get("sample_ids_crc32")
        tolerance = 0 if one["step"] <= 2 else FIRST_LOSS["fp32"] if one["step"] in (3, 5) else 2**-15
        if one["step"] <= 6:
            assert one["loss_nats"] == pytest.approx(other["loss_nats"], rel=tolerance)
    names = {step: {path.name for path in (run / f"checkpoints/step-{step:08d}").glob("random-*")} for step in (6, 8)}
    assert names == {6: {"random-00000.pt"}, 8: {"random-00000.pt", "random-00001.pt"}}
    manifests = [open_checkpoint(run, step).manifest for step in (2, 4, 6, 8)]
    assert [manifest.sequence_parallel for manifest in manifests] == [1, 2, 4, 2]


@pytest.mark.campaign
@pytest.mark.parametrize("name", GRID)
def test_chain_of_changes_loses_nothing(name: str, data: Path, tmp_path: Path) -> None:
    """Each leg takes two steps, and one more that the next leg takes again its own way, from the step before.

    So the first loss after every change is held against that of a run that did not change, and so is the state after
    that step: moments or an average that were lost would be off by all of their size.
    """
    run, legs = tmp_path / "run", GRID[name]
    config_file = tmp_path / "run.json"
    config_file.write_text(json.dumps(configuration(data, run)))
    starts = []
    for number, leg in enumerate(legs):
        resume = "never" if number == 0 else str(2 * number)
        overrides = [f"deepspeed=zero{leg.stage}_{leg.precision}", *leg.others, *CHAINED]
        last = f"train.steps={2 * number + 3}"
        starts.append(Run(["--config", str(config_file), "--resume", resume, *overrides, last], leg.processes))
    same = [each for each in legs[0].others if each in (MUON, ADAFACTOR, EXPERTS, FOUR_EXPERTS, FOUR_HEADS)]
    alone = [*CHAINED, *same, last, f"train.output={tmp_path / 'alone'}"]
    starts.append(Run(["--config", str(config_file), *alone], 1))
    for start, ended in zip(starts, spawn_series(starts), strict=True):
        assert ended.codes == [0] * start.world_size, ended.stderr
    after, undisturbed = by_step(run / "metrics.jsonl"), by_step(tmp_path / "alone/metrics.jsonl")
    ids = {step: line["sample_ids_crc32"] for step, line in after.items()}
    assert ids == {step: line["sample_ids_crc32"] for step, line in undisturbed.items()}
    for number, (last_leg, leg) in enumerate(pairwise(legs), start=1):
        step = 2 * number + 1
        before = by_step(run / f"metrics.before-resume-{number}.jsonl")[step]
        difference = abs(after[step]["loss_nats"] / before["loss_nats"] - 1)
        print(f"{name}: {told(last_leg)} -> {told(leg)}: first loss off by {difference:.1e}")
        same = leg.precision == last_leg.precision
        assert difference <= (FIRST_LOSS[leg.precision] if same else 1e-2)
        for key in ("learning_rate", "sample_ids_crc32", *(["loss_scale"] if same else [])):
            assert after[step][key] == before[key]
        folders = [run / f"checkpoints/step-{step:08d}{end}" for end in ("", ".replaced-1")]
        states = [SavedState(Checkpoint(folder, read_manifest(folder))) for folder in folders]
        assert_states_close(*states, half={leg.precision, last_leg.precision} != {"fp32"})


def by_step(path: Path) -> dict[int, dict[str, Any]]:
    """The training steps in a file of metrics."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["step"]: line for line in lines if line["split"] == "train"}


def told(leg: Leg) -> str:
    """A leg in short."""
    return " ".join([f"{leg.processes} x ZeRO {leg.stage} {leg.precision}", *leg.others])


@pytest.fixture
def two_ranks(trained: Trained, tmp_path: Path) -> tuple[Path, list[str]]:
    """A run of one process in fp32, and the arguments by which two go on with it in ZeRO 2."""
    run = Path(shutil.copytree(trained("no-dropout", 1, *MONITORED), tmp_path / "run"))
    config = json.loads((run / "config.json").read_text()) | {"deepspeed": "zero2_fp32"}
    config["train"]["output"] = str(run)
    (tmp_path / "run.json").write_text(json.dumps(config))
    return run, ["--config", str(tmp_path / "run.json"), "--resume", "4"]


def kept_files(run: Path) -> dict[str, tuple[int, int]]:
    """A run's files but for what any start writes: who holds the lock, and stacks."""
    written = (str(run / ".lock"), str(run / "stacks"))
    return {path: each for path, each in files_under(run).items() if not path.startswith(written)}


@pytest.mark.campaign
def test_model_that_computes_otherwise_ends_the_run_before_any_step(two_ranks: tuple[Path, list[str]]) -> None:
    run, arguments = two_ranks
    before = kept_files(run)
    ended = spawn(arguments, 2, {"SPOIL_AFTER_LOAD": "1"})
    assert ended.codes == [2, 2], ended.stderr
    (told,) = ended.refusals
    assert "the loaded model's loss on probe.npy is" in told
    assert kept_files(run) == before
    assert spawn([*arguments, "train.probe=false"], 2, {"SPOIL_AFTER_LOAD": "1"}).codes == [0, 0]


def section(tmp_path: Path, *overrides: str) -> RunConfig:
    """The tiny configuration with changes."""
    (tmp_path / "x.json").write_text(json.dumps(configuration(Path("data"), Path("run"))))
    return load_config(tmp_path / "x.json", overrides)


def test_conversion_is_told_where_the_layout_changes(trained: Trained, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(trained("alone", 1), 4)
    assert checkpoint.is_repeated_by(section(tmp_path), 1)
    assert checkpoint.is_repeated_by(section(tmp_path, "deepspeed.gradient_clipping=2"), 1)
    assert not checkpoint.is_repeated_by(section(tmp_path), 2)
    assert not checkpoint.is_repeated_by(section(tmp_path, "deepspeed=zero1_fp32"), 1)
    config = section(tmp_path, "deepspeed=zero0_fp16")
    assert not checkpoint.is_repeated_by(config, 1)
    line = "step 4 was saved by 1 process in ZeRO 0, fp32; converted for 2 processes in ZeRO 0, fp16, "
    assert checkpoint.conversion(config, 2) == f"{line}where the loss scale starts over"


def test_generators_of_a_new_size_follow_from_seed_step_and_rank_or_group() -> None:
    before = torch.get_rng_state()
    try:
        drawn = {}
        for seed, step, size, rank in ((0, 4, 2, 0), (0, 4, 2, 1), (0, 4, 3, 1), (0, 8, 2, 0), (1, 4, 2, 0)):
            for place in (Ranks(rank, rank, size), Ranks(2 * rank + 1, 0, 2 * size, sequence_parallel=2)):
                seed_generators(seed, step, place)
                drawn.setdefault((seed, step, size, rank), []).append(torch.rand(4).tolist())
    finally:
        torch.set_rng_state(before)
    assert all(first == second for first, second in drawn.values())
    assert len({tuple(first) for first, _ in drawn.values()}) == len(drawn)


def test_state_before_adams_first_step_has_weights_alone(trained: Trained, tmp_path: Path) -> None:
    """Every step so far overflowed: there are neither moments nor an average, and none are made up."""
    overrides = ("deepspeed=zero0_fp16", "deepspeed.fp16.initial_scale_power=30", "train.steps=4")
    checkpoint = open_checkpoint(trained("overflown", 1, *overrides), 4)
    state = SavedState(checkpoint)
    assert (state.kinds, state.adam_step) == ((MASTER,), None)
    model = SparseTransformer(ModelConfig.model_validate(configuration(Path(), Path())["model"]))
    optimizer = torch.optim.AdamW(model.parameters())
    engine = SimpleNamespace(
        optimizer=optimizer,
        param_names={parameter: name for name, parameter in model.named_parameters()},
        zero_optimization=lambda: False,
        lr_scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0),
        settings=SimpleNamespace(apply=lambda *_: None),
        held=SimpleNamespace(parts=[]),
    )
    load_state(engine, state, Ranks())  # type: ignore[arg-type]  ZeRO 0, fp32
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, state.tensor(name))
    assert optimizer.state_dict()["state"] == {} and engine.global_steps == 4


def test_another_optimisers_moments_begin_anew_and_the_average_goes_on(trained: Trained, tmp_path: Path) -> None:
    """From Adam to Muon: no momentum of the matrices is there. The other way round no moments of theirs are."""
    whole = trained("no-dropout", 1, *MONITORED)
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    arguments = ["--config", str(whole / "config.json"), f"train.output={run}", "model.dropout=0"]
    for start, optimizer, saved in ((4, MUON, states.MOMENTS[1]), (6, "train.optimizer=null", ())):
        ended = spawn([*arguments, optimizer, "--resume", str(start), f"train.steps={start + 2}"], 1)
        assert ended.codes == [0], ended.stderr
        assert "; the optimiser's moments start from zero\n" in ended.stderr[0]
        state = SavedState(open_checkpoint(run, start + 2))
        assert state.kinds == (MASTER, *states.MOMENTS[0], *saved, AVERAGE)
        assert state.adam_step == 2
    assert by_step(run / "metrics.jsonl")[8]["loss_nats"] == pytest.approx(
        by_step(whole / "metrics.jsonl")[8]["loss_nats"], rel=0.05
    )
