"""A run's configuration: its file and what that extends, and on top of them the keys of the command line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from longstride.data_pipelines.plain_files import expand_path
from longstride.kernels import ConfigError, Problem
from longstride.launcher.config.deepspeed_keys import KNOWN
from longstride.launcher.config.extending import (
    EXTENDS,
    SCHEMA,
    Written,
    find_config,
    load_written,
    name_length,
    resolve_deepspeed,
)
from longstride.launcher.config.json_file import flattened, parse_override, put
from longstride.launcher.config.run_config import RunConfig
from longstride.launcher.config.schema import known_keys

# Keys whose values are paths; those of DeepSpeed's section by their names there.
PATHS = re.compile(
    r"data\.path|data\.remote\.cache|train\.output|deepspeed\.(?:.+\.)?(?:output_path|output_file|nvme_path)"
)
_MOST_PLACES = 3  # that are named for a key


def load_config(
    path: str | Path, overrides: Sequence[str] = (), tell: Callable[[str], None] | None = None
) -> RunConfig:
    """The configuration in a file (see ``find_config``), with ``path.to.key=value`` overrides applied in order.

    ``tell`` is given a line where the command line's steps change more than they say.

    Raises:
        ConfigError: every wrong field, one line each.
    """
    written = load_written(find_config(path))
    content, parsed = written.content, [parse_override(text) for text in overrides]
    given = {".".join(parts): value for parts, value in parsed}
    if EXTENDS in given:
        raise ConfigError.at(EXTENDS, given[EXTENDS], "stands in a file; to take another base, write a file with it")
    if SCHEMA in given:
        raise ConfigError.at(SCHEMA, given[SCHEMA], "stands in a file, for editors; leave it out here")
    of_train = {name.removeprefix("train."): value for name, value in given.items() if name.startswith("train.")}
    warm_up = _shorter_warm_up(content.get("train"), of_train) if "train" not in given else None
    name_length(content.get("train"), of_train)
    for parts, value in parsed:
        # An override below a named DeepSpeed configuration changes a copy of what the name stands for.
        if parts[0] == "deepspeed" and len(parts) > 1:
            resolve_deepspeed(content)
        put(content, parts, value)
    if warm_up is not None:
        if tell is not None:
            rule = f"becomes {warm_up}, in proportion to train.steps={given['train.steps']}; give it too for another"
            tell(str(Problem("train.warmup_steps", rule, content["train"]["warmup_steps"])))
        content["train"]["warmup_steps"] = warm_up
    written = replace(written, given=written.given | _with_parents(given))
    try:
        resolve_deepspeed(content)
        _expand_paths(content)
        config = RunConfig.model_validate(content)
    except ConfigError as error:
        raise ConfigError(*_advised(error.problems, written)) from None
    config.data.check_order()
    return config


def _expand_paths(content: dict[str, Any]) -> None:
    """Expands every path of a configuration that a person wrote, in place; what a run saved has been expanded.

    Raises:
        ConfigError: every path that cannot be.
    """
    problems = []
    for place, text in flattened(content).items():
        if isinstance(text, str) and PATHS.fullmatch(place):
            try:
                put(content, place.split("."), expand_path(text))
            except ValueError as error:
                problems.append(Problem(place, str(error), text))
    if problems:
        raise ConfigError(*problems)


def _shorter_warm_up(train: Any, given: dict[str, Any]) -> int | None:
    """Steps of the warm-up where a command line asks for a shorter run than a file's warm-up is.

    It stays the same share of the run; of epochs, whose steps are not known yet, it becomes a tenth. None: the file's
    own fits, is wrong by itself, or is given on the command line too.
    """
    steps = given.get("steps")
    if not isinstance(train, dict) or "warmup_steps" in given or type(steps) is not int or steps < 1:
        return None
    before, warm_up = train.get("steps"), train.get("warmup_steps")
    if type(warm_up) is not int or warm_up <= steps:
        return None
    if before is None:
        return steps // 10
    return None if type(before) is not int or warm_up > before else warm_up * steps // before


def _with_parents(names: Iterable[str]) -> set[str]:
    """Dotted paths, and those of the objects that they lead through."""
    parts = [name.split(".") for name in names]
    return {".".join(each[:length]) for each in parts for length in range(1, len(each) + 1)}


def _advised(problems: Sequence[Problem], written: Written) -> list[Problem]:
    """The problems, told by the files that they stand in; an unknown key that is known elsewhere is led there."""
    places: dict[str, list[str]] = {}  # of each key's name
    if any(problem.rule.startswith("unknown key; ") for problem in problems):
        for place in sorted(
            (*known_keys(), *(f"deepspeed.{name}" for name in KNOWN)), key=lambda each: each.count(".")
        ):
            places.setdefault(place.rpartition(".")[2], []).append(place)
    advised = []
    for problem in problems:
        if problem.rule.startswith("unknown key; "):
            name = problem.path.rpartition(".")[2]
            if name not in places and "nearest" not in problem.rule:
                name = next(iter(difflib.get_close_matches(name, places, n=1, cutoff=0.8)), name)
            if name in places:
                rule = f"unknown key; did you mean {' or '.join(places[name][:_MOST_PLACES])}"
                problem = replace(problem, rule=rule)
        advised.append(written.told_by_file(problem))
    return advised
