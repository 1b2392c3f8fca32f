"""A checkpoint from elsewhere runs nothing, until a person says that it may."""

import argparse
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum

from longstride.kernels import ConfigError
from longstride.launcher import cli
from longstride.launcher.checkpoints.checkpoint import checkpoint_folder, open_checkpoint
from longstride.launcher.checkpoints.manifest import read_manifest, record_files, write_manifest
from longstride.launcher.checkpoints.pickles import read_pickle, refuse_foreign_content, unsafe_content, write_pickle
from longstride.launcher.cluster.placement import launcher_command
from longstride.launcher.output.file_names import LOCK
from longstride.launcher.output.messages import AgreedError, mistake
from longstride.launcher.ranks.processes import Ranks
from longstride.launcher.verbs.train import add_train_arguments
from tests.harness.runs import spawn
from tests.launcher.conftest import Refusal
from tests.launcher.training.test_training import RUNS

Trained = Callable[..., Path]
NAME = "zero2-fp16"


class Touching:
    """What a pickle of it does, wherever it is opened: makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.system, (f"touch {self._path}",)


def poison(folder: Path, name: str, mark: Path) -> Path:
    """Puts code into a file of a checkpoint, whose manifest is made to agree: its writer can do that."""
    path = folder / name
    content = torch.load(path, weights_only=False)
    torch.save(content | {"more": Touching(mark)}, path)
    records = record_files(folder)
    del records["manifest.json"]
    write_manifest(folder, read_manifest(folder).model_copy(update={"files": records}))
    return path


def test_stage_is_written_by_its_value_whatever_python_would_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first releases of Python 3.11 pickle a member of an enumeration as a call of getattr."""
    by_name = lambda stage, protocol: (getattr, (ZeroStageEnum, stage.name))  # noqa: E731
    monkeypatch.setattr(ZeroStageEnum, "__reduce_ex__", by_name)
    path = tmp_path / "state.pt"
    write_pickle({"zero_stage": ZeroStageEnum.weights}, path)
    assert unsafe_content(path) is None
    assert read_pickle(path) == {"zero_stage": 3}


@pytest.fixture
def poisoned(trained: Trained, tmp_path: Path) -> tuple[Path, dict[str, Path]]:
    """A run whose checkpoint of step 8 has code in a file of each kind; the files, and what each would make."""
    run = tmp_path / "run"
    shutil.copytree(trained(NAME, 2, *RUNS[NAME]), run)
    shutil.rmtree(checkpoint_folder(run, 4))
    folder = checkpoint_folder(run, 8)
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.pt"))
    return run, {name: tmp_path / f"made-{number}" for number, name in enumerate(names)}


def spoilt(poisoned: tuple[Path, dict[str, Path]], *kinds: str) -> tuple[Path, list[Path]]:
    """The run with code in the files of these kinds, and what they would make."""
    run, marks = poisoned
    chosen = {name: mark for name, mark in marks.items() if any(kind in name for kind in kinds)}
    assert chosen
    for name, mark in chosen.items():
        poison(checkpoint_folder(run, 8), name, mark)
    return run, list(chosen.values())


def test_no_verb_runs_what_a_checkpoint_holds(
    poisoned: tuple[Path, dict[str, Path]], tmp_path: Path, refusal: Refusal, capsys: pytest.CaptureFixture[str]
) -> None:
    run, marks = spoilt(poisoned, "model_states", "optim_states")
    export = ["export", str(run), "--output", str(tmp_path / "out")]
    for words in (export, ["evaluate", run], ["show", "attention", run, "--output", tmp_path / "out.png"]):
        line = refusal(*words)
        assert line.startswith(f"{run}/checkpoints/step-00000008/deepspeed/"), line
        assert "holds more than tensors and numbers (posix.system)" in line, line
        assert "--trust-checkpoint opens it" in line
        assert not any(mark.exists() for mark in marks)
    assert not list(tmp_path.glob("out*")) and not list(tmp_path.glob(".out*"))
    assert cli.main([*export, "--trust-checkpoint"]) == 0
    told = capsys.readouterr().err
    assert told.count("opened because of --trust-checkpoint, which runs its code: posix.system") == 3
    assert all(mark.exists() for mark in marks)
    assert (tmp_path / "out/model.safetensors").exists()


def test_checkpoint_that_asks_for_more_is_refused_before_it_is_read(poisoned: tuple[Path, dict[str, Path]]) -> None:
    run, marks = spoilt(poisoned, "random")
    checkpoint = open_checkpoint(run, None)
    assert checkpoint.find_damage(Ranks()) == []
    with pytest.raises(AgreedError) as caught:
        checkpoint.check_trust(Ranks())
    assert [line.split(": ")[0] for line in str(caught.value).splitlines()] == [
        f"{checkpoint.folder}/random-{rank:05d}.pt" for rank in range(2)
    ]
    open_checkpoint(run, None, trusted=True).check_trust(Ranks())
    assert not any(mark.exists() for mark in marks)


