"""The n-gram tables in a checkpoint: one safetensors file a rank, for every ZeRO stage.

With W ranks, `tables-00001.safetensors` has rows 1, 1 + W, 1 + 2 W …, so any number of ranks can read them. All tensors
are fp32, named as in ``Tables.share``: weights and moving average (R, C); each row's second moment, number of steps and
step of its average (R,); and the number of all steps (1,).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from deepspeed import DeepSpeedEngine
from safetensors import SafetensorError, safe_open
from torch import Tensor

from longstride.kernels import ConfigError
from longstride.launcher.checkpoints.manifest import CheckpointManifest
from longstride.launcher.config import RunConfig
from longstride.launcher.engine import states
from longstride.launcher.models import AVERAGE


def tables_name(rank: int) -> str:
    """Return the file name of a rank's share."""
    return f"tables-{rank:05d}.safetensors"


class SavedTables:
    """The table files of a verified checkpoint of a model with n-gram tables; ConfigError if one is missing."""

    def __init__(self, folder: Path, manifest: CheckpointManifest, config: RunConfig) -> None:
        tables = config.model.ngrams
        assert tables is not None
        self._folder, self._ranks, self._decay = folder, manifest.world_size, config.train.ema_decay
        self.shape = torch.Size((len(tables.orders) * tables.rows, config.model.width))
        missing = [name for name in map(tables_name, range(self._ranks)) if name not in manifest.files]
        if missing:
            raise ConfigError(f"{folder}: lacks {missing[0]}, which holds n-gram tables of its model")

    def tensor(self, kind: str) -> Tensor:
        """Return all rows, (R, C) fp32: trained ("fp32"), or their moving average as of the checkpoint's step."""
        table = torch.empty(self.shape)
        for first, saved in self.shares():
            rows = saved["fp32"]
            if kind == AVERAGE:
                assert self._decay is not None
                rows = states.advance_average(
                    saved[AVERAGE], rows, self._decay, saved["steps"] - saved[f"{AVERAGE}_step"]
                )
            table[first :: self._ranks] = rows
        return table

    def load(self, engine: DeepSpeedEngine) -> None:
        """Load the tables into an engine of any layout."""
        for first, saved in self.shares():
            engine.tables.fill(first, self._ranks, saved, self._decay)

    def shares(self) -> Iterator[tuple[int, Mapping[str, Tensor]]]:
        """Yield each file's first row and its tensors."""
        for rank in range(self._ranks):
            path = self._folder / tables_name(rank)
            try:
                with safe_open(path, "pt") as file:
                    saved = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  no dictionary
            except SafetensorError as error:
                raise ConfigError(f"{path}: cannot be read: {error}") from None
            rows = len(range(rank, self.shape[0], self._ranks))
            shapes = {"fp32": (rows, self.shape[1]), "exp_avg_sq": (rows,), "touches": (rows,), "steps": (1,)}
            if self._decay is not None:
                shapes |= {AVERAGE: (rows, self.shape[1]), f"{AVERAGE}_step": (rows,)}
            saved_shapes = {
                name: tuple(tensor.shape) for name, tensor in saved.items() if tensor.dtype == torch.float32
            }
            if saved_shapes != shapes or len(saved_shapes) != len(saved):
                raise ConfigError(f"{path}: its tensors are not those of the model's n-gram tables")
            yield rank, saved
