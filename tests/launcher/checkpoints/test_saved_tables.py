"""The files of n-gram tables in a checkpoint: what is wrong with one is told in one line."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from longstride.kernels import ConfigError
from longstride.launcher.checkpoints.checkpoint import open_checkpoint
from longstride.launcher.checkpoints.saved_tables import SavedTables, tables_name
from tests.launcher.training.test_training import RUNS

NAME = "zero3-bf16"


def test_files_that_are_missing_or_of_another_model_are_refused(trained: Callable[..., Path], tmp_path: Path) -> None:
    run = shutil.copytree(trained(NAME, 2, *RUNS[NAME]), tmp_path / "run")
    checkpoint = open_checkpoint(run, 8)
    folder, manifest, config = checkpoint.folder, checkpoint.manifest, checkpoint.config
    second = folder / tables_name(1)
    content = load_file(second)
    whole = SavedTables(folder, manifest, config).tensor("fp32")
    assert whole[1::2].equal(content["fp32"]) and bool(whole.any())
    for spoilt in (
        content | {"fp32": content["fp32"][:-1]},
        content | {"touches": content["touches"].double()},
        {name: tensor for name, tensor in content.items() if name != "steps"},
        content | {"other": content["steps"].clone()},
    ):
        save_file({name: tensor.contiguous() for name, tensor in spoilt.items()}, second)
        with pytest.raises(ConfigError, match=r"tables-00001.safetensors: its tensors are not those of the model's"):
            SavedTables(folder, manifest, config).tensor("fp32")
    second.write_bytes(b"no tensors")
    with pytest.raises(ConfigError, match=r"tables-00001.safetensors: cannot be read"):
        SavedTables(folder, manifest, config).tensor("fp32")
    files = {name: record for name, record in manifest.files.items() if name != second.name}
    with pytest.raises(ConfigError, match=r"lacks tables-00001.safetensors"):
        SavedTables(folder, manifest.model_copy(update={"files": files}), config)
