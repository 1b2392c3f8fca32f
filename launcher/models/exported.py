"""An exported model's folder, read: config.json, and weights in one safetensors file or several. Needs no deepspeed.

Weights are mapped. A CPU uses them where they lie on the disk, and they take no memory of the process's own.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.func import functional_call

from longstride.data_pipelines.plain_files import open_plain
from longstride.kernels import ConfigError, Problem
from longstride.launcher.config import load_json_object
from longstride.launcher.models.tensors import (
    ALIGNMENT,
    MAPPED_BYTES,
    STORED,
    Fingerprint,
    Shapes,
    empty_model,
    refuse,
)
from longstride.launcher.output import file_names, say
from longstride.sparse_model import BlockContext, MixerOutput, ModelConfig, SparseTransformer

_ADVICE = "name a folder written by `longstride export RUN --output DIR`"
_MOST_NAME = 255  # characters of a file's
_HEADER_BYTES, _ENTRY_BYTES = 1 << 20, 1 << 10  # the most of a safetensors header: in all, and a tensor more


class Exported:
    """A folder whose files fit together: every tensor of the model is there, in its shape, and nothing else.

    Args:
        folder: written by `longstride export`.
        trust_code: whether parts of the model that other packages define may be imported.

    Raises:
        ConfigError: it is no export, of a newer format, torn, or its files do not belong together; or it needs code of
            other packages that is not trusted or not installed.
    """

    FORMAT = 1

    def __init__(self, folder: str | Path, *, trust_code: bool = False) -> None:
        self.folder = folder = Path(folder)
        if not os.path.lexists(folder / file_names.CONFIG):
            raise ConfigError(f"{folder}: has no {file_names.CONFIG}; {_ADVICE}")
        self.content = load_json_object(folder / file_names.CONFIG)
        self.config, self._shapes = self._read_config(trust_code)
        self._open: dict[str, Any] = {}
        self._file_of = self._find_tensors()
        self._taken = 0  # bytes, since files were opened last
        self.dtype = self._check_tensors()

    @property
    def names(self) -> list[str]:
        """Of all tensors."""
        return list(self._file_of)

    @property
    def has_palette(self) -> bool:
        """Whether its tokens are the colours of a palette, and not bytes."""
        data = self.content.get("data")
        return isinstance(data, dict) and data.get("palette") is not None

    def tensor(self, name: str) -> Tensor:
        """One tensor as it is stored, on the CPU; it stays on the disk until it is used."""
        if self._taken > MAPPED_BYTES:
            self._open.clear()
            self._taken = 0
        tensor: Tensor = self._opened(self._file_of[name]).get_tensor(name)
        self._taken += tensor.nbytes
        return tensor

    def fingerprint(self) -> str:
        """The fingerprint, computed from the files: see ``longstride.launcher.models.tensors``."""
        fingerprint = Fingerprint(self.content["model"])
        for name in self.names:
            fingerprint.add(name, self.tensor(name))
        return fingerprint.hexdigest()

    def _read_config(self, trust_code: bool) -> tuple[ModelConfig, Shapes]:
        version, path = self.content.get("format", self.FORMAT), self.folder / file_names.CONFIG
        if type(version) is not int or not 1 <= version <= self.FORMAT:
            raise ConfigError.at(f"{path}: format", version, f"this Longstride reads 1 to {self.FORMAT}")
        if "model" not in self.content:
            raise ConfigError(f"{path}: has no model; {_ADVICE}")
        model, recorded = self.content["model"], self.content.get("code")
        recorded = recorded if isinstance(recorded, dict) else {}
        packages = ", ".join(dict.fromkeys(str(source).partition(", source ")[0] for source in recorded.values()))
        exported_with = f" (exported with {packages:.200})" if packages else ""
        if not trust_code and isinstance(model, dict) and (types := ModelConfig.foreign_types(model)):
            rule = f"is from another package{exported_with}; install it, and give --trust-code to run its code"
            raise ConfigError(f"{path}: {Problem('type', rule, types[0])}")
        try:
            config = ModelConfig.model_validate(model)
            shapes = Shapes.of_model(config)
        except ConfigError as error:
            told = (f"{path}: {problem}{exported_with}" for problem in error.under("model").problems)
            raise ConfigError(*told) from None
        for name, source in config.foreign_code().items():
            if (before := recorded.get(name)) not in (None, source):
                rule = f"was exported with {name} of {before!r:.99}, and here is {source}; it may compute otherwise"
                say(f"notice: {path}: {rule}")
        return config, shapes

    def _find_tensors(self) -> dict[str, str]:
        """Every tensor's file."""
        if os.path.lexists(self.folder / file_names.WEIGHTS):
            return dict.fromkeys(self._opened(file_names.WEIGHTS).keys(), file_names.WEIGHTS)
        index = self.folder / file_names.WEIGHTS_INDEX
        if not os.path.lexists(index):
            raise ConfigError(f"{self.folder}: has no {file_names.WEIGHTS} and no {index.name}; {_ADVICE}")
        file_of = load_json_object(index).get("weight_map")
        if not isinstance(file_of, dict) or not file_of:
            raise ConfigError(f"{index}: has no weight_map, which tells the file of every tensor")
        names_in: dict[str, set[str]] = {}
        for name, file in file_of.items():
            # A name alone: a path could lead out of the folder.
            plain = isinstance(file, str) and Path(file).name == file and file.strip(".")
            if not plain or len(file) > _MOST_NAME or "\\" in file or "\0" in file:
                raise ConfigError.at(f"{index}: weight_map.{name[:160]}", file, "must be the name of a file beside it")
            names_in.setdefault(file, set()).add(name)
        for file, indexed in sorted(names_in.items()):
            if not os.path.lexists(self.folder / file):
                raise ConfigError(f"{self.folder}: has no {file}, which {index.name} names")
            refuse(indexed ^ set(self._opened(file).keys()), f"{self.folder}: {file} and {index.name} differ about")
        return file_of

    def _opened(self, file: str) -> Any:
        """A file of tensors, whose header is no longer than the model's can be, and fits what follows it."""
        if file not in self._open:
            path = self.folder / file
            try:
                with open_plain(path) as weights:
                    length = int.from_bytes(weights.read(8), "little")
                most = _HEADER_BYTES + _ENTRY_BYTES * len(self._shapes.of)
                if length > most:
                    rule = f"a header of {length:,} bytes, where that of the model in {file_names.CONFIG} has at most"
                    raise ConfigError(f"{path}: cannot be read as an export: {rule} {most:,}")
                self._open[file] = safe_open(path, "pt")
            except (SafetensorError, OSError) as error:
                why = getattr(error, "strerror", None) or " ".join(str(error).split())[:400]
                raise ConfigError(f"{path}: cannot be read as an export: {why}") from None
        return self._open[file]

    def _check_tensors(self) -> torch.dtype:
        """The type of all tensors, held against the model's names and shapes."""
        weights = file_names.WEIGHTS if file_names.WEIGHTS in self._file_of.values() else file_names.WEIGHTS_INDEX
        described = {name: self._opened(file).get_slice(name) for name, file in self._file_of.items()}
        mismatch = f"{weights} is not the model of {file_names.CONFIG}:"
        self._shapes.check(
            {name: tuple(each.get_shape()) for name, each in described.items()}, mismatch, f"{self.folder}"
        )
        stored, wrong = set(), set()
        for name, each in described.items():
            if name not in self._shapes.buffers:
                stored.add(each.get_dtype())
            elif each.get_dtype() != STORED[torch.float32]:
                wrong.add(f"{name} of {each.get_dtype()} instead of F32")
        refuse(wrong, f"{self.folder}: {mismatch} it has")
        types = {text: dtype for dtype, text in STORED.items()}
        if len(stored) > 1 or not stored <= types.keys():
            rule = f"tensors of {', '.join(sorted(stored))}; all must be of one of {', '.join(types)}"
            raise ConfigError(f"{self.folder / weights}: {rule}")
        return types[stored.pop()]


