"""Caches that are bounded by the memory they hold, for plans.

A plan in closed form has some hundred bytes, one of vectors has megabytes. A limit on their number would forget the
first too soon, where hundreds of layers have patterns of their own, and the second too late.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, ParamSpec, TypeVar

from torch import Tensor

LIMIT_BYTES = 1 << 29  # a cache
ENTRY_BYTES = 1 << 13  # that an entry counts for besides its tensors: no cache has more than 65,536

Value = TypeVar("Value")
Given = ParamSpec("Given")


class _Entry(Generic[Value]):
    def __init__(self, value: Value, num_bytes: int) -> None:
        self.value, self.num_bytes = value, num_bytes
        self.used = True  # since room was last made


class Kept(Generic[Value]):
    """Values by key. Where they hold more than ``limit_bytes`` together, those go that were not used of late."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self._entries: dict[Hashable, _Entry[Value]] = {}
        self._num_bytes = 0
        self._lock = threading.Lock()  # backward passes run on threads of their own

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable) -> Value | None:
        """The value of a key, or None; it looks the key up once, as a key of many patterns takes time to hash."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry.used = True
        return entry.value

    def put(self, key: Hashable, value: Value) -> None:
        """Keep a value; the last one is kept whatever its size."""
        tensors = {id(tensor): tensor for tensor in _tensors(value)}.values()
        added = _Entry(value, ENTRY_BYTES + sum(t.numel() * t.element_size() for t in tensors))
        with self._lock:
            if key in self._entries:
                self._num_bytes -= self._entries.pop(key).num_bytes
            self._entries[key] = added
            self._num_bytes += added.num_bytes
            while self._num_bytes > self.limit_bytes and len(self._entries) > 1:
                oldest = next(iter(self._entries))
                entry = self._entries.pop(oldest)
                if entry.used:  # a second chance, behind all others
                    entry.used = False
                    self._entries[oldest] = entry
                else:
                    self._num_bytes -= entry.num_bytes

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._entries.clear()
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
