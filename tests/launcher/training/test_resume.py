"""Which checkpoint a run goes on from: the newest whole one, told by its manifest."""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from longstride.data_pipelines.building.build import build
from longstride.kernels import ConfigError
from longstride.launcher import cli
from longstride.launcher.checkpoints.checkpoint import list_checkpoints, open_checkpoint
from longstride.launcher.checkpoints.manifest import find_damage, read_manifest
from longstride.launcher.checkpoints.saving import set_aside
from longstride.launcher.output import exit_codes
from longstride.launcher.output.metrics_file import cut_metrics, find_steps
from tests.harness.lines import step_line
from tests.harness.runs import Rank, complete, free_port, metrics, plain_environment, rank_environment, spawn

Trained = Callable[..., Path]


def flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_damaged_newest_checkpoint_is_passed_over_and_settings_apply(run_copy: Path, config_file: Path) -> None:
    """One run for two facts: it goes on from step 4, and with the learning rate that it is given now."""
    before = metrics(run_copy)
    damaged = run_copy / "checkpoints/step-00000008/random-00000.pt"
    flip_byte(damaged)
    arguments = ["--config", str(config_file), "--resume", "auto", "train.learning_rate=0.0015", "model.backend=auto"]
    ended = complete([*arguments, "train.weight_decay=0.1"], 1)
    assert f"longstride: passed over: {damaged}: is damaged: its SHA-256 is not the manifest's" in ended.stderr[0]
    assert f"longstride: continuing from {run_copy / 'checkpoints/step-00000004'}" in ended.stderr[0]
    (change,) = (line for line in ended.stderr[0].splitlines() if "the learning rate" in line)
    assert change.startswith("longstride: train.learning_rate=0.0015 (was 0.003): the learning rate was ")
    after = metrics(run_copy)
    assert after[:5] == before[:5]
    assert [line["step"] for line in after] == [line["step"] for line in before]
    assert [line.get("sample_ids_crc32") for line in after] == [line.get("sample_ids_crc32") for line in before]
    rates = [
        (new["learning_rate"], old["learning_rate"]) for new, old in zip(after, before, strict=True) if "epoch" in new
    ]
    assert all(new == pytest.approx(old / 2) for new, old in rates[4:])
    assert f" was {rates[3][1]:.4g} at the step before, is {rates[4][0]:.4g} at the next and " in change
    # The weights and dropout of step 4, though another backend computes in another order.
    assert after[5]["loss_nats"] == pytest.approx(before[5]["loss_nats"], rel=2**-20)
    assert after[6]["loss_nats"] != before[6]["loss_nats"]
    first, second = map(json.loads, (run_copy / "starts.jsonl").read_text().splitlines())
    assert (first["how"], first["step"], first["changes"]) == ("new", 0, {})
    assert (second["how"], second["step"], second["processes"]) == ("resume", 4, 1)
    assert sum(second["devices"].values()) == 1 and second["device_type"] == "cpu" and len(second["hosts"]) == 1
    changed = {"train.output", "train.learning_rate", "train.weight_decay", "model.backend"}
    assert set(second["changes"]) == changed
    assert second["changes"]["train.learning_rate"] == [0.003, 0.0015]


