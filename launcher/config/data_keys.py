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
        default=None, min_length=1, description="folder for fetched files; null: longstride in the user's cache"
    )
    cache_bytes: int = Field(default=_REMOTE.cache_bytes, gt=0, description="bytes that the cache may hold")
    attempts: int = Field(
        default=_REMOTE.attempts, gt=0, description="fetches in a row that bring nothing, until a file is given up"
    )
    timeout_seconds: float = Field(
        default=_REMOTE.timeout_seconds, gt=0, le=MOST_SECONDS, description="until a fetch that stalls counts as failed"
    )
    parallel: int = Field(default=_REMOTE.parallel, gt=0, le=1024, description="files fetched ahead at once")
    most_bytes: int = Field(
        default=_REMOTE.most_bytes,
        gt=0,
        description="of a manifest, or another file whose size is not known before; more is refused",
    )
    least_bytes_per_second: float = Field(
        default=_REMOTE.least_bytes_per_second,
        gt=0,
        le=MOST_SECONDS,
        description="rate below which a fetch is given up, its attempts together",
    )
    window_seconds: float = Field(
        default=_REMOTE.window_seconds,
        gt=0,
        le=MOST_SECONDS,
        description="for which a fetch may be slower than that rate",
    )


class PackingConfig(StrictModel):
    """The attention between packed documents of one context."""

    attend: Literal["context", "document"] = Field(
        description="document: each is computed as in a context of its own; context: they are one text, as with true"
    )


class DataConfig(StrictModel):
    """The source of the bytes and the order in which they are read."""

    path: str = Field(
        min_length=1,
        description="folder of `longstride data build` or `index`, or its URL (https://, s3://, gs://, az://, hf://); "
        "a path counts from the folder in which the run is started",
    )
    train_split: str = Field(default="train", min_length=1, description="split that the model learns")
    validation_split: str = Field(
        default="validation", min_length=1, description="split that evaluations score; another one"
    )
    order: Literal["exact", "streaming"] = Field(
        default="exact",
        description="leave it out; streaming is of older runs alone: `longstride data index` takes its place",
    )
    modality: str | None = Field(default=None, description="leave it out; of older runs alone: a folder knows its own")
    extension: str | None = Field(default=None, description="leave it out; of older runs alone: a folder knows its own")
    seed: int = Field(default=0, ge=0, lt=2**64, description="of the order of the shards")
    shuffle_bytes: int = Field(
        default=SHUFFLE_BYTES,
        ge=0,
        description="each lane (what one row of the batches reads) is shuffled in blocks of this size; 0: in sequence",
    )
    packing: bool | PackingConfig | None = Field(
        default=None,
        description="documents laid end to end (true), with contexts of their own (false), or end to end and apart "
        "from each other (an object with attend); null: text true, pictures and sounds false",
    )
    separator: int | None = Field(default=None, ge=0, le=255, description="a byte behind each packed document")
    hop: int | None = Field(
        default=None, gt=0, description="bytes between the contexts of a document that is not packed; null: the context"
    )
    on_damage: Literal["abort", "substitute"] = Field(
        default="abort",
        description="what becomes of a context that cannot be read; substitute: another one stands in for it",
    )
    workers: int = Field(default=0, ge=0, le=1024, description="processes that read ahead for each rank")
    prefetch: int = Field(default=2, gt=0, le=65_536, description="steps that each worker reads ahead")
    worker_timeout_seconds: float | None = Field(
        default=None,
        gt=0,
        description="without anything from a worker that is waited for and fetches nothing, until the run saves and "
        "ends; null: half of train.timeout_seconds, and of remote data at least 2 × attempts × remote.timeout_seconds",
    )
    remote: RemoteConfig = Field(default=RemoteConfig(), description="how shards behind a URL are fetched")

    left_out_at_default = ("worker_timeout_seconds",)

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
            rule = "has a user or a query, which would be saved with the run: leave them out, and give credentials by "
            rule += "the environment (~/.netrc, AWS_PROFILE)"
            problems.append(Problem("path", rule, f"{url['protocol']}***{url['path']}"))
        if self.train_split == self.validation_split:
            rule = (
                "must be another split than train_split, or the score would be of what was learned; such as validation"
            )
            problems.append(Problem("validation_split", rule, self.validation_split))
        for name, value in (("modality", self.modality), ("extension", self.extension)):
            if self.order == "exact" and value is not None:
                rule = f"a data folder knows its own; leave it out, and give --{name} to `longstride data index`"
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
        rule = f"is read no longer: run `{command}`, set data.path to DIR, leave out order, modality and extension"
        raise ConfigError.at("data.order", self.order, f"{rule}; such as exact, in a new run")


# The path in the configuration of each setting of the data room.
DATA_PATHS = {
    **{name: f"data.{name}" for name in DataConfig.model_fields},
    **{name: f"data.remote.{name}" for name in RemoteConfig.model_fields},
}


# `data.path` is relative to the folder in which a run is started. If `train.output` is relative too, that folder is the
# run folder's path without `train.output`. So a project that is moved as a whole keeps its runs and their data.
def lasting_path(data: str, output: str) -> str:
    """Return the path of the data as a run saves it: absolute if the run folder would not lead to it."""
    if not _is_relative(data) or _start_folder(output, Path(output).resolve()) == Path.cwd().resolve():
        return data
    return str(Path(data).absolute())


def found_path(data: str, output: str, run: Path) -> str:
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
