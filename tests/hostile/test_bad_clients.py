"""Clients that are idle, slow, malformed or many cost nobody else an answer, and the server no memory."""

import concurrent.futures
import itertools
import json
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.harness.runs import free_port
from tests.harness.tiny_models import random_export
from tests.hostile.commands import Commands, Outcome, campaign
from tests.hostile.generators.http_clients import (
    HALVES,
    MALFORMED,
    WHOLE,
    Client,
    ask,
    close_all,
    request,
    status,
)

TIMEOUT = 3.0  # of the server
LATE = TIMEOUT + 4  # by when a connection is closed: the watch looks every 0.75 s, and cores are shared


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_export(tmp_path_factory.mktemp("export") / "model")


@dataclass
class Server:
    """`longstride serve` in a process of its own."""

    address: tuple[str, int]
    process: psutil.Process
    stop: Callable[[], Outcome]

    @property
    def memory(self) -> int:
        """Resident bytes."""
        return int(self.process.memory_info().rss)


@contextmanager
def serving(commands: Commands, model: Path, *options: object, **limits: Any) -> Iterator[Server]:
    """Run a server. ``stop`` ends it in an orderly way and returns its outcome; otherwise the block's end does."""
    address = ("127.0.0.1", free_port())
    words = ("serve", model, "--port", address[1], "--timeout", TIMEOUT, *options)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        run = pool.submit(commands, *words, seconds=120, **limits)
        until = time.monotonic() + 30
        while True:  # a port that nobody listens on sends no event
            try:
                assert status(ask(address, request(method="GET", path="/health"))) == 200
                break
            except ConnectionRefusedError:
                assert time.monotonic() < until and not run.done(), run
                time.sleep(0.02)
        (process,) = commands.running()

        def stop() -> Outcome:
            if not run.done():
                process.send_signal(signal.SIGTERM)
            return run.result(60)

        try:
            yield Server(address, process, stop)
        finally:
            outcome = stop()
    assert outcome.code == 0, outcome.err
    assert "Traceback" not in outcome.err, outcome.err[-4000:]


