"""Which parameters ZeRO 3 gathers in a micro-batch: the rules of DeepSpeed's coordinator applied to the model's
modules.

The order of modules is recorded in a forward and backward pass on fake tensors, with hooks at the places of DeepSpeed's
(runtime/zero/parameter_offload.py). The rules are those of its partitioned_param_coordinator.py once it knows the
order, which is from the third micro-batch on:

- a module's missing parameters are gathered before its forward and before its backward pass;
- then those that come next, until the prefetch bucket is full or the limit of live parameters is reached;
- they are released after it, unless they are persistent (small), or the queue of prefetches has already passed a later
  use of them, or they are used again within the reuse distance.
"""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from benchmarks.training.training_step import attention_replaced
from longstride.launcher.config import RunConfig
from longstride.sparse_model import Division, MixerOutput, SparseTransformer

FETCH, RELEASE = "fetch", "release"


class Event(NamedTuple):
    """A module that needs its parameters, or is finished with them, in one pass."""

    kind: str
    module: str


class Use(NamedTuple):
    """A parameter's place in the order of uses."""

    parameter: str
    step: int  # the module use, counted from 0


@dataclass(frozen=True, slots=True)
class Limits:
    """DeepSpeed's settings of stage 3, in elements."""

    persistence: int = 100_000
    model_persistence: int = 2**63 - 1
    max_live: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    prefetch_bucket: int = 50_000_000

    @classmethod
    def of(cls, section: dict[str, Any]) -> Limits:
        """Read the limits from a run's DeepSpeed section."""
        zero = section.get("zero_optimization", {})
        names = {
            "persistence": "stage3_param_persistence_threshold",
            "model_persistence": "stage3_model_persistence_threshold",
            "max_live": "stage3_max_live_parameters",
            "max_reuse_distance": "stage3_max_reuse_distance",
            "prefetch_bucket": "stage3_prefetch_bucket_size",
        }
        return cls(**{name: int(zero[key]) for name, key in names.items() if key in zero})


@dataclass(slots=True)
class Trace:
    """A micro-batch's uses of modules, and the parameters that each use needs."""

    events: list[Event] = field(default_factory=list)
    parameters: dict[str, list[str]] = field(default_factory=dict)  # of a module, in the model's order
    numel: dict[str, int] = field(default_factory=dict)


def persistent(numel: dict[str, int], limits: Limits) -> list[str]:
    """Return the parameters that every rank keeps whole: small ones, in the model's order."""
    names, total = [], 0
    for name, count in numel.items():
        if count <= limits.persistence and count + total <= limits.model_persistence:
            names.append(name)
            total += count
    return names


def trace(config: RunConfig) -> Trace:
    """Record a micro-batch of the run: a forward and backward pass on fake tensors."""
    train, record = config.train, Trace()
    with ExitStack() as modes:
        modes.enter_context(FakeTensorMode())
        modes.enter_context(attention_replaced(_read_all))
        model = SparseTransformer(config.model.model_copy(update={"backend": "cpu"}))
        record.numel = {name: parameter.numel() for name, parameter in model.named_parameters()}
        _record(model, record.events)
        if train.activation_checkpointing:
            model.activation_checkpoint = _recomputed
        # It takes a section of rows, and attends as if that were all: the order of the modules is the same.
        model.division = model.embedding.division = Division(0, train.sequence_parallel or 1)
        tokens = torch.zeros(train.micro_batch, config.model.context, dtype=torch.uint8)
        model(tokens, return_nats=True).sum().backward()
        record.parameters = _owners(model, record.events)
    return record


def _read_all(q: Tensor, k: Tensor, v: Tensor, patterns: Any, backend: str) -> Tensor:
    """Return rows that depend on q, k and v as those of attention do, in a few operations."""
    return q.sum(-1, keepdim=True) + (k.sum() + v.sum()) + q.new_zeros(v.shape[-1])


def _recomputed(function: Any, *args: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=True)


def _record(model: nn.Module, events: list[Event]) -> None:
    """Add hooks to every module: identities in the graph around it record when its backward pass begins and ends."""
    for name, module in model.named_modules():

        def before(_: nn.Module, args: tuple[Any, ...], name: str = name) -> tuple[Any, ...]:
            events.append(Event(FETCH, name))
            return tuple(_mark(argument, Event(RELEASE, name), events) for argument in args)

        def after(_: nn.Module, args: tuple[Any, ...], out: Any, name: str = name) -> Any:
            events.append(Event(RELEASE, name))
            if isinstance(out, MixerOutput):
                return out._replace(rows=_mark(out.rows, Event(FETCH, name), events))
            return _mark(out, Event(FETCH, name), events)

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)


