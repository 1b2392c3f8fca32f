"""Reading and writing of an engine's pickle files. Imports deepspeed.

Reading runs no code and takes memory in proportion to the file. torch's weights-only unpickler accepts tensors,
numbers, texts and their containers. The only other classes in DeepSpeed's files are four plain ones.

Writing raises nothing. DeepSpeed saves between collectives: if a rank raised on a full disk, the others would wait for
it. The failure is recorded instead. The rank goes on to the point where all ranks meet, and the caller reads the
failure there.

A background save copies to host memory, and a thread writes the copies while training goes on. DeepSpeed's own
background writer is a second process for each rank. Only that rank notices if it dies, and the next optimiser step must
wait for it, because it reads the tensors themselves.
"""

from __future__ import annotations

import copy
import hashlib
import os
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from longstride.data_pipelines.plain_files import open_plain
from longstride.kernels import ConfigError
from longstride.launcher.checkpoints.manifest import FileRecord
from longstride.launcher.models import write_tensors
from longstride.launcher.output import AgreedError
from longstride.launcher.verbs import TRUST_OPTION

FAILURES = (OSError, RuntimeError, MemoryError)  # of writing: from the disk, torch and copying
_PLAIN_CLASSES = [fragment_address, ZeroStageEnum, DynamicLossScaler, LossScaler]
_NO_ARCHIVE = "not a zip archive by torch.save, so its content is unknown"
_MOST_PICKLED_BYTES = 2**24  # without the tensors' data; about 100 for each tensor
# Errors from types, keys, sizes or shapes that no run of ours writes.
_UNFORESEEN = (RuntimeError, LookupError, TypeError, ValueError, AttributeError, AssertionError, ArithmeticError)


@contextmanager
def refuse_foreign_content(where: Path | str) -> Iterator[None]:
    """Turn any exception from the content of a file or folder into a one-line ConfigError.

    An OSError of the disk passes, with a path. The block must have no collective: a lost rank raises a RuntimeError.
    """
    try:
        yield
    except (ConfigError, AgreedError, torch.OutOfMemoryError):
        raise
    except (*_UNFORESEEN, EOFError, MemoryError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # from the disk, whatever the content is
            raise OSError(error.errno, error.strerror, error.filename or str(where)) from error
        what = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        is_memory = isinstance(error, MemoryError) or "can't allocate memory" in what  # torch's is a RuntimeError
        rule = "needs more memory than is available, or is not" if is_memory else "is not"
        raise ConfigError(f"{where}: {rule} what a run writes: {what}") from None


def read_pickle(path: Path | str, *, trusted: bool = False) -> Any:
    """Read a file that torch.save wrote. Its tensors stay on the disk until they are used.

    Raises:
        ConfigError: reading it would run code and it is not ``trusted``, or it cannot be read.
    """
    with refuse_foreign_content(path):
        content = _unbounded_content(path)
        if content is None:
            try:
                with torch.serialization.safe_globals(_PLAIN_CLASSES):
                    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except pickle.UnpicklingError as error:
                content = unsafe_content(path) or " ".join(str(error).partition("\n")[2].split())[:200]
        if not trusted:
            raise ConfigError(f"{path}: {refusal_line(content)}")
        print(f"longstride: {path}: opened because of {TRUST_OPTION}, which runs its code: {content}", file=sys.stderr)
        return torch.load(path, map_location="cpu", weights_only=False, mmap=content != _NO_ARCHIVE)


def unsafe_content(path: Path | str) -> str | None:
    """Describe the code that reading a file would run, without reading it; None if there is none.

    A file that is not an archive as torch.save writes it counts as unsafe, because Longstride writes none.
    """
    if content := _unbounded_content(path):
        return content
    try:
        with torch.serialization.safe_globals(_PLAIN_CLASSES):
            names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except (*_UNFORESEEN, EOFError, pickle.UnpicklingError):
        return "unknown content"
    return ", ".join(sorted(names)) or None


def _unbounded_content(path: Path | str) -> str | None:
    """Say why torch's weights-only unpickler could take unbounded memory for a file; None if it could not.

    It reads older formats without a bound, leaves TorchScript to another reader, and compressed records may have any
    size.
    """
    try:
        with open_plain(Path(path)) as file, zipfile.ZipFile(file) as archive:
            records = archive.infolist()
            pickled = [record for record in records if record.filename.endswith(".pkl")]
            stored = all(record.compress_type == zipfile.ZIP_STORED for record in records)
            if not stored or len(pickled) != 1 or pickled[0].file_size > _MOST_PICKLED_BYTES:
                return _NO_ARCHIVE
            content = archive.read(pickled[0])
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, EOFError, struct.error):
        return _NO_ARCHIVE
    return "a bytearray, which torch would make of any size" if b"bytearray" in content else None


def refusal_line(content: str) -> str:
    """Describe what is wrong with a file of unsafe content."""
    return (
        f"holds more than tensors and numbers ({content}), and loading those would run its code; if you trust "
        f"whoever wrote it, {TRUST_OPTION} opens it"
    )


