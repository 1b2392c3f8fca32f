"""Makes the tables of docs/configuration.md from the classes that check it: `python docs/configuration_tables.py`.

A region between the marks `<!-- keys of WHAT -->` and `<!-- end of keys -->` has a row for each key of WHAT: its
default, and the description that editors show too. What only a page can do, a link for more, is here.
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
MORE = {  # where a page tells more
    "model.attention": "[systems](systems.md)",
    "model.vocabulary": "[palettes](data/images.md#use-a-palette)",
    "model.rotary": '`{"base": 10000}`',
    "model.reversible": "[systems](systems.md#attention-by-hashing-in-reversible-blocks-reformer)",
    "model.ngrams": "[n-grams](#modelngrams)",
    "model.feed_forward": "[experts](systems.md#mixture-of-experts)",
    "model.embedding": "[below](#modelembedding)",
    "data.order": "[why](data/tars.md)",
    "data.packing": '`{"attend": "document"}`: [documents apart](data/order.md#keep-packed-documents-apart)',
    "data.worker_timeout_seconds": "[how it ends](training/resume.md#when-a-loader-worker-is-lost)",
    "data.remote": "[below](#dataremote)",
    "train.optimizer": "[below](#trainoptimizer)",
    "train.schedule": '`{"type": "wsd", "decay_fraction": 0.5}`',
    "train.ema_decay": "`--weights ema` exports and scores it",
    "train.compile": "[what it needs and gives](training/speed.md#compile-the-blocks)",
    "train.sequence_parallel": "[contexts over several processes](training/share-contexts.md)",
    "train.keep_best": "[what it costs](training/evaluate.md#keep-and-use-the-best-checkpoint)",
    "train.checkpoint_in_background": "[how](checkpoints.md#save-in-the-background)",
    "train.timeout_seconds": "[what ends then, and how](faults.md#hangs)",
    "train.max_seconds": "[stopping](training/resume.md#stop-a-run)",
    "train.stop_when": '`{"evaluations": 5, "by": 0.0}`: [how it goes on](training/evaluate.md#stop-when-the-loss-stands-still)',
    "train.samples_every": "[how](training/watch.md#sample-during-training)",
    "train.samples": "[what](training/watch.md#sample-during-training)",
    "train.guards": "[below](#trainguards)",
    "train.guards.spike": '`{"deviations": 6, "window": 100, "policy": "skip"}`',
}
PAPER = (  # of the paper's network; all other keys of `model` came later
    *("context", "layers", "heads", "width", "attention", "embedding", "vocabulary", "feed_forward_ratio"),
    *("query_key_ratio", "dropout", "initialization", "backend"),
)
OF_ALL_PATTERNS = ("type", "combine", "key_value_heads")


def page() -> str:
    """The page with its tables as they should be."""
    made = RunConfig.model_json_schema()
    tables = {"patterns": pattern_keys(made)}
    return MARKS.sub(
        lambda mark: f"{mark[1]}{tables.get(mark[2]) or table(made, mark[2])}{mark[3]}",
        PAGE.read_text(encoding="utf-8"),
    )


def table(made: dict[str, Any], what: str) -> str:
    """The rows of an object, by its path. A word behind it chooses one of several kinds, or some keys of the model."""
    path, _, word = what.partition(" ")
    definition = part_of(made, path, word if path != "model" else "")
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for name, entry in definition["properties"].items():
        if path == "model" and (name in PAPER) != (word == "paper"):
            continue
        rows.append(row(name, entry, MORE.get(f"{path}.{name}")))
    return "\n".join(rows) + "\n"


def pattern_keys(made: dict[str, Any]) -> str:
    """A row for each key of each pattern; those that all have stand once."""
    rows = ["| type | key | default | meaning |", "|---|---|---|---|"]
    for part in made["$defs"]["ModelConfig"]["properties"]["attention"]["anyOf"]:
        kind = part.get("properties", {}).get("type", {}).get("const")
        if kind in PATTERNS:
            own = {name: entry for name, entry in part["properties"].items() if name not in OF_ALL_PATTERNS}
            rows += [f"| `{kind}` {row(name, entry)}" for name, entry in own.items()]
            shared = {name: part["properties"][name] for name in OF_ALL_PATTERNS[1:]}
    rows += [f"| all {row(name, entry)}" for name, entry in shared.items()]
    return "\n".join(rows) + "\n"


def row(name: str, entry: dict[str, Any], more: str | None = None) -> str:
    """The row of a key: its description, what it may be, and where there is ``more``."""
    meaning = entry["description"].replace("|", "\\|")
    whole = (each for each in (entry, *entry.get("anyOf", ())) if each.get("type") == "integer")
    bound = next((each["maximum"] for each in whole if "maximum" in each), None)
    if bound is not None and "at most" not in meaning:
        meaning += f"; at most {bound:,}"
    if "enum" in entry:
        meaning += f"; {', '.join(f'`{json.dumps(each)}`' for each in entry['enum'])}"
    return f"| `{name}` | {default(entry)} | {meaning}{f' ({more})' if more else ''} |"


def part_of(made: dict[str, Any], path: str, kind: str) -> dict[str, Any]:
    """The schema of the object at a path: the one whose `type` is ``kind``, where there are several."""
    definitions, part = made["$defs"], made
    for name in path.split("."):
        part = objects(part["properties"][name], definitions, kind)
    return part


def objects(entry: dict[str, Any], definitions: dict[str, Any], kind: str) -> dict[str, Any]:
    """The object that an entry may be."""
    if "$ref" in entry:
        return definitions[entry["$ref"].rpartition("/")[2]]
    choices = [*entry.get("anyOf", ()), *entry.get("oneOf", ())]
    found = [
        objects(each, definitions, kind) for each in choices if "$ref" in each or "anyOf" in each or "oneOf" in each
    ]
    fitting = [each for each in found if not kind or kind in kinds(each)]
    assert len(fitting) == 1, f"{len(fitting)} objects of {kind}"
    return fitting[0]


def kinds(part: dict[str, Any]) -> list[str]:
    """The types that an object goes by."""
    entry = part["properties"].get("type", {})
    return [entry["const"]] if "const" in entry else entry.get("enum", [])


def default(entry: dict[str, Any]) -> str:
    """The cell of a default: none where the key is required, or an object of its own."""
    value = entry.get("default", ...)
    if value is ... or ("$ref" in entry and isinstance(value, dict)):
        return "" if value is ... else "as below"
    text = json.dumps(value)
    return f"`{text}`" if isinstance(value, str | list | dict) else text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
