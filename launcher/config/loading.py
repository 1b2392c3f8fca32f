"""Load a run's configuration: its JSON file, the files that it extends, and ``path.to.key=value`` overrides."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from longstride.data_pipelines.plain_files import JSONError, dotted_paths, expand_path, parse_json, read_plain
from longstride.kernels import ConfigError, Problem, join_paths, nearest
from longstride.launcher.config.deepspeed_keys import KNOWN
from longstride.launcher.config.run_config import EXTENDS, SCHEMA, RunConfig, schema_entries

DEEPSPEED_CONFIGS = Path(__file__).resolve().parents[2] / "ds_configs"
EXPERIMENTS = DEEPSPEED_CONFIGS / "experiments"
# Keys whose values are paths; those of the DeepSpeed section by their names there.
PATHS = re.compile(
    r"data\.path|data\.remote\.cache|train\.output|deepspeed\.(?:.+\.)?(?:output_path|output_file|nvme_path)"
)
_MOST_SUGGESTIONS = 3  # for an unknown key
MOST_OBJECT_BYTES = 2**24  # the manifest of a checkpoint of 16,384 ranks takes two thirds of it


def load_config(
    path: str | Path, overrides: Sequence[str] = (), notify: Callable[[str], None] | None = None
) -> RunConfig:
    """Load a configuration file (see ``find_config``) and apply ``path.to.key=value`` overrides in order.

    ``notify`` receives a line if an override of ``train.steps`` also shortens the warm-up.

    Raises:
        ConfigError: every wrong field, one line per field.
    """
    file = find_config(path)
    content, origins = _load_source(file)
    parsed = [parse_override(text) for text in overrides]
    values = {".".join(parts): value for parts, value in parsed}
    if EXTENDS in values:
        rule = "can only be set in a file; to change the base, write a file with it"
        raise ConfigError.at(EXTENDS, values[EXTENDS], rule)
    if SCHEMA in values:
        raise ConfigError.at(SCHEMA, values[SCHEMA], "can only be set in a file, for editors; leave it out")
    train_values = {name.removeprefix("train."): value for name, value in values.items() if name.startswith("train.")}
    warm_up = _shorter_warm_up(content.get("train"), train_values) if "train" not in values else None
    _replace_length(content.get("train"), train_values)
    for parts, value in parsed:
        # An override below a named DeepSpeed configuration changes a copy of the named file.
        if parts[0] == "deepspeed" and len(parts) > 1:
            _resolve_deepspeed(content)
        put(content, parts, value)
    if warm_up is not None:
        if notify is not None:
            steps = values["train.steps"]
            rule = f"becomes {warm_up}, in proportion to train.steps={steps}; set it too for another value"
            notify(str(Problem("train.warmup_steps", rule, content["train"]["warmup_steps"])))
        content["train"]["warmup_steps"] = warm_up
    origins |= {".".join(parts[:end]): file for parts, _ in parsed for end in range(1, len(parts) + 1)}
    try:
        _resolve_deepspeed(content)
        problems = []
        for name, text in flattened(content).items():
            if isinstance(text, str) and PATHS.fullmatch(name):
                try:
                    put(content, name.split("."), expand_path(text))
                except ValueError as error:
                    problems.append(Problem(name, str(error), text))
        if problems:
            raise ConfigError(*problems)
        config = RunConfig.model_validate(content)
    except ConfigError as error:
        problems = [_locate(problem, origins, file) for problem in _with_suggestions(error.problems)]
        raise ConfigError(*problems) from None
    config.data.check_order()
    return config


def _locate(problem: Problem, origins: Mapping[str, Path], file: Path) -> Problem:
    """Put the name of a base before a problem's path if the value does not come from the file itself."""
    path = problem.path.replace("[", ".[")
    while path and path not in origins:
        path = path.rpartition(".")[0]
    origin = origins.get(path, file)
    return problem if origin == file else replace(problem, path=f"{origin}: {problem.path}")


