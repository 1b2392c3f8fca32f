"""The section `data`: where the bytes come from, and in what order they are read."""

from __future__ import annotations

import re
from pathlib import Path, PurePath
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from longstride.data_pipelines.settings import MOST_SECONDS, SHUFFLE_BYTES, RemoteSettings
from longstride.kernels import ConfigError, Problem
from longstride.sparse_model import StrictModel

_REMOTE = RemoteSettings()
_URL = re.compile(r"(?P<protocol>[^/]+://)(?P<user>[^/?#]*@)?(?P<path>[^?]*)(?P<query>\?.*)?", re.DOTALL)


class RemoteConfig(StrictModel):
    """The settings for fetching remote shards. Credentials come from the environment of the store's library."""

    cache: str | None = Field(
        default=None, min_length=1, description="folder for fetched files; null: `longstride` in the user's cache"
    )
    cache_bytes: int = Field(default=_REMOTE.cache_bytes, gt=0, description="size of the cache in bytes")
    attempts: int = Field(
        default=_REMOTE.attempts, gt=0, description="attempts in a row without a new byte before a file is given up"
    )
    timeout_seconds: float = Field(
        default=_REMOTE.timeout_seconds, gt=0, le=MOST_SECONDS, description="time-out of a connection and of a read"
    )
    parallel: int = Field(
        default=_REMOTE.parallel, gt=0, le=1024, description="files that each process fetches ahead at once"
    )
    most_bytes: int = Field(
        default=_REMOTE.most_bytes, gt=0, description="largest size of a manifest or another file of unknown size"
    )
    least_bytes_per_second: float = Field(
        default=_REMOTE.least_bytes_per_second,
        gt=0,
        le=MOST_SECONDS,
        description="lowest rate of a fetch, over all its attempts",
    )
    window_seconds: float = Field(
        default=_REMOTE.window_seconds, gt=0, le=MOST_SECONDS, description="how long a fetch may stay below that rate"
    )


class PackingConfig(StrictModel):
    """The attention between packed documents of one context."""

    attend: Literal["context", "document"] = Field(
        description="document: each is computed as in its own context; context: they form one text, as with true"
    )


