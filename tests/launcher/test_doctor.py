"""`longstride doctor`: what it finds wrong with a machine, a run and its hosts. What is outside is made up."""

import argparse
import json
import locale
import os
import resource
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from longstride.launcher import cli, doctor, planning
from longstride.launcher.doctor import Finding, answer_of_child
from tests.harness.runs import ROOT, configuration

HERE = {
    "python": "3.11.7",
    "torch": "2.13.0",
    "triton": "3.7.1",
    "deepspeed": "0.19.8",
    "code": "ab" * 6,
    "devices": {"cards": [], "nccl": None, "built": None, "bf16_products": False},
    "mpi": "Open MPI",
    "attention": {"backend": "cpu", "device": "cpu", "precision": "fp32"},
    "data": "f" * 64,
}
CARD = {"name": "NVIDIA H100", "capability": [9, 0], "bytes": 80 << 30, "bf16": True}


def by_subject(found: Any) -> dict[str, Finding]:
    """Findings by what they are of."""
    return {finding.subject: finding for finding in found}


def program(folder: Path, name: str, lines: str) -> Path:
    """A shell script on a path of its own."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_packages_here_are_in_the_ranges_asked_for() -> None:
    found = by_subject(doctor.packages())
    assert {finding.state for finding in found.values()} == {"ok"}, found
    assert "torch 2" in found["packages"].text


def test_package_that_is_missing_or_out_of_range_is_told_with_its_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    own = doctor.importlib.metadata

    def version(name: str) -> str:
        if name == "webdataset":
            raise own.PackageNotFoundError(name)
        return "1.2.0" if name == "torch" else real(name)

    real = own.version
    monkeypatch.setattr(own, "version", version)
    monkeypatch.setattr(doctor.platform, "python_version", lambda: "3.9.1")
    found = by_subject(doctor.packages())
    assert found["webdataset"].mend == "`pip install 'webdataset<2,>=1.0'`"
    assert str(found["torch"]) == "broken   torch: 1.2.0 is outside <2.14,>=2.9; `pip install 'torch<2.14,>=2.9'`"
    assert found["python"].state == "broken"


@pytest.mark.parametrize(("cards", "state"), [(True, "broken"), (False, "warning")])
def test_missing_and_failing_compilers_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cards: bool, state: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CC", raising=False)
    (missing,) = doctor.compilers(cards=cards, compiled=False)
    assert (missing.state, missing.text.partition(";")[0]) == (state, "gcc or cc or clang is not on PATH")
    program(tmp_path / "bin", "gcc", "echo cannot find ld >&2; exit 1")
    (failing,) = doctor.compilers(cards=cards, compiled=False)
    assert failing.state == state and "compiles nothing (cannot find ld)" in failing.text
    program(tmp_path / "bin", "mine", "exit 0")
    monkeypatch.setenv("CC", "mine")
    (well,) = doctor.compilers(cards=cards, compiled=False)
    assert well.state == "ok"


def test_limits_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {resource.RLIMIT_NOFILE: (200, 4096), resource.RLIMIT_FSIZE: (1 << 20, 1 << 20)}
    monkeypatch.setattr(doctor.resource, "getrlimit", given.__getitem__)
    found = by_subject(doctor.limits())
    assert str(found["open files"]) == "broken   open files: 200 at once are few; `ulimit -n 4096`"
    assert found["file size"].state == "broken"
    given[resource.RLIMIT_NOFILE] = (1024, 1024)
    given[resource.RLIMIT_FSIZE] = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert [finding.state for finding in doctor.limits()] == ["ok"]


@pytest.mark.parametrize(("free", "needed", "state"), [(32, 0, "warning"), (32, 40, "broken"), (900, 40, "ok")])
def test_shared_memory_is_held_against_batches(
    monkeypatch: pytest.MonkeyPatch, free: int, needed: int, state: str
) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: argparse.Namespace(free=free << 20))
    (finding,) = doctor.shared_memory(needed << 20)
    assert finding.state == state and bool(finding.mend) == (state != "ok")


def test_bare_surroundings_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HOME", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(locale, "getpreferredencoding", lambda _: "ANSI_X3.4-1968")
    found = by_subject(doctor.surroundings())
    assert [found[name].state for name in ("home", "locale", "mpirun")] == ["warning"] * 3


def test_disk_without_room_is_found(tmp_path: Path) -> None:
    (well,) = doctor.disk("run folder", tmp_path / "a/b", 1, "2 checkpoints")
    (full,) = doctor.disk("run folder", tmp_path / "a/b", 1 << 60, "2 checkpoints")
    assert (well.state, full.state) == ("ok", "broken")
    assert not (tmp_path / "a").exists()


def test_child_that_hangs_crashes_or_babbles_is_told() -> None:
    since = time.monotonic()
    assert answer_of_child(["-c", "import time; time.sleep(60)"], 0.5) == "no answer in 0.5 seconds"
    assert time.monotonic() - since < 20
    assert answer_of_child(["-c", "import os; os.kill(os.getpid(), 11)"]) == "ended by signal 11"
    assert answer_of_child(["-c", "1 / 0"]) == "ZeroDivisionError: division by zero"
    assert answer_of_child(["-c", "print('noise'); print('{\"a\": 1}')"]) == {"a": 1}


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """A run whose data is nowhere: nothing here reads it."""
    path = tmp_path / "run.json"
    path.write_text(json.dumps(configuration(tmp_path / "data", tmp_path / "run")))
    return path


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The answer of this machine's child, and the plan of a run."""
    rows = dict.fromkeys(("weights", "masters", "moments", "average", "tables"), 1 << 20)
    rows |= {"peak_kept": 1 << 30, "peak_recomputed": 1 << 29}
    plan = {"memory": [{"stage": 0, **rows}], "zero_stage": 0, "activation_checkpointing": False}
    answers: dict[str, Any] = {"answer": dict(HERE), "plan": plan}

    def plan_run(config: Any, processes: int, device: str | None, contexts: int) -> Any:
        answers["device"] = device
        return plan

    monkeypatch.setattr(doctor, "answer_of_child", lambda words: answers["answer"])
    monkeypatch.setattr(planning, "plan_run", plan_run)
    return answers


