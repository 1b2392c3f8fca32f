"""The command line: verbs, their modules, and what they print."""

import importlib
import importlib.metadata
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from longstride.launcher import cli
from longstride.launcher.cluster.supervisor import Launch, Outcome
from tests.harness.runs import ROOT, free_port, metrics, plain_environment
from tests.launcher.conftest import Refusal

Trained = Callable[..., Path]


@pytest.mark.parametrize("words", [["data", "--help"], ["data", "-h"], ["help", "data"]], ids=" ".join)
def test_help_of_a_group_lists_its_verbs(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "usage: longstride data VERB …"
    assert [line.split()[:2] for line in lines if line.startswith("  data")] == [
        verb.words.split() for verb in cli.VERBS if verb.words.startswith("data ")
    ]


def test_version_names_what_decides_a_result(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    versions = {name: importlib.metadata.version(name) for name in ("longstride", "torch", "triton", "deepspeed")}
    ours = f"longstride {versions.pop('longstride')}"
    others = ", ".join(f"{name} {version}" for name, version in versions.items())
    assert capsys.readouterr().out == f"{ours} ({others})\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan"], "the following arguments are required: CONFIG"),
        (["data", "verify", "data", "--quick\nly"], "unrecognized arguments: --quick ly"),
    ],
)
def test_command_line_that_cannot_be_read_is_told_in_one_line(words: list[str], message: str, refusal: Refusal) -> None:
    assert refusal(*words) == f"{message}; `longstride {' '.join(words[:2])} --help` lists the options"


def test_ctrl_c_ends_a_verb_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stop(arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("longstride.launcher.cli.print_schema", stop)
    assert cli.main(["config", "schema"]) == 130
    assert capsys.readouterr().err == "longstride: stopped\n"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["config"], 2),
        (["data", "show", "--help"], 0),  # it is done: what it says waits in Python's buffer
        (["config", "schema"], 141),  # it is not: the schema does not fit there
    ],
    ids=["wrong", "done", "cut off"],
)
def test_verb_ends_quietly_where_its_reader_goes_away(words: list[str], code: int) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "longstride.launcher.cli", *words]
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    ended = subprocess.run(command, cwd=ROOT, env=buffered, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert ended.returncode == code
    assert ended.stderr.startswith("longstride: error: no verb config;" if code == 2 else "")
    assert ended.stderr.count("\n") == (1 if code == 2 else 0)


def test_a_result_that_a_full_disk_takes_is_told_in_one_line() -> None:
    command = [sys.executable, "-m", "longstride.launcher.cli", "--help"]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    line = "standard output, or a file: cannot be written: No space left on device; write to a disk with free space"
    assert (ended.returncode, ended.stderr) == (2, f"longstride: error: {line}\n")


def test_help_takes_a_moment() -> None:
    """The least of three: a busy machine may slow one down."""
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "longstride.launcher.cli", "--help"]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    assert min(seconds) < 0.3


def test_standard_output_is_the_verbs_alone() -> None:
    """Importing deepspeed prints which accelerator it has chosen."""
    environment = {name: value for name, value in plain_environment().items() if name != "DS_ACCELERATOR"}
    command = [sys.executable, "-m", "longstride.launcher.cli", "evaluate", "missing"]
    ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (2, "")


def test_data_build_and_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "source").mkdir()
    for number in range(8):
        (tmp_path / f"source/{number}.txt").write_text(str(number) * 1000)
    build = ["data", "build", str(tmp_path / "source"), "--output", str(tmp_path / "data"), "--validation-fraction"]
    assert cli.main([*build, "0.3"]) == 0
    assert "train" in capsys.readouterr().err
    assert cli.main(["data", "verify", str(tmp_path / "data")]) == 0
    shard = tmp_path / "data/train-00000.tar"
    shard.write_bytes(shard.read_bytes()[:-512])
    assert cli.main(["data", "verify", str(tmp_path / "data")]) == 1
    assert str(shard) in capsys.readouterr().out
    build[build.index("--output") + 1] = str(tmp_path / "data/manifest.json/data")
    assert cli.main([*build, "0.3"]) == 2
    assert "manifest.json is not a folder); name an output where you may write" in capsys.readouterr().err


def test_deepspeed_launcher_gives_the_same_training(trained: Trained, tmp_path: Path) -> None:
    """`deepspeed launcher/train.py` from another folder, by the script that a person calls."""
    directly = trained("alone", 1)
    command = [str(Path(sys.executable).with_name("deepspeed")), "--num_gpus", "1", f"--master_port={free_port()}"]
    command += [str(ROOT / "launcher/train.py"), "--config", str(directly.parent / "run.json"), "train.output=run"]
    ended = subprocess.run(command, env=plain_environment(), cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert metrics(tmp_path / "run") == metrics(directly)


def supervised(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """What `longstride train` would run from here on."""
    launches: list[Launch] = []

    def supervise(launch: Launch, *_: object) -> Outcome:
        launches.append(launch)
        return Outcome(0, "done")

    monkeypatch.setattr("longstride.launcher.cluster.start.supervise", supervise)
    return launches


def test_longstride_train_starts_the_launcher(
    tmp_path: Path, config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = supervised(monkeypatch)
    cli.main(["train", "--config", str(config_file), "train.steps=3", "--processes", "2", "--resume", "auto"])
    (launch,) = launches
    command = launch.command
    assert command[:3] == [sys.executable, "-m", "deepspeed.launcher.runner"]
    assert command[command.index("--num_gpus") + 1] == "2"
    script = command.index(str(ROOT / "launcher/train.py"))
    assert command[script + 1 : -2] == ["--config", str(config_file), "--resume", "auto", "train.steps=3"]
    assert command[-2] == f"--stop-file={launch.stop_file}"
    assert launch.stop_file.parent == tmp_path / "run"


def test_longstride_train_starts_one_process_without_a_gpu(
    tmp_path: Path, config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = supervised(monkeypatch)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("longstride.launcher.cluster.hosts.HOSTFILE", tmp_path / "hostfile")
    cli.main(["train", "--config", str(config_file)])
    [alone] = (launch.command for launch in launches)
    assert alone[alone.index("--num_gpus") + 1] == "1"


def test_lm_eval_that_is_not_installed_is_told(monkeypatch: pytest.MonkeyPatch, refusal: Refusal) -> None:
    for name in ("lm_eval", "lm_eval.models"):
        monkeypatch.setitem(sys.modules, name, None)
    line = refusal("lm-eval", "--model", "longstride", "--tasks", "wikitext")
    assert line.startswith("lm-eval: needs lm_eval (") and line.endswith('; pip install "longstride[lm_eval]"')
