"""What a model was trained on: the modality, a picture's size, a sound's rate, the palette, and which data it was."""

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
    """What an export and a run tell of their data."""

    modality: str | None = None
    properties: dict[str, int] = Field(default_factory=dict)
    palette: Any = None  # see ``Palette.from_text``
    separator: int | None = None
    splits: dict[str, str] = Field(default_factory=dict)
    fingerprint: str | None = None


@dataclass(frozen=True, slots=True)
class ModelData:
    """What a model was trained on, or data that it is to read: the kind of the bytes and tokens, and their identity."""

    modality: Modality
    properties: Mapping[str, int]  # those that are known
    palette: Palette | None = None  # whose colours the tokens are; None: they are bytes
    separator: int | None = None  # the byte behind each packed document
    splits: Mapping[str, str] = field(default_factory=dict)  # a digest of each split's shards
    fingerprint: str | None = None  # of the training stream, as checkpoints have it; None: not known

    MEANING: ClassVar = ("palette", "arrangement")  # of ``differences``: tokens or their places mean something else

    @classmethod
    def of(
        cls, content: Mapping[str, Any], config: ModelConfig, modality: str | None = None, rate: int | None = None
    ) -> ModelData:
        """From the content of an exported config.json; a command line's ``modality`` and ``rate`` go first.

        Raises:
            ConfigError: pictures of unknown size, or of another than the model's context; a rate out of range; tokens
                that are neither bytes nor colours of a palette that is known.
        """
        data = cls.from_json(content.get("data"), config, modality=modality)
        kind, name, known = data.modality, data.modality.name, dict(data.properties)
        if data.palette is not None and not kind.has_palettes:
            rule = "the model's tokens are colours of a palette, which make pictures; leave it out"
            raise ConfigError(f"--modality={name}: {rule}")
        if rate is not None:
            if "rate" not in kind.asks:
                raise ConfigError(f"--rate={rate}: the model writes {kind.words}; leave it out")
            if not 1 <= rate < 2**32:
                raise ConfigError(f"--rate={rate}: must be from 1 to 2**32 - 1 Hz")
            known["rate"] = rate
        try:
            return replace(data, properties=kind.model_properties(known, data.token_bytes * config.context))
        except DataError as error:
            rule = f"{file_names.CONFIG} {error}; take --modality text for plain bytes"
            raise ConfigError(f"--modality={name}: {rule}") from None

    @classmethod
    def from_json(
        cls, content: Any, config: ModelConfig, place: str = f"{file_names.CONFIG}: data.", modality: str | None = None
    ) -> ModelData:
        """Read what ``to_json`` wrote; the model's embedding tells what is not known.

        Args:
            content: a run's data.json, or ``data`` in an export's config.json; None counts as empty.
            config: the model.
            place: where it stands, for messages.
            modality: the name to take in place of what ``content`` has.

        Raises:
            ConfigError: what no run writes, an unknown modality, or a palette that is none or does not fit the model.
        """
        try:
            saved = _SavedData.model_validate({} if content is None else content)
        except ConfigError as error:
            raise ConfigError(*(f"{place}{each}" for each in error.problems)) from None
        name = modality or saved.modality or config.embedding.modality
        if name not in MODALITIES:
            raise ConfigError(f"{place}modality={name!r}: must be one of {', '.join(sorted(MODALITIES))}")
        palette = _palette(saved.palette, config, place)
        properties = dict(saved.properties)
        if palette is None and isinstance(config.embedding, ImageEmbedding):
            properties |= {size: getattr(config.embedding, size) for size in _ARRANGEMENT}
        return cls(MODALITIES[name], properties, palette, saved.separator, saved.splits, saved.fingerprint)

    @classmethod
    def of_folder(cls, folder: DataFolder) -> ModelData:
        """What a data folder holds. Raises DataError for a damaged palette."""
        return cls(modality_named(folder.manifest.modality), folder.manifest.properties, folder.palette)

    def differences(self, data: ModelData) -> dict[str, str]:
        """Compare data with what a model was trained on: a clause for each thing that differs, by its name.

        No model can make sense of data where a name is in ``MEANING``.
        """
        found: dict[str, str] = {}
        if self.palette != data.palette:
            found["palette"] = "its tokens are of another palette"
        here, there = ([each.properties.get(name) for name in _ARRANGEMENT] for each in (data, self))
        if None not in here + there and here != there:
            sizes = " and the model's ".join(" x ".join(map(str, each)) for each in (here, there))
            found["arrangement"] = f"its pictures are {sizes} (height, width, channels)"
        if self.modality is not data.modality:
            found["modality"] = f"it holds {data.modality.words} and the model's data {self.modality.words}"
        rate, trained = data.properties.get("rate"), self.properties.get("rate")
        if rate and trained and rate != trained:
            found["rate"] = f"its sounds have {rate} Hz and the model's {trained}"
        if data.fingerprint and self.separator != data.separator:  # a folder alone is not cut into contexts
            words = ["none" if each.separator is None else str(each.separator) for each in (data, self)]
            found["separator"] = f"its separator is {words[0]} and the model's {words[1]}"
        if self.fingerprint and self.fingerprint != data.fingerprint:
            found["data"] = f"it is {self.different_splits(self.splits, data.splits)}"
        return found

    @staticmethod
    def different_splits(trained: Mapping[str, str], splits: Mapping[str, str]) -> str:
        """Name the splits whose digests differ, in words."""
        names = [name for name, digest in trained.items() if splits.get(name) != digest]
        if names:
            return f"another split {' and '.join(names)}"
        return "data that was built otherwise" if trained else "other data"

    def to_json(self) -> dict[str, Any]:
        """As a run's data.json and an export's config.json have it, and ``from_json`` reads it."""
        content: dict[str, Any] = {"modality": self.modality.name, "properties": dict(self.properties)}
        palette = self.palette and self.palette.to_text()
        known = {"palette": palette, "separator": self.separator, "splits": dict(self.splits) or None}
        known["fingerprint"] = self.fingerprint
        return content | {name: value for name, value in known.items() if value is not None}

    @property
    def unit(self) -> str:
        """What a token stands for."""
        return self.modality.unit if self.palette is None else self.palette.unit

    @property
    def token_bytes(self) -> int:
        """Content bytes of a token."""
        return 1 if self.palette is None else CHANNELS

    def tokens(self, content: bytes) -> np.ndarray:
        """The tokens of content bytes, (n,) integers; DataError for bytes that are no whole tokens."""
        array = np.frombuffer(content, dtype=np.uint8)
        return array if self.palette is None else self.palette.tokens(array)

    def content(self, tokens: np.ndarray) -> np.ndarray:
        """Tokens (…, n), integers, as content bytes: (…, n · ``token_bytes``) uint8."""
        return tokens.astype(np.uint8) if self.palette is None else self.palette.content(tokens)

    @property
    def file_properties(self) -> Mapping[str, int]:
        """The properties, with all that a file of the modality needs; ConfigError where one is not known."""
        for name in self.modality.asks:
            if name not in self.properties:
                rule = f"does not tell the {self.modality.words}' {name}; add it, such as --{name} 12000"
                raise ConfigError(f"--{name}: {file_names.CONFIG} {rule}")
        return self.properties


def _palette(content: Any, config: ModelConfig, place: str) -> Palette | None:
    """The palette that a file tells; ConfigError where it does not fit the model's tokens."""
    try:
        palette = None if content is None else Palette.from_text(content)
    except DataError as error:
        raise ConfigError(f"{place}palette: {error}") from None
    if palette is not None and len(palette) != config.vocabulary:
        rule = f"has {len(palette)} colours, and the model {config.vocabulary} tokens"
        raise ConfigError(f"{place}palette: {rule}; export it again")
    return palette
