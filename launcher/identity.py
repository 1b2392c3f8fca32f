"""The data that a run was trained on, and its comparison with the data at hand, for every verb that reads both."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from longstride.data_pipelines.errors import DataError
from longstride.kernels import ConfigError, Problem
from longstride.launcher.checkpoints import Checkpoint
from longstride.launcher.config import RunConfig, flattened, load_json_object
from longstride.launcher.data import TrainingData
from longstride.launcher.models import ModelData
from longstride.launcher.output import file_names, say
from longstride.launcher.ranks import Ranks


def trained_on(checkpoint: Checkpoint, data: ModelData | None = None) -> ModelData:
    """Return the description of the data that a checkpoint's run was trained on, from the run's data.json.

    Older runs have no such file. Then their data folder describes it, if it is on this machine and has the fingerprint
    of the checkpoint's manifest. Otherwise unknown properties are those of ``data``, or follow from the model.
    """
    path, config = checkpoint.folder.parents[1] / file_names.DATA, checkpoint.config
    fingerprint = checkpoint.manifest.stream.get("fingerprint")
    if os.path.lexists(path):
        identity = ModelData.from_json(load_json_object(path, follow_links=False), config.model, f"{path}: ")
    elif data is not None and data.fingerprint == fingerprint:
        identity = data
    else:
        content = {"modality": config.data.modality} if data is None else data.to_json()
        kind = {name: content[name] for name in ("modality", "properties") if name in content}  # older: no palette
        identity = ModelData.from_json(kind, config.model)
        if "://" not in config.data.path:  # remote data is not downloaded for this
            with suppress(ConfigError, DataError, OSError):
                folder = TrainingData(config, Ranks()).identity
                identity = folder if folder.fingerprint == fingerprint else identity
    return replace(identity, separator=config.data.separator, fingerprint=fingerprint)


def open_data(checkpoint: Checkpoint, location: str | None, ranks: Ranks) -> tuple[TrainingData, dict[str, str]]:
    """Open the data of a checkpoint's run, or other data that the user names; return it and its differences.

    Rank 0 prints the differences, see ``ModelData.differences``. ConfigError means that the run's data folder is
    missing or has changed, or that tokens have another meaning.
    """
    path = checkpoint.config.data.path
    if location is None and "://" not in path and not Path(path).exists():
        rule = f"of the run {checkpoint.folder.parents[1]} cannot be found; give --data FOLDER"
        raise ConfigError.at("data.path", path, rule)
    data = TrainingData(checkpoint.config, ranks, location)
    training_data, place = trained_on(checkpoint, data.identity), "data.path" if location is None else "--data"
    differences, rule = compare_data(training_data, data.identity, f"{place}={location or path}", "run")
    if differences and location is None:
        raise ConfigError.at("data.path", path, f"{rule}; name the run's data, or this, by --data FOLDER")
    if differences and ranks.is_first:
        say(f"notice: --data={location}: {rule}")
    return data, differences


def compare_data(training_data: ModelData, data: ModelData, place: str, subject: str) -> tuple[dict[str, str], str]:
    """Compare data with the training data of a run or model; return the differences, and a message about them.

    ConfigError means that tokens or their positions have another meaning.
    """
    differences = training_data.differences(data)
    rule = f"is not what the {subject} was trained on: {'; '.join(differences.values())}"
    if any(name in differences for name in ModelData.MEANING):
        way = f"name data of the {subject}'s palette and size by --data FOLDER"
        raise ConfigError(f"{place}: {rule}; {way}, built with --palette-from if it has a palette")
    return differences, rule


def check_matches(checkpoint: Checkpoint, config: RunConfig, data: ModelData) -> None:
    """Raise ConfigError if a checkpoint belongs to a run of another model, data order or batch.

    The number of processes, the ZeRO stage and the precision may differ.
    """
    saved, state = checkpoint.config, checkpoint.stream
    origin = f"the checkpoint {checkpoint.folder}"
    if saved.data.order != config.data.order:
        rule = f"{origin} counts steps of the order {saved.data.order!r}, which was removed; index its tars with "
        rule += "`longstride data index`, and start a run in another folder"
        raise ConfigError.at("data.order", config.data.order, rule)
    problems = []
    model, saved_model = (flattened(version.to_json()["model"], "model") for version in (config, saved))
    for path in sorted((model.keys() | saved_model.keys()) - {"model.backend"}):  # any backend computes the same
        if model.get(path) != saved_model.get(path):
            rule = f"{origin} belongs to another model, with {saved_model.get(path)!r} there"
            problems.append(Problem(path, rule, model.get(path)))
    names = ("train_split", "shuffle_bytes", "packing", "separator", "hop")
    now, before = (version.to_json()["data"] for version in (config, saved))
    pairs = [(f"data.{name}", now[name], before[name]) for name in names]
    pairs.append(("data.shuffle_shards", config.data.shuffle_shards, saved.data.shuffle_shards))
    pairs.append(("data.seed", config.data.seed, state.seed))
    pairs.append(("train.global_batch", config.train.global_batch, state.global_batch))
    problems += [Problem(path, f"{origin} has {before}", now) for path, now, before in pairs if now != before]
    # The fingerprint covers the context, the split, cutting and shuffling, which may have a problem already.
    is_explained = any(problem.path == "model.context" or problem.path.startswith("data.") for problem in problems)
    if state.fingerprint != data.fingerprint and not is_explained:
        differences = trained_on(checkpoint, data).differences(data)
        rule = f"{origin} belongs to other data: {'; '.join(differences.values())}"
        problems.append(Problem("data.path", rule, config.data.path))
    if problems:
        raise ConfigError(*problems)