class CheckpointFiles(TorchCheckpointEngine):
    """A checkpoint engine for DeepSpeed: files have its names and contents, and we read and write them."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._is_background = False
        self.failure: Exception | None = None
        self._records: dict[Path, FileRecord] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._writes: list[Future[None]] = []

    def begin(self, *, background: bool = False) -> None:
        """Prepare for a new checkpoint, once the last one is written."""
        self.wait()
        self.failure, self._records, self._writes = None, {}, []
        if background and self._thread is None:
            self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._is_background = background

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a folder, and record a failure."""
        try:
            os.makedirs(path, exist_ok=exist_ok)  # noqa: PTH103  as the base class's
        except OSError as error:
            self.failure = self.failure or error

    def save(self, state_dict: Any, path: str) -> None:
        """Write a file, hashed and flushed, now or in the background. After the first failure nothing is written.

        A path that ends with .safetensors becomes a safetensors file of fp32 tensors by name.
        """
        if not self._is_background:
            self._write(state_dict, Path(path))
            return
        assert self._thread is not None
        try:
            copied = host_copy(state_dict)
        except FAILURES as error:
            self.failure = self.failure or error
        else:
            self._writes.append(self._thread.submit(self._write, copied, Path(path)))

    def is_done(self) -> bool:
        """Whether all files are written or have failed."""
        return all(write.done() for write in self._writes)

    def wait(self) -> None:
        """Wait until all files are written or have failed."""
        for write in self._writes:
            write.result()

    def take_records(self, folder: Path) -> dict[str, FileRecord]:
        """Wait for all files, and return their records by path below ``folder``, or raise the first failure."""
        self.wait()
        if self.failure is not None:
            raise self.failure
        return {path.relative_to(folder).as_posix(): record for path, record in self._records.items()}

    def _write(self, content: Any, path: Path) -> None:
        if self.failure is not None:
            return
        try:
            if path.suffix == ".safetensors":
                shapes, dtypes = ({name: getattr(x, key) for name, x in content.items()} for key in ("shape", "dtype"))
                size, sha256 = write_tensors(path, shapes, content.values(), dtypes)
                self._records[path] = FileRecord(bytes=size, sha256=sha256)
            else:
                self._records[path] = write_pickle(content, path)
        except FAILURES as error:
            if isinstance(error, OSError):
                error.filename = error.filename or str(path)
            self.failure = error


def checkpoint_files(engine: DeepSpeedEngine) -> CheckpointFiles:
    """Return the object that an engine reads and writes checkpoints with, creating it on the first call."""
    if not isinstance(engine.checkpoint_engine, CheckpointFiles):
        engine.checkpoint_engine = CheckpointFiles(engine._config)
        # It would copy scripts into the checkpoint, between two collectives; `longstride export` replaces them.
        engine._copy_recovery_script = lambda _: None
    return engine.checkpoint_engine


def write_pickle(content: Any, path: Path) -> FileRecord:
    """Write an object with torch.save to a new file, and flush it; OSError has the path and the system's reason."""
    file = _HashedFile(path)
    try:
        torch.save(content, cast(IO[bytes], file), pickle_module=_PickleModule)
    finally:
        record = file.finish()
    return record


def host_copy(value: Any) -> Any:
    """Copy a value to host memory. The copy shares storage where the original does, so that it saves the same bytes."""
    copies: dict[int, Any] = {}  # by the original's id; the original is kept alive, so that its id stays unique
    storages: dict[int, torch.UntypedStorage] = {}

    def copied(value: Any) -> Any:
        if id(value) in copies:
            return copies[id(value)][0]
        if type(value) in (torch.Tensor, torch.nn.Parameter):
            storage = value.untyped_storage()
            if storage._cdata not in storages:
                storages[storage._cdata] = storage.clone() if storage.device.type == "cpu" else storage.cpu()
            result = torch.empty(0, dtype=value.dtype)
            result.set_(storages[storage._cdata], value.storage_offset(), value.size(), value.stride())
            if type(value) is torch.Tensor:
                result.requires_grad_(value.requires_grad)
            else:
                result = torch.nn.Parameter(result, requires_grad=value.requires_grad)
        elif type(value) in (dict, OrderedDict):
            result = type(value)((key, copied(part)) for key, part in value.items())
        elif type(value) in (list, tuple):
            result = type(value)(copied(part) for part in value)
        else:
            result = copy.deepcopy(value)
        if isinstance(value, torch.Tensor | OrderedDict) and vars(value):  # attributes that DeepSpeed and torch set
            vars(result).update(copied(vars(value)))
        copies[id(value)] = result, value
        return result

    return copied(value)


class _Pickler(pickle.Pickler):
    """A pickler that writes DeepSpeed's enumeration by value; the first releases of Python 3.11 write a getattr."""

    def reducer_override(self, value: Any) -> Any:
        """Return how a value is written; NotImplemented means as usual."""
        return (ZeroStageEnum, (value.value,)) if isinstance(value, ZeroStageEnum) else NotImplemented


class _PickleModule:
    """The part of the module pickle that torch.save uses."""

    Pickler = _Pickler


class _HashedFile:
    """A new file that counts and hashes what is written to it.

    An error is stored until ``finish``, because torch's writer would replace it by one about positions.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("xb", buffering=1 << 20)
        self._digest, self._size = hashlib.sha256(), 0
        self._error: OSError | None = None

    def write(self, piece: Any) -> int:
        """Write bytes, unless an earlier write failed."""
        size = memoryview(piece).nbytes
        if self._error is None:
            try:
                self._file.write(piece)
                self._digest.update(piece)
                self._size += size
            except OSError as error:
                self._error = error
        return size

    def flush(self) -> None:
        """Do nothing: torch calls it before the last bytes. ``finish`` flushes."""

    def finish(self) -> FileRecord:
        """Flush to the disk, close, and raise the first OSError if there was one."""
        try:
            with self._file:  # closing flushes again
                if self._error is None:
                    self._file.flush()
                    os.fsync(self._file.fileno())
        except OSError as error:
            self._error = self._error or error
        if self._error is not None:
            raise OSError(self._error.errno, self._error.strerror, str(self._path)) from None
        return FileRecord(bytes=self._size, sha256=self._digest.hexdigest())