def find_config(text: str | Path) -> Path:
    """Find the file of a path, or of the bare name of a preset in ds_configs/experiments.

    A path is not checked any further: that is up to the reader of the file.

    Raises:
        ConfigError: an empty name, an override instead of a file, an unknown bare name, or a missing file next to one
            of a similar name.
    """
    path = Path(text)
    if text == "":
        raise ConfigError("CONFIG=: must name a file, such as my.json, or a preset, such as demo")
    if "=" in path.name and not path.exists():
        rule = "no such file; changes follow the configuration's file, as in my.json train.steps=100"
        raise ConfigError(f"{text}: {rule}")
    if path.is_file() or len(path.parts) != 1 or path.suffix:
        neighbours = {} if path.exists() else {file.stem: file for file in path.parent.glob("*.json")}
        if matches := difflib.get_close_matches(path.stem, neighbours, n=1):
            raise ConfigError(f"{text}: no such file; nearest {neighbours[matches[0]]}")
        return path
    presets = sorted(file.stem for file in EXPERIMENTS.glob("*.json"))
    if path.name not in presets:
        rule = f"no such file, and no preset of that name in ds_configs/experiments; {nearest(str(text), presets)}"
        raise ConfigError(f"{text}: {rule}")
    return EXPERIMENTS / f"{path.name}.json"


def load_content(source: str | Path) -> dict[str, Any]:
    """Load the merged, unchecked content of a configuration; see ``find_config``.

    Raises:
        ConfigError: a file cannot be read, extends no file, or extends itself in the end.
    """
    return _load_source(find_config(source))[0]


def _load_source(path: Path, extending: tuple[Path, ...] = ()) -> tuple[dict[str, Any], dict[str, Path]]:
    """Return a file's content over that of its base, and the file of each key. ``extending``: files that lead here."""
    content = load_json_object(path)
    if not isinstance(content.pop(SCHEMA, ""), str):
        raise ConfigError(f"{path}: {SCHEMA}: must be text, the file or address of a JSON schema; or leave it out")
    origins = dict.fromkeys(dotted_paths(content), path)
    if EXTENDS not in content:
        return content, origins
    name = content.pop(EXTENDS)
    if not isinstance(name, str) or not name:
        rule = "must be text: the path of a file, from this file's folder, or a name in ds_configs/experiments"
        raise ConfigError(f"{path}: {Problem(EXTENDS, rule, name)}")
    try:
        base, chain = path.parent / expand_path(name), (*extending, path)
    except ValueError as error:
        raise ConfigError(f"{path}: {Problem(EXTENDS, str(error), name)}") from None
    if not base.is_file():
        presets = {file.stem: file for file in sorted(EXPERIMENTS.glob("*.json"))}
        if name not in presets:
            rule = f"no such file in the folder of {path.name}, and no preset of that name in ds_configs/experiments"
            raise ConfigError(f"{path}: {Problem(EXTENDS, f'{rule}; {nearest(name, presets)}', name)}")
        base = presets[name]
    if base.resolve() in {file.resolve() for file in chain}:
        circle = " extends ".join(map(str, (*chain, base)))
        raise ConfigError(f"{path}: {Problem(EXTENDS, f'forms a cycle: {circle}; name another file', name)}")
    below, base_origins = _load_source(base, chain)
    try:  # a file's notes are about that file alone
        merged = _merge({key: value for key, value in below.items() if key != "notes"}, content)
    except ConfigError as error:  # a wrong name of a DeepSpeed configuration in the base
        raise ConfigError(*(replace(problem, path=f"{base}: {problem.path}") for problem in error.problems)) from None
    return merged, {name: base_origins[name] for name in dotted_paths(merged) if name in base_origins} | origins


