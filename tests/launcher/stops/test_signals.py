"""Signals that come by a pipe."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from longstride.launcher.stops.signals import SignalPipe


def test_signal_that_comes_while_the_pipe_is_made_or_closed_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    before: list[int] = []
    original = signal.signal(signal.SIGUSR1, lambda number, frame: before.append(number))
    install = signal.signal

    def install_and_raise(number: signal.Signals, handler: Any) -> Any:
        found = install(number, handler)
        signal.raise_signal(number)
        return found

    try:
        monkeypatch.setattr(signal, "signal", install_and_raise)
        pipe = SignalPipe([signal.SIGUSR1])
        assert pipe.wait(0) == [signal.SIGUSR1] and not before
        pipe.close()
        assert before == [signal.SIGUSR1]
    finally:
        install(signal.SIGUSR1, original)
