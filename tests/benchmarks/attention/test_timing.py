"""How contenders take turns, on a CPU and on a made-up card."""

from __future__ import annotations

import time
import types

import pytest
import torch
from torch import Tensor

from benchmarks import machine
from benchmarks.attention import timing
from benchmarks.attention.cases import Group
from benchmarks.attention.timing import Contender, inputs_of, take_turns

CPU = torch.device("cpu")
GROUP = Group(context=8, stride=2, head_width=4, dtype="float32", heads=1)


class Event:
    """A made-up card's event: the host's clock."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) * 1e3  # milliseconds


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A clock of a made-up card over CPU tensors; returns the cycles that it was asked to sleep."""
    slept: list[int] = []
    fake = types.SimpleNamespace(Event=Event, synchronize=lambda device: None, _sleep=slept.append)
    monkeypatch.setattr(timing.torch, "cuda", fake)
    monkeypatch.setattr(timing, "FLUSH_BYTES", 16)
    monkeypatch.setattr(timing, "clock_of", lambda device, sets: timing.DeviceClock(device, len(sets)))
    return slept


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q * k + v


def test_each_repeat_has_all_in_a_drawn_order_and_what_has_no_backward_gets_none() -> None:
    order: list[tuple[str, bool]] = []

    def named(name: str):
        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            order.append((name, torch.is_grad_enabled()))
            return attention(q, k, v)

        return run

    contenders = {"a": Contender(named("a")), "b": Contender(named("b"), backward=False)}
    turns = take_turns(contenders, inputs_of(GROUP, CPU), CPU, repeats=9, seconds=0.0)
    rounds = [order[i : i + 2] for i in range(0, len(order), 2)]
    assert len(rounds) == 10 and all(sorted(one) == [("a", True), ("b", False)] for one in rounds)  # one warms up
    assert len({tuple(one) for one in rounds}) == 2
    a, b = turns["a"].seconds(), turns["b"].seconds()
    assert a["both"] >= a["forward"] + a["backward"] > 0
    assert b["forward"] > 0 and b["backward"] is b["both"] is None
    assert set(turns["b"].host_seconds()) == {"forward"}


def test_a_cards_region_holds_several_calls_over_all_inputs(card: list[int]) -> None:
    sets = [inputs_of(GROUP, CPU)[0] for _ in range(3)]
    seen: list[int] = []

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append(next(i for i, one in enumerate(sets) if one.leaves[0] is q))
        return attention(q, k, v)

    turns = take_turns({"a": Contender(run)}, sets, CPU, repeats=3, seconds=60.0)["a"]
    assert len(turns.runs) == 3
    assert seen[:9] == [0, 1, 2] * 3  # at first each set once
    assert len(seen) > 3 * 6  # then as many calls as fill a region
    assert set(seen) == {0, 1, 2}
    assert any(card), "the device waits until the host has queued a region"
    assert turns.seconds()["both"] > 0


def test_long_rounds_are_repeated_less() -> None:
    clock = timing.DeviceClock.repeats
    assert clock(None, 20, 0.1, 6.0) == 20
    assert clock(None, 20, 1.0, 6.0) == 6
    assert clock(None, 20, 100.0, 6.0) == timing.FEWEST_REPEATS
    assert clock(None, 1, 100.0, 6.0) == 1


def test_inputs_rotate_where_a_cache_could_hold_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(inputs_of(GROUP, CPU)) == 1
    monkeypatch.setattr(timing, "cache_bytes", lambda device: 600)
    assert len(inputs_of(GROUP, CPU)) == 5  # 4 x 600 bytes over 8 x (4 x 16 + 4)


def test_ceilings_are_positive() -> None:
    assert machine.copy_bandwidth(CPU, 2**16) > 0
    assert machine.matmul_flops(CPU, torch.float32, 16) > 0
