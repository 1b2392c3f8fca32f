"""Runs that end because their validation loss stands still, and the checkpoints with the lowest one, which stay."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from longstride.kernels import ConfigError
from longstride.launcher import cli
from longstride.launcher.checkpoints.checkpoint import checkpoint_folder, list_checkpoints, open_checkpoint
from longstride.launcher.checkpoints.manifest import Score
from longstride.launcher.config import load_config
from longstride.launcher.data.run import RunSetup as Asked
from longstride.launcher.data.run_data import TrainingData
from longstride.launcher.output.metrics_file import is_step
from longstride.launcher.ranks.processes import Ranks
from longstride.launcher.training.guards import Plateau
from tests.harness.lines import evaluation_line
from tests.harness.runs import complete, metrics, spawn

Trained = Callable[..., Path]
STOP = 'train.stop_when={"evaluations": 3, "by": 0.1}'
SHARED = "train.sequence_parallel=2"
SCORES = {2: 5.0, 4: 4.0, 6: 4.5, 8: 3.95, 10: 4.2, 12: 4.3, 14: 4.1}
EVERY = ["train.steps=16", "train.evaluate_every=2", "train.checkpoint_every=6", "train.keep_last=1"]
EXTRA = {"SCORES": json.dumps(SCORES)}
OVER = "the validation loss has not improved by more than 0.1 bits per byte for 3 evaluations in a row"


def score(step: int, bits: float | None, tokens: int = 64) -> Score:
    return Score(step=step, split="validation", tokens=tokens, bits_per_byte=bits)


def lines_of(scores: dict[int, float]) -> str:
    return "".join(json.dumps(evaluation_line(step, bits)) + "\n" for step, bits in scores.items())


@pytest.fixture
def plateau(config_file: Path) -> Callable[..., Plateau]:
    """A function (memory) -> the plateau of a run whose metrics.jsonl is at tmp_path / "run"."""
    config = load_config(config_file, [STOP])
    Path(config.train.output).mkdir()
    return lambda memory=None: Plateau(Asked(config, Ranks(), TrainingData(config, Ranks())), memory)


def test_run_is_over_once_no_evaluation_has_improved_enough(plateau: Callable[..., Plateau]) -> None:
    judge = plateau()
    for step, bits, since in (
        (2, 5.0, 0), (4, 4.0, 0), (6, 3.95, 1), (8, None, 2), (10, 3.875, 0), (12, 3.875, 1), (14, 3.8, 2), (14, 9.0, 2)
    ):  # fmt: skip
        judge.add(score(step, bits))
        assert (judge.memory() or {})["since"] == since and judge.reason is None, step
    judge.add(score(16, 9.0))
    assert judge.reason == f"{OVER}, since 3.8750 at step 10"
    judge.add(score(18, 9.0, tokens=32))  # over other bytes: a count of its own
    assert judge.reason is None


def test_pictures_of_a_palette_are_judged_by_bits_per_pixel(config_file: Path) -> None:
    config, ranks = load_config(config_file, [STOP]), Ranks()
    run: Any = SimpleNamespace(
        config=config, ranks=ranks, data=SimpleNamespace(unit="pixel"), folder=config_file.parent
    )
    judge = Plateau(run)
    for step in (2, 4, 6, 8):
        judge.add(score(step, 3.0))
    assert judge.reason == f"{OVER.replace('byte', 'pixel')}, since 3.0000 at step 2"


def test_memory_lacks_no_evaluation_and_counts_none_twice(plateau: Callable[..., Plateau], tmp_path: Path) -> None:
    """Saved before its step was evaluated or behind that, by a run with stop_when or without: all go on alike."""
    judge, path = plateau(), tmp_path / "run/metrics.jsonl"
    memories: list[Any] = [None]
    for step, bits in SCORES.items():
        judge.add(score(step, bits))
        memories.append(json.loads(json.dumps(judge.memory())))
    path.write_text(lines_of(SCORES))
    assert all(plateau(memory).memory() == memories[-1] for memory in memories)
    path.unlink()  # what a manifest has is enough where nothing lies behind it
    assert all(plateau(memory).memory() == memory for memory in memories[1:])


def test_without_stop_when_nothing_is_remembered_or_saved(config_file: Path) -> None:
    config = load_config(config_file)
    judge = Plateau(Asked(config, Ranks(), TrainingData(config, Ranks())))
    for step in range(1, 9):
        judge.add(score(step, 5.0))
    assert judge.memory() is None and judge.reason is None
    assert not {"stop_when", "keep_best"} & config.to_json()["train"].keys()


def check_ended(run: Path, told: str) -> None:
    """Over at step 10, saved, with the best two checkpoints beside the last one."""
    assert f"step 10: the run is over, as {OVER}, since 4.0000 at step 4; --resume auto" in told
    assert [line["step"] for line in metrics(run) if is_step(line)] == list(range(1, 11))
    assert (run / ".over").read_text() == "10\n"
    found = {each.manifest.step: each.manifest for each in list_checkpoints(run)[0]}
    assert sorted(found) == [4, 8, 10]
    assert [each.step for each in found[10].best or []] == [8, 4]
    assert (found[10].plateau or {}) == {
        "step": 10,
        "best": {**(found[10].plateau or {})["best"], "step": 4},
        "since": 3,
    }


def test_run_ends_keeps_its_best_and_says_how_to_go_on(config_file: Path, tmp_path: Path) -> None:
    """Steps 2, 4 and 8 are saved as the best ones, of which 2 goes; 6 as it is due, and goes; 10 as the last one.

    It trains on the data's validation split, and evaluates on the other.
    """
    run = tmp_path / "run"
    arguments = ["--config", str(config_file), *EVERY, "train.keep_best=2"]
    arguments += ["data.train_split=validation", "data.validation_split=train"]
    for added, world_size in (([STOP, SHARED], 2), ([STOP, "--resume", "auto", "deepspeed=zero1_bf16"], 1)):
        ended = complete([*arguments, *added], world_size, EXTRA)
        check_ended(run, ended.stderr[0])
    ended = complete([*arguments, "--resume", "auto", 'train.stop_when={"evaluations": 5, "by": 0.1}'], 2, EXTRA)
    assert "step 14: the run is over" in ended.stderr[0] and "for 5 evaluations in a row" in ended.stderr[0]
    assert (run / ".over").read_text() == "14\n"
    assert [each.manifest.step for each in list_checkpoints(run)[0]] == [14, 8, 4]
    assert open_checkpoint(run, "best").manifest.step == 8
    assert {(line["split"], is_step(line)) for line in metrics(run)} == {("validation", True), ("train", False)}


def test_rewound_and_killed_run_ends_where_the_undisturbed_one_does(config_file: Path, tmp_path: Path) -> None:
    """It goes from step 8 back to 6, is killed in step 10, and goes on as another number of processes and stage."""
    arguments = ["--config", str(config_file), *EVERY, STOP, "train.keep_best=2", "train.guards.non_finite=rewind"]
    hurt = {"SPOIL": "loss,1,8,8,1", "HALT": "step,10,killed"}
    ended = spawn([*arguments, SHARED], 2, EXTRA | hurt)
    assert ended.codes[1] == -9 and "step 6: continuing from" in ended.stderr[0], ended.stderr
    assert [each.manifest.step for each in list_checkpoints(tmp_path / "run")[0]] == [8, 4]
    ended = complete([*arguments, "--resume", "auto", "deepspeed=zero3_bf16"], 1, EXTRA)
    check_ended(tmp_path / "run", ended.stderr[0])


@pytest.mark.parametrize("step", ["worst", "-1", "1.5", ""])
def test_step_that_is_none_is_refused(step: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["evaluate", str(tmp_path), f"--step={step}"])
    assert f"argument --step: {step}: must be the number of a step, or best" in capsys.readouterr().err


def test_best_step_is_found_by_metrics_or_manifests_or_refused(trained: Trained, tmp_path: Path) -> None:
    whole = trained("alone", 1)
    run = Path(shutil.copytree(whole, tmp_path / "moved"))
    assert open_checkpoint(run, "best").manifest.step == 8  # of a run that kept none, by its metrics alone
    (run / "metrics.jsonl").write_text(lines_of({4: 1.0, 6: 0.5, 8: 2.0}))
    output = tmp_path / "model"  # 6 was evaluated, and is not there
    assert cli.main(["export", str(run), "--step", "best", "--no-check", "--output", str(output)]) == 0
    assert json.loads((output / "config.json").read_text())["origin"]["step"] == 4
    ended = spawn(["--config", str(whole.parent / "run.json"), f"train.output={run}", "--resume", "best"], 1)
    assert ended.codes == [0] and f"continuing from {checkpoint_folder(run, 4)}\n" in ended.stderr[0], ended.stderr
    (run / "metrics.jsonl").write_text(lines_of({4: 1.0, 8: 2.0}))
    (checkpoint_folder(run, 4) / "manifest.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"step-00000004/manifest\.json"):
        open_checkpoint(run, "best")
    (run / "metrics.jsonl").unlink()
    with pytest.raises(ConfigError) as caught:
        open_checkpoint(run, "best")
    rule = "no checkpoint has a validation loss in metrics.jsonl or in its manifest; complete ones: 8"
    assert str(caught.value).startswith(f"{run / 'checkpoints'}: {rule}")
