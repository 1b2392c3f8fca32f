"""Starts ranks of tests by forking, so that slow imports happen once.

Run as a separate process, with one end of a socket as its only argument. Each request is a rank's arguments and
environment, with three files: standard output, standard error, and one that receives its id and exit code.
"""

import json
import os
import signal
import socket
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[3])

import torch  # noqa: E402  the path comes first

from tests.harness.processes import worker  # noqa: E402
from tests.harness.processes.preloaded import share_pages  # noqa: E402

LARGEST_REQUEST = 1 << 20


def serve(requests: socket.socket) -> None:
    """Fork ranks until the other end is closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait for ranks
    while True:
        text, files, *_ = socket.recv_fds(requests, LARGEST_REQUEST, 3)
        if not text:
            return
        if os.fork() == 0:
            requests.close()
            watch(json.loads(text), *files)
        for file in files:
            os.close(file)


def watch(request: dict, output: int, errors: int, status: int) -> None:
    """Fork a rank and report its id and, once it has ended, its exit code (negative: the signal)."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    rank = os.fork()
    if rank == 0:
        os.close(status)
        os.dup2(output, 1)
        os.dup2(errors, 2)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir("/")
        torch.set_num_threads(int(request["environment"]["OMP_NUM_THREADS"]))
        worker.work(request["arguments"])
    os.write(status, f"{rank}\n".encode())
    code = os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])
    os.write(status, f"{code}\n".encode())
    os._exit(0)


if __name__ == "__main__":
    share_pages()
    serve(socket.socket(fileno=int(sys.argv[1])))
