"""Work of the first rank alone, for which the others wait."""

import errno
import threading
import time

import pytest

from longstride.launcher.output.messages import AgreedError
from longstride.launcher.ranks.processes import Ranks


def test_result_or_mistake_is_every_ranks() -> None:
    assert Ranks().run_on_first(lambda: 3) == 3

    def forbidden() -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "there")

    with pytest.raises(AgreedError, match=r"^there: Permission denied$"):
        Ranks().run_on_first(forbidden)
    with pytest.raises(ZeroDivisionError):  # nobody's mistake: as it was raised
        Ranks().run_on_first(lambda: 1 // 0)


def test_peer_that_dies_is_told_while_the_work_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(ranks: Ranks, value: object) -> list:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(Ranks, "gather_objects", gather)
    over = threading.Event()
    began = time.monotonic()
    try:
        with pytest.raises(RuntimeError, match="Connection closed by peer"):
            Ranks(0, 0, 2).run_on_first(lambda: over.wait(30.0))
        assert time.monotonic() - began < 10.0
        (thread,) = [each for each in threading.enumerate() if each.name == "first works"]
        assert thread.daemon  # nor does the end of the process wait for it
    finally:
        over.set()
