"""Files of an export for other people and programs: a model card, and what transformers needs to load it.

transformers uses the classes of ``longstride.launcher.hub``: through the stub next to the weights, which imports the
installed Longstride, or through ``longstride.launcher.hub.register()``.
"""

from __future__ import annotations

import difflib
import json
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from jinja2 import StrictUndefined, Template

from longstride.data_pipelines.durable import write_over
from longstride.data_pipelines.plain_files import read_plain
from longstride.kernels import ConfigError
from longstride.launcher.checkpoints import Checkpoint
from longstride.launcher.models import AVERAGE, Exported, ModelData, Shapes
from longstride.launcher.output import file_names, hub_stub, metrics_file
from longstride.sparse_model import ModelConfig

_BYTE_VALUES = 256
# https://huggingface.co/docs/hub/repositories-licenses lists the hub's identifiers.
_LICENSES = (
    "afl-3.0", "agpl-3.0", "apache-2.0", "apple-amlr", "apple-ascl", "artistic-2.0", "bigcode-openrail-m",
    "bigscience-bloom-rail-1.0", "bigscience-openrail-m", "bsd", "bsd-2-clause", "bsd-3-clause",
    "bsd-3-clause-clear", "bsl-1.0", "c-uda", "cc", "cc-by-2.0", "cc-by-2.5", "cc-by-3.0", "cc-by-4.0",
    "cc-by-nc-2.0", "cc-by-nc-3.0", "cc-by-nc-4.0", "cc-by-nc-nd-3.0", "cc-by-nc-nd-4.0", "cc-by-nc-sa-2.0",
    "cc-by-nc-sa-3.0", "cc-by-nc-sa-4.0", "cc-by-nd-4.0", "cc-by-sa-3.0", "cc-by-sa-4.0", "cc0-1.0",
    "cdla-permissive-1.0", "cdla-permissive-2.0", "cdla-sharing-1.0", "creativeml-openrail-m",
    "deepfloyd-if-license", "ecl-2.0", "epl-1.0", "epl-2.0", "etalab-2.0", "eupl-1.1", "eupl-1.2",
    "fair-noncommercial-research-license", "gemma", "gfdl", "gpl", "gpl-2.0", "gpl-3.0", "h-research",
    "intel-research", "isc", "lgpl", "lgpl-2.1", "lgpl-3.0", "lgpl-lr", "llama2", "llama3", "llama3.1", "llama3.2",
    "llama3.3", "llama4", "lppl-1.3c", "mit", "mpl-2.0", "ms-pl", "ncsa", "odbl", "odc-by", "ofl-1.1", "openrail",
    "openrail++", "osl-3.0", "pddl", "postgresql", "unknown", "unlicense", "wtfpl", "zlib",
)  # fmt: skip
_OTHER = "other:"  # prefix of a license unknown to the hub


def hub_fields(model: ModelConfig) -> dict[str, Any]:
    """Return the fields of config.json for transformers. Its classes refuse a model of classes in one line."""
    causal = model.objective.causal
    architecture = "LongstrideForCausalLM" if causal else "LongstrideForMaskedLM"
    return {
        "model_type": "longstride",  # see longstride.launcher.hub.LongstrideConfig
        "architectures": [] if model.objective.num_classes else [architecture],
        "auto_map": hub_stub.auto_map(causal),
    }


def hub_files(model: ModelConfig, palette: bool = False) -> dict[str, str]:
    """Return files by name: the stub, and a tokenizer if all tokens are bytes of text and some are predicted."""
    causal = model.objective.causal
    files = {hub_stub.FILE: hub_stub.text(causal)}
    if _has_tokenizer(model, palette) and not model.objective.num_classes:
        content = {
            "tokenizer_class": "LongstrideTokenizer",
            "auto_map": hub_stub.TOKENIZER_AUTO_MAP,
            "model_max_length": model.context - causal,  # if causal, without the start, and so that a byte can follow
            **({} if causal else {"mask_token": hub_stub.MASK}),
        }
        files["tokenizer_config.json"] = json.dumps(content, indent=2) + "\n"
    return files


def _has_tokenizer(model: ModelConfig, palette: bool) -> bool:
    return model.embedding.modality == "text" and model.vocabulary == _BYTE_VALUES and not palette


def refresh_stub(folder: Path, *, trust_code: bool = False) -> str:
    """Rewrite the stub for transformers in an export by an earlier Longstride; return a line about it.

    Older stubs import modules that were renamed since. Nothing else in the folder changes.

    Raises:
        ConfigError: the folder holds no export, or one from before exports had stubs.
    """
    exported, path = Exported(folder, trust_code=trust_code), folder / hub_stub.FILE
    if exported.content.get("auto_map") != hub_fields(exported.config)["auto_map"]:
        rule = f"does not name the classes of {hub_stub.FILE} for transformers; export the model again"
        raise ConfigError(f"{folder / file_names.CONFIG}: {rule}")
    text = hub_stub.text(exported.config.objective.causal).encode()
    with suppress(OSError):  # missing, not a plain file, or longer
        if read_plain(path, len(text)) == text:
            return f"{path}: is this version's already; nothing is written"
    write_over(path, text)
    return f"{path}: rewritten; nothing else is changed"


