"""A configuration on top of another one: what is merged, what replaces, and whose file a mistake is told by."""

import json
from pathlib import Path
from typing import Any

import pytest

from longstride.launcher.config import load_config
from tests.harness.runs import configuration
from tests.launcher.config.test_config import refused


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "bases").mkdir()
    content = configuration(Path("data"), Path("run")) | {"notes": "of the base"}
    return write(tmp_path / "bases/base.json", content)


def write(path: Path, content: dict[str, Any]) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_objects_go_together_and_all_else_replaces(base: Path, tmp_path: Path) -> None:
    whole = load_config(base)
    own = {"extends": "bases/base.json", "train": {"steps": 5, "betas": [0.8, 0.9]}, "model": {"heads": 4}}
    config = load_config(write(tmp_path / "own.json", own))
    assert (config.train.steps, config.train.betas, config.model.heads) == (5, (0.8, 0.9), 4)
    assert config.notes == ""  # those of the base tell of another run
    expected = whole.to_json()
    expected["train"] |= {"steps": 5, "betas": [0.8, 0.9]}
    expected["model"] |= {"heads": 4}
    assert config.to_json() == expected | {"notes": ""}


def test_an_object_of_another_kind_replaces_whole(base: Path, tmp_path: Path) -> None:
    def attention(value: dict[str, Any], name: str = "bases/base.json") -> Any:
        own = {"extends": name, "model": {"attention": value}}
        return load_config(write(tmp_path / "own.json", own)).model.attention

    fixed = {"type": "fixed", "stride": 8, "summary": 2}
    assert attention({"summary": 4}) == fixed | {"summary": 4}
    assert attention({"type": "fixed", "stride": 16}) == fixed | {"stride": 16}
    assert attention({"type": "local", "window": 8}) == {"type": "local", "window": 8}
    by_head = {"heads": [{"count": 1, "type": "dense"}, {"count": 1, "type": "local", "window": 8}]}
    assert attention(by_head) == by_head
    write(tmp_path / "heads.json", {"extends": "bases/base.json", "model": {"attention": by_head}})
    assert attention(fixed, "heads.json") == fixed


def test_a_chain_is_read_from_its_end_and_each_path_from_its_own_folder(base: Path, tmp_path: Path) -> None:
    write(tmp_path / "bases/middle.json", {"extends": "base.json", "train": {"epochs": 2.0}, "data": {"seed": 3}})
    own = {"extends": "bases/middle.json", "data": {"seed": 4}, "deepspeed": {"gradient_clipping": 0.5}}
    config = load_config(write(tmp_path / "own.json", own), ["train.learning_rate=0.5"])
    assert (config.train.steps, config.train.epochs, config.data.seed) == (None, 2.0, 4)
    assert config.train.learning_rate == 0.5
    # On top of a name, keys change a copy of what it stands for.
    named = load_config(base).deepspeed
    assert config.deepspeed == named | {"gradient_clipping": 0.5} != named


def test_a_preset_is_a_base_by_its_name(tmp_path: Path) -> None:
    own = {"$schema": "./longstride.schema.json", "extends": "enwik8_fixed", "data": {"path": "elsewhere"}}
    config, preset = load_config(write(tmp_path / "own.json", own)), load_config("enwik8_fixed")
    assert config.data.path == "elsewhere"
    assert (config.model, config.train) == (preset.model, preset.train)
    assert not {"$schema", "extends"} & config.to_json().keys()
    # A file of that name beside it goes first.
    write(tmp_path / "enwik8_fixed", {"extends": "enwik8_strided"})
    assert load_config(tmp_path / "own.json").model == load_config("enwik8_strided").model


def test_a_mistake_is_told_by_the_file_that_it_stands_in(base: Path, tmp_path: Path) -> None:
    content = json.loads(base.read_text())
    content["model"]["attention"]["stride"] = 7
    content["train"] |= {"log_every": 0, "micro_batch": 0}
    write(base, content)
    own = write(tmp_path / "own.json", {"extends": "bases/base.json", "train": {"micro_batch": -1}, "dat": 1})
    assert refused(own, "train.evaluate_every=-1") == [
        f"{base}: model.attention.stride=7: must divide context 64; nearest 4, 8",
        "train.micro_batch=-1: must be greater than 0",
        f"{base}: train.log_every=0: must be greater than 0",
        "train.evaluate_every=-1: must be greater than or equal to 0",
        "dat: unknown key; nearest data",
    ]
    assert refused(own, "train.log_every=-2")[2] == "train.log_every=-2: must be greater than 0"


def test_a_base_that_is_none_is_told_in_one_line(base: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    none = "no such file in the folder of own.json, and no preset of that name in ds_configs/experiments"
    assert refused(write(own, {"extends": "enwik8_fixt"}))[0] == (
        f'{own}: extends="enwik8_fixt": {none}; nearest enwik8_fixed'
    )
    assert refused(write(own, {"extends": 3}))[0].startswith(f"{own}: extends=3: must be text")
    assert refused(write(own, {"extends": ["bases/base.json"]}))[0].startswith(f"{own}: extends=")
    (tmp_path / "folder.json").mkdir()
    assert none in refused(write(own, {"extends": "folder.json"}))[0]
    base.write_text('{"model": x}')
    assert refused(write(own, {"extends": "bases/base.json"}))[0].startswith(f"{base}:1:11: ")
    assert refused(write(own, {"$schema": 3}))[0].startswith(f"{own}: $schema: must be text")
    write(base, {"deepspeed": "zero9"})
    (line,) = refused(write(own, {"extends": "bases/base.json", "deepspeed": {"log_level": "info"}}))
    assert line.startswith(f'{base}: deepspeed="zero9": no such file in ds_configs')
    (line,) = refused(base, "extends=enwik8_fixed")
    assert line.startswith('extends="enwik8_fixed": can only be set in a file')
