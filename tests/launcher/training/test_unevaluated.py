"""Runs without evaluations, by train.evaluate_every=null: of data without a validation split, and of other data."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from longstride.data_pipelines.building import build
from longstride.kernels import ConfigError
from longstride.launcher import cli
from longstride.launcher.checkpoints import list_checkpoints, open_checkpoint
from longstride.launcher.config import load_config
from longstride.launcher.data import check_data
from longstride.launcher.reporting.page import compose
from longstride.launcher.reporting.records import read_run
from longstride.launcher.training.loop import is_due
from tests.harness.runs import complete, configuration, metrics, spawn

NEVER = "train.evaluate_every=null"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data of one file, all of which is trained on, and a run of it of eight steps."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "my.txt").write_text("stride after stride, and byte after byte. " * 200)
    build([folder / "my.txt"], folder / "data", validation_fraction=0)
    (folder / "run.json").write_text(json.dumps(configuration(folder / "data", folder / "run")))
    ended = complete(["--config", str(folder / "run.json"), NEVER], 1)
    (folder / "stderr").write_text(ended.stderr[0])
    return folder


def test_run_is_trained_saved_and_ends_with_commands_that_work(alone: Path) -> None:
    run = alone / "run"
    assert {line["split"] for line in metrics(run)} == {"train"} and metrics(run)[-1]["step"] == 8
    assert [each.manifest.step for each in list_checkpoints(run)[0]] == [8, 4]
    assert json.loads((run / "config.json").read_text())["train"]["evaluate_every"] is None
    assert load_config(run / "config.json").train.evaluate_every is None
    told = (alone / "stderr").read_text()
    assert "best" not in told and "on validation" not in told
    assert f"longstride evaluate {run} --split train\n" in told


def test_what_reads_evaluations_works_or_names_the_way(
    alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run, data = str(alone / "run"), alone / "data"

    def told(*words: str, code: int = 0) -> str:
        capsys.readouterr()
        assert cli.main([*words]) == code
        return capsys.readouterr().err

    rule = "the data lacks the run's split 'validation'; name another split, such as --split train, or"
    assert f"error: --split: {rule} name other data with --data" in told("evaluate", run, code=2)
    assert "bits per byte on train" in told("evaluate", run, "--split", "train")
    rule = f"--data={data}: the data has no split 'validation'; name data that has it, or give --te"
    assert rule in told("show", "attention", run, "--output", "a.png", code=2)
    told("show", "attention", run, "--output", "b.png", "--text", str(alone / "my.txt"))
    told("show", "loss", run, "--output", "c.png")
    rule = "no checkpoint has a validation loss in metrics.jsonl or in its manifest; complete ones: 4, 8; give"
    assert rule in told("export", run, "--step", "best", "--output", "best", code=2)
    told("export", run, "--output", "model")
    assert "training bits per byte" in (card := Path("model/README.md").read_text()) and "validation" not in card
    page = compose([read_run(alone / "run")], [], [{}])
    assert "none, as train.evaluate_every is null" in page and f"evaluate {run} --split train --positions" in page
    with pytest.raises(ConfigError, match="complete ones: 4, 8; give the number of one"):
        open_checkpoint(alone / "run", "best")


@pytest.mark.parametrize("change", [[], ["train.evaluate_every=0"], ["train.evaluate_every=1"], ["train.steps=2"]])
def test_evaluations_of_a_split_that_is_not_there_are_refused(
    change: list[str], alone: Path, refused: Callable[..., list[str]], tmp_path: Path
) -> None:
    arguments = ["--config", str(alone / "run.json"), f"train.output={tmp_path / 'new'}"]
    rule = f"no split of {alone / 'data'}, which holds train; train without evaluations by train.evaluate_every=null"
    assert refused(*arguments, *change) == [f'data.validation_split="validation": {rule}']


def test_split_that_is_not_there_is_refused_with_one_that_is(
    config_file: Path, data: Path, refused: Callable[..., list[str]]
) -> None:
    rule = f"no split of {data}, which holds train, validation; take validation, or train without evaluations by"
    assert refused("--config", str(config_file), "data.validation_split=test") == [
        f'data.validation_split="test": {rule} train.evaluate_every=null'
    ]


def test_bytes_beyond_the_vocabulary_are_looked_for_in_what_is_trained_on(alone: Path) -> None:
    """There is no validation split to look into."""
    config = load_config(alone / "run.json", [NEVER, "model.vocabulary=128"])
    check_data(config)
    with pytest.raises(Exception, match=r"^model\.vocabulary=64: the data contains byte 1\d\d; 256 allows any"):
        check_data(load_config(alone / "run.json", [NEVER, "model.vocabulary=64"]))


def test_new_run_of_such_data_is_one_without_evaluations(
    alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", "mine", "--data", str(alone / "data"), "--processes", "1"]) == 0
    told = capsys.readouterr().out
    assert "saved every 5, and never evaluated, as the data has no split 'validation'.\n" in told
    train = json.loads(Path("mine.json").read_text())["train"]
    assert train["evaluate_every"] is None and "evaluate_contexts" not in train and train["checkpoint_every"] == 5
    check_data(load_config(Path("mine.json")))
    assert cli.main(["plan", "mine.json"]) == 0


def test_run_with_a_validation_split_may_do_without_evaluations(config_file: Path, tmp_path: Path) -> None:
    """And a resume may begin with them."""
    ended = spawn(["--config", str(config_file), NEVER, "train.steps=2"], 1)
    assert ended.codes == [0] and f"longstride evaluate {tmp_path / 'run'}\n" in ended.stderr[0], ended.stderr
    assert [line["split"] for line in metrics(tmp_path / "run")] == ["train"] * 2
    ended = complete(["--config", str(config_file), "train.steps=4", "--resume", "auto"], 1)
    assert [line["split"] for line in metrics(tmp_path / "run")] == ["train"] * 4 + ["validation"]


@pytest.mark.parametrize(
    ("every", "steps"), [(None, []), (0, [8]), (1, list(range(1, 9))), (3, [3, 6, 8]), (4, [4, 8]), (9, [8])]
)
def test_steps_that_are_due(every: int | None, steps: list[int]) -> None:
    assert [step for step in range(1, 9) if is_due(step, every, 8)] == steps