class DataConfig(StrictModel):
    """The source of the bytes and the order in which they are read."""

    path: str = Field(
        min_length=1,
        description="data folder, or its URL (https://, s3://, gs://, az://, hf://); relative to the folder in "
        "which the run is started",
    )
    train_split: str = Field(default="train", min_length=1, description="split to train on")
    validation_split: str = Field(default="validation", min_length=1, description="split that evaluations score")
    order: Literal["exact", "streaming"] = Field(
        default="exact", description="leave it out; streaming is only for exports of old runs"
    )
    modality: str | None = Field(default=None, description="leave it out; only in old runs")
    extension: str | None = Field(default=None, description="leave it out; only in old runs")
    seed: int = Field(default=0, ge=0, lt=2**64, description="seed of the order")
    shuffle_bytes: int = Field(
        default=SHUFFLE_BYTES, ge=0, description="size of the blocks in which each lane is shuffled; 0: in sequence"
    )
    shuffle_shards: bool = Field(
        default=True, description="whether each epoch permutes the shards; false: in order, so that lanes go on"
    )
    packing: bool | PackingConfig | None = Field(
        default=None,
        description="whether documents are laid end to end; null: true for text, false for pictures, sounds and "
        "objective classify",
    )
    separator: int | None = Field(default=None, ge=0, le=255, description="byte after each packed document")
    hop: int | None = Field(
        default=None, gt=0, description="distance between contexts of an unpacked document; null: the context"
    )
    on_damage: Literal["abort", "substitute"] = Field(
        default="abort", description="what to do with damaged contexts; substitute: use another one"
    )
    workers: int = Field(default=0, ge=0, le=1024, description="loader processes per rank")
    prefetch: int = Field(default=2, gt=0, le=65_536, description="steps that each worker reads ahead")
    worker_timeout_seconds: float | None = Field(
        default=None,
        gt=0,
        description="time after which a silent worker counts as lost; null: half of train.timeout_seconds, and "
        "for remote data at least 2 × attempts × remote.timeout_seconds",
    )
    remote: RemoteConfig = Field(default=RemoteConfig(), description="how remote shards are fetched")

    left_out_at_default = ("shuffle_shards", "worker_timeout_seconds")

    @field_validator("packing", mode="before")
    @classmethod
    def _packing_object(cls, value: Any) -> Any:
        """Validate an object by its own rules, so that its errors do not mention booleans."""
        return PackingConfig.model_validate(value) if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _check_together(self) -> DataConfig:
        problems = []
        url = _URL.fullmatch(self.path)
        if url and (url["user"] or url["query"]):
            rule = "has a user or a query, which would be saved with the run: leave them out, and give credentials in "
            rule += "the environment (~/.netrc, AWS_PROFILE)"
            problems.append(Problem("path", rule, f"{url['protocol']}***{url['path']}"))
        if self.train_split == self.validation_split:
            rule = "must differ from train_split, or evaluations would score the training data; such as validation"
            problems.append(Problem("validation_split", rule, self.validation_split))
        for name, value in (("modality", self.modality), ("extension", self.extension)):
            if self.order == "exact" and value is not None:
                rule = f"is stored in the data folder; leave it out, and give --{name} to `longstride data index`"
                problems.append(Problem(name, rule, value))
        if problems:
            raise ConfigError(*problems)
        return self

    @property
    def packed(self) -> bool | None:
        """Whether documents are laid end to end; None: the modality decides."""
        return True if isinstance(self.packing, PackingConfig) else self.packing

    @property
    def apart(self) -> bool:
        """Whether packed documents cannot attend to each other."""
        return isinstance(self.packing, PackingConfig) and self.packing.attend == "document"

    def check_order(self) -> None:
        """Check that data in this order can be read. "streaming" only exists so that older runs can be exported.

        Raises:
            ConfigError: the order is "streaming"; the message has the command that converts the data.
        """
        if self.order == "exact":
            return
        options = [f"--{name} {value}" for name in ("modality", "extension") if (value := getattr(self, name))]
        command = " ".join(["longstride data index", self.path, "--output DIR", *options])
        rule = f"is no longer supported: run `{command}`, set data.path to DIR, leave out order, modality and extension"
        raise ConfigError.at("data.order", self.order, f"{rule}; such as exact, in a new run")


# The path in the configuration of each setting of the data room.
DATA_PATHS = {
    **{name: f"data.{name}" for name in DataConfig.model_fields},
    **{name: f"data.remote.{name}" for name in RemoteConfig.model_fields},
}


# `data.path` is relative to the folder in which a run is started. If `train.output` is relative too, that folder is the
# run folder's path without `train.output`. So a project that is moved as a whole keeps its runs and their data.
def saved_path(data: str, output: str) -> str:
    """Return the path of the data as a run saves it: absolute if the run folder would not lead to it."""
    if not _is_relative(data) or _start_folder(output, Path(output).resolve()) == Path.cwd().resolve():
        return data
    return str(Path(data).absolute())


def resolve_saved_path(data: str, output: str, run: Path) -> str:
    """Return a saved path of data as seen from the working directory; unchanged if nothing is there.

    ``output`` is the saved ``train.output``, ``run`` the run's folder at its present place.
    """
    start = _start_folder(output, run.resolve())
    if start is not None and _is_relative(data) and (start / data).exists():
        return str(start / data)
    return data


def _start_folder(output: str, run: Path) -> Path | None:
    """Return the folder in which a run was started, by its absolute path; None if ``output`` does not lead there."""
    parts = PurePath(output).parts
    if PurePath(output).is_absolute() or not parts or ".." in parts or run.parts[-len(parts) :] != parts:
        return None
    return run.parents[len(parts) - 1]


def _is_relative(path: str) -> bool:
    return "://" not in path and not Path(path).is_absolute()
