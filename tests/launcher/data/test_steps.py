"""Epochs as steps: found once the data is known, and saved with the run."""

import json
from pathlib import Path

import pytest

from longstride.data_pipelines.shards.reading import DataFolder
from longstride.kernels import ConfigError
from longstride.launcher.checkpoints.manifest import read_checkpoint_config
from longstride.launcher.config import find_config, load_config
from longstride.launcher.config.loading import load_json_object
from longstride.launcher.data.run import RunSetup, resolve_steps, steps_of
from longstride.launcher.data.run_data import TrainingData
from longstride.launcher.ranks.processes import Ranks
from longstride.launcher.training.resume import choose_start
from tests.harness.runs import metrics, spawn


def train_bytes(data: Path) -> int:
    return sum(shard.content_bytes for shard in DataFolder(data).split("train").shards)


@pytest.mark.parametrize(
    "epochs, contexts, global_batch, steps",
    [
        (120.0, 48_000, 16, 360_000),
        (80.0, 90_000_000 // 12_288, 8, 73_240),
        (0.29, 100, 1, 29),  # 28.999… in binary
        (1.0, 7, 4, 1),
        (0.001, 7, 4, 1),
        (1e-9, 1, 1, 1),
    ],
)
def test_steps_are_whole_and_at_least_one(epochs: float, contexts: int, global_batch: int, steps: int) -> None:
    config = load_config(
        "paper_small", [f"train.epochs={epochs}", f"train.global_batch={global_batch}", "train.warmup_steps=0"]
    )
    assert steps_of(config, contexts) == steps


def test_epochs_are_resolved_by_the_data_on_every_rank_alike(
    config_file: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(config_file, ["train.epochs=2.5"])
    contexts = train_bytes(data) // 64
    wanted = int(2.5 * contexts / 8)
    for ranks in (Ranks(0, 0, 2), Ranks(1, 1, 2)):
        assert resolve_steps(config, TrainingData(config, ranks), ranks).train.steps == wanted > 8
    told = f"longstride: 2.5 epochs are {wanted:,} steps, of {contexts:,} contexts an epoch\n"
    assert capsys.readouterr().err == told  # the first of them alone


def test_steps_take_the_place_of_a_files_epochs_and_epochs_that_of_its_steps(config_file: Path) -> None:
    assert load_config(config_file, ["train.epochs=2"]).train.steps is None
    content = load_json_object(config_file)
    content["train"] |= {"epochs": content["train"].pop("steps")}
    config_file.write_text(json.dumps(content))
    assert load_config(config_file).train.epochs == 8
    by_steps = load_config(config_file, ["train.steps=5"]).train
    assert (by_steps.steps, by_steps.epochs) == (5, None)


@pytest.mark.parametrize("other, own", [("epochs", "steps"), ("steps", "epochs")])
def test_a_length_of_null_takes_the_place_of_nothing(config_file: Path, other: str, own: str) -> None:
    content = load_json_object(config_file)
    content["train"][own] = content["train"].pop("steps")
    config_file.write_text(json.dumps(content))
    for overrides in ([f"train.{other}=null"], [f"train.{other}=3", f"train.{other}=null"]):
        train = load_config(config_file, overrides).train
        assert (getattr(train, own), getattr(train, other)) == (8, None)
    train = load_config(config_file, [f"train.{own}=null", f"train.{other}=3"]).train
    assert (getattr(train, own), getattr(train, other)) == (None, 3)


def test_warm_up_longer_than_the_epochs_is_refused_once_they_are_known(config_file: Path) -> None:
    config = load_config(config_file, ["train.epochs=0.01", "train.warmup_steps=50"])
    with pytest.raises(ConfigError, match=r"^train.warmup_steps=50: must be at most the \d+ steps that 0.01 epochs"):
        resolve_steps(config, TrainingData(config, Ranks()))


def test_run_of_epochs_saves_its_steps_and_goes_on_by_the_same_file(
    config_file: Path, data: Path, tmp_path: Path
) -> None:
    steps = int(0.3 * (train_bytes(data) // 64) / 8)
    changes = ["train.epochs=0.3", "train.evaluate_every=0", "train.evaluate_contexts=2", "train.checkpoint_every=0"]
    ended = spawn(["--config", str(config_file), *changes], 1)
    assert ended.codes == [0], ended.stderr
    assert f"longstride: 0.3 epochs are {steps} steps, of " in ended.stderr[0]
    run = tmp_path / "run"
    assert metrics(run)[-1]["step"] == steps
    saved = load_config(run / "config.json")
    assert (saved.train.steps, saved.train.epochs) == (steps, None)
    assert read_checkpoint_config(run / f"checkpoints/step-{steps:08d}") == saved
    config = load_config(config_file, changes)
    data_of_run = TrainingData(config, Ranks())
    start = choose_start(RunSetup(resolve_steps(config, data_of_run), Ranks(), data_of_run, resume="auto"))
    assert [each.manifest.step for each in start.candidates] == [steps]
    short = int(0.2 * (train_bytes(data) // 64) / 8)
    for change, line in (
        ("train.epochs=0.2", f"train.epochs=0.2: comes to step {short}, and the checkpoint {{}} is already beyond it"),
        ("train.steps=2", "train.steps=2: the checkpoint {} is already beyond it"),
    ):
        less = load_config(config_file, [change])
        with pytest.raises(ConfigError) as caught:
            resolved = resolve_steps(less, data_of_run)
            choose_start(RunSetup(resolved, Ranks(), data_of_run, resume="auto", epochs=less.train.epochs))
        assert str(caught.value) == line.format(run / f"checkpoints/step-{steps:08d}")


def test_a_name_stands_for_a_published_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_config("cifar10_strided").name == "cifar10_strided.json"
    assert find_config("runs/cifar10_strided") == Path("runs/cifar10_strided")
    (tmp_path / "demo").write_text("{}")
    assert find_config("demo") == Path("demo")  # a file of one's own goes first
    with pytest.raises(ConfigError) as caught:
        find_config("cifar10_stridde")
    rule = "no such file, and no preset of that name in ds_configs/experiments; nearest cifar10_strided"
    assert str(caught.value) == f"cifar10_stridde: {rule}"
