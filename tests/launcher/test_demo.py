"""The demo's own parts; its stages are commands with tests of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from longstride.launcher import demo
from longstride.launcher.config.run_config import DEEPSPEED_CONFIGS, load_config


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
