"""An output that is there before a build: left as it is where the build would make the same, and never written over."""

import os
from pathlib import Path

from longstride.data_pipelines.documents import Plan, Settings
from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.shards import DataManifest, ShardRecord, verify
from longstride.data_pipelines.stores import open_store

_KEPT = "nothing is overwritten: name another output, or remove this one first"


def is_occupied(output: Path) -> bool:
    """Whether something lies where the output is to be; an empty folder is nothing."""
    return os.path.lexists(output) and (not output.is_dir() or any(output.iterdir()))


def cannot_be_made(output: Path, reason: str) -> DataError:
    """What to tell of an output for which there is no room in the tree of folders."""
    return DataError(f"{output}: cannot be made ({reason}); name an output where you may write, such as data/mine")


def check_output(output: Path, settings: Settings) -> None:
    """Raises DataError for what cannot become an identical build, before any file is looked for."""
    try:
        _check_output(output, settings)
    except OSError as error:  # a folder above it, or itself, is closed to us
        raise cannot_be_made(output, error.strerror or str(error)) from error


def _check_output(output: Path, settings: Settings) -> None:
    if not output.name or output.is_mount():
        raise DataError(f"{output}: a whole file system, which no rename can make appear; name a folder in it")
    if not is_occupied(output):
        _check_can_be_made(output)
        return
    if not (output / DataManifest.FILE_NAME).is_file():
        raise DataError(f"{output}: there already, and no data folder; nothing is overwritten: name another output")
    there = _loaded(output)
    if there.modality != settings.modality.name or dict(there.made["settings"]) != settings.to_json():
        raise DataError(f"{output}: holds a data set made with other settings; {_KEPT}")


def _check_can_be_made(output: Path) -> None:
    """To be told before a long walk; what this does not foresee is told when the folder is made."""
    above = next(folder for folder in output.parents if folder.exists())
    if not above.is_dir():
        raise cannot_be_made(output, f"{above} is no folder")
    if not os.access(above, os.W_OK | os.X_OK):
        raise cannot_be_made(output, f"{above} cannot be written to")


class PresentOutput:
    """A data folder that a build is compared with, shard by shard, without writing anything."""

    def __init__(self, output: Path, plan: Plan) -> None:
        """Raises DataError where the plan alone tells that the folder holds something else."""
        self._output, self._plan = output, plan
        check_output(output, plan.settings)
        manifest = _loaded(output)
        self.records: dict[str, ShardRecord] = {record.name: record for record in manifest.shards()}
        planned = {
            name: (len(pieces), sum(piece.ends for piece in pieces), sum(piece.size for piece in pieces))
            for name, pieces in plan.shards()
        }
        there = {name: (one.samples, one.documents, one.content_bytes) for name, one in self.records.items()}
        if planned != there or dict(manifest.made) != plan.made or dict(manifest.properties) != dict(plan.properties):
            raise DataError(self.other_files(output))

    def check_content(self, manifest: DataManifest) -> None:
        """Raises DataError where the folder is not, to the last bit, what the build would have made."""
        if _loaded(self._output).fingerprint != manifest.fingerprint:
            raise DataError(self.other_files(self._output))
        findings = verify(self._output)
        if findings:
            raise DataError(f"{findings[0]}; {_KEPT}")

    @staticmethod
    def other_files(output: Path) -> str:
        """What to tell where the files are not those that the output was made from."""
        return f"{output}: holds a data set made from other files; {_KEPT}"


def _loaded(output: Path) -> DataManifest:
    try:
        return DataManifest.load(open_store(output))
    except DataError as error:
        raise DataError(f"{error}; {_KEPT}") from error
