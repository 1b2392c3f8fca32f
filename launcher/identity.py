"""What a run was trained on, and whether the data at hand is that: the comparison of every verb that reads both."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from longstride.data_pipelines.errors import DataError
from longstride.kernels import ConfigError, Problem
from longstride.launcher.checkpoints import Checkpoint
from longstride.launcher.config import RunConfig, flattened, load_json_object
from longstride.launcher.data import RunData
from longstride.launcher.models import ModelData
from longstride.launcher.output import file_names, say
from longstride.launcher.ranks import Ranks


def trained_on(checkpoint: Checkpoint, data: ModelData | None = None) -> ModelData:
    """Return what a checkpoint's run was trained on, by the run's data.json.

    Older runs have no such file. Their data folder tells it where it is on this machine and still the one of the
    checkpoint's manifest; else what is not known counts as it is in ``data``, or follows from the model.

    Raises:
        ConfigError: data.json cannot be read.
    """
    path, config = checkpoint.folder.parents[1] / file_names.DATA, checkpoint.config
    fingerprint = checkpoint.manifest.stream.get("fingerprint")
    if os.path.lexists(path):
        known = ModelData.from_json(load_json_object(path, follow_links=False), config.model, f"{path}: ")
    elif data is not None and data.fingerprint == fingerprint:
        known = data
    else:
        content = {"modality": config.data.modality} if data is None else data.to_json()
        kind = {name: content[name] for name in ("modality", "properties") if name in content}  # older: no palette
        known = ModelData.from_json(kind, config.model)
        if "://" not in config.data.path:  # nothing is downloaded for it
            with suppress(ConfigError, DataError, OSError):
                folder = RunData(config, Ranks()).identity
                known = folder if folder.fingerprint == fingerprint else known
    return replace(known, separator=config.data.separator, fingerprint=fingerprint)


def open_data(checkpoint: Checkpoint, location: str | None, ranks: Ranks) -> tuple[RunData, dict[str, str]]:
    """Open the data that a checkpoint's run was trained on, or other data that the user names.

    Returns:
        The data, and how it differs from the run's (see ``ModelData.differences``). The first rank prints it.

    Raises:
        ConfigError: the run's folder is not found, or holds other data by now; or tokens mean something else.
        DataError: there is no data folder.
    """
    path = checkpoint.config.data.path
    if location is None and "://" not in path and not Path(path).exists():
        rule = f"of the run {checkpoint.folder.parents[1]} is not found from here; give --data FOLDER"
        raise ConfigError.at("data.path", path, rule)
    data = RunData(checkpoint.config, ranks, location)
    known, place = trained_on(checkpoint, data.identity), "data.path" if location is None else "--data"
    found, rule = compare_data(known, data.identity, f"{place}={location or path}", "run")
    if found and location is None:
        raise ConfigError.at("data.path", path, f"{rule}; name the run's data, or this, by --data FOLDER")
    if found and ranks.is_first:
        say(f"notice: --data={location}: {rule}")
    return data, found


def compare_data(known: ModelData, data: ModelData, place: str, subject: str) -> tuple[dict[str, str], str]:
    """Compare data with what a run or model was trained on: the differences, and what is said of them.

    Raises:
        ConfigError: tokens or their places mean something else.
    """
    found = known.differences(data)
    rule = f"is not what the {subject} was trained on: {'; '.join(found.values())}"
    if any(name in found for name in ModelData.MEANING):
        way = f"name data of the {subject}'s palette and size by --data FOLDER"
        raise ConfigError(f"{place}: {rule}; {way}, built with --palette-from where there is one")
    return found, rule


def check_matches(checkpoint: Checkpoint, config: RunConfig, data: ModelData) -> None:
    """Whether a run of a configuration on ``data`` may go on from a checkpoint.

    Raises:
        ConfigError: it belongs to another model, data order or batch. Another number of processes, ZeRO stage or
            precision is no reason: see ``needs_conversion``.
    """
    saved, state = checkpoint.config, checkpoint.stream
    origin = f"the checkpoint {checkpoint.folder}"
    if saved.data.order != config.data.order:
        rule = f"{origin} counts steps of the order {saved.data.order!r}, which is no more; index its tars with "
        rule += "`longstride data index`, and begin a run in another folder"
        raise ConfigError.at("data.order", config.data.order, rule)
    problems = []
    model, saved_model = (flattened(each.to_json()["model"], "model") for each in (config, saved))
    for path in sorted((model.keys() | saved_model.keys()) - {"model.backend"}):  # who computes, not what
        if model.get(path) != saved_model.get(path):
            rule = f"{origin} belongs to another model, with {saved_model.get(path)!r} there"
            problems.append(Problem(path, rule, model.get(path)))
    names = ("train_split", "shuffle_bytes", "packing", "separator", "hop")
    now, before = (each.to_json()["data"] for each in (config, saved))
    pairs = [(f"data.{name}", now[name], before[name]) for name in names]
    pairs.append(("data.seed", config.data.seed, state.seed))
    pairs.append(("train.global_batch", config.train.global_batch, state.global_batch))
    problems += [Problem(path, f"{origin} has {before}", now) for path, now, before in pairs if now != before]
    # The fingerprint covers the context, the split, cutting and shuffling: no second line for what has one.
    explained = any(each.path == "model.context" or each.path.startswith("data.") for each in problems)
    if state.fingerprint != data.fingerprint and not explained:
        found = trained_on(checkpoint, data).differences(data)
        rule = f"{origin} belongs to other data: {'; '.join(found.values())}"
        problems.append(Problem("data.path", rule, config.data.path))
    if problems:
        raise ConfigError(*problems)
