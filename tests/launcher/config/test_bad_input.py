"""What a person gets wrong ends with exit code 2, one line a problem, no traceback, and nothing written."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from longstride.data_pipelines.building.build import build
from longstride.launcher import cli
from longstride.launcher.checkpoints.manifest import add_digest, write_json
from longstride.launcher.config import load_config
from longstride.launcher.data.run_data import TrainingData
from longstride.launcher.output.exit_codes import WRONG_INPUT
from longstride.launcher.ranks.processes import Ranks
from tests.harness.runs import ROOT, files_under, plain_environment

ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="FlexAttention has a backward on a GPU")


@pytest.mark.parametrize(
    ("arguments", "starts"),
    [
        pytest.param(
            ["model.backend=flex"],
            ['model.backend="flex": cannot run here: FlexAttention has no backward on the CPU'],
            marks=ON_CPU,
        ),
        (
            ["model.backend=triton", "model.width=1024"],
            ['model.backend="triton": cannot run here: a head width of 512 exceeds 256'],
        ),
        (["--resume=4"], ["{run}: no such run folder; name one that `longstride train` wrote"]),
        (["model.layers=0", "--resume", "auto", "notes=x", "train.steps=0"], ["model.layers=0:", "train.steps=0:"]),
        (["data.train_split=validation"], ["data.validation_split="]),
        (
            ["data.worker_timeout_seconds=60"],
            ["data.worker_timeout_seconds=60.0: must be less than train.timeout_seconds"],
        ),
        (["model.context=1048576"], ["model.context=1048576: is longer than the split"]),
        (["data.hop=8"], ["data.hop=8: packed documents are cut every 64 bytes; set packing=false"]),
    ],
)
def test_wrong_words_have_a_line_each(
    refused: Callable[..., list[str]], config_file: Path, tmp_path: Path, arguments: list[str], starts: list[str]
) -> None:
    first, *others = arguments  # options and overrides stand in any order
    for line, start in zip(refused(first, "--config", str(config_file), *others), starts, strict=True):
        assert line.startswith(start.format(run=tmp_path / "run"))


def test_configuration_of_another_ending(refused: Callable[..., list[str]], config_file: Path) -> None:
    wrong = config_file.with_suffix(".jsn")
    assert refused("--config", str(wrong)) == [f"{wrong}: no such file; nearest {config_file}"]


@pytest.mark.parametrize(
    "key",
    [
        "activation_checkpointing.partition_activations",
        "activation_checkpointing.cpu_checkpointing",
        "zero_optimization.zero_quantized_weights",
    ],
)
def test_setting_that_needs_a_gpu(
    refused: Callable[..., list[str]], config_file: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ranks, "device", torch.device("cpu"))
    path = f"deepspeed.{key}"
    assert refused("--config", str(config_file), f"{path}=true") == [f"{path}=true: needs a GPU; leave it out on a CPU"]


def test_half_a_launchers_environment(
    refused: Callable[..., list[str]], config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    (line,) = refused("--config", str(config_file))
    assert line.startswith("environment: WORLD_SIZE given without RANK, LOCAL_RANK")


def test_output_that_holds_a_run(refused: Callable[..., list[str]], config_file: Path, run_copy: Path) -> None:
    (line,) = refused("--config", str(config_file))
    assert line == (
        f'train.output="{run_copy}": already holds a run (config.json, metrics.jsonl, checkpoints); '
        "continue it with --resume auto, or name another folder"
    )


@pytest.mark.parametrize(
    ("overrides", "starts"),
    [
        (["model.layers=3", "model.dropout=0.2"], ["model.dropout=0.2: ", "model.layers=3: "]),
        (["data.seed=1"], ["data.seed=1: "]),
        (["data.shuffle_bytes=0"], ["data.shuffle_bytes=0: "]),
        (["model.context=128"], ["model.context=128: "]),
        (["train.global_batch=4"], ["train.global_batch=4: "]),
        (["train.steps=7"], ["train.steps=7: "]),
    ],
)
def test_checkpoint_of_another_run(
    refused: Callable[..., list[str]], config_file: Path, run_copy: Path, overrides: list[str], starts: list[str]
) -> None:
    lines = refused("--config", str(config_file), "--resume", "auto", *overrides)
    assert len(lines) == len(starts)
    for line, start in zip(lines, starts, strict=True):
        assert line.startswith(start)
        assert str(run_copy / "checkpoints/step-00000008") in line


def test_newer_checkpoint_format(refused: Callable[..., list[str]], config_file: Path, run_copy: Path) -> None:
    for step in (4, 8):
        manifest = run_copy / f"checkpoints/step-{step:08d}/manifest.json"
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format_version": 99}))
    lines = refused("--config", str(config_file), "--resume", "auto")
    assert lines[0] == "no checkpoint can be read:"
    assert all(line.endswith("format_version=99: this Longstride reads 1 to 2, and is older") for line in lines[1:])
    assert len(lines) == 3


def test_state_that_the_stream_does_not_have(
    refused: Callable[..., list[str]], config_file: Path, run_copy: Path
) -> None:
    path = run_copy / "checkpoints/step-00000008/manifest.json"
    manifest = json.loads(path.read_text())
    manifest["stream"]["step"] = 10**6
    write_json(path, add_digest(manifest))
    (line,) = refused("--config", str(config_file), "--resume", "8")
    assert line.startswith(f"{path.parent}: state.step=1000000: epoch ")


@pytest.mark.parametrize("name", ["manifest.json", "config.json"])
def test_resume_of_a_step_whose_description_is_damaged(
    refused: Callable[..., list[str]], config_file: Path, run_copy: Path, name: str
) -> None:
    path = run_copy / f"checkpoints/step-00000008/{name}"
    path.write_text(path.read_text().replace("0", "1", 1))
    (line,) = refused("--config", str(config_file), "--resume", "8")
    assert line.startswith(f"{path}: is damaged: its SHA-256 is not ")


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize("suffix", ["tar", "index.npy"])
def test_shard_or_index_of_the_right_size_and_wrong_content(
    refused: Callable[..., list[str]], config_file: Path, tmp_path: Path, data: Path, split: str, suffix: str
) -> None:
    shutil.copytree(data, tmp_path / "data")
    path = tmp_path / f"data/{split}-00000.{suffix}"
    path.write_bytes(b"x" * path.stat().st_size)
    (line,) = refused("--config", str(config_file), f"data.path={tmp_path / 'data'}")
    assert line.startswith(f"{path}: ")


def test_output_that_cannot_be_written(
    refused: Callable[..., list[str]], config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longstride.launcher.data.run.os.access", lambda path, mode: False)
    (line,) = refused("--config", str(config_file))
    assert line == f'train.output="{tmp_path / "run"}": {tmp_path} cannot be written; name another folder'


def test_write_that_the_system_refuses(
    refused: Callable[..., list[str]], config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbid(*_: object) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path / "run"))

    monkeypatch.setattr("longstride.launcher.training.begin", forbid)
    assert refused("--config", str(config_file)) == [f"{tmp_path / 'run'}: Permission denied"]


def test_deeply_nested_configuration(refused: Callable[..., list[str]], config_file: Path) -> None:
    deep = "[" * 100_000 + "]" * 100_000
    rule = "objects and lists nested more than 64 deep"
    assert refused("--config", str(config_file), f"model.attention={deep}") == [f"model.attention: {rule}"]
    config_file.write_text(deep)
    assert refused("--config", str(config_file)) == [f"{config_file}: {rule}"]


def test_export_of_a_damaged_checkpoint(run_copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = run_copy / "checkpoints/step-00000008/deepspeed/mp_rank_00_model_states.pt"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    before = files_under(tmp_path)
    assert cli.main(["export", str(run_copy), "--output", str(tmp_path / "out")]) == WRONG_INPUT
    assert f"{weights}: is damaged: its SHA-256 is not the manifest's" in capsys.readouterr().err
    assert files_under(tmp_path) == before
    assert cli.main(["export", str(run_copy), "--step", "4", "--output", str(tmp_path / "out")]) == 0


@pytest.mark.campaign
def test_one_rank_of_two_reports_through_the_launcher(config_file: Path, tmp_path: Path) -> None:
    """The real launcher: exit code 2, the line once, no traceback."""
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", str(ROOT / "launcher/train.py")]
    ended = subprocess.run(
        [*command, "--config", str(config_file), "train.steps=0"],
        env=plain_environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ended.returncode == WRONG_INPUT
    assert ended.stderr.count("longstride: error: train.steps=0: must be greater than 0") == 1
    assert "Traceback" not in ended.stderr + ended.stdout
    assert not (tmp_path / "run").exists()


def test_picture_of_another_shape_is_refused(
    refused: Callable[..., list[str]], config_file: Path, tmp_path: Path
) -> None:
    """As many bytes, and otherwise arranged: every position would be wrong, and nothing else would say so."""
    (tmp_path / "source").mkdir()
    for number in range(4):
        (tmp_path / "source" / f"{number}.ppm").write_bytes(b"P6\n4 2\n255\n" + bytes([number]) * 24)
    build([tmp_path / "source"], tmp_path / "pictures", modality="image", validation_fraction=0.5)
    embedding = {"type": "image", "height": 4, "width": 2, "channels": 3}
    changes = ["model.context=24", 'model.attention={"type": "dense"}', "train.global_batch=2", "train.micro_batch=1"]
    (line,) = refused(
        "--config",
        str(config_file),
        f"data.path={tmp_path / 'pictures'}",
        f"model.embedding={json.dumps(embedding)}",
        *changes,
    )
    assert line.startswith("model.embedding=")
    assert 'the data holds pictures of 2 x 4 x 3 (height, width, channels); {"type": "image", "height": 2' in line
    for fitting in ("tokens", "learned"):  # these have no shape
        overrides = [f"data.path={tmp_path / 'pictures'}", f'model.embedding={{"type": "{fitting}"}}', *changes]
        TrainingData(load_config(config_file, overrides), Ranks()).check()
