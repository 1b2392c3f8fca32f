"""Write the tables of docs/configuration.md from the configuration's classes: `python docs/configuration_tables.py`.

Each region between `<!-- keys of WHAT -->` and `<!-- end of keys -->` becomes a table of the keys of WHAT. Defaults and
descriptions come from the JSON schema that editors use; only links and examples are kept here.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from longstride.kernels.patterns import PATTERNS
from longstride.launcher.config import RunConfig

PAGE = Path(__file__).resolve().parent / "configuration.md"
MARKS = re.compile(r"(<!-- keys of ([\w. ]+) -->\n).*?(<!-- end of keys -->)", re.DOTALL)
EVALUATE, RESUME, WATCH = (f"training/{name}.md" for name in ("evaluate", "resume", "watch"))
NOTES = {  # appended to a description
    "model.attention": "[systems](systems.md)",
    "model.vocabulary": "[palettes](data/images.md#use-a-palette)",
    "model.rotary": '`{"base": 10000}`',
    "model.relative_bias": "`{}`: MPNet's",
    "model.reversible": "[systems](systems.md#attention-by-hashing-in-reversible-blocks-reformer)",
    "model.ngrams": "[n-grams](#modelngrams)",
    "model.feed_forward": "[experts](systems.md#mixture-of-experts), [product keys](systems.md#product-keys)",
    "model.embedding": "[below](#modelembedding)",
    "model.objective": "[masked](systems.md#masked-bytes-bert), [classes](training/fine-tune.md#fine-tune-on-labels)",
    "model.output": '`{"tied": true, "transform": true, "bias": true}`: BERT',
    "data.order": "[index tars](data/tars.md)",
    "data.packing": '`{"attend": "document"}`: [documents apart](data/order.md#keep-packed-documents-apart)',
    "data.worker_timeout_seconds": f"[lost workers]({RESUME}#when-a-loader-worker-is-lost)",
    "data.remote": "[below](#dataremote)",
    "train.optimizer": "[below](#trainoptimizer)",
    "train.schedule": '`{"type": "wsd", "decay_fraction": 0.5}`',
    "train.ema_decay": "`--weights ema` exports and scores it",
    "train.compile": "[gains](training/speed.md#compile-the-blocks)",
    "train.sequence_parallel": "[shared contexts](training/share-contexts.md)",
    "train.keep_best": f"[costs]({EVALUATE}#keep-and-use-the-best-checkpoint)",
    "train.checkpoint_in_background": "[gains](checkpoints.md#save-in-the-background)",
    "train.timeout_seconds": "[hangs](faults.md#hangs)",
    "train.max_seconds": f"[stopping]({RESUME}#stop-a-run)",
    "train.stop_when": f'`{{"evaluations": 5, "by": 0.0}}`: [early stop]({EVALUATE}#stop-when-the-loss-plateaus)',
    "train.samples_every": f"[samples]({WATCH}#sample-during-training)",
    "train.samples": f"[samples]({WATCH}#sample-during-training)",
    "train.guards": "[below](#trainguards)",
    "train.guards.spike": '`{"deviations": 6, "window": 100, "policy": "skip"}`',
}
PAPER_KEYS = (  # of the paper's network; all other keys of `model` came later
    *("context", "layers", "heads", "width", "attention", "embedding", "vocabulary", "feed_forward_ratio"),
    *("query_key_ratio", "dropout", "initialization", "backend"),
)
LARGEST_SHOWN = 100_000  # larger limits only bound memory: docs/hostile.md
SHARED_PATTERN_KEYS = ("type", "combine", "key_value_heads")


def page() -> str:
    """Return the page with up-to-date tables."""
    schema = RunConfig.model_json_schema()
    return MARKS.sub(
        lambda match: (
            f"{match[1]}{pattern_table(schema) if match[2] == 'patterns' else table(schema, match[2])}{match[3]}"
        ),
        PAGE.read_text(encoding="utf-8"),
    )


def table(schema: dict[str, Any], name: str) -> str:
    """Return the table of an object's keys.

    Args:
        name: the object's path, and after a space the `type` of the object or, for `model`, which of its keys.
    """
    path, _, kind = name.partition(" ")
    properties = find_object(schema, path, kind if path != "model" else "")["properties"]
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for key, entry in properties.items():
        if (path == "model" and (key in PAPER_KEYS) != (kind == "paper")) or is_type(key, entry):
            continue
        rows.append(row(key, entry, NOTES.get(f"{path}.{key}")))
    return "\n".join(rows) + "\n"


def pattern_table(schema: dict[str, Any]) -> str:
    """Return the table of all patterns' keys. Equal keys share a row; keys of all patterns come last."""
    kinds: dict[str, list[str]] = {}  # those that have a row, in order
    shared: dict[str, Any] = {}
    for choice in schema["$defs"]["ModelConfig"]["properties"]["attention"]["anyOf"]:
        properties = choice.get("properties", {})
        kind = properties.get("type", {}).get("const")
        if kind in PATTERNS:
            for key, entry in properties.items():
                if key not in SHARED_PATTERN_KEYS:
                    kinds.setdefault(row(key, entry), []).append(f"`{kind}`")
            shared = {key: properties[key] for key in SHARED_PATTERN_KEYS[1:]}
    rows = [f"| {', '.join(names)} {text}" for text, names in kinds.items()]
    rows += [f"| all {row(key, entry)}" for key, entry in shared.items()]
    return "\n".join(["| type | key | default | meaning |", "|---|---|---|---|", *rows]) + "\n"


