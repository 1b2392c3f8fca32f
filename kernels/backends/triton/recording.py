"""Calls made again from a recording: what a call allocated, and which compiled kernel got what.

Choosing passes, tables, tiles and specialised kernels costs the host some hundred microseconds a call, longer than a
short kernel runs. A call whose inputs look as those of an earlier one (``look``) chooses the same. So the first call
with a look runs as it is written and is noted down; later ones allocate, put their tensors in the places of the first
one's, and launch.

A recording numbers what launches get: the call's inputs first, then what it allocated, then constants (tables of
plans, integers). A call that launches with any other tensor, such as a copy in another dtype, cannot be made
again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

ALIGNMENT = 16  # bytes: triton compiles another kernel for addresses that are no multiples of it

Inputs = Sequence[Tensor | None]


def look(inputs: Inputs) -> tuple[object, ...]:
    """All that plans and specialised kernels depend on, but for patterns and device."""
    return tuple([None if t is None else (t.shape, t.stride(), t.dtype, t.data_ptr() % ALIGNMENT == 0) for t in inputs])


class Launch(NamedTuple):
    """One launch of a recorded call."""

    kernel: Any  # compiled; in the interpreter as it is written
    grid: int
    arguments: Callable[[list[Any]], tuple[Any, ...]]  # of all that is numbered

    def run(self, numbered: list[Any], stream: int | None) -> None:
        """Launch on a stream of the current device; without one in the interpreter."""
        arguments = self.arguments(numbered)
        if stream is None:
            self.kernel[(self.grid,)](*arguments)
            return
        kernel, hooks = self.kernel, triton.knobs.runtime
        enter, leave, metadata = hooks.launch_enter_hook, hooks.launch_exit_hook, None
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):  # a profiler is looking
            metadata = kernel.launch_metadata((self.grid,), stream, *arguments)
        else:
            enter = leave = None
        function, packed = kernel.function, kernel.packed_metadata
        kernel.run(self.grid, 1, 1, stream, function, packed, metadata, enter, leave, *arguments)


class Recording(NamedTuple):
    """A call that can be made again."""

    allocated: tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...]  # shape, strides
    constants: tuple[Any, ...]
    launches: tuple[Launch, ...]
    results: tuple[int, ...]

    def again(self, inputs: Inputs, device: torch.device, stream: int | None) -> tuple[Tensor, ...]:
        """The call with other inputs of the same look; ``stream`` is one of the current device."""
        numbered: list[Any] = [*inputs]
        for shape, strides, dtype in self.allocated:
            numbered.append(torch.empty_strided(shape, strides, dtype=dtype, device=device))
        numbered += self.constants
        for launch in self.launches:
            launch.run(numbered, stream)
        return tuple([numbered[number] for number in self.results])


class Recorder:
    """Notes down one call while it is made."""

    def __init__(self, inputs: Inputs) -> None:
        """The inputs must be objects of their own, not one tensor twice: tensors are known by identity."""
        # All that a kind has, in order; a number is found once the length of all kinds is known.
        self._kinds: dict[str, list[Any]] = {"inputs": [*inputs], "allocated": [], "constants": []}
        self._places = {id(tensor): ("inputs", place) for place, tensor in enumerate(inputs)}
        self._launches: list[tuple[Any, int, list[tuple[str, int]]]] = []
        self._complete = True

    def allocated(self, tensor: Tensor) -> Tensor:
        """Note a tensor that is new, and that nothing but launches will write; it is returned."""
        self._note("allocated", tensor)
        return tensor

    def constant(self, *tensors: Tensor) -> None:
        """Note tensors that every call of this look reads."""
        for tensor in tensors:
            if id(tensor) not in self._places:
                self._note("constants", tensor)

    def launched(self, kernel: Any, grid: int, arguments: Sequence[Any]) -> None:
        """Note a launch with all arguments of the kernel: compiled, or in the interpreter as it is written."""
        self._launches.append((kernel, grid, [self._place(argument) for argument in arguments]))

    def recording(self, results: Sequence[Tensor]) -> Recording | None:
        """The whole call, which has returned these; None where it cannot be made again."""
        places = [self._places.get(id(tensor)) for tensor in results]
        if not self._complete or any(place is None or place[0] != "allocated" for place in places):
            return None
        starts, length = {}, 0
        for kind, values in self._kinds.items():
            starts[kind], length = length, length + len(values)

        def number(place: tuple[str, int]) -> int:
            return starts[place[0]] + place[1]

        return Recording(
            tuple((t.shape, t.stride(), t.dtype) for t in self._kinds["allocated"]),
            tuple(self._kinds["constants"]),
            tuple(Launch(k, grid, operator.itemgetter(*map(number, places))) for k, grid, places in self._launches),
            tuple(number(place) for place in places if place is not None),
        )

    def _note(self, kind: str, value: Any) -> tuple[str, int]:
        self._kinds[kind].append(value)
        place = self._places[id(value)] = (kind, len(self._kinds[kind]) - 1)
        return place

    def _place(self, argument: Any) -> tuple[str, int]:
        if isinstance(argument, Tensor):
            self._complete &= id(argument) in self._places
            return self._places.get(id(argument), ("constants", 0))
        self._kinds["constants"].append(argument)  # an integer: not by identity, which small ones share
        return "constants", len(self._kinds["constants"]) - 1
