"""Every path that a person writes: options of all verbs, keys of the configuration."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from deepspeed.monitor.config import DeepSpeedMonitorConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from pydantic import BaseModel

from longstride.data_pipelines.plain_files import expand_path
from longstride.kernels import ConfigError
from longstride.launcher.cli import VERBS, parser_of
from longstride.launcher.config import RunConfig, load_config
from longstride.launcher.config.deepspeed_keys import _Section
from longstride.launcher.config.loading import PATHS
from longstride.launcher.verbs.shared import path, place
from tests.harness.runs import configuration

# Options and keys of free text that are no paths. What is new stands here, or is a path.
NO_PATHS = {
    "--allow-host", "--exclude", "--extension", "--field", "--host", "--image-size", "--include", "--dataset",
    "--job-name", "--launcher-args", "--license", "--like", "--master-addr", "--memory", "--modality", "--name",
    "--device", "--account", "--partition", "--processes", "--profile", "--prompt", "--rate", "--replay", "--resume",
    "--sbatch", "--shard-size", "--size", "--split", "--suffix", "--tflops", "--time", "--wav", "name", "overrides",
}  # fmt: skip
NO_PATH_KEYS = {
    "$schema", "extends", "deepspeed", "notes", "data.extension", "data.modality", "data.train_split",
    "data.validation_split", "model.order", "train.context_schedule.trained",
    "train.samples.prompt",
}  # fmt: skip  # `extends` has a test of its own; an editor alone reads `$schema`


def options() -> Iterator[tuple[str, argparse.Action]]:
    """Every option of every verb that takes text of any kind."""
    for verb in VERBS:
        for action in parser_of(verb)._actions:
            takes_text = action.type in (None, str, Path, path, place)
            if takes_text and action.nargs != 0 and not action.choices:
                yield verb.words, action


OPTIONS = list(options())
PATH_OPTIONS = [(verb, action) for verb, action in OPTIONS if action.type in (path, place)]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder, and an empty working directory."""
    (tmp_path / "home").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    monkeypatch.delenv("NOWHERE", raising=False)
    return tmp_path / "home"


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("~", "HOME"),
        ("~/", "HOME"),
        ("~/a/~b", "HOME/a/~b"),
        ("~root/a", f"{Path('~root').expanduser()}/a"),
        ("./~", "./~"),
        ("./~/a", "./~/a"),
        ("a~", "a~"),
        ("a$", "a$"),
        ("a$1", "a$1"),
        ("", ""),
        ("s3://bucket/~/$SCRATCH", "s3://bucket/~/$SCRATCH"),
        ("https://host/~me/${SCRATCH}", "https://host/~me/${SCRATCH}"),
    ],
)
def test_home_folders_are_expanded_and_nothing_else_is(home: Path, text: str, expanded: str) -> None:
    assert expand_path(text) == expanded.replace("HOME", str(home))


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("$SCRATCH/a", "variables are not replaced here; write /scratch/me/a"),
        ("./${SCRATCH}x", "variables are not replaced here; write .//scratch/mex"),
        ("~/$SCRATCH", "variables are not replaced here; write HOME//scratch/me"),
        ("a/$NOWHERE", "variables are not replaced here; $NOWHERE is not set here; write the path"),
        (
            "~nobody-of-this-name/a",
            "there is no such home folder; for a file name that begins with ~, write ./~nobody-of-",
        ),
    ],
)
def test_what_cannot_be_meant_as_it_stands_is_refused(home: Path, text: str, rule: str) -> None:
    with pytest.raises(ValueError) as refused:
        expand_path(text)
    assert str(refused.value).startswith(rule.replace("HOME", str(home)))


@pytest.mark.parametrize("name", ["a$SCRATCH", "${SCRATCH}", "~nobody-of-this-name"])
def test_what_is_there_is_taken_by_its_name(home: Path, name: str) -> None:
    Path(name).mkdir()
    assert expand_path(name) == name
    assert expand_path(f"{name}/below") == f"{name}/below"


def test_every_option_is_a_path_or_known_to_be_none() -> None:
    free = {action.option_strings[-1] if action.option_strings else action.dest for _, action in OPTIONS}
    paths = {action.option_strings[-1] if action.option_strings else action.dest for _, action in PATH_OPTIONS}
    assert free - paths == NO_PATHS
    assert len(PATH_OPTIONS) > 50


