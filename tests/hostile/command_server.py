"""Forks a process for each line of JSON on standard input, which does what `longstride WORDS` does; see commands.py.

`rank WORDS` is one rank of a run: what `longstride train` would start.
Its argument is the folder for what the processes print. The answer is a line: how each ended, and what it took.
"""

import importlib
import json
import os
import resource
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

sys.path[0] = str(Path(__file__).resolve().parents[2])

import longstride.launcher.cli as cli  # noqa: E402
import longstride.launcher.train as train  # noqa: E402
from longstride.launcher.output import settle_libraries  # noqa: E402

settle_libraries(os.environ)  # standard output carries the answers

from tests.harness.processes.preloaded import share_pages  # noqa: E402
from tests.hostile.generators import faults  # noqa: E402

for verb in cli.VERBS:
    if not verb.passes_words:  # lm_eval may not be here
        importlib.import_module(f"longstride.launcher.{verb.run.rpartition('.')[0]}")


def run(case: dict[str, Any], output: Path) -> NoReturn:
    """Run a command in a forked process."""
    os.setsid()  # what it starts is ended with it
    for name, stream in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(output / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    if case["stdout"] == "full":
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    elif case["stdout"] == "closed":
        reading, writing = os.pipe()
        os.close(reading)
        os.dup2(writing, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    for name, value in case["environment"].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    os.chdir(case["folder"])
    for name, value in case["limits"]:
        resource.setrlimit(getattr(resource, name), (value, value))
    if case["fault"]:
        faults.arm(*case["fault"], output / "operations")
    code = 1
    try:
        words = case["words"]
        code = train.main(words[1:]) if words[0] == "rank" else cli.main(words)
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


def run_case(case: dict[str, Any], output: Path) -> dict[str, Any]:
    """Wait for a case and report how it ended; leave none of its processes behind."""
    start = time.monotonic()
    (output / "operations").unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        run(case, output)
    ended = 0
    while not ended and time.monotonic() < start + case["seconds"]:
        ended, status, usage = os.wait4(pid, os.WNOHANG)
        time.sleep(0 if ended else 0.005)
    seconds = time.monotonic() - start
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if not ended:
        _, status, usage = os.wait4(pid, 0)
    code = os.waitstatus_to_exitcode(status) if ended else None
    return {"code": code, "seconds": seconds, "peak_bytes": usage.ru_maxrss * 1024}


if __name__ == "__main__":
    share_pages()
    for line in sys.stdin:
        print(json.dumps(run_case(json.loads(line), Path(sys.argv[1]))), flush=True)