@pytest.mark.campaign
@pytest.mark.parametrize("kind", ["random", "optim_states"])
def test_resume_runs_what_a_checkpoint_holds_only_where_it_is_trusted(
    poisoned: tuple[Path, dict[str, Path]], config_file: Path, kind: str
) -> None:
    run, marks = spoilt(poisoned, kind)
    arguments = ["--config", str(config_file), "--resume", "auto", *RUNS[NAME], "train.steps=9"]
    arguments += ["train.evaluate_every=0", "train.evaluate_contexts=1"]
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name != LOCK}
    ended = spawn(arguments, 2)
    assert ended.codes == [2, 2], ended.stderr
    lines = [line for line in ended.stderr[0].splitlines() if line.startswith("longstride")]
    assert len(lines) == len(marks) and all("--trust-checkpoint opens it" in line for line in lines), lines
    assert not any(mark.exists() for mark in marks)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert {path for path in run.rglob("*") if path.name != LOCK} == before.keys()
    if kind != "random":
        return
    ended = spawn([*arguments, "--trust-checkpoint"], 2)
    assert ended.codes == [0, 0], ended.stderr
    assert "opened because of --trust-checkpoint" in ended.stderr[0]
    assert all(mark.exists() for mark in marks)


@pytest.mark.campaign
def test_rewind_and_replay_run_what_a_checkpoint_holds_only_where_it_is_trusted(
    poisoned: tuple[Path, dict[str, Path]], config_file: Path
) -> None:
    _, marks = spoilt(poisoned, "random-00001")
    arguments = ["--config", str(config_file), *RUNS[NAME], "train.steps=12", "train.guards.non_finite=rewind"]
    arguments += ["train.evaluate_every=0", "train.evaluate_contexts=1", "train.checkpoint_every=12"]
    for word, codes in ((), [2, 2]), (("--trust-checkpoint",), [0, 0]):
        ended = spawn([*arguments, "--replay", "9", *word], 2)
        assert ended.codes == codes, ended.stderr
        assert marks[0].exists() == bool(word)
        marks[0].unlink(missing_ok=True)
    resumed = [*arguments, "--resume", "auto", "--trust-checkpoint"]
    ended = spawn(resumed, 2, {"SPOIL": "loss,1,10,10,1"})
    assert ended.codes == [0, 0], ended.stderr
    assert "step 8: continuing from" in ended.stderr[0]


def test_file_that_only_reading_can_judge_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """torch's older format is no zip archive."""
    path, mark = tmp_path / "x.pt", tmp_path / "made"
    torch.save({"more": Touching(mark)}, path, _use_new_zipfile_serialization=False)
    assert unsafe_content(path) == "not a zip archive by torch.save, so its content is unknown"
    with pytest.raises(ConfigError, match=r"holds more than tensors and numbers \(not a zip archive .*--trust"):
        read_pickle(path)
    assert not mark.exists()
    assert read_pickle(path, trusted=True) == {"more": 0}
    assert mark.exists()


@pytest.mark.parametrize(
    ("error", "kind", "line"),
    [
        (OSError(errno.EIO, "Input/output error"), OSError, "Input/output error: 'x.pt'"),
        (
            MemoryError(),
            ConfigError,
            "x.pt: needs more memory than is available, or is not what a run writes: MemoryError",
        ),
        (KeyError("module"), ConfigError, "x.pt: is not what a run writes: KeyError: 'module'"),
    ],
)
def test_disk_and_memory_are_told_apart_from_what_a_file_holds(
    error: Exception, kind: type[Exception], line: str
) -> None:
    with pytest.raises(kind) as caught, refuse_foreign_content("x.pt"):
        raise error
    assert line in str(caught.value) and mistake(caught.value) is not None


def test_option_is_asked_of_pictures_that_read_a_checkpoint(tmp_path: Path, refusal: Refusal) -> None:
    words = ["show", "pattern", "demo", "--output", tmp_path / "x.png", "--trust-checkpoint"]
    assert refusal(*words) == "--trust-checkpoint: only --text FILE reads a checkpoint; leave it out"


def test_option_reaches_every_rank() -> None:
    parser = argparse.ArgumentParser()
    add_train_arguments(parser)
    words = ["--config", "paper_small", "--resume", "auto", "train.steps=3"]
    for given in ([], ["--trust-checkpoint"]):
        command = launcher_command(parser.parse_intermixed_args([*words, *given]), "auto", 2)
        assert command[command.index("--config") :] == [*words[:-1], *given, words[-1]]
