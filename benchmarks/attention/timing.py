"""Time attention in turns: every repeat runs each contender once, in random order.

Other work then affects all contenders alike, and none always runs after the same one.

On a card, time is between two events on the device. A short call is repeated between them, over inputs beyond the size
of the cache, and the device sleeps until the host has queued all calls. So gaps between launches are not timed; the
host's seconds are recorded separately. The figure is the median on a card, and the minimum on a CPU, which is shared.
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
CYCLES_A_SECOND = 2e9  # at most; slower devices sleep longer
LONGEST_SLEEP_SECONDS = 0.2
FEWEST_REPEATS = 3


class Inputs(NamedTuple):
    """q, k and v, leaves that require gradients, and the output's gradient; all (B, H, N, D)."""

    leaves: tuple[Tensor, Tensor, Tensor]
    grad_out: Tensor

    def num_bytes(self) -> int:
        """Return the bytes of all four."""
        return sum(x.numel() * x.element_size() for x in (*self.leaves, self.grad_out))


@dataclass(frozen=True)
class Contender:
    """A function that computes attention."""

    attention: Attention
    backward: bool = True  # it has a backward pass


class Region(NamedTuple):
    """A timed region, per call."""

    seconds: float
    host_seconds: float  # until the call was queued


def inputs_of(group: Group, device: torch.device) -> list[Inputs]:
    """Return sets of random inputs to rotate: one on a CPU, on a card enough to exceed its cache."""
    dtype = getattr(torch, group.dtype)
    shape = (group.batch, group.heads, group.context, group.head_width)
    count = min(8, math.ceil(CACHES * cache_bytes(device) / compulsory_bytes(group, "forward"))) or 1

    def draw() -> Inputs:
        q, k, v, grad_out = (torch.randn(shape, device=device, dtype=dtype) for _ in range(4))
        return Inputs((q.requires_grad_(), k.requires_grad_(), v.requires_grad_()), grad_out)

    return [draw() for _ in range(count)]


class HostClock:
    """The clock of a CPU: wall time of one call, or what another clock says."""

    warm_ups = 1
    keeps_graphs = False
    fewest_calls = 1

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now

    def best(self, seconds: Sequence[float]) -> float:
        """Return the figure of several repeats: the minimum, as other work only adds time."""
        return min(seconds)

    def region(self, call: Callable[[int], object], count: int, host_seconds: float) -> Region:
        """Time ``count`` calls and return the seconds per call."""
        start = self._now()
        for number in range(count):
            call(number)
        seconds = (self._now() - start) / count
        return Region(seconds, seconds)

    def calls(self, seconds: float) -> int:
        """Return the number of calls of a region."""
        return 1

    def repeats(self, limit: int, round_seconds: float, seconds: float) -> int:
        """Return the limit."""
        return limit


class DeviceClock:
    """The clock of a card: events around several calls, after a write that flushes the cache."""

    warm_ups = 3
    keeps_graphs = True  # several backward passes follow one forward pass

    def __init__(self, device: torch.device, fewest_calls: int) -> None:
        self.fewest_calls = fewest_calls
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
        self._device = device
        self._sleep = getattr(torch.cuda, "_sleep", None)

    def best(self, seconds: Sequence[float]) -> float:
        """Return the figure of several repeats: the median."""
        return statistics.median(seconds)

    def region(self, call: Callable[[int], object], count: int, host_seconds: float) -> Region:
        """Time ``count`` calls, which the host queues in ``host_seconds`` each; return the seconds per call."""
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
        """Return how many calls fill a region, at least one for every set of inputs."""
        return max(self.fewest_calls, min(MOST_CALLS, math.ceil(REGION_SECONDS / seconds)))

    def repeats(self, limit: int, round_seconds: float, seconds: float) -> int:
        """Return how many repeats fit in ``seconds``, at least FEWEST_REPEATS and at most ``limit``."""
        return max(min(FEWEST_REPEATS, limit), min(limit, int(seconds / round_seconds)))


