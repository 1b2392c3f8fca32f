"""Seconds of attention, in turns: every repeat runs each contender once, in a drawn order.

So other work hits all alike, and none always finds the memory that the same neighbour left.

On a card, time is between two events on the device. A short call is repeated between them, over inputs that the cache
cannot hold, and the device sleeps until the host has queued them all: gaps between launches are not what is timed (the
host's own seconds are kept beside). The median counts there, the minimum on a CPU, whose cores others use too.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.attention.cases import Group
from benchmarks.attention.figures import PHASES, ByPhase, compulsory_bytes
from benchmarks.attention.gate import Attention
from benchmarks.machine import cache_bytes

REGION_SECONDS = 2e-3  # between two events, at least
MOST_CALLS = 64
CACHES = 4  # inputs that rotate are this many times the cache
FLUSH_BYTES = 2**28
CYCLES_A_SECOND = 2e9  # at most; the device sleeps a little long on a slower one
LONGEST_SLEEP_SECONDS = 0.2
FEWEST_REPEATS = 3


class Inputs(NamedTuple):
    """q, k and v, leaves that want gradients, and the output's gradient; all (B, H, N, D)."""

    leaves: tuple[Tensor, Tensor, Tensor]
    grad_out: Tensor

    def num_bytes(self) -> int:
        """Of all four."""
        return sum(x.numel() * x.element_size() for x in (*self.leaves, self.grad_out))


@dataclass(frozen=True)
class Contender:
    """Something that computes attention."""

    attention: Attention
    backward: bool = True  # whether it has one


class Region(NamedTuple):
    """One timed region, by the call."""

    seconds: float
    host_seconds: float  # until the call was queued


def inputs_of(group: Group, device: torch.device) -> list[Inputs]:
    """Sets of random inputs to rotate: one on a CPU, on a card as many as are beyond its cache."""
    dtype = getattr(torch, group.dtype)
    shape = (group.batch, group.heads, group.context, group.head_width)
    count = min(8, math.ceil(CACHES * cache_bytes(device) / compulsory_bytes(group, "forward"))) or 1

    def one() -> Inputs:
        q, k, v, grad_out = (torch.randn(shape, device=device, dtype=dtype) for _ in range(4))
        return Inputs((q.requires_grad_(), k.requires_grad_(), v.requires_grad_()), grad_out)

    return [one() for _ in range(count)]


class HostClock:
    """A CPU's: one call, by the wall."""

    warm_ups = 1
    keeps_graphs = False
    fewest_calls = 1

    def best(self, seconds: Sequence[float]) -> float:
        """The figure of a few repeats: what disturbs a CPU only ever adds."""
        return min(seconds)

    def region(self, call: Callable[[int], object], count: int, host_seconds: float) -> Region:
        """Seconds of one of so many calls."""
        start = time.perf_counter()
        for number in range(count):
            call(number)
        seconds = (time.perf_counter() - start) / count
        return Region(seconds, seconds)

    def calls(self, seconds: float) -> int:
        """How many calls a region has."""
        return 1

    def repeats(self, wanted: int, round_seconds: float, seconds: float) -> int:
        """All that are wanted."""
        return wanted


class DeviceClock:
    """A card's: events around several calls, after a write that empties the cache."""

    warm_ups = 3
    keeps_graphs = True  # several backward passes follow one forward pass

    def __init__(self, device: torch.device, fewest_calls: int) -> None:
        self.fewest_calls = fewest_calls
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
        self._device = device
        self._sleep = getattr(torch.cuda, "_sleep", None)

    def best(self, seconds: Sequence[float]) -> float:
        """The figure of a few repeats."""
        return statistics.median(seconds)

    def region(self, call: Callable[[int], object], count: int, host_seconds: float) -> Region:
        """Seconds of one of so many calls, which the host is known to queue in ``host_seconds`` each."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self._device)
        self._flush.zero_()
        if self._sleep is not None:
            self._sleep(int(min(1.5 * count * host_seconds, LONGEST_SLEEP_SECONDS) * CYCLES_A_SECOND))
        start.record()
        begin = time.perf_counter()
        for number in range(count):
            call(number)
        host = time.perf_counter() - begin
        end.record()
        torch.cuda.synchronize(self._device)
        return Region(start.elapsed_time(end) / 1e3 / count, host / count)

    def calls(self, seconds: float) -> int:
        """As many as fill a region, and every set of inputs once."""
        return max(self.fewest_calls, min(MOST_CALLS, math.ceil(REGION_SECONDS / seconds)))

    def repeats(self, wanted: int, round_seconds: float, seconds: float) -> int:
        """As many as the group's seconds allow, and some in any case."""
        return max(min(FEWEST_REPEATS, wanted), min(wanted, int(seconds / round_seconds)))


