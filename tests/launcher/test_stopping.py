"""A stop that a signal asks for: saved, told by its own exit code, gone on with to the last bit."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher import exit_codes
from tests.launcher.runs import metrics, spawn

Trained = Callable[..., Path]


@pytest.mark.parametrize("where", ["step", pytest.param("evaluation", marks=pytest.mark.campaign)])
def test_signal_to_one_rank_stops_all_and_nothing_is_lost(
    trained: Trained, config_file: Path, tmp_path: Path, where: str
) -> None:
    """The second of two ranks gets the signal in the middle of step 4's computing, or of its evaluation."""
    whole = trained("two", 2)
    arguments = ["--config", str(config_file), "--resume", "auto", "train.checkpoint_every=3", "data.workers=1"]
    ended = spawn(arguments, 2, {"SIGNAL_RANK_1": f"{signal.SIGUSR1.value},4,{where}"})
    assert ended.codes == [exit_codes.REQUEUE] * 2, ended.stderr
    assert "longstride: stopped by SIGUSR1; --resume auto goes on" in ended.stderr[0]
    assert (tmp_path / "run/checkpoints/step-00000004/manifest.json").exists()
    ended = spawn(arguments, 2)
    assert ended.codes == [exit_codes.DONE] * 2, ended.stderr
    assert metrics(tmp_path / "run") == metrics(whole)