def is_export(folder: Path) -> bool:
    """Whether a folder looks like an exported model: it has weights where a run has checkpoints."""
    return any((folder / name).is_file() for name in (file_names.WEIGHTS, file_names.WEIGHTS_INDEX))


def load_model(
    folder: str | Path,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    *,
    trust_code: bool = False,
) -> SparseTransformer:
    """An exported model in evaluation mode, on a device.

    Args:
        folder: written by `longstride export`.
        device: where it is to compute. A backend of attention that cannot run there gives way to the best that can.
        dtype: what it is to compute in; None: as it is stored. On a CPU the weights then stay on the disk, mapped. Any
            other type is a copy in memory.
        trust_code: whether parts of the model that other packages define may be imported.

    Raises:
        ConfigError: the folder holds no export, weights and configuration do not belong together, or the model needs
            code of other packages that is not trusted or not installed.
    """
    exported = Exported(folder, trust_code=trust_code)
    device, dtype = torch.device(device), dtype or exported.dtype
    model = empty_model(_runnable(exported.config, device, dtype))
    model.load_state_dict(_placed_state(model, exported.tensor, device, dtype), assign=True)
    return model.eval()


def streamed_model(
    config: ModelConfig, tensor: Callable[[str], Tensor], dtype: torch.dtype, device: torch.device
) -> SparseTransformer:
    """A model in evaluation mode whose blocks hold no weights: ``tensor`` fetches them by name for each use.

    So memory holds one residual block at a time, and none of those weights that are used as they are stored. The
    backend of attention gives way as in ``load_model``.
    """
    model = empty_model(_runnable(config, device, dtype))

    def fetch(module: nn.Module, prefix: str) -> dict[str, Tensor]:
        return _placed_state(module, lambda name: tensor(f"{prefix}.{name}"), device, dtype)

    prefixes: dict[nn.Module, str] = {block: f"blocks.{number}" for number, block in enumerate(model.blocks)}
    # glibc keeps freed memory, hundreds of MB more with every block, unless it is asked to give it back.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)

    def compute(block: nn.Module, h: Tensor, context: BlockContext) -> MixerOutput:
        output: MixerOutput = functional_call(block, fetch(block, prefixes[block]), (h, context))
        trim(0)
        return output

    model.activation_checkpoint = compute
    for name, module in model.named_children():
        if name != "blocks":
            module.load_state_dict(fetch(module, name), assign=True)
    return model.eval()


