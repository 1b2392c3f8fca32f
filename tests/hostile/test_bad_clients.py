"""Clients that are idle, slow, malformed or many cost nobody else an answer, and the server no memory."""

from __future__ import annotations

import concurrent.futures
import json
import resource
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.harness.runs import free_port
from tests.harness.tiny_models import random_export
from tests.hostile.commands import Commands, Outcome
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
    ended: list[Outcome] = field(default_factory=list)
    stop: Callable[[], Outcome] = lambda: pytest.fail("not started")

    @property
    def memory(self) -> int:
        """Resident bytes."""
        return int(self.process.memory_info().rss)


@contextmanager
def serving(commands: Commands, model: Path, *options: object, **more: object) -> Iterator[Server]:
    """Run a server. ``stop`` ends it in an orderly way and returns its outcome; otherwise the block's end does."""
    port = free_port()
    words = ("serve", model, "--port", port, "--timeout", TIMEOUT, *options)
    ended: list[Outcome] = []
    run = threading.Thread(target=lambda: ended.append(commands(*words, seconds=120, **more)))  # type: ignore[arg-type]
    run.start()
    address = ("127.0.0.1", port)
    until = time.monotonic() + 30
    while True:  # a port that nobody listens at tells no event
        try:
            assert status(ask(address, request(method="GET", path="/health"))) == 200
            break
        except ConnectionRefusedError:
            assert time.monotonic() < until and run.is_alive(), ended
            time.sleep(0.02)
    (process,) = commands.running()

    def stop() -> Outcome:
        if not ended:
            process.send_signal(signal.SIGTERM)
            run.join(60)
        return ended[0]

    server = Server(address, process, ended, stop)
    try:
        yield server
    finally:
        stop()
    outcome = ended[0]
    assert outcome.code == 0, outcome.err
    assert "Traceback" not in outcome.err, outcome.err[-4000:]


