"""The deepspeed launcher with our corrections: the command lines that would be run."""

import shlex
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from deepspeed.launcher import runner

from longstride.launcher.cluster import deepspeed_runner
from tests.harness.programs import Programs
from tests.launcher.cluster.test_hosts import VERSIONS

_PDSH = shutil.which("pdsh")  # the real one, should it be here
JSON = 'model.attention={"type":"strided","stride":8}'


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function of a launcher -> (its command, its runner)."""
    (tmp_path / "hostfile").write_text("node1 slots=2\nnode2 slots=2\n")
    monkeypatch.chdir(tmp_path)
    for name in ("PDSHRunner", "OpenMPIRunner", "MPICHRunner"):
        monkeypatch.setattr(runner, name, getattr(runner, name))
    programs = Programs(tmp_path / "bin", monkeypatch)
    for name in ("pdsh", "ompi_info"):
        programs.add(name)
    run: list[list[str]] = []

    class Started:
        returncode = 0

        def __init__(self, words: list[str], **_: Any) -> None:
            run.append(words)

        def wait(self) -> None:
            pass

    monkeypatch.setattr(runner, "subprocess", SimpleNamespace(Popen=Started))
    monkeypatch.setattr(runner, "signal", SimpleNamespace(signal=lambda *_: None, SIGINT=2, SIGTERM=15))

    def get(launcher: str, *overrides: str) -> list[str]:
        programs.add("mpirun", VERSIONS.get(launcher, ""))
        monkeypatch.setattr(
            "longstride.launcher.cluster.deepspeed_runner.find_mpirun", lambda family: f"/the/{family}/mpirun"
        )
        words = ["--hostfile", str(tmp_path / "hostfile"), "--launcher", launcher, "--no_ssh_check", "--force_multi"]
        words += ["--master_addr", "10.0.0.1", "--master_port", "20007", "train.py", "--config", "a b.json", JSON]
        deepspeed_runner.main([*words, *overrides])
        return run[-1]

    return get


def test_words_pass_the_shells_of_pdsh_whole(command: Any) -> None:
    words = command("pdsh")
    assert words[words.index("deepspeed.launcher.launch") + 1] == "--log_level=info"
    behind = " ".join(words[words.index("train.py") :])  # pdsh joins its words, and a shell there takes them apart
    shell = subprocess.run(["bash", "-c", f"printf '%s\\n' {behind}"], capture_output=True, text=True, check=True)
    assert shell.stdout.splitlines() == ["train.py", "--config", "a b.json", JSON]


def test_percent_signs_pass_pdsh_itself(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    folder = tmp_path / "100%n"
    folder.mkdir()
    monkeypatch.chdir(folder)
    words = command("pdsh", "train.output=runs/%h-%n%%")
    assert words[:6] == ["pdsh", "-S", "-f", "1024", "-w", "node1,node2"]
    if _PDSH is None:
        behind = [" ".join(words[6:]).replace("%%", "\0").replace("%n", number).replace("\0", "%") for number in "01"]
    else:
        subprocess.run([_PDSH, "-R", "exec", "-N", *words[1:6], "echo", "%n", *words[6:]], check=True)
        behind = [line.partition(" ")[2] for line in sorted(capfd.readouterr().out.splitlines()) if "launch" in line]
    assert len(behind) == 2
    for number, line in enumerate(behind):
        assert f"export PYTHONPATH={folder}:" in line and f"cd {folder};" in line
        assert f"--node_rank={number} " in line and line.endswith(" train.output=runs/%h-%n%%")


def test_pdsh_ends_the_ranks_of_this_run_alone(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kills = []
    get_cmd = deepspeed_runner.QuotingPdsh.get_cmd

    def keep(self: Any, *arguments: Any) -> Any:
        commands = get_cmd(self, *arguments)
        kills.append(commands[1])
        return commands

    monkeypatch.setattr(deepspeed_runner.QuotingPdsh, "get_cmd", keep)
    started = " ".join(command("pdsh")[6:])
    [kill] = kills
    assert kill[:6] == ["pdsh", "-S", "-f", "1024", "-w", "node1,node2"]
    pkill = " ".join(kill[6:])
    pattern = shlex.split(pkill)[-1]

    def matches(line: str) -> bool:
        grep = ["grep", "-E", "-q", "-e", pattern]  # extended expressions, as pkill's
        return subprocess.run(grep, input=line, text=True, check=False).returncode == 0

    assert matches(started)
    assert not matches(started.replace("20007", "20008"))
    assert not matches(started.replace("10.0.0.1", "10.0.0.2"))
    assert not matches(pkill)  # or it would end the shell that runs it


@pytest.mark.parametrize("launcher", ["openmpi", "mpich"])
def test_mpirun_is_the_librarys_own_and_starts_the_ranks_itself(launcher: str, command: Any) -> None:
    words = command(launcher)
    assert words[0] == f"/the/{launcher}/mpirun"
    assert not any("launcher_helper" in word for word in words)
    script = words.index("train.py")
    assert words[script - 1] == "-u"
    assert words[script + 1 :] == ["--config", "a b.json", JSON]