def test_export_tells_what_it_passed_over(run_copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged = run_copy / "checkpoints/step-00000008/manifest.json"
    flip_byte(damaged)
    assert cli.main(["export", str(run_copy), "--output", str(tmp_path / "out")]) == 0
    passed_over, _, done = capsys.readouterr().err.splitlines()
    assert passed_over.startswith(f"longstride: passed over: {damaged}:")  # and maybe line and column
    assert "step 4 of" in done


def damage_second_half(data: Path, folder: Path) -> Path:
    """A copy of the data in which the training shard has a flipped bit that the second of two ranks reads first."""
    shutil.copytree(data, folder)
    (shard,) = folder.glob("train-*.tar")
    content = bytearray(shard.read_bytes())
    content[len(content) * 9 // 16] ^= 1
    shard.write_bytes(content)
    return shard


@pytest.mark.parametrize(
    ("workers", "sharing"),
    [pytest.param(0, 1, marks=pytest.mark.campaign), (2, 1), pytest.param(2, 2, marks=pytest.mark.campaign)],
)
def test_damaged_sample_ends_all_ranks_at_one_step_and_what_is_done_is_saved(
    config_file: Path, data: Path, tmp_path: Path, workers: int, sharing: int
) -> None:
    """The second of two ranks meets it, or of two that share a context one alone; the first one tells it, once."""
    shard = damage_second_half(data, tmp_path / "data")
    began = time.monotonic()
    changes = [f"data.path={tmp_path / 'data'}", f"data.workers={workers}", "train.checkpoint_every=0"]
    changes += [f"train.sequence_parallel={sharing}"] * (sharing > 1)
    ended = spawn(["--config", str(config_file), *changes], 2 * sharing)
    assert ended.codes == [2, 2] * sharing, ended.stderr
    (told,) = ended.refusals
    assert f"{shard}: sample " in told
    assert time.monotonic() - began < 25  # a rank that holds its line back does so for 30 seconds
    done = [line["step"] for line in metrics(tmp_path / "run") if line["split"] == "train"]
    assert [path.name for path in (tmp_path / "run/checkpoints").glob("step-*")] == [
        f"step-{step:08d}" for step in done[-1:]
    ]


def test_validation_data_lost_under_a_run_ends_all_ranks_and_saves(
    config_file: Path, data: Path, tmp_path: Path
) -> None:
    """It is there at the start, and cannot be read when the first evaluation is due."""
    folder = shutil.copytree(data, tmp_path / "data")
    (shard,) = folder.glob("validation-*.tar")
    changes = [f"data.path={folder}", "train.checkpoint_every=0", "data.workers=1"]
    ended = spawn(["--config", str(config_file), *changes], 2, {"REMOVE_AFTER_STEP_2": str(shard)})
    assert ended.codes == [2, 2], ended.stderr
    (told,) = ended.refusals
    assert f"{shard}: is missing" in told
    assert [path.name for path in (tmp_path / "run/checkpoints").glob("step-*")] == ["step-00000004"]


def test_substituted_sample_is_told_and_the_run_goes_on(config_file: Path, data: Path, tmp_path: Path) -> None:
    """What stood in for what is in metrics.jsonl and on the screen."""
    shard = damage_second_half(data, tmp_path / "data")
    changes = [f"data.path={tmp_path / 'data'}", "data.on_damage=substitute"]
    ended = complete(["--config", str(config_file), *changes], 2)
    lines = [line for line in metrics(tmp_path / "run") if line["split"] == "train"]
    told = [text for line in lines for text in line["substitutions"]]
    assert told and all(" stands in for " in text and f"{shard}: sample " in text for text in told)
    assert all(text in ended.stderr[0] for text in told)


@pytest.mark.parametrize("step", [4, 8])
def test_failed_evaluation_costs_no_checkpoint_and_is_made_up_for(
    step: int, trained: Trained, config_file: Path, tmp_path: Path
) -> None:
    ended = spawn(["--config", str(config_file)], 1, {"FAIL_EVALUATION_AT_STEP": str(step)})
    assert ended.codes == [1]
    assert "the evaluation fails" in ended.stderr[0]
    assert metrics(tmp_path / "run")[-1]["step"] == step
    for _ in range(1 + (step == 8)):  # after the last step the second start has nothing left to do
        ended = complete(["--config", str(config_file), "--resume", "auto"], 1)
        assert metrics(tmp_path / "run") == metrics(trained("alone", 1))


def test_loss_that_is_no_number_ends_the_run_before_the_step(config_file: Path, tmp_path: Path) -> None:
    ended = spawn(["--config", str(config_file), "train.learning_rate=1e30"], 1)
    assert ended.codes == [exit_codes.GUARDED]
    (told,) = [line for line in ended.stderr[0].splitlines() if line.startswith("longstride: ")]
    assert told.startswith("longstride: stopped by a guard: step 2: the loss is ")
    assert [(line["step"], "guard" in line) for line in metrics(tmp_path / "run")] == [(1, False), (2, True)]
    assert [path.name for path in (tmp_path / "run/checkpoints").glob("step-*")] == ["step-00000001"]


def test_run_without_a_whole_checkpoint_is_refused(run_copy: Path, config_file: Path) -> None:
    for step in (4, 8):
        flip_byte(run_copy / f"checkpoints/step-{step:08d}/deepspeed/mp_rank_00_model_states.pt")
    ended = spawn(["--config", str(config_file), "--resume", "auto"], 1)
    assert ended.codes == [2]
    lines = [line for line in ended.stderr[0].splitlines() if line.startswith("longstride")]
    assert lines[0] == "longstride: error: no checkpoint is complete:"
    assert len(lines) == 3
    assert "Traceback" not in ended.stderr[0]
    assert len(metrics(run_copy)) == 10


@pytest.mark.parametrize(
    ("option", "differing", "change", "line"),
    [
        ("--resume=auto", 1, "train.global_batch=16", "train.global_batch=8: rank 0 on "),
        ("--replay=6", 0, 'data.path="{other}"', 'data.path="{other}": has another split train'),
        ("--resume=auto", None, "train.global_batch=16", "train.global_batch=16: the checkpoint "),
        ("--replay=6", None, "train.global_batch=16", "train.global_batch=16: the checkpoint "),
    ],
)
def test_ranks_agree_before_one_ends_that_differs_from_the_checkpoint(
    option: str, differing: int | None, change: str, line: str, trained: Trained, config_file: Path, tmp_path: Path
) -> None:
    shutil.copytree(trained("zero0-fp32", 2), tmp_path / "run")
    (tmp_path / "text.txt").write_text("other words " * 400)
    build([tmp_path / "text.txt"], tmp_path / "o", validation_fraction=0.2)
    change, line = (text.format(other=tmp_path / "o") for text in (change, line))
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    port = free_port()
    ranks = [
        Rank(
            ["--config", str(config_file), option, *([change] if differing in (rank, None) else [])],
            plain_environment() | rank_environment(rank, 2, port),
        )
        for rank in range(2)
    ]
    assert [rank.wait(50.0) for rank in ranks] == [exit_codes.WRONG_INPUT] * 2  # long before the time-out
    errors = "".join(rank.end()[1] for rank in ranks)
    (told,) = [each for each in errors.splitlines() if each.startswith("longstride: error: ")]
    assert told.startswith(f"longstride: error: {line}") and "Traceback" not in errors
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before


def test_checkpoints_are_listed_newest_first_without_partial_ones(run_copy: Path) -> None:
    (run_copy / "checkpoints/.step-00000012.partial").mkdir()
    (run_copy / "checkpoints/step-00000010").mkdir()  # a torn one: no manifest
    found, refused = list_checkpoints(run_copy)
    assert [checkpoint.manifest.step for checkpoint in found] == [8, 4]
    assert len(refused) == 1
    assert refused[0].step == 10
    assert "step-00000010/manifest.json: cannot be read" in refused[0].line
    assert found[0].newer_refusals() == [refused[0].line]
    assert open_checkpoint(run_copy, None).manifest.step == 8
    with pytest.raises(ConfigError, match=r"step-00000010/manifest\.json: cannot be read"):
        open_checkpoint(run_copy, 10)


def test_manifest_names_every_file(run_copy: Path) -> None:
    folder = run_copy / "checkpoints/step-00000004"
    manifest = read_manifest(folder)
    present = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert present == manifest.files.keys() | {"manifest.json"}
    assert find_damage(folder, sorted(manifest.files), manifest.files) == []
    assert (manifest.step, manifest.world_size, manifest.zero_stage, manifest.precision) == (4, 1, 0, "fp32")
    assert "sequence_parallel" not in (folder / "manifest.json").read_text()  # as before runs could share contexts


def test_cut_metrics_keeps_what_it_takes_out(tmp_path: Path) -> None:
    lines = [json.dumps(step_line(step)) + "\n" for step in range(1, 6)]
    torn = "".join(lines) + lines[0][:30]
    (tmp_path / "metrics.jsonl").write_text(torn)
    copy = cut_metrics(tmp_path, 3)
    assert copy == tmp_path / "metrics.before-resume-1.jsonl"
    assert copy.read_text() == torn
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(lines[:3])
    assert cut_metrics(tmp_path, 3) is None
    assert cut_metrics(tmp_path, 2) == tmp_path / "metrics.before-resume-2.jsonl"


def test_metrics_that_are_no_file_are_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    for read in (find_steps, lambda run: cut_metrics(run, 1)):
        with pytest.raises(OSError, match="is a pipe, not a plain file"):
            read(tmp_path)


def test_set_aside_never_overwrites(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / str(number)).touch()
        assert set_aside(tmp_path / "a") == tmp_path / f"a.replaced-{number}"
    assert set_aside(tmp_path / "a") is None
    assert (tmp_path / "a.replaced-1/1").exists()
