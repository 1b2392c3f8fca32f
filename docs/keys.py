"""Writes launcher/verbs/keys.json, the keys of a run's configuration, from the classes: `python docs/keys.py`."""

import json
from typing import Any

from longstride.launcher.config import RunConfig
from longstride.launcher.verbs import KEYS


def settled_keys(schema: dict[str, Any], part: dict[str, Any] | None = None, path: str = "") -> dict[str, list[str]]:
    """The keys of each object of a schema, by its path, where no other object may stand and no other keys."""
    part = schema if part is None else part
    choices = [each for each in part.get("anyOf", [part]) if each.get("type") != "null"]
    if len(choices) != 1 or "oneOf" in choices[0]:
        return {}
    if "$ref" in choices[0]:
        return settled_keys(schema, schema["$defs"][choices[0]["$ref"].rpartition("/")[2]], path)
    if choices[0].get("additionalProperties") is not False:
        return {}
    properties = choices[0].get("properties", {})
    found = {path: sorted(properties)}
    for key, below in properties.items():
        found |= settled_keys(schema, below, f"{path}.{key}" if path else key)
    return found


if __name__ == "__main__":
    keys = settled_keys(RunConfig.model_json_schema())
    KEYS.write_text(json.dumps(keys, indent=1) + "\n", encoding="utf-8")
