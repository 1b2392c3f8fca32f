"""docs/library.md under the packages that its blocks need."""

from pathlib import Path
from typing import Any

import pytest
import torch

from longstride.data_pipelines.order import ByteStream, StreamSettings
from tests.harness.clients import client
from tests.test_docs import LIBRARY, library_folder, library_namespaces

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("default")]  # its own warnings are its own affair


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(library_folder(tmp_path))
    return tmp_path


def states(count: int) -> list[dict[str, Any]]:
    """Return the state after each batch of the page's stream."""
    batches = iter(ByteStream("data", StreamSettings(context=256, global_batch=8)))
    return [next(batches).state.to_json() for _ in range(count)]


@client("torchdata", "docs/library.md: `StatefulDataLoader` of a `ByteStream`", "the same next batch")
def test_torchdata(folder: Path) -> None:
    (names,) = library_namespaces(LIBRARY, needs="torchdata")
    assert [batch.state.to_json() for batch in (*names["before"], names["after"])] == states(6)


@client("lightning", "docs/library.md: `Trainer` with the model and a `ByteStream`, resumed", "the same next batch")
def test_lightning(folder: Path) -> None:
    (names,) = library_namespaces(LIBRARY, needs="lightning")
    assert [*names["begun"].states, *names["resumed"].states] == states(7)


@client(
    "accelerate",
    "docs/library.md: `prepare` of the model; `save_state` of a `ByteStream`",
    "the loss falls; the same next batch",
)
def test_accelerate(folder: Path) -> None:
    loop, order = library_namespaces(LIBRARY, needs="accelerate")
    assert loop["loss"] < 3  # 5.5 nats is knowing nothing
    assert order["fourth"].state == order["again"].state and torch.equal(order["fourth"].tokens, order["again"].tokens)
