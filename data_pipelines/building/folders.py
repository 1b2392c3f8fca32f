"""The folders of a build: inputs separate from the output, an existing output, and an unfinished build.

An existing output is never overwritten; it is accepted if the build would create the same. If a build is killed or
fails, its finished shards are kept, and the next build resumes from there:

    .NAME.unfinished/       next to the output NAME
      lock                  held by the running build
      plan.json             hashes of settings and files
      data/                 complete files; becomes the output by one rename
      records/              a file for each finished shard: its record in the manifest
      partial/              files that are being written

A record is written after its shard and index are on the disk, so that shard need not be written again. Without
``data``, or without records, nothing is worth keeping: the build ended, or finished no shard.
"""

import json
import logging
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from longstride.data_pipelines.building.planning import BuildPlan, BuildSettings
from longstride.data_pipelines.building.shard_writer import Piece, is_planned
from longstride.data_pipelines.durable import durable_file, flush_folder, lock_path, make_folders
from longstride.data_pipelines.errors import DataError, as_data_error
from longstride.data_pipelines.palette import Palette
from longstride.data_pipelines.plain_files import MOST_JSON_BYTES, parse_json, plain_status, read_plain
from longstride.data_pipelines.shards import DataManifest, ShardRecord, verify
from longstride.data_pipelines.stores import open_store

_NOT_OVERWRITTEN = "it is not overwritten; name another output, or remove this one first"

_log = logging.getLogger(__name__)


def real_path(path: Path) -> Path:
    """Return the path with links followed. A circular link stays unchanged."""
    return Path(os.path.realpath(path))


def check_apart(inputs: Sequence[Path], output: Path) -> None:
    """Raise DataError for inputs that overlap each other or the resolved ``output``.

    A file in two inputs would be two documents, and might be in both splits.
    """
    names: dict[Path, Path] = {}  # the user's names by real paths
    for path in inputs:
        place = real_path(path)
        if place in names:
            alias = f" (as {names[place]})" if names[place] != path else ""
            raise DataError(f"{path}: is named twice{alias}; name every input once")
        names[place] = path
    for place, path in names.items():
        outer = next((names[folder] for folder in place.parents if folder in names), None)
        if outer is not None:
            raise DataError(f"{path}: lies inside {outer}, so its files would be read twice; name only one of the two")
        for written in (output, UnfinishedFolder(output).folder):
            if written.is_relative_to(place):
                raise DataError(f"{output}: lies inside the input {path}; name an output outside it")
            if place.is_relative_to(written):
                raise DataError(f"{path}: lies inside the output, {written}; name an output outside the input")


def is_occupied(output: Path) -> bool:
    """Whether the output exists. An empty folder does not count."""
    return os.path.lexists(output) and (not output.is_dir() or any(output.iterdir()))


def check_output(output: Path, settings: BuildSettings) -> DataManifest | None:
    """Return the manifest of an existing output. Raises DataError if the output cannot become an identical build."""
    try:
        if not output.name or output.is_mount():
            raise DataError(f"{output}: is a mount point, which cannot be replaced by a rename; name a folder in it")
        if not is_occupied(output):
            # Checked before a long search. Other failures are reported when the folder is created.
            above = next(folder for folder in output.parents if folder.exists())
            if not above.is_dir():
                raise _cannot_be_made(output, f"{above} is not a folder")
            if not os.access(above, os.W_OK | os.X_OK):
                raise _cannot_be_made(output, f"{above} cannot be written to")
            return None
        if not (output / DataManifest.FILE_NAME).is_file():
            raise DataError(f"{output}: already exists, is not a data folder, and is not overwritten; name another")
        present = _load_present(output)
        if present.modality != settings.modality.name or dict(present.made["settings"]) != settings.to_json():
            raise DataError(f"{output}: holds a data set made with other settings; {_NOT_OVERWRITTEN}")
        return present
    except OSError as error:  # no permission for the output, or for a folder above it
        raise _cannot_be_made(output, error.strerror or str(error)) from error


def check_room(output: Path, content_bytes: int) -> None:
    """Raise DataError if even an empty disk would be too small: a file may claim any length without taking room."""
    with as_data_error(output, None):
        room = shutil.disk_usage(next(folder for folder in (output, *output.parents) if folder.exists())).total
    if content_bytes > room > 0:  # some file systems do not say
        rule = f"the input declares {content_bytes:,} bytes of content, but the disk holds only {room:,}"
        raise DataError(f"{output}: {rule}; exclude the largest files, or name an output on a larger disk")


