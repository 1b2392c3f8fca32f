"""The demo's own parts; its stages are commands with tests of their own."""

from __future__ import annotations

import lzma
import random
from pathlib import Path

import pytest

from longstride.data_pipelines.building.build import build
from longstride.launcher import demo
from longstride.launcher.config import load_config
from longstride.launcher.config.loading import DEEPSPEED_CONFIGS


@pytest.mark.parametrize("path", sorted((DEEPSPEED_CONFIGS / "experiments").glob("*.json")), ids=lambda path: path.stem)
def test_every_experiment_loads(path: Path) -> None:
    assert load_config(path).notes


def test_each_demo_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    made = [demo.new_folder(tmp_path / "runs") for _ in range(3)]
    assert [folder.name for folder in made] == ["demo-1", "demo-2", "demo-3"]


def test_a_failed_stage_ends_the_demo(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(demo.StageError, match="export failed with exit code 2"):
        demo.stage("export", "nowhere", "--output", "model")
    assert "longstride: error: nowhere: no such run folder" in capfd.readouterr().err


def test_a_stage_hands_back_what_it_printed() -> None:
    assert demo.stage("config", "schema", capture=True).startswith("{")


def test_loss_by_position_is_the_mean_over_the_bytes_of_each_eighth() -> None:
    first = [0, *range(8, 16), *range(16, 64, 8)]
    scored = {
        "first": first,
        "end": [*first[1:], 64],
        "bytes": [8, 3, *[1] * 7, *[24] * 6],  # the first eighth by one context alone
        "bits_per_byte": [9.0, 8.0, *[4.0] * 7, *[2.0] * 6],
    }
    lines = [line.split() for line in demo.by_position({"positions": scored})]
    assert lines[0] == ["8", "to", "15", "5.200"]
    assert lines[-1] == ["56", "to", "63", "2.000"]
    assert len(lines) == 7


def test_xz_that_has_read_the_train_split_needs_less(tmp_path: Path) -> None:
    rng = random.Random(0)
    texts = tmp_path / "texts"
    texts.mkdir()
    shared = rng.randbytes(4_000).hex()
    for number in range(8):
        (texts / f"{number}.txt").write_text(shared + rng.randbytes(50).hex())
    build([texts], tmp_path / "data", validation_fraction=0.25)
    alone = 8 * len(lzma.compress(demo.content(tmp_path / "data", "validation"), preset=9))
    held_out = len(demo.content(tmp_path / "data", "validation"))
    assert demo.xz_that_has_read(tmp_path / "data") < 0.5 * alone / held_out


def test_samples_on_the_way_are_shown_behind_their_prompt(tmp_path: Path) -> None:
    for step, text in ((430, "return 1\n" * 9), (215, "x\x07y")):
        (tmp_path / f"step-{step:08d}.txt").write_text(demo.PROMPT + text)
    lines = demo.samples_on_the_way(tmp_path)
    assert lines[:3] == ["  step 215:", "      | x\ufffdy", "  step 430:"]
    assert lines[3:] == ["      | return 1"] * 6