def usable_device(name: str | None) -> torch.device:
    """The device that `--device` names, or for None a GPU where there is one; ConfigError where torch cannot use it."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"--device={name}: cannot be used: {str(error).splitlines()[0]}") from None


def _placed_state(
    module: nn.Module, tensor: Callable[[str], Tensor], device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """A module's parameters on a device in a type, and its buffers as they are stored."""
    buffers = dict(module.named_buffers())
    stored = {name: tensor(name) for name in module.state_dict()}
    return {name: _placed(each, device, each.dtype if name in buffers else dtype) for name, each in stored.items()}


def _placed(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A tensor on a device, in a type, aligned as torch aligns its own; copied only where one of these asks for it."""
    placed = tensor.to(device, dtype)
    return placed.clone() if placed.data_ptr() % ALIGNMENT else placed


def _runnable(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> ModelConfig:
    """The configuration with a backend of attention that can run there: its own, or else the best."""
    try:
        config.check_backend(device, dtype, training=False)
    except ConfigError:
        return config.model_copy(update={"backend": "auto"})
    return config


@contextmanager
def computing_numbers(folder: Path) -> Iterator[None]:
    """Turns the FloatingPointError of logits that are no numbers into a ConfigError about the exported model."""
    try:
        yield
    except FloatingPointError as error:
        raise ConfigError(f"{folder}: computes {error}; export it anew, or in fp32") from None