def open_output(output: Path, plan: BuildPlan) -> "Output":
    """Return the existing output, for comparison, or its unfinished build, locked and prepared for the plan.

    Raises DataError if the output holds something else, or if its unfinished build is locked, has another plan, or
    cannot be started.
    """
    if not is_occupied(output):
        with ExitStack() as stack:
            unfinished = UnfinishedBuild(output, plan)
            stack.callback(unfinished.close)
            if not is_occupied(output):
                unfinished.begin()
                stack.pop_all()
                return unfinished
            unfinished.tidy()  # another build has ended while this one looked for files
    return PresentOutput(output, plan)


class PresentOutput:
    """An existing data folder that a build is compared with. Nothing is written or locked."""

    place = None

    def __init__(self, path: Path, plan: BuildPlan) -> None:
        """Compare the folder with the plan. Raises DataError if the plan alone shows that they differ."""
        self.path, self.plan = path, plan
        manifest = check_output(path, plan.settings)
        assert manifest is not None
        records = {record.name: record for record in manifest.shards()}
        is_alike = dict(manifest.made) == plan.made and dict(manifest.properties) == dict(plan.properties)
        for name, pieces in plan.shards():
            record = records.pop(name, None)
            is_alike &= record is not None and is_planned(record, pieces, plan.settings.modality)
        if records or not is_alike:
            raise _holds_other_files(path)

    def finished(self, name: str, pieces: list[Piece]) -> None:
        """Return None: every shard is computed again, so that ``finish`` can compare it."""

    def finish(self, records: Mapping[str, ShardRecord], palette: Palette | None) -> DataManifest:
        """Raise DataError unless the folder is, to the last bit, the result of the build.

        Also remove the remains of a build that was killed after its output was complete.
        """
        manifest = self.plan.manifest(records, palette)
        if _load_present(self.path).fingerprint != manifest.fingerprint:
            raise _holds_other_files(self.path)
        findings = verify(self.path)
        if findings:
            raise DataError(f"{findings[0]}; {_NOT_OVERWRITTEN}")
        _log.info("%s: already there, and identical", self.path)
        if UnfinishedFolder(self.path).folder.is_dir():
            with suppress(DataError):  # another build may hold it, or the folder may be read-only: no harm
                leftover = UnfinishedBuild(self.path, self.plan)
                leftover.tidy()
                leftover.close()
        return manifest

    def close(self) -> None:
        pass


def _holds_other_files(output: Path) -> DataError:
    """Return the error for an output from other files."""
    return DataError(f"{output}: holds a data set made from other files; {_NOT_OVERWRITTEN}")


def _load_present(output: Path) -> DataManifest:
    try:
        return DataManifest.load(open_store(output))
    except DataError as error:
        raise DataError(f"{error}; {_NOT_OVERWRITTEN}") from error


class UnfinishedFolder:
    """The folder of an unfinished build, to which every rank writes."""

    def __init__(self, output: Path) -> None:
        """Name the folder next to ``output``, so that a rename finishes the build."""
        self.folder = output.parent / f".{output.name}.unfinished"
        self.data, self.records = self.folder / "data", self.folder / "records"
        self.partial = self.folder / "partial"  # files that are being written

    def record_path(self, shard_name: str) -> Path:
        return self.records / f"{shard_name.removesuffix('.tar')}.json"

    def open(self, name: str) -> AbstractContextManager[BinaryIO]:
        """Open a data file to be written. Raises DataError if it cannot be."""
        return durable_file(self.data / name, self.partial)

    def write(self, name: str, lines: Iterable[bytes]) -> None:
        """Write a data file. Raises DataError if it cannot be."""
        with self.open(name) as file:
            file.writelines(lines)

    def keep_record(self, record: ShardRecord) -> None:
        """Mark a shard as finished, also for later builds. Raises DataError or OSError on failure."""
        flush_folder(self.data)
        with durable_file(self.record_path(record.name), self.partial) as file:
            file.write(record.line().encode())

    @property
    def holds_finished(self) -> bool:
        """Whether any shard is finished, so that the build can be resumed."""
        return self.data.is_dir() and self.records.is_dir() and any(self.records.iterdir())


