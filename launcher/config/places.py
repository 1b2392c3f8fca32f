"""Where a run's data lies for those who read the run later, and elsewhere.

`data.path` counts from the folder in which a run is started. That folder is the run folder's path without
`train.output`, where both are relative; so a project that is moved as a whole keeps its runs and their data.
"""

from __future__ import annotations

from pathlib import Path, PurePath


def lasting_path(data: str, output: str) -> str:
    """The path of the data as a run saves it, for ``found_path``; absolute where the run folder would not tell it."""
    if not _is_relative(data) or _start(output, Path(output).resolve()) == Path.cwd().resolve():
        return data
    return str(Path(data).absolute())


def found_path(data: str, output: str, run: Path) -> str:
    """A saved path of data as it is found from here; as it is where there is nothing.

    ``output`` as it was saved beside it, ``run`` the run's folder, wherever it is now.
    """
    start = _start(output, run.resolve())
    found = _is_relative(data) and start is not None and (start / data).exists()
    return str(start / data) if found and start else data


def _start(output: str, run: Path) -> Path | None:
    """The folder that a run, by its absolute path, was started in; None where its ``output`` does not tell."""
    parts = PurePath(output).parts
    if PurePath(output).is_absolute() or not parts or ".." in parts or run.parts[-len(parts) :] != parts:
        return None
    return run.parents[len(parts) - 1]


def _is_relative(path: str) -> bool:
    return "://" not in path and not Path(path).is_absolute()
