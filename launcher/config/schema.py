"""What a configuration may hold: the JSON schema of a run, for editors, messages and pages.

`longstride config schema` prints it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from longstride.data_pipelines.durable import write_new
from longstride.kernels import ConfigError
from longstride.launcher.config.extending import SCHEMA
from longstride.launcher.config.run_config import RunConfig
from longstride.launcher.output import say


def entries(
    part: dict[str, Any], definitions: dict[str, Any], prefix: str = ""
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every key that a part of a schema knows, by its dotted path; one of several alternatives as often as it stands.

    A list's objects have the path of the list.
    """
    if "$ref" in part:
        part = {**definitions[part["$ref"].rpartition("/")[2]], **part}
    for name, entry in part.get("properties", {}).items():
        place = f"{prefix}.{name}" if prefix else name
        yield place, entry
        yield from entries(entry, definitions, place)
    for each in (*part.get("anyOf", ()), *part.get("oneOf", ()), *filter(None, [part.get("items")])):
        yield from entries(each, definitions, prefix)


def known_keys() -> list[str]:
    """The dotted paths of all keys of a run; those of `deepspeed` are checked elsewhere."""
    made = RunConfig.model_json_schema()
    return list(dict.fromkeys(place for place, _ in entries(made, made["$defs"])))


def run(arguments: argparse.Namespace) -> int:
    """Prints or writes the JSON schema of a run's configuration.

    Raises:
        ConfigError: the file exists, or its folder does not.
    """
    text = json.dumps(RunConfig.model_json_schema(), indent=2)
    if arguments.output is None:
        print(text)
        return 0
    if arguments.output.exists():
        raise ConfigError(f"--output={arguments.output}: exists already; name a new file, or remove it")
    if not arguments.output.parent.is_dir():
        raise ConfigError(f"--output={arguments.output}: its folder does not exist; make it, or name another place")
    try:
        write_new(arguments.output, (text + "\n").encode())
    except OSError as error:
        rule = f"cannot be written: {error.strerror}; name a file in another folder"
        raise ConfigError(f"--output={arguments.output}: {rule}") from None
    say(f'wrote {arguments.output}; a configuration beside it has "{SCHEMA}": "./{arguments.output.name}"')
    return 0
