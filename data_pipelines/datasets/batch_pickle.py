"""CIFAR-10's pickled batches, read without running any code that a pickle names.

A pickle is a program. The few names in these files are replaced by stand-ins that only keep their arguments, and any
other name is refused: no code of numpy or of any other package is called. The memory that a pickle takes is in
proportion to its own bytes, and is freed when it has been read.
"""

import io
import pickle
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, ClassVar

import numpy as np

from longstride.data_pipelines.datasets.excerpts import Planes
from longstride.data_pipelines.documents import OpenInput
from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.modalities import CHANNELS

_BYTE_TYPES = (b"u1", b"|u1", b"uint8")
_MOST_BYTES = 2**27  # of a batch, which is held whole: the published ones have 31 MB
_MOST_STEPS = 2**20  # of its program: they have a tenth of them
_MOST_SHOWN = 200  # characters of what a pickle says


class RefusedPickleError(Exception):
    """A pickle that is no batch: one line that says why."""


class PickledBatch(Planes):
    """The pictures of a pickled batch. About 30 MB, held in memory while it is read."""

    def rows(self, open_input: OpenInput, first: int, stop: int | None) -> np.ndarray:
        """See ``Planes``; without ``stop`` all pictures. Raises DataError for a pickle that holds anything else."""

        def load(_: ExitStack) -> np.ndarray:
            if self.member.size > _MOST_BYTES:
                rule = f"{self.member.size:,} bytes, where a batch has {_MOST_BYTES:,} at most"
                raise DataError(f"{self.member.shown}: {rule}; fetch it again")
            with OpenInput() as open_file:  # `open_input` keeps the array
                content = self.member.read(open_file, 0, self.member.size)
            try:
                return batch_rows(content, CHANNELS * self.edge**2)
            except RefusedPickleError as error:
                raise DataError(f"{self.member.shown}: {error}; nothing of it was run: fetch it again") from error

        return open_input.get(self, load)[first:stop]


def batch_rows(content: bytes, row_bytes: int) -> np.ndarray:
    """(n, row_bytes) uint8: the array under "data" of a pickled dictionary. Raises RefusedPickleError."""
    try:
        batch = _Unpickler(content).load()
    except RefusedPickleError:
        raise
    except Exception as error:  # unpickling may raise anything
        words = " ".join(str(error)[:_MOST_SHOWN].split()) or type(error).__name__
        raise RefusedPickleError(f"cannot be read as a pickle ({words})") from error
    data = batch.get(b"data", batch.get("data")) if isinstance(batch, dict) else None
    if not isinstance(data, _Array):
        raise RefusedPickleError('is no batch: a dictionary with an array of bytes as "data"')
    return data.rows(row_bytes)


class _Type:
    """Stands for numpy.dtype."""

    def __init__(self, name: Any = None, *_: Any) -> None:
        # Longer ones are no type's, and one text may be asked for again and again.
        self.name = name.encode() if isinstance(name, str) and len(name) < 8 else name

    def __setstate__(self, state: Any) -> None:
        """Byte order and the like: single bytes have none."""


class _Array:
    """Stands for numpy.ndarray."""

    def __init__(self) -> None:
        self._state: Any = None

    def __setstate__(self, state: Any) -> None:
        self._state = state

    def rows(self, row_bytes: int) -> np.ndarray:
        """(n, row_bytes) uint8. Raises RefusedPickleError for the state of any other array."""
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
    """Stands for a name: a pickle can call it or hand it on, but not change it."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any] | None) -> None:
        """``call``: what a call runs; None: no batch calls it."""
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        if self._call is None:
            raise RefusedPickleError("calls a name that no batch calls")
        return self._call(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise RefusedPickleError("gives a name a state, which no batch does")


# numpy's _reconstruct makes an empty array, which then gets a state.
_RECONSTRUCT, _NDARRAY, _DTYPE = _Named(lambda *_: _Array()), _Named(None), _Named(_Type)
_KNOWN = {
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy", "ndarray"): _NDARRAY,
    ("numpy", "dtype"): _DTYPE,
}
# Out-of-band buffers, arrays of any claimed length, names that other code registered in this process, and sets.
_BUFFERS = pickle.NEXT_BUFFER, pickle.READONLY_BUFFER, pickle.BYTEARRAY8
_SETS = pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET
_REFUSED_OPCODES = (*_BUFFERS, *_SETS, pickle.EXT1, pickle.EXT2, pickle.EXT4)


class _Steps(io.BytesIO):
    """A pickle's bytes, which are read a few times for each step of its program."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self._left = 4 * _MOST_STEPS

    def read(self, size: int | None = -1) -> bytes:
        """The next bytes. Raises RefusedPickleError for a program that has too many steps."""
        self._left -= 1
        if self._left < 0:
            raise RefusedPickleError(f"has more than {_MOST_STEPS:,} steps, which no batch has")
        return super().read(size)


def _without_tuples(run: Callable[[Any], None], keys: slice) -> Callable[[Any], None]:
    """A step that makes items of a dictionary, whose keys are no tuples: of some the hash takes for ever."""

    def checked(unpickler: Any) -> None:
        if any(isinstance(key, tuple) for key in unpickler.stack[keys]):
            raise RefusedPickleError("has a key that no batch has")
        run(unpickler)

    return checked


class _Unpickler(pickle._Unpickler):
    """Written in Python, as the C one allocates room for as many objects as a pickle claims to remember."""

    dispatch: ClassVar = {
        code: run for code, run in pickle._Unpickler.dispatch.items() if bytes([code]) not in _REFUSED_OPCODES
    }

    # Where a step finds its keys on the stack.
    dispatch |= {
        code[0]: _without_tuples(pickle._Unpickler.dispatch[code[0]], keys)
        for code, keys in (
            (pickle.SETITEM, slice(-2, -1)),
            (pickle.SETITEMS, slice(0, None, 2)),
            (pickle.DICT, slice(0, None, 2)),
        )
    }

    def __init__(self, content: bytes) -> None:
        super().__init__(_Steps(content), encoding="bytes")
        self._encodable = len(content)  # characters: each is at least a byte of the pickle, encoded once

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for a name. Raises RefusedPickleError for a name that no batch holds."""
        if (module, name) == ("_codecs", "encode"):
            return _Named(self._encode)
        if (module, name) not in _KNOWN:
            raise RefusedPickleError(f"asks for {f'{module}.{name}':.{_MOST_SHOWN}}, which no batch of CIFAR-10 does")
        return _KNOWN[module, name]

    def _encode(self, text: Any, encoding: Any = None) -> bytes:
        """Stands for codecs.encode, with which Python 3 writes bytes into pickles of protocol 2."""
        if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
            raise RefusedPickleError("asks for an encoding that no batch has")
        self._encodable -= len(text)
        if self._encodable < 0:
            raise RefusedPickleError("encodes one text again and again, which no batch does")
        return text.encode("latin1")
