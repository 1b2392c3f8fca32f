"""README.md of an exported model: what is known of its run, for people and for model hubs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from longstride.data_pipelines.modalities import modality_named
from longstride.launcher.checkpoints import Checkpoint
from longstride.launcher.config import RunConfig
from longstride.launcher.engine import AVERAGE
from longstride.launcher.models import empty_model
from longstride.launcher.output import find_lines


def model_card(run: Path, checkpoint: Checkpoint, config: RunConfig, kind: str, dtype: str, fingerprint: str) -> str:
    """The text of the card."""
    name = run.resolve().name
    rows = [*_figures(checkpoint, config, kind, dtype), *_losses(run, checkpoint, config)]
    about = ["", config.notes.strip()] if config.notes.strip() else []
    return "\n".join(
        [
            *_front_matter(config),
            "",
            f"# {name}",
            "",
            "A Sparse Transformer (Child et al. 2019) over bytes, trained with Longstride and exported by it.",
            *about,
            "",
            "| | |",
            "|---|---|",
            *(f"| {title} | {_escaped(value)} |" for title, value in rows),
            f"| fingerprint | `{fingerprint}` |",
            "",
            "With Longstride installed, in this folder:",
            "",
            "```",
            *modality_named(config.model.embedding.type).examples,
            "longstride sample . --likelihood FILE",
            "```",
            "",
        ]
    )


def _front_matter(config: RunConfig) -> list[str]:
    """What hubs read."""
    modality = modality_named(config.model.embedding.type)
    task = [f"pipeline_tag: {modality.hub_task}"] if modality.hub_task else []
    tags = ["longstride", "sparse-transformer", "byte-level", modality.name]
    return ["---", "library_name: longstride", *task, "tags:", *(f"- {tag}" for tag in tags), "---"]


def _figures(checkpoint: Checkpoint, config: RunConfig, kind: str, dtype: str) -> list[tuple[str, str]]:
    model, manifest = config.model, checkpoint.manifest
    weights = f"{dtype}, " + ("the moving average of the trained ones" if kind == AVERAGE else "as they were trained")
    return [
        ("parameters", f"{sum(parameter.numel() for parameter in empty_model(model).parameters()):,}"),
        ("context", f"{model.context:,} bytes"),
        ("network", f"{model.layers} layers of width {model.width}, {model.heads} heads"),
        ("attention", f"`{json.dumps(model.attention)}`"),
        ("data", f"{_data_name(config.data.path)}: {modality_named(model.embedding.type).description}"),
        ("steps", f"{manifest.step:,}, each of {config.train.global_batch} contexts"),
        ("trained in", f"{manifest.precision}, ZeRO {manifest.zero_stage}, {manifest.world_size} processes"),
        ("weights", weights),
    ]


def _losses(run: Path, checkpoint: Checkpoint, config: RunConfig) -> list[tuple[str, str]]:
    """What metrics.jsonl says of the very step."""
    found = []
    for title, split in (("training", "train"), ("validation", config.data.validation_split)):
        line: dict[str, Any] = find_lines(run, split).get(checkpoint.manifest.step, {})
        bits = line.get("bits_per_byte")
        if isinstance(bits, int | float):
            what = "the step's batch" if split == "train" else f"{line.get('tokens', 0):,} bytes of {split}"
            found.append((f"{title} bits per byte", f"{bits:.4f} on {what}"))
    return found


def _data_name(path: str) -> str:
    """The last part of a folder's path or URL: no more of a machine belongs into a card."""
    return Path(urlsplit(path).path.rstrip("/")).name or "data"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
