"""How an engine reads and writes the files of its checkpoints: nothing is run, and a failure is no exception.

DeepSpeed saves between collectives: a rank that left on a full disk would have the others wait for it. So what fails is
remembered, the rank goes on to where all meet, and whoever had it save asks afterwards.

In the background, saving is copying to the host's memory; a thread brings the copies to the disk while training goes
on. DeepSpeed's own decoupled writer is a second process for each rank, whose end is noticed by that rank alone, and it
reads the tensors themselves, so that the next optimiser step has to wait for it.
"""

from __future__ import annotations

import copy
import copyreg
import hashlib
import os
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, cast

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.zero.config import ZeroStageEnum

from longstride.launcher.checkpoints.manifest import FileRecord
from longstride.launcher.checkpoints.unpickling import read_pickle

FAILURES = (OSError, RuntimeError, MemoryError)  # of writing: the disk's, torch's, and what copying may end in
BUFFER_BYTES = 1 << 20
# By value, which is how it is read: the first releases of Python 3.11 would have it fetched by a call of getattr.
copyreg.pickle(ZeroStageEnum, lambda stage: (ZeroStageEnum, (stage.value,)))


class CheckpointFiles(TorchCheckpointEngine):
    """DeepSpeed's own names and contents, our reading and writing."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._is_background = False
        self.trusted = False  # whether files may hold more than tensors and numbers
        self.failure: Exception | None = None
        self.records: dict[Path, FileRecord] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._writes: list[Future[None]] = []

    def begin(self, *, background: bool = False) -> None:
        """Forgets the last checkpoint, once it is written."""
        self.wait()
        self.failure, self.records, self._writes = None, {}, []
        if background and self._thread is None:
            self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._is_background = background

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """A folder."""
        try:
            os.makedirs(path, exist_ok=exist_ok)  # noqa: PTH103  as the base class's
        except OSError as error:
            self.failure = self.failure or error

    def save(self, state_dict: Any, path: str) -> None:
        """Writes a file, hashed and flushed, now or in the background; the first failure is the last attempt."""
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
        """Whether everything is written, or has failed."""
        return all(write.done() for write in self._writes)

    def wait(self) -> None:
        """Waits until everything is written, or has failed."""
        for write in self._writes:
            write.result()

    def _write(self, content: Any, path: Path) -> None:
        if self.failure is not None:
            return
        try:
            self.records[path] = write_pickle(content, path)
        except FAILURES as error:
            self.failure = error

    def load(self, path: str, map_location: Any = None) -> Any:
        """The content of a file."""
        return read_pickle(path, map_location=map_location, trusted=self.trusted)


def checkpoint_files(engine: DeepSpeedEngine) -> CheckpointFiles:
    """What an engine reads and writes its checkpoints by, from the first call on."""
    if not isinstance(engine.checkpoint_engine, CheckpointFiles):
        engine.checkpoint_engine = CheckpointFiles(engine._config)
        # Programs beside the data, copied between two collectives; `longstride export` does what they do.
        engine._copy_recovery_script = _copy_nothing
    return engine.checkpoint_engine


def write_pickle(content: Any, path: Path) -> FileRecord:
    """Writes what torch.save makes of something to a new file, and brings it to the disk.

    Raises:
        OSError: with the path, and the reason that the system gave.
    """
    file = _HashedFile(path)
    try:
        torch.save(content, cast(IO[bytes], file))
    finally:
        record = file.finish()
    return record


def host_copy(value: Any) -> Any:
    """A copy in the host's memory that shares what the original shares, so that the same bytes are saved."""
    return _host_copy(value, {}, {})


def _host_copy(value: Any, seen: dict[int, Any], storages: dict[int, torch.UntypedStorage]) -> Any:
    if id(value) in seen:
        return seen[id(value)][0]
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        storage = value.untyped_storage()
        if storage._cdata not in storages:
            storages[storage._cdata] = storage.clone() if storage.device.type == "cpu" else storage.cpu()
        made = torch.empty(0, dtype=value.dtype)
        made.set_(storages[storage._cdata], value.storage_offset(), value.size(), value.stride())
        made = (
            made.requires_grad_(value.requires_grad)
            if type(value) is torch.Tensor
            else torch.nn.Parameter(made, requires_grad=value.requires_grad)
        )
    elif type(value) in (dict, OrderedDict):
        made = type(value)((key, _host_copy(part, seen, storages)) for key, part in value.items())
    elif type(value) in (list, tuple):
        made = type(value)(_host_copy(part, seen, storages) for part in value)
    else:
        made = copy.deepcopy(value)
    if isinstance(value, torch.Tensor | OrderedDict) and vars(value):  # DeepSpeed's and torch's own attributes
        vars(made).update(_host_copy(vars(value), seen, storages))
    seen[id(value)] = made, value  # the original stays: its id must not be another's
    return made


class _HashedFile:
    """A new file that keeps count and hash of what it is given.

    An error is kept until the end: torch's writer would make of it one about positions, which hides the reason.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("xb", buffering=BUFFER_BYTES)
        self._digest, self._size = hashlib.sha256(), 0
        self._error: OSError | None = None

    def write(self, piece: Any) -> int:
        """Takes bytes."""
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
        """Is asked for before the last bytes; ``finish`` does it."""

    def finish(self) -> FileRecord:
        """Flushes to the disk and closes. Raises OSError, the first that there was."""
        try:
            if self._error is None:
                self._file.flush()
                os.fsync(self._file.fileno())
        except OSError as error:
            self._error = error
        try:
            self._file.close()  # flushes again what it could not
        except OSError as error:
            self._error = self._error or error
        if self._error is not None:
            raise OSError(self._error.errno, self._error.strerror, str(self._path)) from None
        return FileRecord(bytes=self._size, sha256=self._digest.hexdigest())


def _copy_nothing(folder: str) -> None:
    """Stands for ``_copy_recovery_script``."""