def findings_of(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """The exit code and the findings of a command line, by their subjects."""
    code = cli.main(["doctor", *words, "--json"])
    return code, {finding["subject"]: finding for finding in json.loads(capsys.readouterr().out)["findings"]}


def test_run_that_fits_has_nothing_broken(
    capsys: pytest.CaptureFixture[str], answers: dict[str, Any], config_file: Path
) -> None:
    code, found = findings_of(capsys, str(config_file))
    assert code == 0, found
    assert answers["device"] == "cpu"  # planned for what is here
    assert found["attention"]["text"] == "computed by the backend cpu on cpu in fp32"
    assert not (config_file.parent / "run").exists()
    code, found = findings_of(capsys)
    assert code == 0 and "memory" not in found and found["python"]["state"] == "ok"


def test_what_a_run_lacks_is_broken(
    capsys: pytest.CaptureFixture[str], answers: dict[str, Any], config_file: Path
) -> None:
    answers["answer"] = {key: value for key, value in HERE.items() if key not in ("data", "attention")}
    answers["answer"] |= {"no data": "data: no such folder", "no attention": "backend=triton: needs a GPU"}
    answers["plan"]["memory"][0]["peak_kept"] = 1 << 60
    code, found = findings_of(capsys, str(config_file), "--processes", "3")
    assert code == 1
    broken = {name for name, finding in found.items() if finding["state"] == "broken"}
    assert broken == {"data", "attention", "memory", "processes"}


def test_torch_that_crashes_is_broken(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import os; os.abort()")
    command = [sys.executable, "-m", "longstride.launcher.cli", "doctor", "missing.json"]
    paths = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    ended = subprocess.run(command, env=os.environ | paths, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    text = "broken   torch: a process that imports it: ended by signal 6; `pip install --force-reinstall torch`"
    assert ended.returncode == 1 and text in ended.stdout.splitlines(), ended.stderr


@pytest.mark.parametrize(
    ("card", "nccl", "broken"),
    [
        ({}, "2.27.5", set()),
        ({"name": "NVIDIA V100", "capability": [7, 0]}, "2.27.5", {"GPU 0", "GPU 1"}),
        ({"bf16": False}, "2.27.5", {"GPU 0", "GPU 1"}),
        ({}, None, {"NCCL"}),
    ],
)
def test_cards_are_held_against_kernels_and_precision(
    capsys: pytest.CaptureFixture[str],
    answers: dict[str, Any],
    config_file: Path,
    card: dict[str, Any],
    nccl: str | None,
    broken: set[str],
) -> None:
    cards = [CARD | card] * 2
    answers["answer"]["devices"] = {"cards": cards, "nccl": nccl, "built": "12.8", "bf16_products": True}
    code, found = findings_of(capsys, str(config_file), "deepspeed=zero0_bf16")
    assert {name for name, finding in found.items() if finding["state"] == "broken"} == broken
    assert code == int(bool(broken)) and answers["device"] is None


def test_hosts_are_held_against_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answers: dict[str, Any]
) -> None:
    """By an ssh that answers as a host would: alike, otherwise, without Python, not at all, or never."""
    other = HERE | {"torch": "2.12.1", "data": "e" * 64, "devices": HERE["devices"] | {"cards": [CARD]}}
    for name, answer in (("alike", HERE), ("other", other)):
        (tmp_path / name).write_text(json.dumps(answer))
    cases = [f"{name}) cat {tmp_path / name};;" for name in ("alike", "other")]
    cases += ["bare) echo 'sh: python: not found' >&2; exit 127;;", "slow) exec sleep 60;;"]
    cases += ["*) echo 'ssh: connect to host: No route to host' >&2; exit 255;;"]
    lines = 'while [ "$1" = -o ]; do shift 2; done\ncase $1 in\n' + "\n".join(cases) + "\nesac"
    program(tmp_path / "bin", "ssh", lines)
    for name in ("cat", "sleep"):
        (tmp_path / "bin" / name).symlink_to(str(shutil.which(name)))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))  # without srun, which may be here
    monkeypatch.setattr(doctor, "CHILD_SECONDS", -57.0)  # 60 are added for ssh
    hostfile = tmp_path / "hosts"
    hostfile.write_text("".join(f"{name} slots=2\n" for name in ("alike", "other", "bare", "slow", "dead")))
    code = cli.main(["doctor", "--hostfile", str(hostfile), "--launcher", "slurm", "--json"])
    found = [(each["subject"], each["state"], each["text"]) for each in json.loads(capsys.readouterr().out)["findings"]]
    assert code == 1
    assert [each for each in found if each[0] == "alike"] == [
        ("alike", "ok", "answers; the same versions and code, the same data; no GPUs")
    ]
    assert [text for name, _, text in found if name == "other"] == [
        "torch is 2.12.1 there, and 2.13.0 here",
        "2 slots and 1 GPUs",
        "has other data than this host",
    ]
    assert [text for name, _, text in found if name in ("bare", "slow", "dead")] == [
        "sh: python: not found",
        "no answer",
        "ssh: connect to host: No route to host",
    ]
    assert next(state for name, state, _ in found if name == "launcher") == "broken"  # there is no srun


@pytest.mark.hostile
def test_a_child_tells_this_machine() -> None:
    found = answer_of_child(["-m", "longstride.launcher.host"])
    assert isinstance(found, dict), found
    assert not [name for name in found if name.startswith("no ") and name != "no mpi"], found
    assert len(found["code"]) == 12 and found["torch"]
    assert doctor.ROOT
