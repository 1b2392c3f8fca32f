"""Programs of torch.export: the logits of the model at every length, and what cannot be traced."""

import functools
import importlib.util
import json
import math
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from longstride.kernels import ConfigError
from longstride.launcher import cli
from longstride.launcher.exports import programs
from longstride.launcher.exports.programs import traced_program
from tests.harness.configs import ATTENTIONS, LATER, SYSTEMS, model_json
from tests.harness.runs import ROOT
from tests.harness.tiny_models import assert_next_logits, random_export
from tests.launcher.conftest import Refusal

LENGTHS = ((1, 1), (2, 2), (3, 7), (1, 17), (2, 39))  # batches, and tokens of contexts of 40
PRODUCT_KEYS = {"type": "product_keys", "keys": 9, "top": 5, "heads": 2, "query_width": 8}
RECIPE = {**LATER, "ngrams": {"orders": [2, 12], "rows": 61}, "reversible": True, "layers": 2} | {
    "feed_forward": [{"type": "experts", "count": 3, "activation": "squared_relu"}, PRODUCT_KEYS],
    "attention": [{**ATTENTIONS["heads"], "key_value_heads": 2}, ATTENTIONS["bigbird"]],
}
UNTRACED = ("adaptive_span", "compressed", "delta", "entmax", "indexed", "moba", "nsa", "recurrent", "synthesizer")
EVERY = SYSTEMS | {f"attention {name}": {"attention": each} for name, each in ATTENTIONS.items()}


def export(folder: Path, changes: dict[str, Any]) -> Path:
    return random_export(folder, **model_json(**changes))


def test_program_has_the_models_logits_at_every_length(tmp_path: Path) -> None:
    folder = export(tmp_path / "model", RECIPE)
    program = traced_program(folder).module()
    assert_next_logits(folder, program, *LENGTHS)
    with pytest.raises(AssertionError, match="39"):  # torch's own, of the bounds of sizes
        program(torch.zeros(1, 40, dtype=torch.int64))


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"attention": {"type": "linformer", "rows": 8}}, marks=pytest.mark.campaign, id="mixtures"),
        pytest.param(
            {"attention": {"type": "linformer", "rows": 8, "share": "layers"}},
            id="mixtures of all layers",
        ),
        pytest.param({"attention": {"type": "dense", "causal": False}, "relative_bias": {}}, id="biases"),
        pytest.param(
            {
                "attention": {"type": "linformer", "rows": 5, "share": "nothing", "key_value_heads": 2},
                "reversible": True,
            },
            id="mixtures of each head",
        ),
        pytest.param(
            {
                "attention": [
                    {"type": "longformer", "window": 4, "globals": 2, "causal": False},
                    {"type": "dense", "causal": False},
                ],
                "norm_position": "after",
                "embedding_norm": True,
                "output": {"tied": True, "transform": True, "bias": True},
            },
            id="patterns",
        ),
    ],
)
def test_program_of_a_masked_model_has_its_logits_in_place(changes: dict[str, Any], tmp_path: Path) -> None:
    folder = export(tmp_path / "model", {"layers": 2, "objective": {"type": "masked"}, **changes})
    program = traced_program(folder).module()
    assert_next_logits(folder, program, *LENGTHS, (2, 40))
    with pytest.raises(AssertionError, match="40"):
        program(torch.zeros(1, 41, dtype=torch.int64))


@pytest.mark.campaign
@pytest.mark.parametrize("name", EVERY)
def test_every_system_is_traced_or_refused(name: str, tmp_path: Path) -> None:
    folder = export(tmp_path / "model", EVERY[name])
    try:
        program = traced_program(folder).module()
    except ConfigError as error:
        text = json.dumps(EVERY[name])
        assert "cannot be traced for all lengths; these can: patterns, linformer, lsh, match, routing" in str(error)
        assert any(f'"type": "{kind}"' in text for kind in UNTRACED)
    else:
        assert_next_logits(folder, program, *LENGTHS)


def test_verb_writes_a_program_that_names_no_file_of_this_machine_or_refuses_another(
    exported: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    refusal: Refusal,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The program is traced once, as that takes seconds. One that computes something else is refused."""
    monkeypatch.setattr(programs, "traced_program", functools.cache(traced_program))
    output = tmp_path / "made/pt2"
    assert cli.main(["export", str(exported), "--format", "pt2", "--output", str(output)]) == 0
    told = capsys.readouterr().err
    assert told.startswith(f"{output}/model.pt2: ") and "logits up to 63 tokens are the model's, " in told
    assert [path.name for path in output.parent.rglob("*")] == ["pt2", "model.pt2"]
    with zipfile.ZipFile(output / "model.pt2") as archive:
        everything = b"".join(archive.read(name) for name in archive.namelist())
    for path in (ROOT, tmp_path, Path(torch.__file__).parents[1]):
        assert str(path).encode() not in everything
    for logit, apart in ((0.0, "1.0e+00"), (math.nan, "nan")):
        found = functools.partial(torch.full, fill_value=logit)
        monkeypatch.setattr(
            programs, "_load_program", lambda *_, found=found: lambda tokens: found((*tokens.shape, 256))
        )
        told = refusal("export", exported, "--format", "pt2", "--output", tmp_path / "deep/new")
        rule = f"the program's logits differ from the model's by {apart} of the largest, and rounding "
        assert told.startswith(f"{exported}: {rule}")


def test_what_cannot_be_is_told_in_one_line(
    exported: Path, tmp_path: Path, refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = export(tmp_path / "chosen", {"attention": {"type": "moba", "block": 8, "top": 2}})
    routed = export(tmp_path / "routed", {"attention": {"type": "routing", "clusters": 4, "window": 8}})
    new = ["--output", tmp_path / "new"]
    only = "only takes the folder of an export, --output, --no-check and --trust-code"
    shapes = "cannot be traced for all lengths; these can: patterns, linformer"
    for words, told in (
        ([exported, "--format", "onnx"], "--output: must name the new folder"),
        ([exported, "--format", "pt2", *new, "--dtype", "bf16"], f"--format=pt2: {only}"),
        ([exported, "--format", "pt2", *new, "--step", "3"], f"--format=pt2: {only}"),
        ([exported, "--format", "pt2", "--refresh"], f"--format=pt2: {only}"),
        (
            [exported, "--format", "pt2", "--output", exported],
            f"--output={exported}: already exists and is not overwritten",
        ),
        ([chosen, "--format", "pt2", *new], f"--format=pt2: attention of type moba {shapes}, lsh, match, routing"),
        ([tmp_path, "--format", "pt2", *new], f"{tmp_path}: has no config.json; name a folder written by"),
    ):
        assert refusal("export", *words).startswith(told)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if "onnx" in name else find(name))
    told = f"--format=onnx: attention of type routing {shapes}, match"
    assert refusal("export", routed, "--format", "onnx", *new) == told
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxscript" else find(name))
    told = '--format=onnx: needs the package onnxscript, which is not installed; pip install "longstride[onnx]"'
    assert refusal("export", exported, "--format", "onnx", *new) in (told, told.replace("onnxscript", "onnx"))
