"""The model whose attention is drawn, from a run or an export, and what it reads."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.order import read_context
from longstride.data_pipelines.palette import Palette
from longstride.data_pipelines.shards import DataFolder
from longstride.kernels import ConfigError
from longstride.launcher.checkpoints import master_weights, open_checkpoint
from longstride.launcher.data import check_location
from longstride.launcher.drawing.pattern import read_text
from longstride.launcher.identity import compare_data, open_data, trained_on
from longstride.launcher.models import Exported, ModelData, load_model
from longstride.launcher.output import say
from longstride.launcher.ranks import Ranks
from longstride.sparse_model import SparseTransformer

Step = int | Literal["best"] | None


class Subject(NamedTuple):
    """A model and what it reads."""

    model: SparseTransformer  # on the CPU, in evaluation mode
    tokens: Tensor  # (N,) integers
    unit: str  # what a token stands for
    palette: Palette | None
    name: str  # in a title


def of_run(
    run: Path, step: Step, number: int, weights: str, data: str | None, text: Path | None, trusted: bool
) -> Subject:
    """Open a run's checkpoint, and a context of its validation split, of other ``data`` or of a ``text``.

    Raises:
        ConfigError: no such checkpoint, or a text or data that are not for this model.
        DataError: no such context, or data that cannot be read.
    """
    checkpoint = open_checkpoint(run, step, trusted=trusted)
    config = checkpoint.config
    name = f"{run.resolve().name}, step {checkpoint.manifest.step}"
    if text is not None:
        identity = trained_on(checkpoint)
        tokens, name = _text(text, identity, config.model.context, config.model.vocabulary), f"{name}: {text.name}"
    else:
        folder, _ = open_data(checkpoint, data, Ranks())
        identity = folder.identity
        if not folder.has_split(config.data.validation_split):
            rule = f"the data has no split {config.data.validation_split!r} to show a context of"
            raise ConfigError(f"--data={data or config.data.path}: {rule}; name data that has it, or give --text FILE")
        tokens, name = folder.context(number), f"{name}, {config.data.validation_split}: context {number}"
    # On the CPU, whatever trained it: only the model's queries and keys are taken, and the rows are computed here.
    state = master_weights(checkpoint, weights)
    model = SparseTransformer(config.model.model_copy(update={"backend": "auto"}))
    model.load_state_dict(state)
    return Subject(model.eval(), tokens, "byte" if identity.palette is None else identity.unit, identity.palette, name)


def of_export(source: Path, number: int, data: str | None, text: Path | None, trusted: bool = False) -> Subject:
    """Open an exported model, and a context of the validation split of ``data`` or of a ``text``.

    Raises:
        ConfigError: no whole export, or one with code that is not ``trusted``; nothing to read; or a text or data that
            are not for this model.
        DataError: no such context, or data that cannot be read.
    """
    exported = Exported(source, trust_code=trusted)
    config, name = exported.config, source.resolve().name
    identity = ModelData.of(exported.content, config)
    if text is not None:
        tokens, name = _text(text, identity, config.context, config.vocabulary), f"{name}: {text.name}"
    elif data is None:
        raise ConfigError(f"{source}: an exported model has no data of its own; give --data DIR or --text FILE")
    else:
        check_location(data)
        folder = DataFolder(data)
        differences, rule = compare_data(identity, ModelData.of_folder(folder), f"--data={data}", "model")
        if differences:
            say(f"notice: --data={data}: {rule}")
        try:
            tokens = read_context(folder, "validation", number, context=config.context)
        except DataError as error:
            raise DataError(str(error).replace("context_number=", "--context-number=")) from None
        if int(tokens.max()) >= config.vocabulary:
            rule = f"has a byte of {int(tokens.max())}, and the model knows those below {config.vocabulary}"
            raise DataError(f"--data={data}: {rule}; name other data")
        name = f"{name}: {folder.store.location.rstrip('/').rpartition('/')[2]}, validation, context {number}"
    model = load_model(source, dtype=torch.float32, trust_code=trusted)
    return Subject(model, tokens, "byte" if identity.palette is None else identity.unit, identity.palette, name)


def _text(text: Path, identity: ModelData, context: int, vocabulary: int) -> Tensor:
    if identity.modality.name != "text":
        raise ConfigError(f"--text={text}: the model reads {identity.modality.words}; give --data DIR")
    return read_text(text, context, vocabulary)
