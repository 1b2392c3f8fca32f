"""Hostile files, servers and accidents: `make hostile` runs a sample of each class, `make campaign` all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hostile.commands import Commands
from tests.launcher.conftest import data, exported, shared, trained  # noqa: F401


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks every test of this folder."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.hostile)


@pytest.fixture(scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    """Provide the command line, from a process that has imported everything."""
    with Commands(tmp_path_factory.mktemp("commands")) as ready:
        yield ready
