"""Which run folders a run may begin in."""

import shutil
from pathlib import Path

import pytest

from longstride.kernels import ConfigError
from longstride.launcher.data import check_output, discard_start


def test_folder_of_a_start_without_a_step_is_taken_and_one_with_more_is_not(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    for name in ("config.json", "metrics.jsonl", ".stop-ab.begun", "hosts-1.env"):
        (run / name).touch()
    with pytest.raises(ConfigError, match="already holds a run"):  # no run has locked it
        check_output(str(run), "never")
    (run / ".lock").touch()
    check_output(str(run), "never")
    for more in ("metrics.jsonl", "model.safetensors", "checkpoints/step-00000001"):
        copy = tmp_path / "copy"
        shutil.copytree(run, copy)
        (copy / more).write_text("{}\n")
        with pytest.raises(ConfigError, match="already holds a run"):
            check_output(str(copy), "never")
        assert not discard_start(copy)
        assert (copy / more).read_text() == "{}\n"
        shutil.rmtree(copy)
    assert discard_start(run)
    assert not run.exists() and discard_start(run)
