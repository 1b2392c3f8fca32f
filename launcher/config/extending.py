"""`"extends"`: a configuration that says only what it has otherwise than another one."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from longstride.data_pipelines.plain_files import expand_path
from longstride.kernels import ConfigError, Problem, nearest
from longstride.launcher.config.json_file import load_json_object

DEEPSPEED_CONFIGS = Path(__file__).resolve().parents[2] / "ds_configs"
EXPERIMENTS = DEEPSPEED_CONFIGS / "experiments"
EXTENDS, SCHEMA = "extends", "$schema"  # of a file alone: what a run saves has neither


@dataclass(frozen=True, slots=True)
class Written:
    """What a file and those that it extends say together."""

    content: dict[str, Any]  # no "extends" and no "$schema"
    origins: Mapping[str, Path]  # the file of each value, by its dotted path, where that is a base
    given: frozenset[str]  # dotted paths of the values that the file itself has

    def told_by_file(self, problem: Problem) -> Problem:
        """The same problem; that of a value of a base is told with its name."""
        place = problem.path.replace("[", ".[")
        while place:
            if place in self.given:
                break
            if place in self.origins:
                return replace(problem, path=f"{self.origins[place]}: {problem.path}")
            place = place.rpartition(".")[0]
        return problem


def find_config(text: str | Path) -> Path:
    """The file of a path, or of the bare name of one of ds_configs/experiments.

    Raises:
        ConfigError: no name, a bare one that is neither, a change in its place, or no file where another is called much
            the same. Whoever reads a path checks it.
    """
    path = Path(text)
    if text == "":
        raise ConfigError("CONFIG=: names no file; such as my.json, or demo")
    if "=" in path.name and not path.exists():
        rule = "no such file; changes stand behind the configuration's file, as in my.json train.steps=100"
        raise ConfigError(f"{text}: {rule}")
    if path.is_file() or len(path.parts) != 1 or path.suffix:
        beside = {} if path.exists() else {file.stem: file for file in path.parent.glob("*.json")}
        if near := difflib.get_close_matches(path.stem, beside, n=1):
            raise ConfigError(f"{text}: no such file; nearest {beside[near[0]]}")
        return path
    known = sorted(file.stem for file in EXPERIMENTS.glob("*.json"))
    if path.name not in known:
        rule = f"no such file, and none of that name in ds_configs/experiments; {nearest(str(text), known)}"
        raise ConfigError(f"{text}: {rule}")
    return EXPERIMENTS / f"{path.name}.json"


def load_content(source: str | Path) -> dict[str, Any]:
    """What a configuration's file and those that it extends say, unchecked; see ``find_config``.

    Raises:
        ConfigError: as ``load_written``.
    """
    return load_written(find_config(source)).content


def load_written(path: Path, before: tuple[Path, ...] = ()) -> Written:
    """What a file says, on top of the one that it extends, and so on. ``before``: the files that lead here.

    Raises:
        ConfigError: a file cannot be read, extends what is no file, or itself in the end.
    """
    own = load_json_object(path)
    if not isinstance(own.pop(SCHEMA, ""), str):
        raise ConfigError(f"{path}: {SCHEMA}: must be text, the file or address of a JSON schema; or leave it out")
    given = frozenset(_places(own))
    if EXTENDS not in own:
        return Written(own, {}, given)
    name = own.pop(EXTENDS)
    if not isinstance(name, str) or not name:
        rule = "must be text: the path of a file, from this file's folder, or a name in ds_configs/experiments"
        raise ConfigError(f"{path}: {Problem(EXTENDS, rule, name)}")
    try:
        base, chain = path.parent / expand_path(name), (*before, path)
    except ValueError as error:
        raise ConfigError(f"{path}: {Problem(EXTENDS, str(error), name)}") from None
    if not base.is_file():
        known = {file.stem: file for file in sorted(EXPERIMENTS.glob("*.json"))}
        if name not in known:
            rule = f"no such file in the folder of {path.name}, and none of that name in ds_configs/experiments"
            raise ConfigError(f"{path}: {Problem(EXTENDS, f'{rule}; {nearest(name, known)}', name)}")
        base = known[name]
    if base.resolve() in {each.resolve() for each in chain}:
        circle = " extends ".join(map(str, (*chain, base)))
        raise ConfigError(f"{path}: {Problem(EXTENDS, f'leads in a circle: {circle}; name another file', name)}")
    below = load_written(base, chain)
    content = {key: value for key, value in below.content.items() if key != "notes"}  # they are of their file
    try:
        content = _merged(content, own)
    except ConfigError as error:  # a name in the base
        raise ConfigError(*(replace(problem, path=f"{base}: {problem.path}") for problem in error.problems)) from None
    kept = frozenset(_places(content)) - given
    origins = {place: below.origins.get(place, base) for place in kept if place in below.given | below.origins.keys()}
    return Written(content, origins, given)


def name_length(train: Any, given: Mapping[str, Any]) -> None:
    """Steps that are given on top replace a file's epochs, and epochs its steps, in place. A null replaces nothing."""
    for length, other in (("steps", "epochs"), ("epochs", "steps")):
        if isinstance(train, dict) and given.get(length) is not None and other not in given:
            train.pop(other, None)


def resolve_deepspeed(content: dict[str, Any]) -> None:
    """Replaces the name of a DeepSpeed configuration by what it stands for, in place."""
    name = content.get("deepspeed")
    if not isinstance(name, str):
        return
    known = sorted(path.stem for path in DEEPSPEED_CONFIGS.glob("*.json"))
    if name not in known:
        raise ConfigError.at("deepspeed", name, f"no such file in ds_configs; {nearest(name, known)}")
    content["deepspeed"] = load_json_object(DEEPSPEED_CONFIGS / f"{name}.json")


def _merged(base: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """A base with what is said on top of it; neither is changed.

    Objects go together key by key. An object of another kind than the base's takes its place whole, as a list does.
    """
    merged = dict(base)
    if isinstance(own.get("deepspeed"), dict):  # keys on top of a name are changes to what it stands for
        resolve_deepspeed(merged)
    if isinstance(base.get("train"), dict) and isinstance(own.get("train"), dict):
        merged["train"] = dict(base["train"])
        name_length(merged["train"], own["train"])
    for key, value in own.items():
        below = merged.get(key)
        if isinstance(below, dict) and isinstance(value, dict) and _kind(value) in (None, _kind(below)):
            merged[key] = _merged(below, value)
        else:
            merged[key] = value
    return merged


def _kind(value: Mapping[str, Any]) -> object:
    """What tells an object from others at its place: its ``type``, or that it has a pattern for some heads each."""
    return value.get("type") or ("heads" if isinstance(value.get("heads"), list) else None)


def _places(content: object, prefix: str = "") -> dict[str, None]:
    """The dotted paths of all keys, objects included."""
    places: dict[str, None] = {}
    if isinstance(content, dict):
        for key, value in content.items():
            place = f"{prefix}.{key}" if prefix else key
            places |= {place: None} | _places(value, place)
    return places
