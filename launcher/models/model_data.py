"""The data that a model was trained on: modality, picture size, sample rate, palette and identity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import Field

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.modalities import MODALITIES, Modality, modality_named
from longstride.data_pipelines.palette import CHANNELS, Palette
from longstride.kernels import ConfigError
from longstride.launcher.output import file_names
from longstride.sparse_model import ImageEmbedding, ModelConfig, StrictModel

if TYPE_CHECKING:
    from longstride.data_pipelines.shards import DataFolder

_ARRANGEMENT = ("height", "width", "channels")


class _SavedData(StrictModel, extra="ignore"):
    """The data fields in an export's config.json and a run's data.json."""

    modality: str | None = None
    properties: dict[str, int] = Field(default_factory=dict)
    palette: Any = None  # see ``Palette.from_text``
    separator: int | None = None
    splits: dict[str, str] = Field(default_factory=dict)
    fingerprint: str | None = None


@dataclass(frozen=True, slots=True)
class ModelData:
    """The data that a model was trained on or is to read: kind of bytes and tokens, and identity."""

    modality: Modality
    properties: Mapping[str, int]  # those that are known
    palette: Palette | None = None  # its colours are the tokens; None: tokens are bytes
    separator: int | None = None  # the byte after each packed document
    splits: Mapping[str, str] = field(default_factory=dict)  # a digest of each split's shards
    fingerprint: str | None = None  # of the training stream, as in checkpoints; None: not known

    MEANING: ClassVar = ("palette", "arrangement")  # keys of ``differences`` that change what tokens mean

    @classmethod
    def of(
        cls, content: Mapping[str, Any], config: ModelConfig, modality: str | None = None, rate: int | None = None
    ) -> ModelData:
        """Read the data from an exported config.json; ``modality`` and ``rate`` from a command line take precedence.

        Raises:
            ConfigError: the picture size is unknown or does not fit the context, the rate is out of range, or tokens
                are neither bytes nor colours of a known palette.
        """
        data = cls.from_json(content.get("data"), config, modality=modality)
        kind, name, properties = data.modality, data.modality.name, dict(data.properties)
        if data.palette is not None and not kind.has_palettes:
            rule = "the model's tokens are colours of a palette, so it writes pictures; leave it out"
            raise ConfigError(f"--modality={name}: {rule}")
        if rate is not None:
            if "rate" not in kind.asks:
                raise ConfigError(f"--rate={rate}: the model writes {kind.words}; leave it out")
            if not 1 <= rate < 2**32:
                raise ConfigError(f"--rate={rate}: must be from 1 to 2**32 - 1 Hz")
            properties["rate"] = rate
        try:
            return replace(data, properties=kind.model_properties(properties, data.token_bytes * config.context))
        except DataError as error:
            rule = f"{file_names.CONFIG} {error}; take --modality text for plain bytes"
            raise ConfigError(f"--modality={name}: {rule}") from None

    @classmethod
    def from_json(
        cls, content: Any, config: ModelConfig, path: str = f"{file_names.CONFIG}: data.", modality: str | None = None
    ) -> ModelData:
        """Read ``content``, which ``to_json`` wrote (None counts as empty). The embedding supplies missing properties.

        ``path`` is the prefix of messages, and ``modality`` overrides the name in ``content``.

        Raises:
            ConfigError: the content is invalid, the modality is unknown, or the palette does not fit the model.
        """
        try:
            saved = _SavedData.model_validate({} if content is None else content)
        except ConfigError as error:
            raise ConfigError(*(f"{path}{problem}" for problem in error.problems)) from None
        name = modality or saved.modality or config.embedding.modality
        if name not in MODALITIES:
            raise ConfigError(f"{path}modality={name!r}: must be one of {', '.join(sorted(MODALITIES))}")
        try:
            palette = None if saved.palette is None else Palette.from_text(saved.palette)
        except DataError as error:
            raise ConfigError(f"{path}palette: {error}") from None
        if palette is not None and len(palette) != config.vocabulary:
            rule = f"has {len(palette)} colours, but the model has {config.vocabulary} tokens"
            raise ConfigError(f"{path}palette: {rule}; export it again")
        properties = dict(saved.properties)
        if palette is None and isinstance(config.embedding, ImageEmbedding):
            properties |= {size: getattr(config.embedding, size) for size in _ARRANGEMENT}
        return cls(MODALITIES[name], properties, palette, saved.separator, saved.splits, saved.fingerprint)

    @classmethod
    def of_folder(cls, folder: DataFolder) -> ModelData:
        """Return the data of a data folder; DataError for a damaged palette."""
        return cls(modality_named(folder.manifest.modality), folder.manifest.properties, folder.palette)

    def differences(self, data: ModelData) -> dict[str, str]:
        """Compare data with those that a model was trained on; return a clause for each difference, by its name.

        Names in ``MEANING`` are differences that make the data useless for the model.
        """
        clauses: dict[str, str] = {}
        if self.palette != data.palette:
            clauses["palette"] = "its palette is different"
        sizes, trained_sizes = ([side.properties.get(name) for name in _ARRANGEMENT] for side in (data, self))
        if None not in sizes + trained_sizes and sizes != trained_sizes:
            both = " and the model's ".join(" x ".join(map(str, size)) for size in (sizes, trained_sizes))
            clauses["arrangement"] = f"its pictures are {both} (height, width, channels)"
        if self.modality is not data.modality:
            clauses["modality"] = f"it holds {data.modality.words} and the model's data {self.modality.words}"
        rate, trained = data.properties.get("rate"), self.properties.get("rate")
        if rate and trained and rate != trained:
            clauses["rate"] = f"its sounds have {rate} Hz and the model's {trained}"
        if data.fingerprint and self.separator != data.separator:  # a bare folder is not cut into contexts
            words = ["none" if side.separator is None else str(side.separator) for side in (data, self)]
            clauses["separator"] = f"its separator is {words[0]} and the model's {words[1]}"
        if self.fingerprint and self.fingerprint != data.fingerprint:
            clauses["data"] = f"it is {self.different_splits(self.splits, data.splits)}"
        return clauses

    @staticmethod
    def different_splits(trained: Mapping[str, str], splits: Mapping[str, str]) -> str:
        """Describe the splits with different digests."""
        names = [name for name, digest in trained.items() if splits.get(name) != digest]
        if names:
            return f"another split {' and '.join(names)}"
        return "data that was built otherwise" if trained else "other data"

    def to_json(self) -> dict[str, Any]:
        """Return the object for a run's data.json and an export's config.json, which ``from_json`` reads."""
        content: dict[str, Any] = {"modality": self.modality.name, "properties": dict(self.properties)}
        palette = self.palette and self.palette.to_text()
        optional = {"palette": palette, "separator": self.separator, "splits": dict(self.splits) or None}
        optional["fingerprint"] = self.fingerprint
        return content | {name: value for name, value in optional.items() if value is not None}

    @property
    def unit(self) -> str:
        """The name of what a token stands for."""
        return self.modality.unit if self.palette is None else self.palette.unit

    @property
    def token_bytes(self) -> int:
        """Content bytes of a token."""
        return 1 if self.palette is None else CHANNELS

    def tokens(self, content: bytes) -> np.ndarray:
        """Convert content bytes to tokens, (n,) integers; DataError for an incomplete token."""
        array = np.frombuffer(content, dtype=np.uint8)
        return array if self.palette is None else self.palette.tokens(array)

    def content(self, tokens: np.ndarray) -> np.ndarray:
        """Convert tokens (…, n), integers, to content bytes: (…, n · ``token_bytes``) uint8."""
        return tokens.astype(np.uint8) if self.palette is None else self.palette.content(tokens)

    @property
    def file_properties(self) -> Mapping[str, int]:
        """The properties that a file of the modality needs; ConfigError if one is unknown."""
        for name in self.modality.asks:
            if name not in self.properties:
                rule = f"lacks the {self.modality.words}' {name}; add it, such as --{name} 12000"
                raise ConfigError(f"--{name}: {file_names.CONFIG} {rule}")
        return self.properties
