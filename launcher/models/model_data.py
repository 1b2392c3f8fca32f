"""What the bytes of an exported model are: its modality, and a picture's size or a sound's rate."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.modalities import MODALITIES, Modality
from longstride.data_pipelines.palette import CHANNELS, Palette
from longstride.kernels import ConfigError
from longstride.launcher.config import load_json_object
from longstride.launcher.output import file_names
from longstride.sparse_model import ImageEmbedding, ModelConfig, StrictModel

if TYPE_CHECKING:
    from longstride.launcher.config import RunConfig


class _SavedData(StrictModel, extra="ignore"):
    """What an export and a run tell of their data."""

    modality: str | None = None
    properties: dict[str, int] = Field(default_factory=dict)
    palette: Any = None  # see ``Palette.from_text``


@dataclass(frozen=True, slots=True)
class ModelData:
    """The kind of a model's bytes, and of its tokens."""

    modality: Modality
    properties: Mapping[str, int]  # those that are known
    palette: Palette | None = None  # whose colours the tokens are; None: they are bytes

    @classmethod
    def of(
        cls, content: Mapping[str, Any], config: ModelConfig, modality: str | None = None, rate: int | None = None
    ) -> ModelData:
        """From the content of an exported config.json; a command line's ``modality`` and ``rate`` go first.

        Raises:
            ConfigError: pictures of unknown size, or of another than the model's context; a rate out of range; tokens
                that are neither bytes nor colours of a palette that is known.
        """
        try:
            data = _SavedData.model_validate(content.get("data") or {})
        except ConfigError as error:
            raise ConfigError(*(f"{file_names.CONFIG}: {each}" for each in error.under("data").problems)) from None
        palette = _palette(data.palette, config)
        known = data.properties | (_picture_size(config) if palette is None else {})
        name = modality or data.modality or config.embedding.modality
        if name not in MODALITIES:
            rule = f"must be one of {', '.join(sorted(MODALITIES))}"
            raise ConfigError(f"{file_names.CONFIG}: data.modality={name!r}: {rule}")
        kind = MODALITIES[name]
        if palette is not None and not kind.has_palettes:
            rule = "the model's tokens are colours of a palette, which make pictures; leave it out"
            raise ConfigError(f"--modality={name}: {rule}")
        if rate is not None:
            if "rate" not in kind.asks:
                raise ConfigError(f"--rate={rate}: the model writes {kind.words}; leave it out")
            if not 1 <= rate < 2**32:
                raise ConfigError(f"--rate={rate}: must be from 1 to 2**32 - 1 Hz")
            known["rate"] = rate
        try:
            context = config.context if palette is None else CHANNELS * config.context
            return cls(kind, kind.model_properties(known, context), palette)
        except DataError as error:
            rule = f"{file_names.CONFIG} {error}; take --modality text for plain bytes"
            raise ConfigError(f"--modality={name}: {rule}") from None

    @classmethod
    def of_run(cls, config: RunConfig, run: Path | None = None) -> ModelData:
        """From what a ``run`` folder tells, or its data folder if that is on this machine, or the model's embedding.

        Nothing is downloaded for it.

        Raises:
            ConfigError: what the run folder tells of its tokens cannot be read.
        """
        from longstride.data_pipelines.shards import DataManifest, load_palette
        from longstride.data_pipelines.stores import open_store

        if run is not None and os.path.lexists(run / file_names.DATA):
            return cls.of({"data": load_json_object(run / file_names.DATA, follow_links=False)}, config.model)
        sizes = _picture_size(config.model)
        if "://" not in config.data.path:
            with contextlib.suppress(DataError, OSError):
                manifest = DataManifest.load(store := open_store(config.data.path))
                kind, properties = MODALITIES[manifest.modality], manifest.properties
                if manifest.palette is not None:
                    return cls(kind, properties, load_palette(store, manifest.palette))
                return cls(kind, {**properties, **sizes})
        return cls(MODALITIES[config.data.modality or config.model.embedding.modality], sizes)

    def to_json(self) -> dict[str, Any]:
        """As config.json of an export has it, and ``of`` reads it."""
        content: dict[str, Any] = {"modality": self.modality.name, "properties": dict(self.properties)}
        return content if self.palette is None else {**content, "palette": self.palette.to_text()}

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


def _palette(told: Any, config: ModelConfig) -> Palette | None:
    """The palette that a config.json tells; ConfigError where it does not fit the model's tokens."""
    try:
        palette = None if told is None else Palette.from_text(told)
    except DataError as error:
        raise ConfigError(f"{file_names.CONFIG}: data.palette: {error}") from None
    if palette is not None and len(palette) != config.vocabulary:
        rule = f"has {len(palette)} colours, and the model {config.vocabulary} tokens"
        raise ConfigError(f"{file_names.CONFIG}: data.palette: {rule}; export it again")
    return palette


def _picture_size(config: ModelConfig) -> dict[str, int]:
    """Of a model whose positions are a picture's; else nothing."""
    embedding = config.embedding
    if not isinstance(embedding, ImageEmbedding):
        return {}
    return {name: getattr(embedding, name) for name in ("height", "width", "channels")}