def clock_of(device: torch.device, sets: Sequence[Inputs]) -> HostClock | DeviceClock:
    """The clock of a device."""
    return DeviceClock(device, len(sets)) if device.type == "cuda" else HostClock()


class Turns:
    """One contender's runs."""

    def __init__(self, contender: Contender, sets: Sequence[Inputs], clock: HostClock | DeviceClock) -> None:
        self._contender, self._sets, self._clock = contender, sets, clock
        self._outs: list[Tensor | None] = [None] * len(sets)
        self._phases = {"forward": self._forward, **({"backward": self._backward} if contender.backward else {})}
        self._calls = dict.fromkeys(self._phases, clock.fewest_calls)
        self._host = dict.fromkeys(self._phases, 0.0)
        self.runs: list[dict[str, Region]] = []

    def warm_up(self) -> float:
        """Compiles, finds how many calls fill a region, and returns the seconds of a turn."""
        for _ in range(self._clock.warm_ups):  # the first compiles, the second finds the host's seconds
            found = self._turn()
            self._calls = {phase: self._clock.calls(one.seconds) for phase, one in found.items()}
            self._host = {phase: one.host_seconds for phase, one in found.items()}
        return sum(one.seconds * self._calls[phase] for phase, one in found.items())

    def take(self) -> None:
        """One turn that counts."""
        self.runs.append(self._turn())

    def _turn(self) -> dict[str, Region]:
        found = {
            phase: self._clock.region(call, self._calls[phase], self._host[phase])
            for phase, call in self._phases.items()
        }
        self._outs = [None] * len(self._sets)
        return found

    def _forward(self, number: int) -> None:
        place = number % len(self._sets)
        leaves = self._sets[place].leaves
        if not self._contender.backward:  # what has no backward is not asked to keep what one needs
            with torch.no_grad():
                self._outs[place] = self._contender.attention(*(x.detach() for x in leaves))
            return
        self._outs[place] = self._contender.attention(*leaves)

    def _backward(self, number: int) -> None:
        one, out = self._sets[number % len(self._sets)], self._outs[number % len(self._sets)]
        assert out is not None
        torch.autograd.grad(out, one.leaves, one.grad_out, retain_graph=self._clock.keeps_graphs)

    def seconds(self) -> ByPhase:
        """Of each phase; both is forward and backward of the same turn."""
        found: ByPhase = dict.fromkeys(PHASES)
        for phase in self._phases:
            found[phase] = self._clock.best([run[phase].seconds for run in self.runs])
        if "backward" in self._phases:
            found["both"] = self._clock.best([run["forward"].seconds + run["backward"].seconds for run in self.runs])
        return found

    def host_seconds(self) -> ByPhase:
        """Seconds until a call of each phase was queued."""
        return {phase: statistics.median(run[phase].host_seconds for run in self.runs) for phase in self._phases}


def take_turns(
    contenders: dict[str, Contender], sets: Sequence[Inputs], device: torch.device, repeats: int, seconds: float
) -> dict[str, Turns]:
    """Run all contenders in turns: so many repeats, fewer where a card would take more than so many seconds."""
    clock = clock_of(device, sets)
    turns = {name: Turns(one, sets, clock) for name, one in contenders.items()}
    round_seconds = sum(one.warm_up() for one in turns.values())
    draws = random.Random(0)
    for _ in range(clock.repeats(repeats, round_seconds, seconds)):
        for one in draws.sample([*turns.values()], len(turns)):
            one.take()
    return turns


def peak_bytes(contender: Contender, one: Inputs, device: torch.device) -> int | None:
    """The most memory of one forward and backward pass, its inputs counted; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    out = contender.attention(*one.leaves)
    torch.autograd.grad(out, one.leaves, one.grad_out)
    return torch.cuda.max_memory_allocated(device) - before + one.num_bytes()
