"""Hostile files, servers and accidents: `make hostile` runs a sample of each class, `make campaign` all of them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.runs import configuration
from tests.harness.tiny_models import random_export
from tests.hostile.commands import Commands
from tests.hostile.generators.http_servers import quick_servers  # noqa: F401
from tests.launcher.conftest import commands, data, exported, shared, trained  # noqa: F401

BASES = {
    "itself.json": {"extends": "itself.json"},
    "round.json": {"extends": "about.json"},
    "about.json": {"extends": "round.json"},
    "lost.json": {"extends": "missing.json"},
    "number.json": {"extends": 3},
    "schema.json": {"extends": "run.json", "$schema": 3},
    "place.json": {"extends": "run.json", "learning_rate": 3},
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.hostile)


@pytest.fixture(scope="session")
def place(
    tmp_path_factory: pytest.TempPathFactory,
    trained: Callable[..., Path],  # noqa: F811
    data: Path,  # noqa: F811
    commands: Commands,  # noqa: F811
) -> Path:
    """Create a folder with one of everything that verbs take; tests must not change it."""
    folder = tmp_path_factory.mktemp("place")
    shutil.copytree(trained("wrong-inputs", 1), folder / "run")
    shutil.copytree(data, folder / "data")
    random_export(folder / "model")
    (folder / "text").write_text("The bytes of a short text. " * 4)
    (folder / "noise").write_bytes(bytes(range(256)) * 4)
    (folder / "run.json").write_text(json.dumps(configuration(Path("data"), Path("fresh"))))
    for name, content in BASES.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "tables").mkdir()
    (folder / "tables/a.json").write_text("[1]")
    (folder / "tables/b.csv").write_text("1, 2")
    outcome = commands("compress", "text", "--model", "model", "--output", "text.lsz", folder=folder)
    assert outcome.code == 0, outcome.err
    return folder
