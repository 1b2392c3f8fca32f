"""CIFAR-10's pickled batches, read without running anything that a pickle asks for.

A pickle is a program. The few names that these files ask for are answered by stand-ins that do nothing but keep what
they are given, and any other name is refused: neither numpy's nor anybody else's code is called. What a pickle takes is
in proportion to its own bytes, and nothing of it stays when it has been read.
"""

import io
import pickle
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from longstride.data_pipelines.datasets.members import Member
from longstride.data_pipelines.datasets.planes import interleaved
from longstride.data_pipelines.documents import Openings
from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.modalities import CHANNELS

_BYTE_TYPES = (b"u1", b"|u1", b"uint8")


class RefusedPickleError(Exception):
    """What a pickle asks for or holds is not what a batch holds: one line."""


@dataclass(frozen=True, slots=True)
class PickledBatch:
    """The pictures of a pickled batch: a source (``parts.Source``). About 30 MB, which are held while it is read."""

    member: Member
    edge: int

    @property
    def identity(self) -> tuple[Any, ...]:
        """The member's."""
        return self.member.identity

    def rows(self, openings: Openings) -> np.ndarray:
        """(n, 3 x edge x edge) uint8, in planes. Raises DataError for a pickle that holds anything else."""

        def load(_: ExitStack) -> np.ndarray:
            own = Openings()  # the one that is given holds what comes of it
            try:
                content = self.member.read(own, 0, self.member.size)
            finally:
                own.close()
            try:
                return batch_rows(content, CHANNELS * self.edge**2)
            except RefusedPickleError as error:
                raise DataError(f"{self.member.shown}: {error}; nothing of it was run: fetch it again") from error

        return openings.get(self, load)

    def read(self, openings: Openings, offset: int, size: int) -> bytes:
        """Content bytes: see ``Source``."""
        rows = self.rows(openings)
        first, stop = offset // rows.shape[1], -(-(offset + size) // rows.shape[1])
        skipped = offset - first * rows.shape[1]
        return interleaved(rows[first:stop], self.edge)[skipped : skipped + size]


def batch_rows(content: bytes, row_bytes: int) -> np.ndarray:
    """(n, row_bytes) uint8: the array under "data" of a pickled dictionary. Raises RefusedPickleError."""
    try:
        batch = _Unpickler(content).load()
    except RefusedPickleError:
        raise
    except Exception as error:  # unpickling raises what it likes
        words = " ".join(str(error).split()) or type(error).__name__
        raise RefusedPickleError(f"cannot be read as a pickle ({words})") from error
    found = batch.get(b"data", batch.get("data")) if isinstance(batch, dict) else None
    if not isinstance(found, _Array):
        raise RefusedPickleError('is no batch: a dictionary with an array of bytes as "data"')
    return found.rows(row_bytes)


class _Type:
    """Stands for numpy.dtype."""

    def __init__(self, name: Any = None, *_: Any) -> None:
        self.name = name.encode() if isinstance(name, str) else name

    def __setstate__(self, state: Any) -> None:
        """Byte order and the like, which single bytes have none of."""


class _Array:
    """Stands for numpy.ndarray."""

    def __init__(self) -> None:
        self._state: Any = None

    def __setstate__(self, state: Any) -> None:
        self._state = state

    def rows(self, row_bytes: int) -> np.ndarray:
        """(n, row_bytes) uint8. Raises RefusedPickleError where the state is that of another array."""
        match self._state:
            case (
                int(),
                (int() as count, int() as width),
                _Type() as kind,
                bool() | int() as columns_first,
                bytes() as raw,
            ):
                if kind.name in _BYTE_TYPES and not columns_first and width == row_bytes and len(raw) == count * width:
                    return np.frombuffer(raw, dtype=np.uint8).reshape(count, width)
        raise RefusedPickleError(f'its "data" is no array of bytes in rows of {row_bytes}')


class _Named:
    """Stands for a name: it can be called or handed on, and there is nothing in it that a pickle could change."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any] | None) -> None:
        """``call``: what calling it does; None: no batch calls it."""
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        if self._call is None:
            raise RefusedPickleError("calls a name that no batch calls")
        return self._call(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise RefusedPickleError("gives a name a state, which no batch does")


# numpy's _reconstruct makes the empty array that a state is then given to.
_RECONSTRUCT, _NDARRAY, _DTYPE = _Named(lambda *_: _Array()), _Named(None), _Named(_Type)
_KNOWN = {
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy", "ndarray"): _NDARRAY,
    ("numpy", "dtype"): _DTYPE,
}
# Out-of-band buffers, arrays of any length that is claimed, and what other code has registered in this process.
_REFUSED_OPCODES = (
    pickle.NEXT_BUFFER,
    pickle.READONLY_BUFFER,
    pickle.BYTEARRAY8,
    pickle.EXT1,
    pickle.EXT2,
    pickle.EXT4,
)


class _Unpickler(pickle._Unpickler):
    """Python's own, not the C one: that one makes room for as many objects as a pickle says it will remember."""

    dispatch: ClassVar = {
        code: run for code, run in pickle._Unpickler.dispatch.items() if bytes([code]) not in _REFUSED_OPCODES
    }

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content), encoding="bytes")
        self._encodable = len(content)  # characters: each is a byte or more of the pickle, and is encoded once

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for a name. Raises RefusedPickleError for one that no batch asks for."""
        if (module, name) == ("_codecs", "encode"):
            return _Named(self._encode)
        if (module, name) not in _KNOWN:
            raise RefusedPickleError(f"asks for {module}.{name}, which no batch of CIFAR-10 does")
        return _KNOWN[module, name]

    def _encode(self, text: Any, encoding: Any = None) -> bytes:
        """Stands for codecs.encode, by which Python 3 writes bytes into pickles of protocol 2."""
        if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
            raise RefusedPickleError(f"asks for an encoding, {encoding!r}, that no batch has")
        self._encodable -= len(text)
        if self._encodable < 0:
            raise RefusedPickleError("encodes one text again and again, which no batch does")
        return text.encode("latin1")
