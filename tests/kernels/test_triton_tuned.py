"""Rows measured on a card: what is written is read, what is damaged or another card's ends in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from longstride.kernels import ConfigError
from tests.harness.backends import WITH_TRITON

pytestmark = WITH_TRITON

CARD = "A Card, 80GB"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of rows, and a card in the place of the CPU."""
    from longstride.kernels.backends.triton import call, tuned

    monkeypatch.setattr(tuned, "FOLDER", tmp_path)
    monkeypatch.setattr(call, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: CARD)
    tuned.rows_on.cache_clear()
    return tmp_path


def candidates(*asked: Any) -> Any:
    from longstride.kernels.backends.triton import call

    return call.candidates_on(torch.device("cuda", 0), *asked)


def test_rows_that_were_written_are_launched(folder: Path) -> None:
    from longstride.kernels.backends.triton import tuned
    from longstride.kernels.backends.triton.configurations import Configuration, Widest
    from longstride.kernels.backends.triton.configurations import candidates as tables

    rows = (Configuration(128, 128, 8, 2, 1.0, True), Configuration(64, 64, 4, 3, 0.5))
    tuned.write(tuned.file_of(CARD), CARD, {("dq", Widest(2, 128)): rows}, date="2026-11-22")
    assert candidates("dq", 2, 128) == candidates("dq", 2, 96) == rows
    for other in (("dq", 2, 64), ("dq", 2, 256), ("dq", 4, 128), ("forward", 2, 128), ("dq", 2, 128, True)):
        assert candidates(*other) == tables(other[0], "sm_90", *other[1:])  # type: ignore[arg-type]
    assert [path.name for path in folder.iterdir()] == [tuned.file_of(CARD).name]


GOOD: dict[str, Any] = {"block_q": 64, "block_k": 64, "num_warps": 4, "num_stages": 2}


@pytest.mark.parametrize(
    "changed, said",
    [
        (None, "must be JSON"),
        ({"device": "Another"}, f'device="Another": must be what runs here; nearest {CARD}'),
        ({"triton": "1.0"}, 'triton="1.0": must be what runs here'),
        ({"rows": 3}, "rows=3: must be a list"),
        ({"width": 100}, "is no case"),
        ({"kernel": "fastest"}, 'rows[0].kernel="fastest": must be a kernel'),
        ({"candidates": []}, "rows[0].candidates=[]: must hold a configuration"),
        ({"block_q": 96}, "rows[0].candidates[0].block_q=96: must be a power of two from 16 to 256"),
        ({"num_warps": True}, "candidates[0].num_warps=true: must be a power of two"),
        ({"num_stages": 0}, "num_stages=0: must be a whole number from 1"),
        ({"rate": -1}, "rate=-1: must be a number above 0"),
        ({"described": 1}, "described=1: must be true or false"),
        ({"colour": 1}, "must have block_q, block_k"),
        ({"kernel": "closed", "block_k": 32}, "rows[0].candidates: must have square tiles"),
        ({"kernel": "closed_forward", "block_k": 32}, "rows[0].candidates: must have square tiles"),
    ],
    ids=str,
)
def test_a_file_that_is_not_this_cards_ends_in_one_line(
    folder: Path, changed: dict[str, Any] | None, said: str
) -> None:
    from longstride.kernels.backends.triton import tuned

    row: dict[str, Any] = {"kernel": "dq", "bytes_an_element": 2, "width": 64, "candidates": [dict(GOOD)]}
    file: dict[str, Any] = {"device": CARD, "triton": tuned.triton_version(), "rows": [row]}
    for name, value in (changed or {}).items():
        owner = file if name in file else row if name in row else row["candidates"][0]
        owner[name] = value
    text = json.dumps(file)
    tuned.file_of(CARD).write_text(text if changed is not None else text[:40])
    with pytest.raises(ConfigError) as raised:
        candidates("dq", 2, 64)
    assert said in str(raised.value) and "\n" not in str(raised.value)


def test_shipped_rows_can_be_read() -> None:
    from longstride.kernels.backends.triton import tuned

    for path in sorted(tuned.FOLDER.glob("*")):
        facts, rows = tuned.read(path)
        assert rows and path.name.endswith(f"triton-{facts['triton']}.json")
