"""Where a build reads and writes: inputs that lie apart from each other, and an output apart from them."""

import os
from collections.abc import Sequence
from pathlib import Path

from longstride.data_pipelines.errors import DataError


def real_path(path: Path) -> Path:
    """Where a path leads, links followed; one that leads in a circle stays as it is."""
    return Path(os.path.realpath(path))


def unfinished_folder(output: Path) -> Path:
    """Where the unfinished build of an output lies: beside it, so that a rename finishes it."""
    return output.parent / f".{output.name}.unfinished"


def check_places(inputs: Sequence[Path], output: Path) -> None:
    """Raises DataError for inputs that overlap, and for inputs that overlap with the resolved ``output``.

    A file that two inputs hold would be two documents, one of which may be trained on and the other validated with.
    """
    found: dict[Path, Path] = {}
    for given in inputs:
        there = real_path(given)
        if there in found:
            other = f" (as {found[there]})" if found[there] != given else ""
            raise DataError(f"{given}: is given twice{other}; name every input once")
        found[there] = given
    for there, given in found.items():
        outer = next((found[folder] for folder in there.parents if folder in found), None)
        if outer is not None:
            raise DataError(f"{given}: lies inside {outer}, and no file is taken twice; name one of the two")
        for place in (output, unfinished_folder(output)):
            if place.is_relative_to(there):
                raise DataError(f"{output}: lies inside the input {given}; name an output beside it")
            if there.is_relative_to(place):
                raise DataError(f"{given}: lies inside the output, {place}; name an output beside the input")
