"""The paper's tables in miniature: that one run writes every cell, and that no run can be compared with another one."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.paper import paper
from benchmarks.paper.cases import IMAGES, MINIMUM_CONTEXTS, PATTERNS, TEXT
from benchmarks.paper.tables import tables_of

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the tiny size finds on this project's own texts."""
    output = tmp_path_factory.mktemp("paper") / "found.json"
    words = ["--size", "tiny", "--seeds", "2", "--steps", "3", "--text", str(ROOT / "launcher"), "--device", "cpu"]
    assert paper.main([*words, "--output", str(output)]) == 0
    assert sorted(path.name for path in output.parent.iterdir()) == ["found.json", "found.png"]
    with pytest.raises(SystemExit):
        paper.read_options(["--output", str(output)])
    result: dict[str, Any] = json.loads(output.read_text())
    return result


def test_one_command_runs_every_pattern_of_both_data_sets_from_every_seed(found: dict[str, Any]) -> None:
    assert {"device", "torch", "date", "threads"} <= set(found)
    runs = [(run["dataset"], run["pattern"], run["seed"]) for run in found["runs"]]
    assert runs == [(name, pattern, seed) for seed in (0, 1) for name in (TEXT, IMAGES) for pattern in PATTERNS]
    assert all(run["steps"] == 3 and run["seconds_per_step"] > 0 for run in found["runs"])


def test_patterns_start_alike_and_end_apart(found: dict[str, Any]) -> None:
    for name in (TEXT, IMAGES):
        some = [run for run in found["runs"] if (run["dataset"], run["seed"]) == (name, 0)]
        assert {run["training_curve"][0][1] for run in some} == {8.0}  # logits begin as 0
        assert len({run["bits_per_byte"] for run in some}) == 3
        assert all(run["bits_per_byte"] < 8.0 for run in some)


def test_every_minimum_context_scores_the_same_bytes(found: dict[str, Any]) -> None:
    rows = found["minimum_contexts"]
    minima = [int(share * found["cases"][TEXT]["context"]) for share in MINIMUM_CONTEXTS]
    assert [(row["seed"], row["minimum_context"]) for row in rows] == [(seed, m) for seed in (0, 1) for m in minima]
    assert {(row["dataset"], row["pattern"]) for row in rows} == {(TEXT, "fixed")}
    assert len({row["bytes"] for row in rows}) == 1 and len({row["bits_per_byte"] for row in rows}) > 2


def test_tables_show_what_the_file_holds(found: dict[str, Any]) -> None:
    text = "\n".join(tables_of(found))
    for run in found["runs"]:
        bits = f"{run['bits_per_byte']:.4f}"
        (line,) = (line for line in text.splitlines() if line.startswith(f"| {run['dataset']} | {run['pattern']} "))
        assert bits in line and "| 2 |" in line


@pytest.mark.parametrize("name", [TEXT, IMAGES])
def test_runs_of_a_seed_differ_in_their_pattern_alone(found: dict[str, Any], name: str) -> None:
    random = ("initial_weights_crc32", "data_order_crc32")
    values = {
        field: [
            {run[field] for run in found["runs"] if (run["dataset"], run["seed"]) == (name, seed)} for seed in (0, 1)
        ]
        for field in ("parameters", "steps", "bytes_trained", "held_out_bytes", *random)
    }
    assert all(len(of_seed) == 1 for of_seeds in values.values() for of_seed in of_seeds)
    assert all(values[field][0] != values[field][1] for field in random)


def test_a_time_limit_cuts_off_seeds(tmp_path: Path) -> None:
    output = tmp_path / "found.json"
    words = ["--size", "tiny", "--datasets", "text", "--seeds", "3", "--steps", "1", "--text", str(ROOT / "docs")]
    assert paper.main([*words, "--device", "cpu", "--time-limit", "0", "--output", str(output)]) == 0
    assert {run["seed"] for run in json.loads(output.read_text())["runs"]} == {0}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seeds", "0"], "--seeds: 0: must be more than 0"),
        (["--images", "/nowhere"], "--images=/nowhere: must be a folder that exists"),
        (["--output", "/nowhere/x.json"], "--output=/nowhere/x.json: must be a .json in a folder that exists"),
    ],
)
def test_wrong_words_end_in_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        paper.main(words)
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(said)


def test_too_little_text_is_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts, output = tmp_path / "texts", tmp_path / "found.json"
    texts.mkdir()
    for number in range(200):
        (texts / f"{number}.txt").write_text("ab")
    words = ["--size", "tiny", "--text", str(texts), "--device", "cpu"]
    assert paper.main([*words, "--output", str(output)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"paper: --text={texts}: ") and line.endswith("give more files")
    assert not output.exists()


def test_a_folder_without_pictures_is_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--size", "tiny", "--datasets", "images", "--images", str(ROOT / "launcher"), "--device", "cpu"]
    assert paper.main([*words, "--output", str(tmp_path / "found.json")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"paper: --images={ROOT / 'launcher'}: no matching file")
    assert list(tmp_path.iterdir()) == []
