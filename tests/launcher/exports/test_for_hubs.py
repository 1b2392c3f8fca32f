"""What an export has for transformers: a stub that imports the installed project, and a tokenizer for bytes."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from longstride.launcher import cli
from longstride.launcher.exports.for_hubs import hub_fields, hub_files
from longstride.launcher.models.exported import Exported
from tests.harness.runs import files_under
from tests.harness.tiny_models import plain_config as config

STUB = "modeling_longstride.py"
OLD_STUB = "from launcher.hub_model import LongstrideConfig, LongstrideForCausalLM\n"  # as exports had it


def test_fields_name_classes_of_the_file() -> None:
    code = hub_files(config())[STUB]
    tree = ast.parse(code)
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    named = [*hub_fields()["auto_map"].values()]
    named.append(json.loads(hub_files(config())["tokenizer_config.json"])["auto_map"]["AutoTokenizer"][0])
    assert {name.removeprefix("modeling_longstride.") for name in named} == names


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
    (exported / "config.json").write_text(json.dumps(content | hub_fields()))
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
    old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["--dtype", "bf16"], ["--step", "4"], ["--output", "x"], ["--no-check"]):
        assert cli.main(["export", "--refresh", str(old), *words]) == 2
        rule = "--refresh: only takes the folder of an export and --trust-code"
        assert capsys.readouterr().err == f"longstride: error: {rule}\n"
    assert cli.main(["export", "--refresh", str(tmp_path)]) == 2
    assert "has no config.json; name a folder written by `longstride export RUN" in capsys.readouterr().err
    content = json.loads((old / "config.json").read_text())
    del content["auto_map"]
    (old / "config.json").write_text(json.dumps(content))
    assert cli.main(["export", "--refresh", str(old)]) == 2
    rule = f"does not name the classes of {STUB} for transformers; export the model again"
    assert capsys.readouterr().err == f"longstride: error: {old / 'config.json'}: {rule}\n"
    assert (old / STUB).read_text() == OLD_STUB
    assert cli.main(["export", str(old)]) == 2
    assert capsys.readouterr().err == "longstride: error: --output: must name the new folder\n"