@contextmanager
def descriptors(count: int) -> Iterator[None]:
    """Allow this process so many descriptors, for its ends of the connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        pytest.skip(f"{count} open files are more than the {hard} that this process may have")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def connected(clients: list[Client]) -> list[Client]:
    """Return the clients whose connection the server has not closed, after reading what it wrote to them."""

    def is_open(client: Client) -> bool:
        try:
            client.socket.settimeout(0)
            while client.socket.recv(1 << 16):
                pass
        except BlockingIOError:
            return True
        except ConnectionError:
            pass
        return False

    return [client for client in clients if is_open(client)]


def test_what_is_half_sent_is_ended_at_the_timeout(commands: Commands, model: Path) -> None:
    with serving(commands, model) as server:
        start = time.monotonic()
        clients = {what: Client(server.address, content) for what, content in HALVES.items()}
        late = Client(server.address, request(method="GET", path="/health"))  # answered, and silent from then on
        for what, client in clients.items():
            answer = client.rest()
            took = time.monotonic() - start
            assert TIMEOUT * 0.9 < took < LATE, (what, took)
            assert status(answer) == (None if what == "idle" else 408), (what, answer)
        assert status(late.rest()) == 200
        assert time.monotonic() - start < LATE
        close_all([*clients.values(), late])


def test_malformed_requests_are_refused_in_a_line(commands: Commands, model: Path) -> None:
    with serving(commands, model) as server:
        for what, (content, statuses) in MALFORMED.items():
            with Client(server.address, content) as client:
                answer = client.socket.recv(1 << 16)
            assert status(answer) in statuses, (what, answer[:300])
            body = answer.partition(b"\r\n\r\n")[2]
            assert len(body) < 4096, what
            assert json.loads(body)["error"], what
        assert status(ask(server.address)) == 200
        outcome = server.stop()
    lines = outcome.err.splitlines()
    assert max(map(len, lines)) < 300
    assert len(lines) <= len(MALFORMED) + 2


def test_few_descriptors_leave_room_for_who_asks(commands: Commands, model: Path) -> None:
    with serving(commands, model, "--timeout", 60, limits=[("RLIMIT_NOFILE", 256)]) as server:
        clients = many_clients(server, 306)
        for _ in range(5):
            start = time.monotonic()
            assert status(ask(server.address)) == 200
            assert time.monotonic() - start < 10
        assert 50 < len(connected(clients)) < 200
        outcome = server.stop()
        close_all(clients)
    assert "connections: the idlest are closed" in outcome.err
    assert "out of system resource" not in outcome.err


def test_too_few_descriptors_are_told(commands: Commands, model: Path) -> None:
    line = commands("serve", model, "--port", 0, limits=[("RLIMIT_NOFILE", 96)]).check_refused()
    assert line.startswith("ulimit -n=96: allows too few open files for a server; set at least ")


def test_names_of_other_hosts_are_refused_wherever_it_listens(commands: Commands, model: Path) -> None:
    options = ("--host", "0.0.0.0", "--allow-host", "gpu7.example", "--allow-host", "Other.example")
    with serving(commands, model, *options) as server:
        port = server.address[1]
        for host, expected in {
            "evil.example": 403,
            "gpu7.example.evil.example": 403,
            "10.9.8": 403,
            "10.9.8.7": 200,
            "gpu7.example": 200,
            f"GPU7.example:{port}": 200,
            "other.example": 200,
            "localhost": 200,
            f"127.0.0.1:{port}": 200,
            "[::1]": 200,
        }.items():
            answer = ask(server.address, request(method="GET", path="/health", host=host))
            assert status(answer) == expected, (host, answer)
            assert (b"--allow-host" in answer) is (expected == 403)


def many_clients(server: Server, count: int) -> list[Client]:
    """Connect clients of each kind in turn that send a part of a request."""
    return [Client(server.address, content) for content in itertools.islice(itertools.cycle(HALVES.values()), count)]


@pytest.mark.parametrize(
    ("idle", "requests", "options", "files"),
    [(200, 20, ("--contexts", 4), 1024), *campaign([(1000, 500, ("--timeout", 20), 4096)])],
)
def test_many_connections_and_requests_beside_them(
    commands: Commands, model: Path, idle: int, requests: int, options: tuple[object, ...], files: int
) -> None:
    """Hold connections open, check that other requests are answered, and check that the connections end."""
    limits = [("RLIMIT_NOFILE", files)] if files > 1024 else []
    with descriptors(files), serving(commands, model, *options, limits=limits) as server:
        before, start = server.memory, time.monotonic()
        clients = many_clients(server, idle)
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda _: ask(server.address, WHOLE), range(requests)))
        assert list(map(status, answers)) == [200] * requests
        open_clients = clients
        while open_clients := connected(open_clients):
            assert time.monotonic() - start < 120
            time.sleep(0.05)
        close_all(clients)
        print(f"memory before and after: {before / 2**20:.0f} and {server.memory / 2**20:.0f} MiB")
        assert server.memory - before < 128 * 2**20


@pytest.mark.parametrize(("count", "files", "seconds"), [(30 * len(HALVES), 1024, 5), *campaign([(1000, 4096, 10)])])
def test_end_under_connections_is_bounded(
    commands: Commands, model: Path, count: int, files: int, seconds: float
) -> None:
    limits = [("RLIMIT_NOFILE", files)] if files > 1024 else []
    with descriptors(files), serving(commands, model, "--timeout", 300, limits=limits) as server:
        clients = many_clients(server, count)
        assert status(ask(server.address)) == 200
        start = time.monotonic()
        outcome = server.stop()
        took = time.monotonic() - start
        print(f"ended in {took:.1f} s")
        assert outcome.code == 0 and took < seconds
        close_all(clients)


def test_client_that_never_reads_is_ended(commands: Commands, tmp_path: Path) -> None:
    scores = {"model": "model", "max_tokens": 120, "n": 16, "logprobs": 256, "seed": 1}  # 16 MB
    contents = [
        request(json.dumps(body).encode(), path="/v1/completions") for body in (scores, scores | {"stream": True})
    ]
    model = random_export(tmp_path / "model", context=128)
    with serving(commands, model, "--timeout", 8, "--contexts", 32) as server:
        files, memory, start = server.process.num_fds(), server.memory, time.monotonic()
        clients = [Client(server.address, content, receive_buffer=4096) for content in contents]
        assert status(ask(server.address)) == 200
        assert server.process.num_fds() == files + 2
        while server.process.num_fds() > files:  # what waits in the system hides the end from the client
            assert time.monotonic() - start < 20, "still connected"
            time.sleep(0.05)
        assert time.monotonic() - start > 7
        assert server.memory - memory < 256 * 2**20
        assert status(ask(server.address)) == 200
        close_all(clients)