@pytest.mark.parametrize("type_of_option", [path, place])
def test_option_expands_its_path(home: Path, type_of_option: Any) -> None:
    assert str(type_of_option("~/a")) == f"{home}/a"
    assert Path(type_of_option("./~/a")) == Path("~/a")
    assert type_of_option is path or type_of_option("s3://a/~/$SCRATCH") == "s3://a/~/$SCRATCH"
    with pytest.raises(argparse.ArgumentTypeError, match=r"\$SCRATCH/a: variables are not replaced here; write /scr"):
        type_of_option("$SCRATCH/a")


def text_keys(part: dict[str, Any], definitions: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Every key of a schema that takes any text."""
    if "$ref" in part:
        part = definitions[part["$ref"].rpartition("/")[2]]
    if part.get("type") == "string" and not part.keys() & {"enum", "const", "pattern"}:
        yield prefix
    for name, entry in part.get("properties", {}).items():
        yield from text_keys(entry, definitions, f"{prefix}.{name}" if prefix else name)
    for each in (*part.get("anyOf", ()), *part.get("oneOf", ()), *filter(None, [part.get("items")])):
        yield from text_keys(each, definitions, prefix)


def named_as_paths(model: Any, prefix: str) -> Iterator[str]:
    """The keys of a class, and of those within, whose names say that they are paths."""
    for name, field in model.model_fields.items():
        place = f"{prefix}.{name}"
        if "path" in name or name.endswith("_file"):
            yield place
        for inner in (field.annotation, *get_args(field.annotation)):
            if isinstance(inner, type(BaseModel)):
                yield from named_as_paths(inner, place)


SCHEMA = RunConfig.model_json_schema()
KEYS = sorted({key for key in text_keys(SCHEMA, SCHEMA["$defs"]) if key not in NO_PATH_KEYS})
DEEPSPEED = (
    ("deepspeed", _Section),
    ("deepspeed", DeepSpeedMonitorConfig),
    ("deepspeed.zero_optimization", DeepSpeedZeroConfig),
)
KEYS += [key for prefix, model in DEEPSPEED for key in named_as_paths(model, prefix)]


def test_every_key_of_text_is_a_path_or_known_to_be_none() -> None:
    assert all(PATHS.fullmatch(key) for key in KEYS)
    assert {"data.path", "train.output", "data.remote.cache", "deepspeed.csv_monitor.output_path"} <= set(KEYS)


@pytest.mark.parametrize("by_file", [True, False], ids=["file", "command line"])
@pytest.mark.parametrize("key", KEYS)
def test_key_expands_its_path(home: Path, key: str, by_file: bool) -> None:
    *parents, name = key.split(".")

    def load(text: str) -> Any:
        content = configuration(Path("data"), Path("run"))
        content["deepspeed"] = {} if isinstance(content["deepspeed"], str) else content["deepspeed"]
        place = content
        if by_file:
            for parent in parents:
                place = place.setdefault(parent, {})
            place[name] = text
        Path("run.json").write_text(json.dumps(content))
        found: Any = load_config("run.json", [] if by_file else [f"{key}={text}"]).to_json()
        for each in key.split("."):
            found = found[each]
        return found

    assert load("~/a") == f"{home}/a"
    assert load("./~/a") == "./~/a"
    assert load("s3://a/~/$SCRATCH") == "s3://a/~/$SCRATCH"
    for text in ("$SCRATCH/a", "${SCRATCH}/a"):
        with pytest.raises(ConfigError) as refused:
            load(text)
        assert str(refused.value) == f'{key}="{text}": variables are not replaced here; write /scratch/me/a'


def test_extended_file_expands_its_path(home: Path) -> None:
    (home / "base.json").write_text(json.dumps(configuration(Path("data"), Path("run"))))
    Path("run.json").write_text('{"extends": "~/base.json"}')
    assert load_config("run.json").data.path == "data"
    Path("run.json").write_text('{"extends": "$SCRATCH/base.json"}')
    with pytest.raises(ConfigError, match=r"variables are not replaced here; write /scratch/me/base\.json"):
        load_config("run.json")


def test_configuration_that_a_run_saved_is_read_as_it_stands(home: Path) -> None:
    content = configuration(Path("data"), Path("run")) | {"deepspeed": {}}
    content["data"]["path"] = "~/a$SCRATCH"
    assert RunConfig.model_validate(content).data.path == "~/a$SCRATCH"
