"""`longstride slurm`: the script's text, its refusals, and what it does beside an srun that ends in every way.

A real SLURM runs it in tests/cluster.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from longstride.launcher import cli
from longstride.launcher.cluster.slurm import time_limit_seconds
from tests.harness.programs import Programs
from tests.harness.runs import ROOT
from tests.launcher.conftest import Refusal

WAITS = "for _ in {1..300}; do sleep 0.1; done; exit 9"  # for half a minute
OPTIONS = ["--nodes", "2", "--processes-per-node", "2", "--time", "12:00:00"]


def slurm(config: Path, *words: str) -> int:
    return cli.main(["slurm", "--config", str(config), *OPTIONS, *words])


def test_script_holds_the_options_and_starts_every_rank(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--partition", "long", "--account=me", "--gpus", "--cpus-per-process", "6", "--sbatch=--qos=night"]
    assert slurm(config_file, *words, "train.micro_batch=1") == 0
    script = tmp_path / "run" / "run.sbatch"
    assert f"{script}: submit it with" in capsys.readouterr().out
    lines = script.read_text().splitlines()
    directives = {line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")}
    assert directives == {
        "job-name=run",
        "nodes=2",
        "ntasks-per-node=2",
        "gpus-per-node=2",
        "cpus-per-task=6",
        "time=12:00:00",
        "partition=long",
        "account=me",
        "qos=night",
        f"chdir={Path.cwd()}",
        f"output={tmp_path}/run/slurm-%j.log",
        "open-mode=append",
        "requeue",
        "signal=B:USR1@120",
    }
    [srun] = [line for line in lines if line.startswith("srun ")]
    assert shlex.split(srun.removesuffix("&")) == [
        *("srun", "--kill-on-bad-exit=0", "--wait=60", "--cpus-per-task=6", sys.executable, "-u"),
        *(str(ROOT / "launcher/train.py"), "--config", str(config_file), "--resume", "auto", "train.micro_batch=1"),
    ]
    assert "{{" not in script.read_text()
    assert max(map(len, [line for line in lines if line.startswith("# ")])) <= 120
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_script_is_never_overwritten_and_may_be_printed(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], refusal: Refusal
) -> None:
    assert slurm(config_file, "--print") == 0
    printed = capsys.readouterr().out
    assert not (tmp_path / "run").exists()
    assert slurm(config_file) == 0
    script = tmp_path / "run" / "run.sbatch"
    assert script.read_text() == printed
    line = refusal("slurm", "--config", config_file, *OPTIONS)
    assert f"{script}: already exists; submit it, or give another --job-name" in line
    assert slurm(config_file, "--job-name=second") == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nodes", "0"], "--nodes=0: must be at least 1"),
        (["--processes-per-node", "3"], "train.global_batch=8: must be a multiple of micro_batch 2 × 6 processes"),
        (
            ["--processes-per-node", "3", "train.sequence_parallel=2", "train.global_batch=12"],
            "train.sequence_parallel=2: must divide the processes of every host, or equal those of several hosts; host",
        ),
        (["--time", "12h"], "--time=12h: must be [days-]hours:minutes:seconds, such as 12:00:00"),
        (["--time", "3"], "--time=3: must be more than --stop-seconds 120 and a minute, or the job would stop at once"),
        (["--partition", "a b"], "--partition=a b: must be a name; such as a-b"),
        (["--account", "x\n#SBATCH --uid=0"], "--account=x #SBATCH --uid=0: must be a name; such as x-SBATCH---uid-0"),
        (["--job-name", "a/b"], "--job-name=a/b: must be letters, digits and ._+-; such as a-b"),
        (["--sbatch", "nodes=4"], "--sbatch=nodes=4: the script or another option sets this; leave it out"),
        (["--sbatch", "qos=a b"], "--sbatch=qos=a b: must be one option of sbatch; such as qos=long"),
        (["--output-dir", "my logs"], "--output-dir=my logs: must be a path without spaces, quotes and %, for SLURM"),
        (["train.steps=-1"], "train.steps=-1"),
    ],
)
def test_wrong_options_are_a_line_each_and_write_nothing(
    words: list[str], message: str, config_file: Path, refusal: Refusal
) -> None:
    assert message in refusal("slurm", "--config", config_file, *OPTIONS, *words)


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("30", 1800), ("30:10", 1810), ("1:00:00", 3600), ("2-0", 172800), ("2-1:30", 178200), ("1-00:00:01", 86401)],
)
def test_times_are_those_of_sbatch(time: str, seconds: int) -> None:
    assert time_limit_seconds(time) == seconds


def test_submitting_needs_sbatch_and_hands_it_the_script(
    config_file: Path, tmp_path: Path, refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = Programs(tmp_path / "bin", monkeypatch, alone=True)
    line = refusal("slurm", "--config", config_file, *OPTIONS, "--submit")
    assert line.startswith("--submit: sbatch is not on PATH")
    monkeypatch.setenv("PATH", f"{programs.folder}:/usr/bin:/bin")
    programs.add("sbatch", "exit 3")
    assert slurm(config_file, "--submit") == 3
    assert programs.calls("sbatch") == [str(tmp_path / "run" / "run.sbatch")]


@pytest.mark.parametrize(
    ("srun", "sent", "state", "code", "requeued"),
    [
        ("exit 0", None, "RUNNING", 0, False),
        ("exit 2", None, "RUNNING", 2, False),
        ("exit 75", None, "RUNNING", 75, True),  # by train.max_seconds, or a signal that SLURM sent to the ranks
        ("trap 'exit 75' USR1; touch $STARTED; " + WAITS, signal.SIGUSR1, "RUNNING", 75, True),
        ("touch $STARTED; exec sleep 30", signal.SIGUSR1, "RUNNING", 138, True),  # ranks that were still starting
        ("trap 'sleep 0.5; exit 75' TERM; touch $STARTED; " + WAITS, signal.SIGTERM, "COMPLETING", 75, False),
    ],
)
def test_script_queues_itself_again_where_the_run_was_stopped_and_saved(
    srun: str,
    sent: signal.Signals | None,
    state: str,
    code: int,
    requeued: bool,
    config_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert slurm(config_file) == 0
    programs = Programs(tmp_path / "bin", monkeypatch)
    programs.add("srun", srun)
    programs.add("squeue", f"echo {state}")
    programs.add("scontrol")
    environment = dict(os.environ) | {"SLURM_JOB_ID": "7", "STARTED": str(tmp_path / "started")}
    script = subprocess.Popen([str(tmp_path / "run" / "run.sbatch")], env=environment, start_new_session=True)
    if sent is not None:
        until = time.monotonic() + 30
        while not (tmp_path / "started").exists():
            assert time.monotonic() < until
            time.sleep(0.05)
        if sent == signal.SIGTERM:
            os.killpg(script.pid, sent)  # scancel signals every process
        else:
            script.send_signal(sent)
    assert script.wait(60) == (75 if code == 138 else code)
    assert programs.calls("scontrol") == (["requeue 7"] if requeued else [])


def test_script_forwards_a_signal_that_came_before_srun_was_known(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert slurm(config_file) == 0
    programs = Programs(tmp_path / "bin", monkeypatch)
    programs.add("srun", "trap 'exit 75' USR1; touch $STARTED; " + WAITS)
    programs.add("squeue", "echo RUNNING")
    programs.add("scontrol")
    script = tmp_path / "run" / "run.sbatch"
    early = "until [ -e $STARTED ]; do sleep 0.05; done\nkill -USR1 $$\ntraining=$!\n"
    assert script.read_text().count("\ntraining=$!\n") == 1
    script.write_text(script.read_text().replace("training=$!\n", early))
    environment = dict(os.environ) | {"SLURM_JOB_ID": "7", "STARTED": str(tmp_path / "started")}
    assert subprocess.run([str(script)], env=environment, timeout=60, check=False).returncode == 75
    assert programs.calls("scontrol") == ["requeue 7"]
