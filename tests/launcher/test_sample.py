"""Sampling from an exported folder: what is written, that it needs no deepspeed, and what is refused."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from launcher import cli
from launcher.sample import load_model, write_text
from sparse_model import ModelConfig, SparseTransformer
from tests.launcher.runs import ROOT


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """An exported model whose every parameter is random: its bytes are anything."""
    torch.manual_seed(0)
    config = ModelConfig.model_validate(
        {
            "context": 64, "layers": 1, "heads": 2, "width": 32, "attention": {"type": "local", "window": 8},
            "embedding": {"type": "text", "row_width": 8},
        }
    )  # fmt: skip
    model = SparseTransformer(config)
    folder = tmp_path / "model"
    folder.mkdir()
    weights = {name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"format": 1, "model": config.model_dump(mode="json")}))
    return folder


def sampled(exported: Path, *options: str) -> bytes:
    command = [sys.executable, "-m", "launcher.cli", "sample", str(exported), *options]
    return subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE).stdout


def test_sample_writes_prompt_and_bytes_as_they_are(exported: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt").write_bytes(b"ab\xff")
    first, again, other = (
        sampled(exported, "--prompt-file", str(tmp_path / "prompt"), "--bytes", "40", "--seed", seed)
        for seed in ("1", "1", "2")
    )
    assert first == again != other
    assert first.startswith(b"ab\xff") and len(first) == 43


def test_sample_fills_the_context_unless_told(exported: Path) -> None:
    assert len(sampled(exported, "--prompt", "häl")) == 64


def test_sample_stops_quietly_where_nobody_reads(exported: Path) -> None:
    command = [sys.executable, "-m", "launcher.cli", "sample", str(exported)]
    writer = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert writer.stdout is not None and writer.stderr is not None
    writer.stdout.close()
    assert (writer.stderr.read(), writer.wait()) == (b"", 0)
    writer.stderr.close()


def test_terminal_shows_whole_characters_and_no_controls() -> None:
    shown = io.StringIO()
    write_text([b"h\xc3", b"\xa4l\t\n", b"\x1b[2J\xff", b"\xe2\x82"], shown)
    assert shown.getvalue() == "häl\t\n[2J\ufffd\ufffd\n"


def test_terminal_of_another_encoding_shows_what_it_can() -> None:
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    write_text(["häl".encode()], shown)
    shown.seek(0)
    assert shown.read() == "h?l\n"


def test_sample_needs_no_deepspeed(exported: Path) -> None:
    program = (
        "import sys\n"
        "for name in ('deepspeed', 'triton', 'mpi4py', 'webdataset'): sys.modules[name] = None\n"
        f"from launcher.cli import main; sys.exit(main(['sample', {str(exported)!r}, '--bytes', '3']))"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, capture_output=True)


def test_loaded_model_has_the_exported_weights(exported: Path) -> None:
    model, weights = load_model(exported), load_file(exported / "model.safetensors")
    assert not model.training
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


def damage_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"no weights")


def damage_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def change_model(folder: Path) -> None:
    content = json.loads((folder / "config.json").read_text())
    content["model"]["width"] = 64
    (folder / "config.json").write_text(json.dumps(content))


def misspell_model(folder: Path) -> None:
    content = json.loads((folder / "config.json").read_text())
    content["model"]["widht"] = 64
    (folder / "config.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    "damage, message",
    [
        (damage_weights, "cannot be read as an export"),
        (damage_config, "cannot be read as an export"),
        (remove_weights, "has no model.safetensors; name a folder written by `longstride export RUN --output DIR`"),
        (change_model, "model.safetensors is not the model of config.json"),
        (misspell_model, "/config.json: model.widht: unknown key; nearest width"),
    ],
)
def test_sample_refuses_what_is_no_export(
    exported: Path, damage: Callable[[Path], None], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(exported)
    assert cli.main(["sample", str(exported)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"longstride: error: {exported}") and message in line


@pytest.mark.parametrize(
    "options, message",
    [
        (["--bytes", "65"], "prompt and sample are 65 tokens: they must fit in the model's context of 64"),
        (["--temperature", "-1"], "temperature=-1.0: must be 0 or more"),
        (["--top-k", "0"], "top_k=0: must be at least 1"),
        (["--prompt-file", "nowhere"], "--prompt-file=nowhere: No such file or directory"),
        (["--device", "tpu"], "--device=tpu: cannot be used"),
        (["--device", "cuda:99"], "--device=cuda:99: cannot be used"),
        (["--seed", "99999999999999999999999"], "--seed=99999999999999999999999: must be from 0"),
    ],
)
def test_sample_refuses_options_before_it_writes(
    exported: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["sample", str(exported), *options]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.startswith("longstride: error: ") and message in error
    assert len(error.splitlines()) == 1
