"""Read an exported model's folder: config.json, and weights in one safetensors file or several. Needs no deepspeed.

Weights are mapped. A CPU uses them from the disk cache, without memory of the process's own.
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
    refuse,
)
from longstride.launcher.output import file_names, say
from longstride.sparse_model import MixerOutput, ModelConfig, SparseTransformer

_ADVICE = "name a folder written by `longstride export RUN --output DIR`"
_MOST_NAME = 255  # characters of a file name
_HEADER_BYTES, _ENTRY_BYTES = 1 << 20, 1 << 10  # limits of a safetensors header: fixed part, and for each tensor


class Exported:
    """An export whose files fit together: every tensor of the model is there in its shape, and nothing else.

    Args:
        folder: written by `longstride export`.
        trust_code: whether parts of the model from other packages may be imported.

    Raises:
        ConfigError: the folder is no export, of a newer format or incomplete, its files do not fit together, or it
            needs code of other packages that is not trusted or not installed.
    """

    FORMAT = 1

    def __init__(self, folder: str | Path, *, trust_code: bool = False) -> None:
        self.folder = folder = Path(folder)
        if not os.path.lexists(folder / file_names.CONFIG):
            raise ConfigError(f"{folder}: has no {file_names.CONFIG}; {_ADVICE}")
        self.content = load_json_object(folder / file_names.CONFIG)
        self.config, self._shapes = self._read_config(trust_code)
        self._files: dict[str, Any] = {}
        self._file_of = self._find_tensors()
        self._taken = 0  # bytes read since the files were opened
        self.dtype = self._check_tensors()

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._file_of)

    @property
    def has_palette(self) -> bool:
        """Whether its tokens are colours of a palette instead of bytes."""
        data = self.content.get("data")
        return isinstance(data, dict) and data.get("palette") is not None

    def tensor(self, name: str) -> Tensor:
        """Return a tensor as it is stored, on the CPU. It stays on the disk until it is used."""
        if self._taken > MAPPED_BYTES:
            self._files.clear()
            self._taken = 0
        tensor: Tensor = self._open_file(self._file_of[name]).get_tensor(name)
        self._taken += tensor.nbytes
        return tensor

    def fingerprint(self) -> str:
        """Compute the fingerprint from the files; see ``longstride.launcher.models.tensors``."""
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
            lines = (f"{path}: {problem}{exported_with}" for problem in error.under("model").problems)
            raise ConfigError(*lines) from None
        for name, source in config.foreign_code().items():
            if (before := recorded.get(name)) not in (None, source):
                rule = f"was exported with {name} of {before!r:.99}, but {source} is installed here; results may differ"
                say(f"notice: {path}: {rule}")
        return config, shapes

    def _find_tensors(self) -> dict[str, str]:
        """Return the file of every tensor."""
        if os.path.lexists(self.folder / file_names.WEIGHTS):
            return dict.fromkeys(self._open_file(file_names.WEIGHTS).keys(), file_names.WEIGHTS)
        index = self.folder / file_names.WEIGHTS_INDEX
        if not os.path.lexists(index):
            raise ConfigError(f"{self.folder}: has neither {file_names.WEIGHTS} nor {index.name}; {_ADVICE}")
        file_of = load_json_object(index).get("weight_map")
        if not isinstance(file_of, dict) or not file_of:
            raise ConfigError(f"{index}: has no weight_map, which names the file of every tensor")
        names_in: dict[str, set[str]] = {}
        for name, file in file_of.items():
            # Only a name, because a path could lead out of the folder.
            is_plain = isinstance(file, str) and Path(file).name == file and file.strip(".")
            if not is_plain or len(file) > _MOST_NAME or "\\" in file or "\0" in file:
                raise ConfigError.at(f"{index}: weight_map.{name[:160]}", file, "must name a file in the same folder")
            names_in.setdefault(file, set()).add(name)
        for file, indexed in sorted(names_in.items()):
            if not os.path.lexists(self.folder / file):
                raise ConfigError(f"{self.folder}: has no {file}, which {index.name} names")
            refuse(indexed ^ set(self._open_file(file).keys()), f"{self.folder}: {file} and {index.name} differ about")
        return file_of

    def _open_file(self, file: str) -> Any:
        """Open a file of tensors, after checking that its header is no longer than this model's can be."""
        if file not in self._files:
            path = self.folder / file
            try:
                with open_plain(path) as weights:
                    length = int.from_bytes(weights.read(8), "little")
                most = _HEADER_BYTES + _ENTRY_BYTES * len(self._shapes.of)
                if length > most:
                    rule = f"its header has {length:,} bytes, and the model of {file_names.CONFIG} needs at most"
                    raise ConfigError(f"{path}: cannot be read as an export: {rule} {most:,}")
                self._files[file] = safe_open(path, "pt")
            except (SafetensorError, OSError) as error:
                why = getattr(error, "strerror", None) or " ".join(str(error).split())[:400]
                raise ConfigError(f"{path}: cannot be read as an export: {why}") from None
        return self._files[file]

    def _check_tensors(self) -> torch.dtype:
        """Check the tensors' names and shapes against the model, and return their dtype."""
        weights = file_names.WEIGHTS if file_names.WEIGHTS in self._file_of.values() else file_names.WEIGHTS_INDEX
        headers = {name: self._open_file(file).get_slice(name) for name, file in self._file_of.items()}
        mismatch = f"{weights} is not the model of {file_names.CONFIG}:"
        self._shapes.check(
            {name: tuple(header.get_shape()) for name, header in headers.items()}, mismatch, f"{self.folder}"
        )
        stored, wrong = set(), set()
        for name, header in headers.items():
            if name not in self._shapes.buffers:
                stored.add(header.get_dtype())
            elif header.get_dtype() != STORED[torch.float32]:
                wrong.add(f"{name} of {header.get_dtype()} instead of F32")
        refuse(wrong, f"{self.folder}: {mismatch} it has")
        types = {text: dtype for dtype, text in STORED.items()}
        if len(stored) > 1 or not stored <= types.keys():
            rule = f"tensors of {', '.join(sorted(stored))}; all must have one type of {', '.join(types)}"
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
    """Load an exported model in evaluation mode.

    Args:
        folder: written by `longstride export`.
        device: where it computes. An attention backend that cannot run there is replaced by the best one that can.
        dtype: to compute in; None: as stored. On a CPU, weights of that dtype stay mapped. Another dtype needs a copy.
        trust_code: whether parts of the model from other packages may be imported.

    Raises:
        ConfigError: the folder holds no export, its files do not fit together, or the model needs code of other
            packages that is not trusted or not installed.
    """
    exported = Exported(folder, trust_code=trust_code)
    device, dtype = torch.device(device), dtype or exported.dtype
    model = SparseTransformer.empty(_runnable(exported.config, device, dtype))
    model.load_state_dict(_module_state(model, exported.tensor, device, dtype), assign=True)
    return model.eval()