def model_card(
    run: Path,
    checkpoint: Checkpoint,
    data_kind: ModelData,
    kind: str,
    dtype: str,
    fingerprint: str,
    licensed: dict[str, str],
) -> str:
    """Return the text of README.md, with what is known about the run of a checkpoint.

    ``data_kind`` describes the bytes, ``kind`` is ``TRAINED`` or ``AVERAGE``, and ``licensed`` has the fields of a
    license.
    """
    config, manifest = checkpoint.config, checkpoint.manifest
    model, modality, palette = config.model, data_kind.modality, data_kind.palette
    token = "byte" if palette is None else palette.unit
    predicted = model.objective.unit(token)
    # Only the last part of a path or URL, since the rest belongs to this machine.
    data = Path(urlsplit(config.data.path).path.rstrip("/")).name or "data"
    weights = "the moving average of the trained ones" if kind == AVERAGE else "as they were trained"
    rows = {
        "parameters": f"{Shapes.of_model(model).parameters:,}",
        "context": f"{model.context:,} {token}s",
        "network": f"{model.layers} layers of width {model.width}, {model.heads} heads",
        "attention": f"`{json.dumps(model.attention)}`",
        **({} if model.objective.next_token else {"objective": f"`{json.dumps(model.objective.model_dump())}`"}),
        "data": f"{data}: {modality.description}"
        if palette is None
        else f"{data}: {modality.words}, each pixel one of {len(palette):,} colours",
        "steps": f"{manifest.step:,}, each of {config.train.global_batch} contexts",
        "trained in": f"{manifest.precision}, ZeRO {manifest.zero_stage}, {manifest.world_size} processes",
        "weights": f"{dtype}, {weights}",
    }
    split = config.data.validation_split
    steps, evaluations = metrics_file.find_steps(run), metrics_file.find_evaluations(run, split)
    for title, recorded in (("training", steps), ("validation", evaluations)):
        line: dict[str, Any] = recorded.get(manifest.step, {})
        bits = line.get(metrics_file.bits_name(predicted))
        is_per_byte = "bytes" in line or config.data.separator is None  # older lines count separators as bytes
        if bits is not None and is_per_byte:
            content = f"{metrics_file.content_of(line):,} {predicted}s of {split}"
            what = "the step's batch" if recorded is steps else content
            accuracy = f", accuracy {line['accuracy']:.4f}" if "accuracy" in line else ""
            rows[f"{title} bits per {predicted}"] = f"{bits:.4f}{accuracy} on {what}"
    front = {"library_name": "longstride", **licensed}
    if "license_name" in front:
        front["license_name"] = json.dumps(front["license_name"])
    if modality.hub_task and not model.objective.num_classes:
        front["pipeline_tag"] = modality.hub_task if model.objective.causal else "fill-mask"
    decoded = "" if palette is None else " --decoded"
    template = resources.files("longstride.launcher.exports").joinpath("model_card.jinja").read_text(encoding="utf-8")
    return Template(template, trim_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined).render(
        front=front,
        tags=["longstride", "sparse-transformer", "byte-level" if palette is None else "palette", modality.name],
        name=run.resolve().name,
        unit=token,
        notes=config.notes.strip(),
        rows=rows,
        fingerprint=fingerprint,
        num_classes=model.objective.num_classes,
        predicts_next=model.objective.next_token,
        commands=[*modality.examples, f"longstride sample . --likelihood FILE{decoded}"],
        has_tokenizer=_has_tokenizer(model, palette is not None),
        context=model.context,
        vocabulary=model.vocabulary,
    )


def license_fields(text: str) -> dict[str, str]:
    """Return the card's fields of a license, an identifier of the hub or `other:NAME`; ConfigError for others."""
    name = text.removeprefix(_OTHER)
    if name != text and name.isprintable() and name.strip() == name != "":
        return {"license": "other", "license_name": name}
    if text not in _LICENSES:
        near = difflib.get_close_matches(text.lower(), _LICENSES, 1)
        nearest = _OTHER + (name if name not in ("", "other") else "NAME")
        rule = f"must be an identifier of Hugging Face's hub, or {_OTHER}NAME"
        raise ConfigError(f"--license={text}: {rule}; nearest {near[0] if near else nearest}")
    return {"license": text}
