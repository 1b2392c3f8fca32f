"""A build in a separate process, as one rank or alone.

Importing torch takes seconds on every rank, and a build never uses it: it is not imported.
"""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[0] = str(ROOT)
sys.modules["torch"] = None  # type: ignore[assignment]  # importing it fails

from longstride.data_pipelines.building.build import build  # noqa: E402  the path comes first
from longstride.data_pipelines.building.crew import Crew, join_crew  # noqa: E402
from longstride.data_pipelines.errors import DataError  # noqa: E402

FILE_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")


def run(asked: dict[str, Any]) -> int:
    """Run one build, disturbed as the test describes. Return the exit code."""
    crew = join_crew()
    calls: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        if not calls:
            disturb(asked)
        calls.append((done, total))

    if asked.get("fail_on") == crew.rank:
        sys.addaudithook(fail_at_first_shard)
    try:
        build_as_asked(asked, crew, progress)
    except DataError as error:
        if crew.is_first:
            print(f"longstride: error: {error}", file=sys.stderr, flush=True)
        crew.meet()
        return 2
    if crew.is_first:
        print(json.dumps({"calls": calls, "mpi": "mpi4py" in sys.modules}))
    return 0


def build_as_asked(asked: dict[str, Any], crew: Crew, progress: Any = None) -> None:
    """Run the build that the test describes."""
    build([Path(asked["source"])], Path(asked["output"]), progress=progress, crew=crew, **asked["arguments"])


def disturb(asked: dict[str, Any]) -> None:
    """Make a document vanish or change while the build runs."""
    if "vanishes" in asked:
        Path(asked["vanishes"]).unlink()
    if "grows" in asked:
        with Path(asked["grows"]).open("ab") as file:
            file.write(b"more")


def fail_at_first_shard(event: str, arguments: tuple[Any, ...]) -> None:
    """Raise an error like a bug."""
    if event == "open" and ".tar." in str(arguments[0]):
        raise RuntimeError("a mistake of ours")


def die_everywhere(asked: dict[str, Any]) -> int:
    """Kill a build at each of its operations on files, and repeat it undisturbed each time.

    Each build is a forked process, so that hundreds take seconds. Prints how many operations there were.
    """
    output = Path(asked["output"])
    undisturbed = contents(Path(asked["undisturbed"]))
    place = output.parent / f".{output.name}.unfinished"
    moment, code = 0, 9
    while code:
        moment += 1
        code = forked(asked, moment)
        assert code in (0, 9), f"the build failed by itself before moment {moment}"
        assert not output.exists() or contents(output) == undisturbed, f"half an output after moment {moment}"
        finished = {}
        if (place / "data").exists():
            finished = {
                path.stem: (place / "data" / f"{path.stem}.tar").stat() for path in place.glob("records/*.json")
            }
        assert forked(asked, None) == 0, f"no build after an end at moment {moment}"
        assert contents(output) == undisturbed, f"other bytes after an end at moment {moment}"
        for name, before in finished.items():
            now = (output / f"{name}.tar").stat()
            assert (now.st_ino, now.st_mtime_ns) == (before.st_ino, before.st_mtime_ns), f"{name} was made again"
        assert [path.name for path in output.parent.iterdir()] == [output.name], f"left over after moment {moment}"
        shutil.rmtree(output)
    print(moment - 1)
    return 0


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file of a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def forked(asked: dict[str, Any], moment: int | None) -> int:
    """Return the exit code of a build that ends, without cleaning up, at operation ``moment``."""
    child = os.fork()
    if child == 0:
        num_events = 0

        def count(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal num_events
            # Folders are emptied by names alone, relative to an open folder.
            is_ours = event in ("os.remove", "os.rmdir") or str(Path(asked["output"]).parent) in str(arguments[0])
            if event in FILE_EVENTS and is_ours:
                num_events += 1
                if num_events == moment:
                    os._exit(9)

        sys.addaudithook(count)
        code = 1
        try:
            build_as_asked(asked, Crew())
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    task = json.loads(sys.argv[1])
    sys.exit(die_everywhere(task) if task.get("die_everywhere") else run(task))