@contextmanager
def descriptors(wanted: int) -> Iterator[None]:
    """Allow this process so many descriptors, for its ends of the connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"{wanted} open files are more than the {hard} that this process may have")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def standing(clients: list[Client]) -> list[Client]:
    """Return the clients whose connection the server has not closed, after reading what it wrote to them."""
    left = []
    for client in clients:
        poll = select.poll()
        poll.register(client.socket, select.POLLIN)
        is_open = True
        while is_open and poll.poll(0):
            try:
                is_open = bool(client.socket.recv(1 << 16))
            except ConnectionError:
                is_open = False
        if is_open:
            left.append(client)
    return left


def test_what_is_half_sent_is_ended_at_the_timeout(commands: Commands, model: Path) -> None:
    with serving(commands, model) as server:
        begun = time.monotonic()
        clients = {what: Client(server.address, content) for what, content in HALVES.items()}
        late = Client(server.address, request(method="GET", path="/health"))  # answered, and silent from then on
        for what, client in clients.items():
            came = client.rest()
            took = time.monotonic() - begun
            assert TIMEOUT * 0.9 < took < LATE, (what, took)
            assert status(came) == (None if what == "idle" else 408), (what, came)
        assert status(late.rest()) == 200
        assert time.monotonic() - begun < LATE
        close_all([*clients.values(), late])


def test_malformed_requests_are_refused_in_a_line(commands: Commands, model: Path) -> None:
    with serving(commands, model) as server:
        for what, (content, wanted) in MALFORMED.items():
            with Client(server.address, content) as client:
                came = client.socket.recv(1 << 16)
            assert status(came) in wanted, (what, came[:300])
            body = came.partition(b"\r\n\r\n")[2]
            assert len(body) < 4096, what
            assert json.loads(body)["error"], what
        assert status(ask(server.address)) == 200
        outcome = server.stop()
    lines = outcome.err.splitlines()
    assert max(map(len, lines)) < 300
    assert len(lines) <= len(MALFORMED) + 2


def test_few_descriptors_leave_room_for_who_asks(commands: Commands, model: Path) -> None:
    with serving(commands, model, "--timeout", 60, limits=[("RLIMIT_NOFILE", 256)]) as server:
        clients = [Client(server.address, content) for _ in range(34) for content in HALVES.values()]  # 306
        for _ in range(5):
            begun = time.monotonic()
            assert status(ask(server.address)) == 200
            assert time.monotonic() - begun < 10
        assert 50 < len(standing(clients)) < 200
        outcome = server.stop()
        close_all(clients)
    assert "connections: the idlest are closed" in outcome.err
    assert "out of system resource" not in outcome.err


def test_too_few_descriptors_are_told(commands: Commands, model: Path) -> None:
    line = commands("serve", model, "--port", 0, limits=[("RLIMIT_NOFILE", 96)]).check_refused()
    assert line.startswith("ulimit -n=96: is too few open files for a server; give at least ")


def test_names_of_other_hosts_are_refused_wherever_it_listens(commands: Commands, model: Path) -> None:
    options = ("--host", "0.0.0.0", "--allow-host", "gpu7.example", "--allow-host", "Other.example")
    with serving(commands, model, *options) as server:
        port = server.address[1]
        for host, wanted in {
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
            came = ask(server.address, request(method="GET", path="/health", host=host))
            assert status(came) == wanted, (host, came)
            assert (b"--allow-host" in came) is (wanted == 403)


def flood(server: Server, idle: int, requests: int) -> None:
    """Hold so many connections open, check that other requests are answered, and check that the connections end."""
    before = server.memory
    begun = time.monotonic()
    kinds = list(HALVES.values())
    clients = [Client(server.address, kinds[number % len(kinds)]) for number in range(idle)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert [status(each) for each in pool.map(lambda _: ask(server.address, WHOLE), range(requests))] == (
            [200] * requests
        )
    left = clients
    while left := standing(left):
        assert time.monotonic() - begun < 120
        time.sleep(0.05)
    close_all(clients)
    grown = server.memory - before
    assert grown < 128 * 2**20, f"{grown / 2**20:.0f} MiB more"


def test_many_connections_and_requests_beside_them(commands: Commands, model: Path) -> None:
    with descriptors(1024), serving(commands, model, "--contexts", 4) as server:
        flood(server, idle=200, requests=20)


def test_end_under_connections_is_bounded(commands: Commands, model: Path) -> None:
    with descriptors(1024), serving(commands, model, "--timeout", 300) as server:
        clients = [Client(server.address, content) for _ in range(30) for content in HALVES.values()]
        assert status(ask(server.address)) == 200
        begun = time.monotonic()
        outcome = server.stop()
        assert outcome.code == 0 and time.monotonic() - begun < 5
        close_all(clients)


def test_client_that_never_reads_is_ended(commands: Commands, tmp_path: Path) -> None:
    scores = {"model": "model", "max_tokens": 120, "n": 16, "logprobs": 256, "seed": 1}  # 16 MB
    whole = request(json.dumps(scores).encode(), path="/v1/completions")
    stream = request(json.dumps(scores | {"stream": True}).encode(), path="/v1/completions")
    model = random_export(tmp_path / "model", context=128)
    with serving(commands, model, "--timeout", 8, "--contexts", 32) as server:
        files, memory, begun = server.process.num_fds(), server.memory, time.monotonic()
        clients = [Client(server.address, content, receive_buffer=4096) for content in (whole, stream)]
        assert status(ask(server.address)) == 200
        assert server.process.num_fds() == files + 2
        while server.process.num_fds() > files:  # what waits in the system hides the end from the client
            assert time.monotonic() - begun < 20, "still connected"
            time.sleep(0.05)
        assert time.monotonic() - begun > 7
        assert server.memory - memory < 256 * 2**20
        assert status(ask(server.address)) == 200
        close_all(clients)


@pytest.mark.campaign
def test_a_thousand_connections_and_five_hundred_requests(commands: Commands, model: Path) -> None:
    with descriptors(4096), serving(commands, model, "--timeout", 20, limits=[("RLIMIT_NOFILE", 4096)]) as server:
        before = server.memory
        flood(server, idle=1000, requests=500)
        print(f"memory before and after: {before / 2**20:.0f} and {server.memory / 2**20:.0f} MiB")


@pytest.mark.campaign
def test_end_under_a_thousand_connections_is_bounded(commands: Commands, model: Path) -> None:
    with descriptors(4096), serving(commands, model, "--timeout", 300, limits=[("RLIMIT_NOFILE", 4096)]) as server:
        kinds = list(HALVES.values())
        clients = [Client(server.address, kinds[number % len(kinds)]) for number in range(1000)]
        assert status(ask(server.address)) == 200
        begun = time.monotonic()
        server.stop()
        took = time.monotonic() - begun
        print(f"ended in {took:.1f} s")
        assert took < 10
        close_all(clients)
