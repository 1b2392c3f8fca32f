"""Caches that are bounded by the memory they hold, for plans.

A plan in closed form has some hundred bytes, one of vectors has megabytes. A limit on their number would forget the
first too soon, where hundreds of layers have patterns of their own, and the second too late.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, ParamSpec, TypeVar

from torch import Tensor

LIMIT_BYTES = 1 << 29  # a cache
ENTRY_BYTES = 1 << 13  # that an entry counts for besides its tensors: no cache has more than 65,536

Value = TypeVar("Value")
Given = ParamSpec("Given")


class Kept(Generic[Value]):
    """Values by key. Where they hold more than ``limit_bytes`` together, those go that were not used for longest."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self._values: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()  # backward passes run on threads of their own

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Hashable) -> Value | None:
        """The value of a key, used now; None where there is none."""
        found = self._values.get(key)
        if found is None:
            return None
        with self._lock:
            if key in self._values:  # another thread may have made room in between
                self._values.move_to_end(key)
        return found[0]

    def put(self, key: Hashable, value: Value) -> None:
        """Keep a value; the last one is kept whatever its size."""
        size = ENTRY_BYTES + sum(t.numel() * t.element_size() for t in {id(t): t for t in _tensors(value)}.values())
        with self._lock:
            if key in self._values:
                self._num_bytes -= self._values.pop(key)[1]
            self._values[key] = value, size
            self._num_bytes += size
            while self._num_bytes > self.limit_bytes and len(self._values) > 1:
                self._num_bytes -= self._values.popitem(last=False)[1][1]

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._values.clear()
            self._num_bytes = 0


class kept(Generic[Given, Value]):  # noqa: N801, a decorator
    """A function with its results ``Kept``, by its positional arguments; a result None is not."""

    def __init__(self, function: Callable[Given, Value]) -> None:
        self._function = function
        self._results: Kept[Value] = Kept()
        functools.update_wrapper(self, function)

    def __call__(self, *arguments: Given.args, **nothing: Given.kwargs) -> Value:
        """The result, computed where it is not known."""
        result = self._results.get(arguments)
        if result is None:
            result = self._function(*arguments, **nothing)
            if result is not None:
                self._results.put(arguments, result)
        return result

    def cache_clear(self) -> None:
        """Forget all results."""
        self._results.clear()


def _tensors(value: object) -> Iterator[Tensor]:
    """The tensors that a value of tuples, lists and dataclasses holds."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))
