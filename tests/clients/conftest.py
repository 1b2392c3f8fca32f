"""What tests against packages of others share: exports that those can load, and no network."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.tiny_models import add_hub_files, random_export


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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Export a tiny model of text with a context of 64, with all files that transformers needs."""
    export = random_export(tmp_path / "model")
    add_hub_files(export)
    return export