def row(key: str, entry: dict[str, Any], note: str | None = None) -> str:
    """Return a key's row: its default, its description with the choices and the largest value, and a note."""
    meaning = entry["description"].replace("|", "\\|")
    integers = [choice for choice in (entry, *entry.get("anyOf", ())) if choice.get("type") == "integer"]
    maximum = next((choice["maximum"] for choice in integers if "maximum" in choice), None)
    if maximum is not None and maximum <= LARGEST_SHOWN and "at most" not in meaning:
        meaning += f"; at most {maximum:,}"
    if "enum" in entry:
        meaning += f"; {', '.join(f'`{json.dumps(value)}`' for value in entry['enum'])}"
    return f"| `{key}` | {default(entry)} | {meaning}{f' ({note})' if note else ''} |"


def is_type(key: str, entry: dict[str, Any]) -> bool:
    """Whether a key is the `type` of an object of only one kind, which the text of the page has."""
    return key == "type" and "const" in entry


def find_object(schema: dict[str, Any], path: str, kind: str) -> dict[str, Any]:
    """Return the schema of the object at a path; ``kind`` is its `type` if there are several."""
    definition = schema
    for name in path.split("."):
        definition = resolve(definition["properties"][name], schema["$defs"], kind)
    return definition


def resolve(entry: dict[str, Any], definitions: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the one object that an entry may be, with the `type` ``kind`` unless that is empty."""
    if "$ref" in entry:
        return definitions[entry["$ref"].rpartition("/")[2]]
    choices = [*entry.get("anyOf", ()), *entry.get("oneOf", ())]
    objects = [resolve(choice, definitions, kind) for choice in choices if {"$ref", "anyOf", "oneOf"} & choice.keys()]
    matches = [definition for definition in objects if not kind or kind in types(definition)]
    assert len(matches) == 1, f"{len(matches)} objects of {kind}"
    return matches[0]


def types(definition: dict[str, Any]) -> list[str]:
    """Return the values of an object's `type`."""
    entry = definition["properties"].get("type", {})
    return [entry["const"]] if "const" in entry else entry.get("enum", [])


def default(entry: dict[str, Any]) -> str:
    """Return the cell of a default: empty if the key is required, "as below" for an object with its own table."""
    value = entry.get("default", ...)
    if value is ... or ("$ref" in entry and isinstance(value, dict)):
        return "" if value is ... else "as below"
    text = json.dumps(value)
    return f"`{text}`" if isinstance(value, str | list | dict) else text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
