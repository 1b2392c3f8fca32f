"""An exported model's folder, read: config.json and weights in one safetensors file or several. Needs no deepspeed.

Weights are mapped: on a CPU they are used where they lie on the disk, and take no memory of the process's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.overrides import TorchFunctionMode

from longstride.kernels import ConfigError, check_backend
from longstride.launcher.config import load_json_object
from longstride.launcher.models.fingerprint import MAPPED_BYTES, STORED, TensorHash, combined
from longstride.launcher.output import file_names
from longstride.sparse_model import ModelConfig, SparseTransformer

EXPORT_FORMAT = 1
_ADVICE = "name a folder written by `longstride export RUN --output DIR`"
_ALIGNMENT = 64  # bytes: what torch's own memory has, and matrix products may round by
_SHOWN = 3  # names, of many that are wrong


class Exported:
    """A folder whose files fit together: every tensor of the model is there, in its shape, and nothing else.

    Raises:
        ConfigError: it is no export, of a newer format, torn, or its files do not belong together.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / file_names.CONFIG).is_file():
            raise ConfigError(f"{folder}: has no {file_names.CONFIG}; {_ADVICE}")
        self.content = load_json_object(folder / file_names.CONFIG)
        self.config = self._read_config()
        self._places = self._find_tensors()
        self._open: dict[str, Any] = {}
        self._taken = 0  # bytes, since files were opened last
        self.dtype = self._check_tensors()

    @property
    def names(self) -> list[str]:
        """Of all tensors."""
        return list(self._places)

    def tensor(self, name: str) -> Tensor:
        """One tensor as it is stored, on the CPU; it stays on the disk until it is used."""
        if self._taken > MAPPED_BYTES:
            self._open.clear()
            self._taken = 0
        found = self._file(self._places[name]).get_tensor(name)
        self._taken += found.nbytes
        return found

    def _read_config(self) -> ModelConfig:
        version, path = self.content.get("format", EXPORT_FORMAT), self.folder / file_names.CONFIG
        if type(version) is not int or not 1 <= version <= EXPORT_FORMAT:
            raise ConfigError(f"{path}: format={version}: this Longstride reads 1 to {EXPORT_FORMAT}")
        if "model" not in self.content:
            raise ConfigError(f"{path}: has no model; {_ADVICE}")
        try:
            return ModelConfig.model_validate(self.content["model"])
        except ConfigError as error:
            raise ConfigError(*(f"{path}: {problem}" for problem in error.under("model").problems)) from None

    def _find_tensors(self) -> dict[str, str]:
        """Every tensor's file."""
        if (self.folder / file_names.WEIGHTS).is_file():
            return dict.fromkeys(self._names_in(file_names.WEIGHTS), file_names.WEIGHTS)
        index = self.folder / file_names.WEIGHTS_INDEX
        if not index.is_file():
            either = f"no {file_names.WEIGHTS} and no {file_names.WEIGHTS_INDEX}"
            raise ConfigError(f"{self.folder}: has {either}; {_ADVICE}")
        places = load_json_object(index).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise ConfigError(f"{index}: has no weight_map, which tells the file of every tensor")
        for name, file in places.items():
            # A name alone: a path could lead out of the folder.
            plain = isinstance(file, str) and Path(file).name == file and file.strip(".")
            if not plain or "\\" in file or "\0" in file:
                raise ConfigError(f"{index}: weight_map.{name}={file!r}: must be the name of a file beside it")
        for file in sorted(set(places.values())):
            if not (self.folder / file).is_file():
                raise ConfigError(f"{self.folder}: has no {file}, which {file_names.WEIGHTS_INDEX} names")
            named = {name for name, place in places.items() if place == file}
            self._tell(sorted(named ^ set(self._names_in(file))), f"{file} and {file_names.WEIGHTS_INDEX} differ about")
        return places

    def _names_in(self, file: str) -> list[str]:
        with self._opened(file) as opened:
            return list(opened.keys())

    def _opened(self, file: str) -> Any:
        try:
            return safe_open(self.folder / file, "pt")
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{self.folder / file}: cannot be read as an export: {error}") from None

    def _file(self, file: str) -> Any:
        if file not in self._open:
            self._open[file] = self._opened(file)
        return self._open[file]

    def _check_tensors(self) -> torch.dtype:
        """The type of all tensors, held against the model's names and shapes."""
        expected = {name: list(tensor.shape) for name, tensor in empty_model(self.config).state_dict().items()}
        own = file_names.WEIGHTS if file_names.WEIGHTS in self._places.values() else file_names.WEIGHTS_INDEX
        mismatch = f"{own} is not the model of {file_names.CONFIG}:"
        self._tell(sorted(expected.keys() - self._places.keys()), f"{mismatch} it lacks")
        self._tell(sorted(self._places.keys() - expected.keys()), f"{mismatch} it has unknown")
        stored, wrong = set(), []
        for name, file in self._places.items():
            described = self._file(file).get_slice(name)
            stored.add(described.get_dtype())
            if described.get_shape() != expected[name]:
                wrong.append(f"{name} of {described.get_shape()} instead of {expected[name]}")
        self._tell(wrong, f"{mismatch} it has")
        types = {text: dtype for dtype, text in STORED.items()}
        if len(stored) > 1 or not stored <= types.keys():
            rule = f"tensors of {', '.join(sorted(stored))}; all must be of one of {', '.join(types)}"
            raise ConfigError(f"{self.folder / own}: {rule}")
        return types[stored.pop()]

    def _tell(self, wrong: list[str], what: str) -> None:
        if wrong:
            more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
            raise ConfigError(f"{self.folder}: {what} {', '.join(wrong[:_SHOWN])}{more}")


