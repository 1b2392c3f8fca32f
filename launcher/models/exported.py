"""An exported model's folder, read: config.json, and weights in one safetensors file or several. Needs no deepspeed.

Weights are mapped. A CPU uses them where they lie on the disk, and they take no memory of the process's own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from longstride.kernels import ConfigError
from longstride.launcher.config import load_json_object
from longstride.launcher.models.tensors import ALIGNMENT, MAPPED_BYTES, STORED, Fingerprint
from longstride.launcher.output import file_names
from longstride.sparse_model import ModelConfig, SparseTransformer

_ADVICE = "name a folder written by `longstride export RUN --output DIR`"
_MOST_NAMES = 3  # of many wrong tensors, in a message


class Exported:
    """A folder whose files fit together: every tensor of the model is there, in its shape, and nothing else.

    Raises:
        ConfigError: it is no export, of a newer format, torn, or its files do not belong together.
    """

    FORMAT = 1

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / file_names.CONFIG).is_file():
            raise ConfigError(f"{folder}: has no {file_names.CONFIG}; {_ADVICE}")
        self.content = load_json_object(folder / file_names.CONFIG)
        self.config = self._read_config()
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

    def _read_config(self) -> ModelConfig:
        version, path = self.content.get("format", self.FORMAT), self.folder / file_names.CONFIG
        if type(version) is not int or not 1 <= version <= self.FORMAT:
            raise ConfigError(f"{path}: format={version}: this Longstride reads 1 to {self.FORMAT}")
        if "model" not in self.content:
            raise ConfigError(f"{path}: has no model; {_ADVICE}")
        try:
            return ModelConfig.model_validate(self.content["model"])
        except ConfigError as error:
            raise ConfigError(*(f"{path}: {problem}" for problem in error.under("model").problems)) from None

    def _find_tensors(self) -> dict[str, str]:
        """Every tensor's file."""
        if (self.folder / file_names.WEIGHTS).is_file():
            return dict.fromkeys(self._opened(file_names.WEIGHTS).keys(), file_names.WEIGHTS)
        index = self.folder / file_names.WEIGHTS_INDEX
        if not index.is_file():
            raise ConfigError(f"{self.folder}: has no {file_names.WEIGHTS} and no {index.name}; {_ADVICE}")
        file_of = load_json_object(index).get("weight_map")
        if not isinstance(file_of, dict) or not file_of:
            raise ConfigError(f"{index}: has no weight_map, which tells the file of every tensor")
        for name, file in file_of.items():
            # A name alone: a path could lead out of the folder.
            plain = isinstance(file, str) and Path(file).name == file and file.strip(".")
            if not plain or "\\" in file or "\0" in file:
                raise ConfigError(f"{index}: weight_map.{name}={file!r}: must be the name of a file beside it")
        for file in sorted(set(file_of.values())):
            if not (self.folder / file).is_file():
                raise ConfigError(f"{self.folder}: has no {file}, which {index.name} names")
            indexed = {name for name, place in file_of.items() if place == file}
            self._refuse(indexed ^ set(self._opened(file).keys()), f"{file} and {index.name} differ about")
        return file_of

    def _opened(self, file: str) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(self.folder / file, "pt")
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{self.folder / file}: cannot be read as an export: {error}") from None
        return self._open[file]

    def _check_tensors(self) -> torch.dtype:
        """The type of all tensors, held against the model's names and shapes."""
        model = empty_model(self.config)
        expected = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
        buffers = dict(model.named_buffers())
        weights = file_names.WEIGHTS if file_names.WEIGHTS in self._file_of.values() else file_names.WEIGHTS_INDEX
        mismatch = f"{weights} is not the model of {file_names.CONFIG}:"
        self._refuse(expected.keys() - self._file_of.keys(), f"{mismatch} it lacks")
        self._refuse(self._file_of.keys() - expected.keys(), f"{mismatch} it has unknown")
        stored, wrong = set(), set()
        for name, file in self._file_of.items():
            described = self._opened(file).get_slice(name)
            if name not in buffers:
                stored.add(described.get_dtype())
            elif described.get_dtype() != STORED[torch.float32]:
                wrong.add(f"{name} of {described.get_dtype()} instead of F32")
            if described.get_shape() != expected[name]:
                wrong.add(f"{name} of {described.get_shape()} instead of {expected[name]}")
        self._refuse(wrong, f"{mismatch} it has")
        types = {text: dtype for dtype, text in STORED.items()}
        if len(stored) > 1 or not stored <= types.keys():
            rule = f"tensors of {', '.join(sorted(stored))}; all must be of one of {', '.join(types)}"
            raise ConfigError(f"{self.folder / weights}: {rule}")
        return types[stored.pop()]

    def _refuse(self, wrong: Set[str], what: str) -> None:
        """Raise ConfigError that names the first of these tensors; nothing where there are none."""
        if wrong:
            more = f" and {len(wrong) - _MOST_NAMES} more" if len(wrong) > _MOST_NAMES else ""
            raise ConfigError(f"{self.folder}: {what} {', '.join(sorted(wrong)[:_MOST_NAMES])}{more}")


def load_model(folder: Path, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> SparseTransformer:
    """An exported model in evaluation mode, on a device.

    Args:
        folder: written by `longstride export`.
        device: where it is to compute. A backend of attention that cannot run there gives way to the best that can.
        dtype: what it is to compute in; None: as it is stored. On a CPU the weights then stay on the disk, mapped. Any
            other type is a copy in memory.

    Raises:
        ConfigError: the folder holds no export, or weights and configuration do not belong together.
    """
    exported = Exported(folder)
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

    prefixes = {block: f"blocks.{number}" for number, block in enumerate(model.blocks)}
    # glibc keeps freed memory, hundreds of MB more with every block, unless it is asked to give it back.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)

    def compute(block: nn.Module, h: Tensor) -> Tensor:
        out = functional_call(block, fetch(block, prefixes[block]), (h,))
        trim(0)
        return out

    model.activation_checkpoint = compute
    for name, module in model.named_children():
        if name != "blocks":
            module.load_state_dict(fetch(module, name), assign=True)
    return model.eval()


def usable_device(name: str) -> torch.device:
    """The device that `--device` names; ConfigError where torch cannot use it."""
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"--device={name}: cannot be used: {str(error).splitlines()[0]}") from None


def empty_model(config: ModelConfig) -> SparseTransformer:
    """The network with names and shapes of its parameters, and neither memory nor values: on torch's meta device."""
    with torch.device("meta"), _Uninitialized():
        return SparseTransformer(config)


class _Uninitialized(TorchFunctionMode):
    """Leaves out initial values: on the meta device they would only load torch's compiler, 75 MB of it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return named["tensor"] if "tensor" in named else args[0]
        return func(*args, **named)


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
