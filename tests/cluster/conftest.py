"""Two hosts, SLURM on them, and a run's data, each made once a session; everything ends with the test process."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import Host, make_hosts
from tests.cluster.slurm import Slurm, start_slurm
from tests.launcher.conftest import data, shared
from tests.launcher.runs import ROOT, configuration, metrics, spawn

__all__ = ["data", "shared"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder needs a cluster."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.cluster)


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    """node1 and node2."""
    made = make_hosts(tmp_path_factory.mktemp("hosts") / "of")
    yield made
    for host in made:
        host.end()


@pytest.fixture(scope="session")
def slurm(hosts: list[Host], tmp_path_factory: pytest.TempPathFactory) -> Slurm:
    """A cluster of the two hosts."""
    return start_slurm(hosts, tmp_path_factory.mktemp("slurm") / "of")


@pytest.fixture
def user() -> dict[str, str]:
    """The environment of a person who is logged in, has activated the virtual environment and wants a thread a rank."""
    return {
        "PATH": f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": os.environ.get("HOME", "/root"),
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }


@pytest.fixture
def config_file(data: Path, tmp_path: Path) -> Path:
    """Eight steps at a constant rate, so that four of them are the first half; the output is tmp_path / "run"."""
    content = configuration(data, tmp_path / "run")
    content["train"]["schedule"] = "constant"
    path = tmp_path / "run.json"
    path.write_text(json.dumps(content))
    return path


@pytest.fixture(scope="session")
def on_one_host(data: Path, tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    """A function (processes, steps) -> the lines of the same steps, undisturbed and on one host."""
    known: dict[tuple[int, int], list[dict]] = {}

    def get(world_size: int, steps: int = 8) -> list[dict]:
        if (world_size, steps) not in known:
            folder = tmp_path_factory.mktemp("whole")
            content = configuration(data, folder / "run")
            content["train"] |= {"schedule": "constant", "steps": steps}
            (folder / "run.json").write_text(json.dumps(content))
            ended = spawn(["--config", str(folder / "run.json")], world_size)
            assert ended.codes == [0] * world_size, ended.stderr
            known[world_size, steps] = metrics(folder / "run")
        return known[world_size, steps]

    return get
