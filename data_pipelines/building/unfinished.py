"""The folder of a build that is not finished: kept when the build is killed or fails, and gone on from.

    .NAME.unfinished/       beside the output NAME
      lock                  held by the build that is under way
      plan.json             of which settings and files
      data/                 what becomes the output by one rename: whole files only
      records/              a file a finished shard: its line of the manifest
      partial/              files that are being written

A record is written when its shard and index are on the disk, so what has a record need not be made again. With no
``data``, or no record, there is nothing worth keeping: the build ended, or had not yet come to anything.
"""

import errno
import fcntl
import json
import logging
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from longstride.data_pipelines.building.durable import durable_file, flush_folder
from longstride.data_pipelines.building.places import real_path, unfinished_folder
from longstride.data_pipelines.building.present import cannot_be_made
from longstride.data_pipelines.documents import Piece, Plan
from longstride.data_pipelines.errors import DataError, os_errors_told
from longstride.data_pipelines.shards import DataManifest, ShardRecord

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Workplace:
    """The folders of an unfinished build, as every rank writes to them."""

    folder: Path

    @property
    def data(self) -> Path:
        """What becomes the output."""
        return self.folder / "data"

    @property
    def partial(self) -> Path:
        """Files that are being written."""
        return self.folder / "partial"

    @property
    def records(self) -> Path:
        """Records of finished shards."""
        return self.folder / "records"

    def record_path(self, shard_name: str) -> Path:
        """The record of a shard."""
        return self.records / f"{shard_name.removesuffix('.tar')}.json"

    def keep_record(self, record: ShardRecord) -> None:
        """Tell later builds that a shard is finished. Raises DataError where it cannot be written."""
        with durable_file(self.record_path(record.name), self.partial) as file:
            file.write(json.dumps(record.to_json()).encode())

    @property
    def holds_finished(self) -> bool:
        """Whether there is a finished shard: something to go on from."""
        return self.data.is_dir() and self.records.is_dir() and any(self.records.iterdir())

    def finished(self, name: str, pieces: list[Piece]) -> ShardRecord | None:
        """The record of a shard that is finished and holds these pieces, else None."""
        try:
            record = ShardRecord(**json.loads(self.record_path(name).read_bytes()))
            sizes = [(self.data / file).stat().st_size for file in (name, record.index_name)]
            wanted = [record.file_bytes, record.index_file.size]
        except (OSError, TypeError, ValueError):
            return None
        planned = (name, len(pieces), sum(piece.size for piece in pieces))
        return record if sizes == wanted and (record.name, record.samples, record.content_bytes) == planned else None


class UnfinishedBuild:
    """The first rank's hold on an unfinished build: nobody else works on it until it is let go."""

    def __init__(self, output: Path) -> None:
        """Raises DataError where another build into ``output`` is under way, or none can be."""
        self.place = Workplace(unfinished_folder(output))
        self._lock = _hold(self.place.folder, output)

    def begin(self, plan: Plan) -> None:
        """Make ready for the plan, or for going on with it. Raises DataError for what is finished of another plan."""
        place = self.place
        plan_path = place.folder / "plan.json"
        with os_errors_told(place.folder):
            if place.holds_finished:
                _check_plan(plan_path, plan)
            else:
                self._clear()
            if place.partial.is_dir():
                shutil.rmtree(place.partial)
            place.partial.mkdir()
            if not plan_path.is_file():
                with durable_file(plan_path, place.partial) as file:
                    file.write(json.dumps(plan.identity).encode())
            place.data.mkdir(exist_ok=True)
            place.records.mkdir(exist_ok=True)
        flush_folder(place.folder)

    def finish(self, output: Path, manifest: DataManifest) -> None:
        """Rename what is whole to ``output``, and remove the rest. Raises DataError where that cannot be."""
        with durable_file(self.place.data / DataManifest.FILE_NAME, self.place.partial) as file:
            file.write(manifest.to_json().encode())
        flush_folder(self.place.data)
        with os_errors_told(output):
            self.place.data.rename(output)  # an empty folder may be there; the system lets it replace nothing else
        flush_folder(output.parent)
        self.tidy()

    def tidy(self) -> None:
        """Remove what a build leaves that has ended; what is not finished stays."""
        if self.place.data.exists():
            return
        with suppress(OSError):  # the output is whole, whatever stays here
            self._clear()
            (self.place.folder / "lock").unlink()
            self.place.folder.rmdir()

    def let_go(self) -> None:
        """Let other builds go on."""
        os.close(self._lock)

    def _clear(self) -> None:
        for path in list(self.place.folder.iterdir()):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != "lock":
                path.unlink()


def kept_folder(output: Path) -> Path | None:
    """Where finished shards of an unfinished build of ``output`` are kept; None where there are none."""
    place = Workplace(unfinished_folder(real_path(output)))
    try:
        return place.folder if place.holds_finished else None
    except OSError:
        return None


def _check_plan(plan_path: Path, plan: Plan) -> None:
    try:
        begun = json.loads(plan_path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{plan_path}: damaged ({error}); remove {plan_path.parent} to start over") from error
    if begun != plan.identity:
        same_settings = isinstance(begun, dict) and begun.get("settings") == plan.identity["settings"]
        what = "other files, or files that changed since" if same_settings else "other settings"
        raise DataError(
            f"{plan_path.parent}: holds an unfinished build of {what}; remove that folder to start over, "
            "or name another output"
        )


def _hold(folder: Path, output: Path) -> int:
    """A descriptor that holds the folder's lock; the system lets go of it when this process ends, however it ends."""
    path = folder / "lock"
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_be_made(output, error.strerror or str(error)) from error
        with os_errors_told(folder):
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            except FileNotFoundError:
                continue  # a build that ended has just removed the folder
        try:
            _take(descriptor, path)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # of a file that a build that ended has just removed: no lock at all


def _take(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise DataError(f"{path.parent}: another build into the same output is under way; wait for its end") from error
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise DataError(f"{path}: cannot be locked ({error.strerror})") from error
        _log.warning("%s: the file system has no locks; start no second build into the same output", path)
