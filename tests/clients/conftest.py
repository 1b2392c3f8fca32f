"""What tests against packages of others share: exports that those can load, and no network."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness.configs import small
from tests.harness.runs import ROOT
from tests.harness.tiny_models import add_hub_files, random_export, tiny_export

START, END, PADDING = 256, 257, 258  # the tokens that are not bytes


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(seed))


def new_model(**changes: Any) -> Any:
    """Return a new model of transformers with the small configuration, changed, and the initial weights of seed 0."""
    from longstride.launcher.hub import LongstrideConfig, LongstrideForCausalLM

    torch.manual_seed(0)
    return LongstrideForCausalLM(LongstrideConfig(model=small(**changes).model_dump(mode="json")))


def assert_rounded(result: Tensor, expected: Tensor, dtype: torch.dtype = torch.float64) -> None:
    """Assert equality up to rounding in fp64, as another number of rows changes the order of sums."""
    assert result.shape == expected.shape and result.dtype == dtype
    assert (result - expected).abs().max() <= 1e-12 * expected.abs().max()


def run_python(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a separate process, with this checkout on its path."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Disable hubs, and put the caches of these packages among the test's own files."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))


@pytest.fixture
def past() -> str:
    """Return the installed transformers' name of a cache: an argument of generate, and an output."""
    from longstride.launcher.hub.cache import CACHE_NAME

    return CACHE_NAME


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export a model with a context of 192 that writes words, "tränen" among them."""
    folder = tiny_export(tmp_path_factory.mktemp("words") / "model", "text", steps=200)
    add_hub_files(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Export a tiny model of text with a context of 64, with all files that transformers needs."""
    export = random_export(tmp_path / "model")
    add_hub_files(export)
    return export