def _mark(tensor: Any, event: Event, events: list[Event]) -> Any:
    """Return the tensor; its gradient's passing is recorded as an event."""
    if isinstance(tensor, Tensor) and tensor.requires_grad and torch.is_grad_enabled():
        return _Mark.apply(tensor, event, events)
    return tensor


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, event: Event, events: list[Event]) -> Tensor:
        ctx.event, ctx.events = event, events
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.events.append(ctx.event)
        return grad, None, None


def _owners(model: nn.Module, events: list[Event]) -> dict[str, list[str]]:
    """Map each module to its own parameters and those of children that it computes itself."""
    used = {event.module for event in events}
    owners: dict[str, list[str]] = {name: [] for name, _ in model.named_modules()}
    for name, _ in model.named_parameters():
        owner = name.rpartition(".")[0]
        while owner not in used:
            owner = owner.rpartition(".")[0]
        owners[owner].append(name)
    return owners


def gathers(record: Trace, limits: Limits) -> list[list[str]]:
    """Return the parameters of each all_gather of a micro-batch once DeepSpeed knows the order of the modules."""
    coordinator = _Coordinator(record, limits)
    for _ in range(2):  # the second one begins as every later one does
        coordinator.begin()
        for event in record.events:
            (coordinator.fetch if event.kind == FETCH else coordinator.release)(event.module)
        coordinator.end()
    return coordinator.gathered


class _Coordinator:
    """The state of every parameter, as DeepSpeed tracks it."""

    def __init__(self, record: Trace, limits: Limits) -> None:
        self._trace, self._limits = record, limits
        self._persistent = set(persistent(record.numel, limits))
        self._here = set(self._persistent)
        self._in_flight: set[str] = set()
        self._users: dict[str, set[str]] = {name: set() for name in record.numel}
        self._modules = [event.module for event in record.events if event.kind == FETCH]
        self._order = [Use(p, step) for step, module in enumerate(self._modules) for p in record.parameters[module]]
        self._reused: dict[tuple[str, int], set[str]] = {}
        self.gathered: list[list[str]] = []

    def begin(self) -> None:
        """Begin a micro-batch's forward pass, and drop unused prefetches."""
        for name in self._in_flight:
            if not self._users[name]:
                self._here.discard(name)
        self._in_flight.clear()
        self._queue = deque(self._order)
        self._passed: dict[str, int] = dict.fromkeys(self._trace.numel, -1)
        self._live = self._step = 0
        self.gathered = []

    def fetch(self, module: str) -> None:
        """Gather a module's parameters, and prefetch some of those that come next."""
        names = self._trace.parameters[module]
        self._gather([name for name in names if name not in self._here])
        for name in names:
            self._users[name].add(module)
            self._in_flight.discard(name)
        ahead = {name for name in names if self._passed[name] < self._step}
        popped: set[str] = set()
        while self._queue and len(popped) < len(ahead):
            use = self._queue.popleft()
            self._passed[use.parameter] = use.step
            popped.add(use.parameter)
        room = min(self._limits.max_live - self._live, self._limits.prefetch_bucket)
        prefetched: dict[str, int] = {}
        while self._limits.prefetch_bucket and self._queue and sum(prefetched.values()) < room:
            use = self._queue.popleft()
            self._passed[use.parameter] = max(self._passed[use.parameter], use.step)
            if use.parameter not in self._here:
                prefetched[use.parameter] = self._trace.numel[use.parameter]
        self._gather(list(prefetched))
        self._in_flight.update(prefetched)
        self._step += 1

    def release(self, module: str) -> None:
        """Release what a module no longer needs."""
        names = self._trace.parameters[module]
        for name in names:
            self._users[name].discard(module)
        if not names:
            return
        needed = self._persistent | self._used_again(module)
        for name in names:
            free = name in self._here and name not in self._in_flight and not self._users[name]
            if free and name not in needed and self._passed[name] <= self._step:
                self._here.discard(name)
                self._live -= self._trace.numel[name]

    def end(self) -> None:
        """End a micro-batch's backward pass, also for the embedding, whose input has no gradient."""
        for name, users in self._users.items():
            if users and name not in self._persistent and name not in self._in_flight:
                self._here.discard(name)
            users.clear()

    def _used_again(self, module: str) -> set[str]:
        """Return the module's parameters that are used again within the reuse distance."""
        key = (module, self._step)
        if key not in self._reused:
            names, distance = set(self._trace.parameters[module]), 0
            used: set[str] = set()
            for later in self._modules[self._step :]:
                if distance >= self._limits.max_reuse_distance or used == names:
                    break
                for name in self._trace.parameters[later]:
                    distance += self._trace.numel[name]
                    if name in names:
                        used.add(name)
            self._reused[key] = used
        return self._reused[key]

    def _gather(self, names: list[str]) -> None:
        if names:
            self.gathered.append(names)
            self._here.update(names)
            self._live += sum(self._trace.numel[name] for name in names)