def clock_of(device: torch.device, sets: Sequence[Inputs]) -> HostClock | DeviceClock:
    """Return the clock of a device."""
    return DeviceClock(device, len(sets)) if device.type == "cuda" else HostClock()


class Turns:
    """The runs of one contender."""

    def __init__(self, contender: Contender, sets: Sequence[Inputs], clock: HostClock | DeviceClock) -> None:
        self._contender, self._sets, self._clock = contender, sets, clock
        self._outs: list[Tensor | None] = [None] * len(sets)
        self._phases = {"forward": self._forward, **({"backward": self._backward} if contender.backward else {})}
        self._calls = dict.fromkeys(self._phases, clock.fewest_calls)
        self._host = dict.fromkeys(self._phases, 0.0)
        self.runs: list[dict[str, Region]] = []

    def warm_up(self) -> float:
        """Compile, find how many calls fill a region, and return the seconds of a turn."""
        for _ in range(self._clock.warm_ups):  # the first compiles, the second measures the host's seconds
            regions = self._turn()
            self._calls = {phase: self._clock.calls(region.seconds) for phase, region in regions.items()}
            self._host = {phase: region.host_seconds for phase, region in regions.items()}
        return sum(region.seconds * self._calls[phase] for phase, region in regions.items())

    def take(self) -> None:
        """Record one turn."""
        self.runs.append(self._turn())

    def _turn(self) -> dict[str, Region]:
        regions = {
            phase: self._clock.region(call, self._calls[phase], self._host[phase])
            for phase, call in self._phases.items()
        }
        self._outs = [None] * len(self._sets)
        return regions

    def _forward(self, number: int) -> None:
        place = number % len(self._sets)
        leaves = self._sets[place].leaves
        if not self._contender.backward:
            with torch.no_grad():
                self._outs[place] = self._contender.attention(*(x.detach() for x in leaves))
            return
        self._outs[place] = self._contender.attention(*leaves)

    def _backward(self, number: int) -> None:
        inputs, out = self._sets[number % len(self._sets)], self._outs[number % len(self._sets)]
        assert out is not None
        torch.autograd.grad(out, inputs.leaves, inputs.grad_out, retain_graph=self._clock.keeps_graphs)

    def seconds(self) -> ByPhase:
        """Return the seconds of each phase; "both" is forward and backward of the same turn."""
        seconds: ByPhase = dict.fromkeys(PHASES)
        for phase in self._phases:
            seconds[phase] = self._clock.best([run[phase].seconds for run in self.runs])
        if "backward" in self._phases:
            seconds["both"] = self._clock.best([run["forward"].seconds + run["backward"].seconds for run in self.runs])
        return seconds

    def host_seconds(self) -> ByPhase:
        """Return the seconds until a call of each phase was queued."""
        return {phase: statistics.median(run[phase].host_seconds for run in self.runs) for phase in self._phases}


def take_turns(
    contenders: dict[str, Contender],
    sets: Sequence[Inputs],
    device: torch.device,
    repeats: int,
    seconds: float,
    clock: HostClock | DeviceClock | None = None,
) -> dict[str, Turns]:
    """Run all contenders in turns: ``repeats`` times, or less if a card would take more than ``seconds``."""
    clock = clock or clock_of(device, sets)
    turns = {name: Turns(contender, sets, clock) for name, contender in contenders.items()}
    round_seconds = sum(contender_turns.warm_up() for contender_turns in turns.values())
    draws = random.Random(0)
    for _ in range(clock.repeats(repeats, round_seconds, seconds)):
        for contender_turns in draws.sample([*turns.values()], len(turns)):
            contender_turns.take()
    return turns


def peak_bytes(contender: Contender, inputs: Inputs, device: torch.device) -> int | None:
    """Return the peak memory of a forward and backward pass, including inputs; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    out = contender.attention(*inputs.leaves)
    torch.autograd.grad(out, inputs.leaves, inputs.grad_out)
    return torch.cuda.max_memory_allocated(device) - before + inputs.num_bytes()
