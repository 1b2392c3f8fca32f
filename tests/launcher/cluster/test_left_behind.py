"""What a lost attempt may have left elsewhere is asked to stop, then ended, before the next one."""

from __future__ import annotations

from pathlib import Path

import pytest

from longstride.kernels import ConfigError
from longstride.launcher.cluster import left_behind
from longstride.launcher.cluster.left_behind import vacate
from longstride.launcher.cluster.supervisor import Wish, supervised_signals


class Elsewhere:
    """An attempt that holds the folder until the stop file is seen, or until it is ended."""

    def __init__(self, run: Path, monkeypatch: pytest.MonkeyPatch, *, heeds: str) -> None:
        self.run, self.heeds, self.holds, self.ended = run, heeds, True, 0
        monkeypatch.setattr(left_behind, "check_unlocked", self._check)
        monkeypatch.setattr(left_behind, "_LOOK_SECONDS", 0.01)
        monkeypatch.setattr(left_behind, "_ENDED_SECONDS", 0.05)

    def vacate(self) -> None:
        with supervised_signals() as signals:
            vacate(self.run, self.run / ".stop-1", Wish(signals), 0.05, self.end)

    def end(self) -> None:
        self.ended += 1
        self.holds = self.holds and self.heeds != "end"

    def _check(self, run: Path) -> None:
        if self.heeds == "file" and (run / ".stop-1").exists():
            self.holds = False
        if self.holds:
            raise ConfigError("another run writes there")


@pytest.mark.parametrize("heeds", ["file", "end", "nothing"])
def test_next_attempt_waits_until_the_folder_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heeds: str
) -> None:
    elsewhere = Elsewhere(tmp_path, monkeypatch, heeds=heeds)
    if heeds == "nothing":
        with pytest.raises(ConfigError, match="another run writes there"):
            elsewhere.vacate()
    else:
        elsewhere.vacate()
    assert elsewhere.ended == 1  # ranks other than the one with the lock may be left
    assert not list(tmp_path.iterdir())


def test_free_folder_costs_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = Elsewhere(tmp_path / "unborn", monkeypatch, heeds="file")
    elsewhere.holds = False
    elsewhere.vacate()
    assert not (tmp_path / "unborn").exists()