def unfinished_folder(output: Path) -> Path | None:
    """Return the folder of an unfinished build of ``output`` with finished shards; None if there is none."""
    place = UnfinishedFolder(real_path(output))
    try:
        return place.folder if place.holds_finished else None
    except OSError:
        return None


class UnfinishedBuild:
    """The first rank's lock on an unfinished build: no other build works on it until it is closed."""

    def __init__(self, path: Path, plan: BuildPlan) -> None:
        """Lock the folder. Raises DataError if another build into ``path`` is running, or it cannot be created."""
        self.path, self.plan = path, plan
        self.place = UnfinishedFolder(path)
        lock = None
        while lock is None:
            try:
                make_folders(self.place.folder)
            except OSError as error:
                raise _cannot_be_made(path, error.strerror or str(error)) from error
            file = self.place.folder / "lock"
            with as_data_error(file, "cannot be locked"), suppress(FileNotFoundError):  # another build has just ended
                lock = lock_path(file)
                if lock is None:
                    rule = "another build into the same output is running; wait until it has finished"
                    raise DataError(f"{self.place.folder}: {rule}")
        self._lock = lock

    def begin(self) -> None:
        """Prepare the folder for the plan, or resume it. Raises DataError if shards of another plan are finished."""
        plan, place = self.plan, self.place
        plan_path = place.folder / "plan.json"
        with as_data_error(place.folder, None):
            if place.holds_finished:
                try:
                    begun = parse_json(read_plain(plan_path, MOST_JSON_BYTES))
                except (OSError, ValueError) as error:
                    raise DataError(f"{plan_path}: damaged ({error}); remove {place.folder} to start over") from error
                if begun != plan.identity:
                    same_settings = isinstance(begun, dict) and begun.get("settings") == plan.identity["settings"]
                    what = "other files, or files that changed since" if same_settings else "other settings"
                    mend = "remove that folder to start over, or name another output"
                    raise DataError(f"{place.folder}: holds an unfinished build of {what}; {mend}")
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

    def finished(self, name: str, pieces: list[Piece]) -> ShardRecord | None:
        """Return the record of a shard if it is finished and has these pieces, else None."""
        place = self.place
        try:
            record = ShardRecord.parse(parse_json(read_plain(place.record_path(name), MOST_JSON_BYTES)))
            sizes = [plain_status(place.data / file).st_size for file in (name, record.index_name)]
            recorded_sizes = [record.file_bytes, record.index_file.size]
        except (OSError, ValueError):
            return None
        is_this_one = record.name == name and is_planned(record, pieces, self.plan.settings.modality)
        return record if sizes == recorded_sizes and is_this_one else None

    def finish(self, records: Mapping[str, ShardRecord], palette: Palette | None) -> DataManifest:
        """Rename the complete data to the output, and remove the rest. Raises DataError on failure."""
        manifest = self.plan.manifest(records, palette)
        if palette is not None:
            self.place.write(Palette.FILE_NAME, [palette.to_ppm()])
        if manifest.pieces is not None:
            self.place.write(manifest.pieces.name, self.plan.piece_lines())
        if manifest.labels is not None:
            self.place.write(manifest.labels.name, [self.plan.labels or b""])
        if first := next(lines := self.plan.source_lines(), None):
            self.place.write(DataManifest.SOURCES_NAME, chain((first,), lines))
        self.place.write(DataManifest.FILE_NAME, [manifest.to_json().encode()])
        with as_data_error(self.path, None):
            flush_folder(self.place.data)
            self.place.data.rename(self.path)  # replaces an empty folder; the system refuses to replace more
            flush_folder(self.path.parent)
        self.tidy()
        return manifest

    def tidy(self) -> None:
        """Remove the remains of a build that has ended. An unfinished build stays."""
        if self.place.data.exists():
            return
        with suppress(OSError):  # the output is whole, whatever stays here
            self._clear()
            (self.place.folder / "lock").unlink()
            self.place.folder.rmdir()

    def close(self) -> None:
        os.close(self._lock)

    def _clear(self) -> None:
        for path in list(self.place.folder.iterdir()):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != "lock":
                path.unlink()


Output = PresentOutput | UnfinishedBuild


def _cannot_be_made(output: Path, reason: str) -> DataError:
    return DataError(f"{output}: cannot be created ({reason}); name an output where you may write, such as data/mine")
