"""`longstride train --dry-run`: a run for any number of processes, tried by one, which writes nothing."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness.runs import files_under
from tests.hostile.commands import Commands, Outcome

DryRun = Callable[..., Outcome]
TABLES = 'model.ngrams={"orders": [2, 3], "rows": 64}'
MUON = 'train.optimizer={"type": "muon"}'
LOSS = re.compile(
    r"took a step with one micro-batch of it, of 2: [0-9.]+ s, .*, ([0-9.]+) bits per byte$", re.MULTILINE
)


@pytest.fixture
def dry_run(commands: Commands, config_file: Path, tmp_path: Path) -> DryRun:
    """A function of words -> what became of a dry run of the tiny run of 8 contexts a step; it has written nothing."""

    def run(*words: object, **more: Any) -> Outcome:
        before = files_under(tmp_path)
        found = commands("train", "--config", config_file, "--dry-run", *words, seconds=120.0, **more)
        found.check_bounded()
        assert files_under(tmp_path) == before
        return found

    return run


def loss_of(found: Outcome) -> float | None:
    """In bits per byte, of a dry run that took its step; None: it tells none."""
    assert found.code == 0, found.err
    assert "the same command without --dry-run starts the run" in found.err
    told = LOSS.search(found.err)
    return None if told is None else float(told[1])


SHARED = "train.sequence_parallel=2"
CASES = [
    (*parts, shared)
    for parts in (
        ("zero0_fp32",),
        ("zero1_bf16",),
        ("zero2_fp16", TABLES),
        ("zero3_bf16", TABLES),
        ("zero3_fp32", MUON),
    )
    for shared in ("train.sequence_parallel=null", SHARED)
]
DIVIDED = "train.expert_parallel=2", 'model.feed_forward={"type": "experts", "count": 4}'
CASES += [("zero1_bf16", MUON, *DIVIDED), ("zero3_fp32", *DIVIDED)]
BY_DEFAULT = [CASES[0], CASES[6], CASES[9], CASES[10]]


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in BY_DEFAULT else pytest.mark.campaign, id="-".join(case)) for case in CASES],
)
def test_one_process_stands_for_the_first_of_four(dry_run: DryRun, case: tuple[str, ...]) -> None:
    """Where it has all weights and rows, the loss of a fresh network is that of guessing: its last layer is zero."""
    stage, *more = case
    found = dry_run("--processes", 4, f"deepspeed={stage}", *more)
    assert loss_of(found) == (8.0 if stage < "zero3" and not {SHARED, DIVIDED[0]} & {*case} else None)
    assert "dry run: this process acts as the first of 4 processes, on cpu; it writes nothing" in found.err
    assert "memory of a process on a CPU" in found.out and f"\n          4     {stage[4]} " in found.out  # the plan


def test_processes_of_a_hostfile_need_not_be_here(dry_run: DryRun, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("nowhere1 slots=2\nnowhere2 slots=2\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/pdsh").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bin/pdsh").chmod(0o755)
    path = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}
    found = dry_run("--hostfile", tmp_path / "hosts", environment=path)
    assert loss_of(found) == 8.0 and "the first of 4 processes" in found.err


def test_first_weights_are_those_of_from(dry_run: DryRun, trained: Callable[..., Path]) -> None:
    source = trained("zero0-fp32", 2)
    found = dry_run("--from", source)
    assert 1 < (loss_of(found) or 0) < 7.9 and "longstride: from step 8 of" in found.err
    assert "model.width=64" in dry_run("--from", source, "model.width=64").check_refused()


def test_run_that_goes_on_is_verified(dry_run: DryRun, trained: Callable[..., Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained("zero0-fp32", 2), run)
    more = ("--resume", "auto", "train.steps=16")
    newest = run / "checkpoints/step-00000008"
    found = dry_run(*more)
    assert loss_of(found) == 8.0 and f"would continue from {newest}, which is complete" in found.err
    with next(newest.rglob("*model_states.pt")).open("r+b") as file:
        file.seek(1000)
        file.write(b"damage")
    found = dry_run(*more)
    assert f"would be skipped: {newest}" in found.err
    assert f"would continue from {newest.with_name('step-00000004')}, which is complete" in found.err
    assert "no checkpoint is complete" in dry_run("--resume", "8", "train.steps=16").err
    assert "already holds a run" in dry_run().check_refused()


def test_step_that_does_not_fit_the_memory_is_not_taken(dry_run: DryRun) -> None:
    found = dry_run('model.ngrams={"orders": [2], "rows": 2147483647}')
    assert found.code == 0
    assert re.search(
        r"no step is taken: it takes [0-9.]+ GiB, and [0-9.]+ are free here; everything else is ready", found.err
    )


def test_what_would_keep_the_run_from_starting_is_one_line(dry_run: DryRun, config_file: Path, tmp_path: Path) -> None:
    for words, line in (
        (["--replay", "3"], "--replay=3: needs steps, but --dry-run takes none; leave out one of them"),
        (["--profile", "3"], "--profile=3: needs steps, but --dry-run takes none; leave out one of them"),
        (["deepspeed.zero_optimization.stage=9"], "deepspeed.zero_optimization.stage=9"),
    ):  # fmt: skip
        assert dry_run(*words).check_refused().startswith(line)
    damaged = tmp_path / "data"
    shutil.copytree(json.loads(config_file.read_text())["data"]["path"], damaged)
    for shard in damaged.rglob("*.tar"):
        content = bytearray(shard.read_bytes())
        content[512:] = bytes(byte ^ 1 for byte in content[512:])
        shard.write_bytes(content)
    assert str(damaged) in dry_run(f"data.path={damaged}").check_refused()
