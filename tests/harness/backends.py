"""Backends as parameters of tests, each with its device and marks."""

import importlib.util
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from longstride.kernels.patterns import Column, Dense, Fixed, Local, Pattern, Strided, Summary

HAS_TRITON = importlib.util.find_spec("triton") is not None
WITH_TRITON = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
ON_A_CARD = torch.cuda.is_available()
DEVICES = {"triton": "cuda" if torch.cuda.is_available() else "cpu", "cpu": "cpu", "reference": "cpu"}
IN_THE_INTERPRETER = pytest.mark.skipif(DEVICES["triton"] == "cuda", reason="fp64 runs in Triton's interpreter alone")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Heads that differ: in kind, around another one, and by themselves.
MIXES: tuple[list[Pattern], ...] = (
    [Local(20), Column(3), Fixed(8, 2)],
    [Summary(8, 2, num_summaries=3), Dense(), Summary(8, 2, num_summaries=3)],
    [Fixed(8, 2, 3), Strided(8), Summary(9, 2, include_self=True)],
    [Strided(8, align="target"), Column(8), Summary(8, 2)],
)


def on(backend: str, *values: Any, marks: Iterable[Any] = ()) -> Any:
    """Make a test case whose first parameter is the backend, skipped if that backend cannot run."""
    skips = [WITH_TRITON] if backend == "triton" else []
    if backend == "triton" and torch.float64 in values:
        skips.append(IN_THE_INTERPRETER)
    return pytest.param(backend, *values, marks=[*skips, *marks])


def repeats(number: int) -> list[pytest.MarkDecorator]:
    """Return marks of case ``number`` of a grid in the slow interpreter: 0 and every second case run by default.

    With ``i + j`` of two axes for a number, each value of either axis runs by default; all pairs run in ``make
    campaign``.
    """
    return [pytest.mark.campaign] if number % 2 else []


def use_tiles(monkeypatch: pytest.MonkeyPatch, edges: tuple[int, int], closed: int | None) -> None:
    """Make the interpreter use these tile edges, and serve closed runs of up to ``closed`` rows at once, or none."""
    from longstride.kernels.backends import triton as backend
    from longstride.kernels.backends.triton import configurations
    from longstride.kernels.cache import BoundedCache

    monkeypatch.setattr(backend, "PLANS", BoundedCache())  # those that were made have others
    tiles = (configurations.Configuration(*edges, 1, 1),)
    runs = () if closed is None else configurations.squares((closed, 1, 1.0))
    entry = configurations.Candidates(tiles, tiles, tiles, runs, runs)
    monkeypatch.setitem(configurations.ARCHITECTURES, "interpreter", {configurations.Widest(8, 256): entry})


def use_configuration(monkeypatch: pytest.MonkeyPatch, kernel: str, one: Any) -> None:
    """Make one kernel use only this configuration on any device; general kernels serve closed runs as well."""
    from longstride.kernels.backends import triton as backend
    from longstride.kernels.backends.triton import launch_plan
    from longstride.kernels.cache import BoundedCache

    monkeypatch.setattr(backend, "PLANS", BoundedCache())  # those that were made have another
    table = launch_plan.candidates_on

    def candidates_on(device: torch.device, asked: Any, *case: Any) -> Any:
        if asked == kernel:
            return (one,)
        if asked.startswith("closed") and not kernel.startswith("closed"):
            return ()
        return table(device, asked, *case)

    monkeypatch.setattr(launch_plan, "candidates_on", candidates_on)