def stream_model(
    config: ModelConfig, tensor: Callable[[str], Tensor], dtype: torch.dtype, device: torch.device
) -> SparseTransformer:
    """Return a model in evaluation mode whose blocks hold no weights: ``tensor`` fetches them by name for each use.

    Memory holds one residual block at a time, and no weights that are used as stored. The attention backend is replaced
    as in ``load_model``.
    """
    model = SparseTransformer.empty(_runnable(config, device, dtype))

    def fetch(module: nn.Module, prefix: str) -> dict[str, Tensor]:
        return _module_state(module, lambda name: tensor(f"{prefix}.{name}"), device, dtype)

    prefixes: dict[nn.Module, str] = {block: f"blocks.{number}" for number, block in enumerate(model.blocks)}
    # glibc does not return freed memory by itself, which adds up to hundreds of MB for every block.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)

    def compute(block: nn.Module, h: Tensor, *inputs: Any) -> MixerOutput:
        output: MixerOutput = functional_call(block, fetch(block, prefixes[block]), (h, *inputs))
        trim(0)
        return output

    model.activation_checkpoint = compute
    for name, module in model.named_children():
        if name != "blocks":
            module.load_state_dict(fetch(module, name), assign=True)
    return model.eval()


def usable_device(name: str | None) -> torch.device:
    """Return the device for `--device`, by default a GPU if there is one; ConfigError if torch cannot use it."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"--device={name}: cannot be used: {str(error).splitlines()[0]}") from None


def _module_state(
    module: nn.Module, tensor: Callable[[str], Tensor], device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return a module's parameters on a device in a dtype, and its buffers as stored."""
    buffers = dict(module.named_buffers())
    stored = {name: tensor(name) for name in module.state_dict()}
    state = {}
    for name, value in stored.items():
        value = value.to(device, value.dtype if name in buffers else dtype)
        # Aligned like torch's own memory, since the rounding of matrix products may depend on it.
        state[name] = value.clone() if value.data_ptr() % ALIGNMENT else value
    return state


def _runnable(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> ModelConfig:
    """Return the configuration with an attention backend that can run: its own, or else the best."""
    try:
        config.check_backend(device, dtype, training=False)
    except ConfigError:
        return config.model_copy(update={"backend": "auto"})
    return config


@contextmanager
def require_finite_logits(folder: Path) -> Iterator[None]:
    """Turn the FloatingPointError of logits that are not finite into a ConfigError about the exported model."""
    try:
        yield
    except FloatingPointError as error:
        raise ConfigError(f"{folder}: its {error}; export it again, or in fp32") from None
