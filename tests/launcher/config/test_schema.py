"""The JSON schema that editors read: a description of every key, and no run that it would refuse or let through."""

import json
from pathlib import Path
from typing import Any

import pytest

from longstride.launcher import cli
from longstride.launcher.config import RunConfig, load_config
from longstride.launcher.config.loading import EXPERIMENTS
from longstride.launcher.config.run_config import schema_entries
from tests.launcher.conftest import Refusal

LEAST_KEYS = 180


def test_every_key_has_a_description() -> None:
    made = RunConfig.model_json_schema()
    told = list(schema_entries(made))
    assert len({place for place, _ in told}) > LEAST_KEYS
    assert not sorted({place for place, entry in told if not entry.get("description", "").strip()})


def test_a_file_that_extends_need_not_be_whole_and_any_other_must() -> None:
    made = RunConfig.model_json_schema()
    assert made["if"] == {"not": {"required": ["extends"]}}
    assert set(made["then"]["required"]) == {"model", "data", "train", "deepspeed"}
    assert "context" in made["then"]["properties"]["model"]["required"]
    assert "required" not in made and "required" not in made["$defs"]["TrainConfig"]


@pytest.mark.parametrize("preset", sorted(EXPERIMENTS.glob("*.json")), ids=lambda path: path.stem)
def test_the_schema_knows_all_that_presets_say(preset: Path) -> None:
    made = RunConfig.model_json_schema()
    known = {place for place, _ in schema_entries(made)}

    def places(value: Any, prefix: str) -> set[str]:
        found = set()
        for key, below in value.items() if isinstance(value, dict) else ():
            others = ("deepspeed", "model.attention.pattern", "train.context_schedule.attention")
            free = f"{prefix}{key}" in others  # objects that are checked elsewhere
            found |= {f"{prefix}{key}"} | (set() if free else places(below, f"{prefix}{key}."))
        for each in value if isinstance(value, list) else ():
            found |= places(each, prefix)
        return found

    assert places(json.loads(preset.read_text()), "") <= known


def test_schema_is_written_whole_and_never_over_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], refusal: Refusal
) -> None:
    file = tmp_path / "longstride.schema.json"
    assert cli.main(["config", "schema", "--output", str(file)]) == 0
    assert '"$schema": "./longstride.schema.json"' in capsys.readouterr().err
    assert json.loads(file.read_text()) == RunConfig.model_json_schema()
    rule = "already exists and is not overwritten"
    assert refusal("config", "schema", "--output", file) == f"--output={file}: {rule}"
    line = refusal("config", "schema", "--output", "nowhere/new.json")
    assert line.startswith("--output=nowhere/new.json: must lie in a folder that exists")


def test_the_name_of_the_schema_changes_nothing_of_a_run(tmp_path: Path) -> None:
    content = json.loads((EXPERIMENTS / "enwik8_fixed.json").read_text())
    named = tmp_path / "named.json"
    named.write_text(json.dumps({"$schema": "./longstride.schema.json", **content}))
    assert load_config(named).to_json() == load_config("enwik8_fixed").to_json()