def load_model(folder: Path, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> SparseTransformer:
    """An exported model in evaluation mode, on a device.

    Args:
        folder: written by `longstride export`.
        device: where it is to compute. A backend of attention that cannot run there gives way to the best that can.
        dtype: what it is to compute in; as it is stored where None. On a CPU the weights then stay where they lie on
            the disk, and any other type is a copy in memory.

    Raises:
        ConfigError: the folder holds no export, or weights and configuration do not belong together.
    """
    exported = Exported(folder)
    device, dtype = torch.device(device), dtype or exported.dtype
    model = empty_model(runnable(exported.config, device, dtype))
    weights = {name: placed(exported.tensor(name), device, dtype) for name in exported.names}
    model.load_state_dict(weights, assign=True)
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
    """Leaves out initial values: on the meta device nothing would come of them but torch's compiler, 75 MB of it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return named["tensor"] if "tensor" in named else args[0]
        return func(*args, **named)


def placed(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A tensor on a device, in a type, at an address as torch chooses them: a copy only where one asks for it."""
    found = tensor.to(device, dtype)
    return found.clone() if found.data_ptr() % _ALIGNMENT else found


def runnable(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> ModelConfig:
    """The configuration with a backend of attention that can run there: its own, or else the best."""
    widths = {"head_width": config.query_key_width // config.heads, "value_width": config.width // config.heads}
    try:
        check_backend(config.backend, device=device, dtype=dtype, **widths, training=False)
    except ConfigError:
        return config.model_copy(update={"backend": "auto"})
    return config


@contextmanager
def computing_numbers(folder: Path) -> Iterator[None]:
    """Tells logits that are no numbers, a FloatingPointError, as what is wrong with the exported model: ConfigError."""
    try:
        yield
    except FloatingPointError as error:
        raise ConfigError(f"{folder}: computes {error}; export it anew, or in fp32") from None


def fingerprint(folder: Path) -> str:
    """The fingerprint of an exported model, computed from its files: see ``longstride.launcher.models.fingerprint``.

    Raises:
        ConfigError: as ``load_model``.
    """
    exported = Exported(folder)
    return combined(exported.content["model"], {name: TensorHash.of(exported.tensor(name)) for name in exported.names})
