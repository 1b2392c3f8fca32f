"""Work of the first rank alone, for which the others wait."""

from __future__ import annotations

import errno
import threading
import time

import pytest

from longstride.launcher.output.messages import AgreedError
from longstride.launcher.ranks import waiting
from longstride.launcher.ranks.processes import Ranks
from longstride.launcher.ranks.waiting import first_works


def test_result_or_mistake_is_every_ranks() -> None:
    assert first_works(lambda: 3, Ranks()) == 3

    def forbidden() -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "there")

    with pytest.raises(AgreedError, match=r"^there: Permission denied$"):
        first_works(forbidden, Ranks())
    with pytest.raises(ZeroDivisionError):  # nobody's mistake: as it was raised
        first_works(lambda: 1 // 0, Ranks())


def test_peer_that_dies_is_told_while_the_work_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(value: object, _: Ranks) -> list:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(waiting, "gather_objects", gather)
    over = threading.Event()
    began = time.monotonic()
    try:
        with pytest.raises(RuntimeError, match="Connection closed by peer"):
            first_works(lambda: over.wait(30.0), Ranks(0, 0, 2))
        assert time.monotonic() - began < 10.0
        (thread,) = [each for each in threading.enumerate() if each.name == "first works"]
        assert thread.daemon  # nor does the end of the process wait for it
    finally:
        over.set()
