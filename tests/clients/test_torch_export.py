"""Exports under other runtimes: a program of torch.export without Longstride, ONNX, and the hub's reading of a card."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longstride.data_pipelines.building.build import build
from longstride.launcher import cli
from tests.harness.clients import client
from tests.harness.configs import ATTENTIONS, LATER, SYSTEMS
from tests.harness.data.builds import write_files
from tests.harness.runs import configuration, spawn
from tests.harness.tiny_models import assert_next_logits, random_export

pytestmark = pytest.mark.filterwarnings("default")  # theirs are their own affair
LENGTHS = ((1, 1), (2, 2), (3, 7), (1, 17), (2, 63))  # batch and tokens
RECIPE = {**LATER, "ngrams": {"orders": [2, 12], "rows": 61}, "feed_forward": {"activation": "squared_relu"}}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Export a current recipe: rotary positions, a convolution, n-gram tables, a pattern per layer."""
    layers = [{"type": "local", "window": 16}, {**ATTENTIONS["fixed merged"], "key_value_heads": 2}]
    return random_export(tmp_path / "model", **RECIPE, heads=4, width=64, layers=2, attention=layers)


def program_of(model: Path, format: str) -> Path:
    output = model.with_name(format)
    assert cli.main(["export", str(model), "--format", format, "--output", str(output), "--no-check"]) == 0
    (path,) = output.iterdir()
    return path


@client(
    "torch",
    "`longstride export --format pt2`, loaded by `torch.export.load` where Longstride is not installed",
    "the model's logits in fp32, for any batch and 1 to context - 1 tokens",
)
def test_program_runs_without_longstride(recipe: Path, tmp_path: Path) -> None:
    path = program_of(recipe, "pt2")
    script = (
        "import json, sys, torch\n"
        "sys.modules['longstride'] = None\n"
        f"program = torch.export.load({str(path)!r}).module()\n"
        f"for batch, length in {LENGTHS}:\n"
        "    tokens = torch.randint(256, (batch, length), generator=torch.Generator().manual_seed(length))\n"
        f"    torch.save(program(tokens), {str(tmp_path)!r} + f'/{{length}}.pt')\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert_next_logits(recipe, lambda tokens: torch.load(tmp_path / f"{tokens.shape[1]}.pt"), *LENGTHS)


def session_of(path: Path) -> Any:
    import onnxruntime

    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def logits_of(session: Any, tokens: Tensor) -> Tensor:
    return torch.from_numpy(session.run(None, {"input_ids": tokens.numpy()})[0])


@client(
    "onnxruntime",
    "`longstride export --format onnx`: patterns, rotary positions, convolutions, n-gram tables",
    "the model's logits in fp32, for any batch and length",
)
def test_onnx_has_the_models_logits(recipe: Path) -> None:
    import onnx

    path = program_of(recipe, "onnx")
    onnx.checker.check_model(str(path), full_check=True)
    session = session_of(path)
    tensors = [(value.name, value.shape[:2], value.type) for value in (*session.get_inputs(), *session.get_outputs())]
    sizes = ["batch", "length"]
    assert tensors == [("input_ids", sizes, "tensor(int64)"), ("logits", sizes, "tensor(float)")]
    assert_next_logits(recipe, partial(logits_of, session), *LENGTHS)
    for name in (Path(__file__).parents[2], recipe.parent):
        assert str(name).encode() not in path.read_bytes()


@pytest.mark.clients
@pytest.mark.parametrize(
    "name",
    ["matches", "one expert a row", "experts by thresholds", "zero experts", "reversible", "norms after, as BERT"],
)
def test_onnx_of_other_systems(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Use the verb's own check."""
    model = random_export(tmp_path / "model", **{"heads": 4, "width": 64, "layers": 2, **SYSTEMS[name], "context": 64})
    assert cli.main(["export", str(model), "--format", "onnx", "--output", str(tmp_path / "onnx")]) == 0
    assert "; logits up to 63 tokens are the model's, " in capsys.readouterr().err


@pytest.mark.clients
def test_onnx_of_a_masked_model_has_its_logits_in_place(tmp_path: Path) -> None:
    mixtures = {"type": "linformer", "rows": 8, "share": "nothing", "key_value_heads": 2}
    changes = {"heads": 4, "width": 64, "attention": mixtures, "objective": {"type": "masked"}}
    model = random_export(tmp_path / "model", **changes)
    assert_next_logits(model, partial(logits_of, session_of(program_of(model, "onnx"))), *LENGTHS, (2, 64))


@pytest.mark.clients
def test_beyond_the_context_onnx_gives_no_numbers(folder: Path) -> None:
    """Test position tables, which would wrap around; other positions have no rows there, and the runtime refuses."""
    session = session_of(program_of(folder, "onnx"))
    logits = logits_of(session, torch.zeros(1, 66, dtype=torch.int64))
    assert logits.isnan().all(2)[0].tolist() == [False] * 63 + [True] * 3


@client(
    "huggingface_hub",
    "the card of `longstride export --license other:NAME`, read by `ModelCard.load`",
    "licence, library, task and tags",
)
@pytest.mark.parametrize("objective", ["autoregressive", "masked"])
def test_card_is_read_by_the_hub(objective: str, tmp_path: Path) -> None:
    from huggingface_hub import ModelCard

    texts = {f"{number}.txt": f"a stride of {number} bytes ".encode() * 150 for number in range(4)}
    build([write_files(tmp_path / "source", texts)], tmp_path / "data", validation_fraction=0.3)
    content = configuration(tmp_path / "data", tmp_path / "run")
    if objective == "masked":
        content["model"] |= {"objective": {"type": "masked"}, "attention": {"type": "linformer", "rows": 8}}
    (tmp_path / "run.json").write_text(json.dumps(content))
    ended = spawn(["--config", str(tmp_path / "run.json"), "train.steps=2"], 1)
    assert ended.codes == [0], ended.stderr
    license = ["--license", "other:ours: 1.0"]
    assert cli.main(["export", str(tmp_path / "run"), "--output", str(tmp_path / "model"), *license]) == 0
    data = ModelCard.load(tmp_path / "model/README.md").data
    assert (data.license, data.license_name) == ("other", "ours: 1.0")
    task = {"autoregressive": "text-generation", "masked": "fill-mask"}[objective]
    assert (data.library_name, data.pipeline_tag) == ("longstride", task)
    assert data.tags == ["longstride", "sparse-transformer", "byte-level", "text"]
