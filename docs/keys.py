"""Write launcher/verbs/keys.json, the keys of a run's configuration, from its classes: `python docs/keys.py`."""

import json
from typing import Any

from longstride.launcher.config import RunConfig
from longstride.launcher.verbs import KEYS


def settled_keys(schema: dict[str, Any], entry: dict[str, Any] | None = None, path: str = "") -> dict[str, list[str]]:
    """Return the keys of each object by its path, except for objects of several kinds or with free keys."""
    entry = schema if entry is None else entry
    choices = [choice for choice in entry.get("anyOf", [entry]) if choice.get("type") != "null"]
    if len(choices) != 1 or "oneOf" in choices[0]:
        return {}
    if "$ref" in choices[0]:
        return settled_keys(schema, schema["$defs"][choices[0]["$ref"].rpartition("/")[2]], path)
    if choices[0].get("additionalProperties") is not False:
        return {}
    properties = choices[0].get("properties", {})
    keys = {path: sorted(properties)}
    for key, child in properties.items():
        keys |= settled_keys(schema, child, f"{path}.{key}" if path else key)
    return keys


if __name__ == "__main__":
    KEYS.write_text(json.dumps(settled_keys(RunConfig.model_json_schema()), indent=1) + "\n", encoding="utf-8")
