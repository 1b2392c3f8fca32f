"""Stand-ins for the processes of a run: parent, runner, launch, ranks and loader workers, but no model.

`python stand_ins.py ROLE FOLDER [words by which the command line is recognised]`. They start and end as the real ones.
The parent's supervisor and the ranks' stop flag are the launcher's own code.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[3])

from longstride.launcher.output import exit_codes, nonblocking_output  # noqa: E402  the path comes first
from longstride.launcher.stops import LauncherGone, StopFile, StopFlag, end_now  # noqa: E402


def command(role: str, folder: Path, *words: str) -> list[str]:
    """Return the command line that starts a role."""
    return [sys.executable, __file__, role, str(folder), *words]


def parent(folder: Path) -> int:
    """Play `longstride train`."""
    from longstride.launcher.cluster.supervisor import Launch, StopRequest, supervise

    launch = Launch(command("runner", folder, "deepspeed.launcher.runner"), dict(os.environ), folder / ".stop-token")
    with closing(StopRequest()) as request:
        ended = supervise(launch, request, 5.0, lambda: (folder / "done").exists())
    print(ended.description, file=sys.stderr)
    return ended.code


def runner(folder: Path) -> int:
    """Play DeepSpeed's runner: it exits with 0 if launch was killed."""
    return max(0, subprocess.Popen(command("launch", folder, "deepspeed.launcher.launch")).wait())


def launch(folder: Path) -> int:
    """Play DeepSpeed's launch: once a rank fails, kill the others and exit with that rank's code."""
    ranks = [subprocess.Popen(command("rank", folder), env={**os.environ, "RANK": str(rank)}) for rank in range(2)]
    while any(rank.poll() is None for rank in ranks):
        failed = [rank.returncode for rank in ranks if rank.returncode]
        if failed:
            for rank in ranks:
                rank.terminate()
            for rank in ranks:
                rank.wait()
            return failed[0] % 256
        time.sleep(0.05)
    return max(rank.returncode for rank in ranks) % 256


def rank(folder: Path) -> int:
    """Play launcher/train.py: a loop that a stop ends, then a save that takes SAVE_SECONDS."""
    stop = StopFlag()
    stop.listen()
    stop.add_source(LauncherGone(os.environ))
    file = StopFile(folder / ".stop-token")
    if os.environ["RANK"] == "0":
        stop.add_source(file)
    worker = subprocess.Popen(command("worker", folder), stdout=subprocess.PIPE)
    assert worker.stdout is not None
    worker.stdout.read(1)
    with stop.handled():
        if os.environ["RANK"] == "0" and "UNBEGUN" not in os.environ:
            file.mark_begun()
        with (folder / "marks").open("a") as marks:
            marks.write(f"rank {os.environ['RANK']}\n")
        while stop.reason is None and not (folder / "done").exists():
            time.sleep(0.02)
        end = time.monotonic() + float(os.environ.get("SAVE_SECONDS", "0"))
        while time.monotonic() < end:  # in short sleeps: a signal may cut one short
            time.sleep(0.02)
        (folder / f"saved-{os.environ['RANK']}").write_text(str(stop.reason))
    end_now(exit_codes.REQUEUE if stop.reason else exit_codes.DONE)


def worker(folder: Path) -> int:
    """Play a loader worker: ignore the signals that request a stop."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    print("x", flush=True)
    time.sleep(300)
    return 0


ROLES = {"parent": parent, "runner": runner, "launch": launch, "rank": rank, "worker": worker}

if __name__ == "__main__":
    with nonblocking_output():
        sys.exit(ROLES[sys.argv[1]](Path(sys.argv[2])))