def _merge(base: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge objects key by key into a new one. A list, or an object of another kind, replaces the base's."""

    def kind(value: Mapping[str, Any]) -> object:
        return value.get("type") or ("heads" if isinstance(value.get("heads"), list) else None)

    merged = dict(base)
    if isinstance(changes.get("deepspeed"), dict):  # changes to the file that the base names
        _resolve_deepspeed(merged)
    if isinstance(base.get("train"), dict) and isinstance(changes.get("train"), dict):
        merged["train"] = dict(base["train"])
        _replace_length(merged["train"], changes["train"])
    for key, value in changes.items():
        below = merged.get(key)
        if isinstance(below, dict) and isinstance(value, dict) and kind(value) in (None, kind(below)):
            merged[key] = _merge(below, value)
        else:
            merged[key] = value
    return merged


def _replace_length(train: Any, changes: Mapping[str, Any]) -> None:
    """Drop a file's epochs where changes set the steps, and the other way round, in place. A null changes nothing.

    The length of the last stage follows from either.
    """
    for name, replaced in (("steps", "epochs"), ("epochs", "steps")):
        if isinstance(train, dict) and changes.get(name) is not None and replaced not in changes:
            train.pop(replaced, None)
            stages = train.get("context_schedule")
            if isinstance(stages, list) and stages and isinstance(stages[-1], dict):
                stages[-1].pop("steps", None)


def _resolve_deepspeed(content: dict[str, Any]) -> None:
    """Replace the name of a DeepSpeed configuration by its content, in place."""
    name = content.get("deepspeed")
    if not isinstance(name, str):
        return
    names = sorted(path.stem for path in DEEPSPEED_CONFIGS.glob("*.json"))
    if name not in names:
        raise ConfigError.at("deepspeed", name, f"no such file in ds_configs; {nearest(name, names)}")
    content["deepspeed"] = load_json_object(DEEPSPEED_CONFIGS / f"{name}.json")


def _shorter_warm_up(train: Any, overrides: dict[str, Any]) -> int | None:
    """Reduce the warm-up if the command line asks for fewer steps than the file's warm-up has.

    It stays the same share of the run; a run whose file gives epochs gets a tenth. None leaves the file's warm-up.
    """
    steps = overrides.get("steps")
    if not isinstance(train, dict) or "warmup_steps" in overrides or type(steps) is not int or steps < 1:
        return None
    before, warm_up = train.get("steps"), train.get("warmup_steps")
    if type(warm_up) is not int or warm_up <= steps:
        return None
    if before is None:
        return steps // 10
    return None if type(before) is not int or warm_up > before else warm_up * steps // before


def _with_suggestions(problems: Sequence[Problem]) -> list[Problem]:
    """Refer an unknown key to the sections that know its name, or a similar one."""
    if not any(problem.rule.startswith("unknown key; ") for problem in problems):
        return list(problems)
    paths: dict[str, list[str]] = {}  # by the last part of each
    keys = [path for path, _ in schema_entries(RunConfig.model_json_schema())]
    for path in sorted(
        dict.fromkeys([*keys, *(f"deepspeed.{name}" for name in KNOWN)]), key=lambda key: key.count(".")
    ):
        paths.setdefault(path.rpartition(".")[2], []).append(path)
    improved = []
    for problem in problems:
        if problem.rule.startswith("unknown key; "):
            name = problem.path.rpartition(".")[2]
            if name not in paths and "nearest" not in problem.rule:
                name = next(iter(difflib.get_close_matches(name, paths, n=1, cutoff=0.8)), name)
            places = paths.get(name, [])
            if places and problem.path not in places:  # one of them: a key of another type
                suggestion = " or ".join(places[:_MOST_SUGGESTIONS])
                problem = replace(problem, rule=f"unknown key; did you mean {suggestion}")
        improved.append(problem)
    return improved


def load_json_object(path: Path, *, follow_links: bool = True) -> dict[str, Any]:
    """Load the object in a JSON file.

    Raises:
        ConfigError: the file is missing, not a regular one, too long, not UTF-8, not JSON (with line and column) or not
            an object, or has a key twice in one object.
    """
    try:
        value = parse_json(read_plain(path, MOST_OBJECT_BYTES, follow_links=follow_links), keys_once=True)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except JSONError as error:
        place = path if error.line is None else f"{path}:{error.line}:{error.column}"
        raise ConfigError(f"{place}: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: must hold a JSON object")
    return value


def parse_override(text: str) -> tuple[list[str], Any]:
    """Parse ``train.steps=10`` to (["train", "steps"], 10); a value that is not JSON is a string.

    Raises:
        ConfigError: no ``=``, or an empty part of the path.
    """
    path, equals, value = text.partition("=")
    parts = path.split(".")
    if not equals or not all(parts):
        raise ConfigError(f"{text}: must be path.to.key=value, such as train.steps=100")
    try:
        return parts, parse_json(value)
    except JSONError as error:
        if error.line is not None:  # not JSON at all
            return parts, value
        raise ConfigError(f"{path}: {error}") from None


def put(content: dict[str, Any], parts: Sequence[str], value: Any) -> None:
    """Set a nested key in place, and create missing objects on the way.

    Raises:
        ConfigError: the path leads through a value that is not an object.
    """
    place = content
    for number, part in enumerate(parts[:-1]):
        below = place.setdefault(part, {})
        if not isinstance(below, dict):
            raise ConfigError.at(".".join(parts[: number + 1]), below, f"has no key {parts[number + 1]} to override")
        place = below
    place[parts[-1]] = value


def flattened(content: object, prefix: str = "") -> dict[str, object]:
    """Flatten nested objects to one object with dotted paths; lists count as values."""
    if not isinstance(content, dict) or not content:
        return {prefix: content}
    flat: dict[str, object] = {}
    for key, value in content.items():
        flat.update(flattened(value, join_paths(prefix, key)))
    return flat
