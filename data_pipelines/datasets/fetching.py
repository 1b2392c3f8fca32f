"""Where a dataset's input is, and how it comes there where a person asks for that."""

import os
import threading
from contextlib import suppress
from pathlib import Path

from longstride.data_pipelines.datasets.dataset import Dataset, files_in, is_archive
from longstride.data_pipelines.datasets.published import Archive
from longstride.data_pipelines.documents import reading
from longstride.data_pipelines.errors import DataError, os_errors_told
from longstride.data_pipelines.settings import RemoteSettings
from longstride.data_pipelines.shards import Progress
from longstride.data_pipelines.stores import (
    Address,
    Download,
    StoredFile,
    Transport,
    check_protocol,
    lock_file,
    unlock_file,
)

DOWNLOADS = Path("downloads")
_PARTIAL = ".partial"
_ATTEMPTS = 4  # in a row without a byte: a person waits at a terminal, and seconds tell whether there is a network


def default_input(dataset: Dataset) -> Path:
    """What is fetched, and read, where a person names no input."""
    return DOWNLOADS if dataset.archive is None else DOWNLOADS / dataset.archive.name


def fetched_input(dataset: Dataset, there: Path, asked_for: bool, download: bool, progress: Progress | None) -> Path:
    """The input, after it was fetched if it is missing and ``download`` says so. ``asked_for``: a person named it.

    An archive is fetched to ``there`` where that is its name, else into that folder. Raises DataError where it is
    missing and cannot be fetched.
    """
    if not asked_for and not download:
        raise DataError(f"--input: must name the archive or folder of {dataset.name}; {_how(dataset)}")
    with reading(there):
        present = _holds(there, dataset) if download and there.is_dir() else there.exists()
    if present:
        return there
    if not download:
        raise DataError(f"--input={there}: no such file or folder; {_how(dataset)}")
    if dataset.archive is None:
        raise DataError(f"--download: no program may fetch {dataset.name}; {dataset.where} as --input")
    target = there / dataset.archive.name if there.is_dir() or not is_archive(there) else there
    fetch(dataset.archive, target, progress)
    return target


def _holds(folder: Path, dataset: Dataset) -> bool:
    """Whether a folder has anything of a dataset, by the names; of one that cannot be fetched, anything at all."""
    if dataset.archive is None:
        return any(folder.iterdir())
    return any(path.name in dataset.file_names for files in files_in(folder) for path in files)


def fetch(archive: Archive, target: Path, progress: Progress | None) -> None:
    """Make the file ``target`` of what lies behind a URL, going on from an earlier attempt.

    Raises DataError, naming the URL and what to do by hand.
    """
    settings = RemoteSettings(attempts=_ATTEMPTS)
    partial = target.with_name(target.name + _PARTIAL)
    with os_errors_told(target):
        made = [folder for folder in (target.parent, *target.parent.parents) if not folder.exists()]  # nearest first
        target.parent.mkdir(parents=True, exist_ok=True)
        handle = lock_file(partial)
    if handle is None:
        raise DataError(f"{partial}: is being fetched by another process; wait for its end")
    try:
        if not target.exists():  # else another process has just ended
            address = Address(archive.folder_url)
            check_protocol(address)
            file = StoredFile(archive.name, archive.size, archive.sha256)
            Download(
                Transport(address, settings.timeout_seconds),
                file,
                handle,
                partial,
                settings,
                threading.Event(),
                way_out="fetch it by hand and look at it",
                advance=lambda have: progress(have, archive.size) if progress is not None else None,
            ).run()
            with os_errors_told(target):
                os.fsync(handle.fileno())
                partial.rename(target)
    except DataError as error:
        raise DataError(f"{error}; or fetch {archive.url} by hand and name it with --input") from error
    finally:
        with suppress(OSError):  # of what did not even begin nothing stays
            if partial.exists() and not partial.stat().st_size:
                partial.unlink()
                for folder in made:
                    folder.rmdir()
        unlock_file(handle)


def _how(dataset: Dataset) -> str:
    """How a person comes by it."""
    if dataset.archive is None:
        return dataset.where
    return f"{dataset.where}, or let --download do it (into {DOWNLOADS}, or what --input names)"
