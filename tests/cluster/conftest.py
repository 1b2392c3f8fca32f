"""Two hosts, SLURM on them, and data for runs, each created once per session; all end with the tests' process."""

import functools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import Host, make_hosts
from tests.cluster.person import Lines, Person
from tests.cluster.slurm import Slurm, start_slurm
from tests.harness.runs import complete, configuration, metrics
from tests.launcher.conftest import data, shared

__all__ = ["data", "shared"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder as one that needs a cluster."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.cluster)


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    """Start node1 and node2."""
    hosts = make_hosts(tmp_path_factory.mktemp("hosts") / "of")
    yield hosts
    for host in hosts:
        host.end()


@pytest.fixture(scope="session")
def slurm(hosts: list[Host], tmp_path_factory: pytest.TempPathFactory) -> Slurm:
    """Start SLURM on both hosts."""
    return start_slurm(hosts, tmp_path_factory.mktemp("slurm") / "of")


@pytest.fixture
def person(hosts: list[Host], data: Path, tmp_path: Path) -> Person:
    """Return a user with a run.json of eight steps at a constant rate, so that four steps are its first half."""
    content = configuration(data, tmp_path / "run")
    content["train"]["schedule"] = "constant"
    person = Person(hosts, tmp_path)
    person.config.write_text(json.dumps(content))
    return person


@pytest.fixture(scope="session")
def on_one_host(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Lines:
    """Return a function (processes, steps, *overrides) -> metrics of an undisturbed run on one host."""

    @functools.cache
    def get(world_size: int, steps: int = 8, *overrides: str) -> list[dict]:
        folder = tmp_path_factory.mktemp("whole")
        content = configuration(data, folder / "run")
        content["train"] |= {"schedule": "constant", "steps": steps}
        (folder / "run.json").write_text(json.dumps(content))
        complete(["--config", str(folder / "run.json"), *overrides], world_size)
        return metrics(folder / "run")

    return get
