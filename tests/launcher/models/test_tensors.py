"""Files of tensors that are written one by one."""

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from longstride.launcher.models.tensors import write_tensors


@pytest.mark.parametrize("names", [["a"], ["layer.weight", "layer.bias", "scalar", "ümlaut"]])
def test_written_tensors_are_read_by_the_formats_library(names: list[str], tmp_path: Path) -> None:
    shapes = [(3, 5), (7,), (), (0, 2)]
    tensors = {name: torch.randn(shape) for name, shape in zip(names, shapes, strict=False)}
    path = tmp_path / "x.safetensors"
    size, sha256 = write_tensors(path, {name: tensor.shape for name, tensor in tensors.items()}, tensors.values())
    assert size == path.stat().st_size
    assert sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    read = load_file(path)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(read[name], tensor) and read[name].dtype == torch.float32


def test_tensors_that_are_not_as_announced_are_no_file(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="a"):
        write_tensors(tmp_path / "x", {"a": (2,)}, [torch.zeros(3)])
    with pytest.raises(ValueError, match="shorter"):
        write_tensors(tmp_path / "x", {"a": (2,), "b": (1,)}, [torch.zeros(2)])
