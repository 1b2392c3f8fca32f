"""What is written is whole, and nothing is written over unasked."""

import json
from pathlib import Path

import pytest

from benchmarks.attention import attention
from benchmarks.report import cell, write_json


def test_a_result_file_is_replaced_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    write_json(path, {"a": 1})
    write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 2}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), object()])
def test_a_failed_write_leaves_the_file_before(tmp_path: Path, bad: object) -> None:
    path = tmp_path / "found.json"
    write_json(path, {"a": 1})
    with pytest.raises((ValueError, TypeError)):
        write_json(path, {"a": bad})
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "name, rule",
    [
        ("taken.json", "exists already; --overwrite replaces it"),
        ("found.txt", "must be a .json in a folder that exists"),
        ("nowhere/found.json", "must be a .json in a folder that exists"),
    ],
)
def test_a_wrong_output_ends_in_one_line(
    name: str, rule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken.json").write_text("{}")
    with pytest.raises(SystemExit) as ended:
        attention.main(["--output", str(tmp_path / name), "--device", "cpu"])
    assert ended.value.code == 2
    assert rule in capsys.readouterr().err.splitlines()[-1]


def test_a_missing_number_is_a_dash() -> None:
    assert (cell(None), cell(0.5, ".1f"), cell(0.002, ".1f", 1e3)) == ("–", "0.5", "2.0")
