"""What a rank sees of its loader workers: their items in order, and how they end."""

import itertools
import multiprocessing.connection
import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.order.workers import LostWorkerError, Workers

LARGE = bytes(10**6)  # more than a socket holds


def pids(workers: Workers) -> list[int]:
    return [each.process.pid for each in workers._workers]


def test_items_come_in_order_and_so_many_ahead() -> None:
    begun = multiprocessing.get_context("fork").Value("i", 0)

    def counted() -> Iterator[int]:
        for number in itertools.count():
            with begun.get_lock():
                begun.value = number + 1
            yield number

    with closing(Workers([counted(), iter(itertools.count(100))], 3, 60.0)) as workers:
        for number in range(50):
            assert workers.take() == [number, 100 + number]
            assert begun.value <= number + 1 + 3
        left = pids(workers)
    assert not any(map(psutil.pid_exists, left))


def test_what_a_killed_worker_has_sent_is_taken_first() -> None:
    def three() -> Iterator[int]:
        yield from (0, 1, 2)
        os.kill(os.getpid(), signal.SIGKILL)

    before = signal.getsignal(signal.SIGCHLD)
    with closing(Workers([three()], 4, 60.0)) as workers:
        assert signal.getsignal(signal.SIGCHLD) is before  # nothing is raised while a rank computes
        assert [workers.take() for _ in range(3)] == [[0], [1], [2]]
        with pytest.raises(LostWorkerError, match=r"worker 1 of 1 \(process \d+\) was ended by SIGKILL; .*memory"):
            workers.take()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_worker_that_is_lost_within_a_message_spoils_no_other(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    send = multiprocessing.connection.Connection._send

    def send_half(self: multiprocessing.connection.Connection, content: bytes, *args: object) -> None:
        if len(content) > 2 * len(LARGE):
            send(self, content[: len(content) // 2], *args)
            os.kill(os.getpid(), number)
        send(self, content, *args)

    monkeypatch.setattr(multiprocessing.connection.Connection, "_send", send_half)
    lost = iter([LARGE, 3 * LARGE])
    with closing(Workers([itertools.repeat(LARGE), lost], 2, 0.5)) as workers:
        assert workers.take() == [LARGE, LARGE]
        how = "was ended by SIGKILL" if number == signal.SIGKILL else "has delivered nothing for 0.5 s"
        with pytest.raises(LostWorkerError, match=rf"loader worker 2 of 2 .*{how}"):
            workers.take()
        left = pids(workers)
    assert not any(map(psutil.pid_exists, left))


def test_worker_that_writes_what_it_fetches_is_waited_for(tmp_path: Path) -> None:
    def fetched() -> Iterator[int]:
        with (tmp_path / "shard").open("wb", buffering=0) as file:
            for _ in range(25):
                file.write(b"some")
                time.sleep(0.1)
        yield 7

    with closing(Workers([fetched()], 1, 1.0)) as workers:
        assert workers.take() == [7]


def test_errors_of_a_worker_are_those_of_reading() -> None:
    def damaged() -> Iterator[int]:
        yield 0
        raise DataError("train-00000.tar: damaged")

    def unforeseen() -> Iterator[int]:
        raise KeyError("unforeseen")
        yield 0

    with closing(Workers([damaged()], 2, 60.0)) as workers:
        workers.take()
        with pytest.raises(DataError, match=r"^train-00000.tar: damaged$"):
            workers.take()
    with closing(Workers([unforeseen()], 2, 60.0)) as workers:
        with pytest.raises(KeyError) as caught:
            workers.take()
        assert "in unforeseen" in str(caught.value.__cause__)  # the worker's own stack


def test_a_worker_ends_with_its_rank_even_where_it_is_stopped() -> None:
    reader, writer = os.pipe()
    rank = os.fork()
    if rank == 0:
        workers = Workers([iter(itertools.count())], 1, 60.0)
        workers.take()
        (pid,) = pids(workers)
        os.kill(pid, signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
        os.write(writer, str(pid).encode())
        signal.pause()
    worker = psutil.Process(int(os.read(reader, 32)))
    os.kill(rank, signal.SIGKILL)
    os.waitpid(rank, 0)
    os.close(reader)
    os.close(writer)
    psutil.wait_procs([worker], timeout=10)
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE
