"""What an export has for transformers: names that lead to the installed project, and a tokenizer for bytes of text."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest

from longstride.launcher.models.hub_files import hub_fields, hub_files
from tests.harness.tiny_models import plain_config as config


def test_fields_name_classes_of_the_file() -> None:
    code = hub_files(config())["modeling_longstride.py"]
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
