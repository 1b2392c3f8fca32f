"""Caches bounded by the memory that their values hold.

A plan in closed form takes some hundred bytes, a plan of vectors takes megabytes. A bound on the number of entries
would evict the first kind too early, if hundreds of layers have patterns of their own, and the second too late.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, ParamSpec, TypeVar

from torch import Tensor

LIMIT_BYTES = 1 << 29  # of a cache
ENTRY_BYTES = 1 << 13  # size of an entry without its tensors; so no cache has more than 65,536 entries

Value = TypeVar("Value")
Arguments = ParamSpec("Arguments")


@dataclasses.dataclass
class _Entry(Generic[Value]):
    value: Value
    num_bytes: int
    is_recent: bool = True  # used since the cache last evicted


class BoundedCache(Generic[Value]):
    """Values by key. Beyond ``limit_bytes`` in total, entries that were not used recently are evicted."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self._entries: dict[Hashable, _Entry[Value]] = {}
        self._num_bytes = 0
        self._lock = threading.Lock()  # backward passes run on threads of their own

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable) -> Value | None:
        """Return the value of a key, or None. The key is hashed once, as hashing many patterns takes time."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry.is_recent = True
        return entry.value

    def put(self, key: Hashable, value: Value) -> None:
        """Store a value. The last one is stored even if it exceeds the limit."""
        tensors = {id(tensor): tensor for tensor in _tensors(value)}.values()
        entry = _Entry(value, ENTRY_BYTES + sum(t.numel() * t.element_size() for t in tensors))
        with self._lock:
            if key in self._entries:
                self._num_bytes -= self._entries.pop(key).num_bytes
            self._entries[key] = entry
            self._num_bytes += entry.num_bytes
            while self._num_bytes > self.limit_bytes and len(self._entries) > 1:
                oldest_key = next(iter(self._entries))
                oldest = self._entries.pop(oldest_key)
                if oldest.is_recent:  # a second chance, at the end of the queue
                    oldest.is_recent = False
                    self._entries[oldest_key] = oldest
                else:
                    self._num_bytes -= oldest.num_bytes

    def clear(self) -> None:
        """Remove all entries."""
        with self._lock:
            self._entries.clear()
            self._num_bytes = 0


class cached(Generic[Arguments, Value]):  # noqa: N801, a decorator
    """Decorate a function so that a ``BoundedCache`` stores its results by positional arguments, except None."""

    def __init__(self, function: Callable[Arguments, Value]) -> None:
        self._function = function
        self._results: BoundedCache[Value] = BoundedCache()
        functools.update_wrapper(self, function)

    def __call__(self, *arguments: Arguments.args, **options: Arguments.kwargs) -> Value:
        """Return the stored result, or compute and store it."""
        result = self._results.get(arguments)
        if result is None:
            result = self._function(*arguments, **options)
            if result is not None:
                self._results.put(arguments, result)
        return result

    def cache_clear(self) -> None:
        """Remove all results."""
        self._results.clear()


def _tensors(value: object) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for entry in value:
            yield from _tensors(entry)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))
