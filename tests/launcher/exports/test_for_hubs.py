"""What an export has for transformers: a stub that imports the installed project, and a tokenizer for bytes."""

import ast
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from longstride.data_pipelines.modalities import MODALITIES
from longstride.launcher import cli
from longstride.launcher.exports.for_hubs import hub_fields, hub_files, model_card
from longstride.launcher.models import ModelData
from longstride.launcher.models.exported import Exported
from longstride.launcher.output.metrics_file import loss_fields
from tests.harness.lines import evaluation_line, step_line, write_metrics
from tests.harness.runs import files_under
from tests.harness.tiny_models import plain_config as config
from tests.launcher.conftest import Refusal

STUB = "modeling_longstride.py"
CAUSAL_STUB = '''"""What transformers runs by `trust_remote_code=True`: it leads to the installed Longstride."""

try:
    from longstride.launcher.hub import LongstrideConfig, LongstrideForCausalLM, LongstrideTokenizer
except ImportError as error:
    raise ImportError(f"this model needs Longstride, and transformers 5.23 or newer, installed: {error}") from error

__all__ = ["LongstrideConfig", "LongstrideForCausalLM", "LongstrideTokenizer"]
'''
MASKED: dict[str, Any] = {"objective": {"type": "masked"}, "attention": {"type": "linformer", "rows": 8}}
OLD_STUB = "from launcher.hub_model import LongstrideConfig, LongstrideForCausalLM\n"  # as exports had it


@pytest.mark.parametrize("changes", [{}, MASKED], ids=["causal", "masked"])
def test_fields_name_classes_of_the_file(changes: dict[str, Any]) -> None:
    model = config(**changes)
    files, fields = hub_files(model), hub_fields(model)
    tree = ast.parse(files[STUB])
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    tokenizer = json.loads(files["tokenizer_config.json"])
    named = [*fields["auto_map"].values(), tokenizer["auto_map"]["AutoTokenizer"][0]]
    assert {name.removeprefix("modeling_longstride.") for name in named} == names
    assert fields["architectures"] == ["LongstrideForMaskedLM" if changes else "LongstrideForCausalLM"]
    assert fields["architectures"][0] in names
    assert tokenizer.get("mask_token") == ("<|longstride_mask|>" if changes else None)
    assert tokenizer["model_max_length"] == (64 if changes else 63)


def test_files_of_a_causal_model_are_those_before_masked_ones() -> None:
    assert hub_files(config())[STUB] == CAUSAL_STUB
    classes = {"AutoConfig": "LongstrideConfig", "AutoModelForCausalLM": "LongstrideForCausalLM"}
    auto_map = {name: f"modeling_longstride.{kind}" for name, kind in classes.items()}
    assert list(hub_fields(config())["auto_map"].items()) == list(auto_map.items())


def test_card_of_a_masked_model_has_bits_per_masked_byte(tmp_path: Path) -> None:
    run = SimpleNamespace(
        model=config(**MASKED), notes="", train=SimpleNamespace(global_batch=8),
        data=SimpleNamespace(path="data", validation_split="validation", separator=b"\0"),
    )  # fmt: skip
    write_metrics(tmp_path, [
        step_line(4, None) | loss_fields(1.5 * math.log(2), 80, 70, "masked byte"),
        evaluation_line(4, None) | loss_fields(2.5 * math.log(2), 9_000, 8_000, "masked byte"),
    ])  # fmt: skip
    manifest = SimpleNamespace(step=4, precision="fp32", zero_stage=0, world_size=1)
    checkpoint: Any = SimpleNamespace(config=run, manifest=manifest)
    card = model_card(tmp_path, checkpoint, ModelData(MODALITIES["text"], {}), "trained", "fp32", "", {})
    assert "| training bits per masked byte | 1.5000 on the step's batch |\n" in card
    assert "| validation bits per masked byte | 2.5000 on 8,000 masked bytes of validation |\n" in card
    assert '| objective | `{"type": "masked", "share": 0.15, "span": 1, ' in card
    assert "per byte" not in card and "longstride sample" not in card
    assert "\npipeline_tag: fill-mask\n" in card and 'pipeline("fill-mask"' in card


@pytest.mark.parametrize(
    "changes", [{"vocabulary": 16}, {"embedding": {"type": "audio", "row_width": 8}}], ids=["few tokens", "sound"]
)
def test_tokenizer_is_for_bytes_of_text_alone(changes: dict[str, Any]) -> None:
    assert "tokenizer_config.json" in hub_files(config())
    assert "tokenizer_config.json" not in hub_files(config(**changes))


@pytest.fixture
def old(exported: Path) -> Path:
    """An export whose stub imports modules of before the rooms moved."""
    content = json.loads((exported / "config.json").read_text())
    (exported / "config.json").write_text(json.dumps(content | hub_fields(config())))
    (exported / STUB).write_text(OLD_STUB)
    return exported


def test_refresh_writes_the_stub_and_nothing_else(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, fingerprint = files_under(old), Exported(old).fingerprint()
    assert cli.main(["export", "--refresh", str(old)]) == 0
    assert capsys.readouterr().err == f"{old / STUB}: rewritten; nothing else is changed\n"
    after = files_under(old)
    assert after.keys() == before.keys()
    assert [path for path in after if after[path] != before[path]] == [str(old / STUB)]
    assert (old / STUB).read_text() == hub_files(config())[STUB]
    assert Exported(old).fingerprint() == fingerprint
    assert cli.main(["export", str(old), "--refresh"]) == 0
    assert capsys.readouterr().err == f"{old / STUB}: is this version's already; nothing is written\n"
    assert files_under(old) == after


def test_refresh_takes_an_export_that_names_the_stub_and_no_other_option(
    old: Path, tmp_path: Path, refusal: Refusal
) -> None:
    for words in (["--dtype", "bf16"], ["--step", "4"], ["--output", "x"], ["--no-check"]):
        rule = "--refresh: only takes the folder of an export and --trust-code"
        assert refusal("export", "--refresh", old, *words) == rule
    rule = "has no config.json; name a folder written by `longstride export RUN"
    assert rule in refusal("export", "--refresh", tmp_path)
    content = json.loads((old / "config.json").read_text())
    del content["auto_map"]
    (old / "config.json").write_text(json.dumps(content))
    rule = f"does not name the classes of {STUB} for transformers; export the model again"
    assert refusal("export", "--refresh", old) == f"{old / 'config.json'}: {rule}"
    assert (old / STUB).read_text() == OLD_STUB
    assert refusal("export", old) == "--output: must name the new folder"
