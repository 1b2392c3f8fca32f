"""The service over real sockets: what it answers, what it refuses, and how it ends."""

import asyncio
import base64
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from torch import Tensor

from longstride.launcher.models.exported import load_model
from longstride.launcher.serving import sampler as sampler_module
from longstride.launcher.serving.application import Limits, Service
from longstride.launcher.serving.sampler import Sampler
from longstride.launcher.serving.serve import listening
from longstride.sparse_model import SparseTransformer, generate
from tests.harness.served import alone

JSON = {"Content-Type": "application/json"}
Gate = threading.Semaphore


@pytest.fixture
def model(exported: Path) -> SparseTransformer:
    return load_model(exported)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Make sampling wait for a release before each byte."""
    released = threading.Semaphore(0)

    def gated(*arguments: Any, **options: Any) -> Iterator[Tensor]:
        for token in generate(*arguments, **options):
            assert released.acquire(timeout=30)
            yield token

    monkeypatch.setattr(sampler_module, "generate", gated)
    yield released
    released.release(10_000)  # whatever still waits


class Client:
    """A server, and requests to it."""

    def __init__(self, url: str, session: aiohttp.ClientSession, sampler: Sampler) -> None:
        self.url, self.session, self.sampler = url, session, sampler

    def post(self, content: object, **options: Any) -> Any:
        return self.session.post(f"{self.url}sample", json=content, **options)

    async def until(self, state: Callable[[], bool]) -> None:
        for _ in range(1000):
            if state():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("that state did not come")


@asynccontextmanager
async def started(model: SparseTransformer, **changes: Any) -> AsyncIterator[Client]:
    limits = Limits(**{"max_bytes": 64, "waiting": 2, "seconds": 30.0, "contexts": 1} | changes)
    sampler = Sampler(model, "cpu", limits.waiting, limits.contexts)
    service = Service(model.config, {"context": 64}, sampler, limits)
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        listening(service, sampler, "127.0.0.1", 0) as url,
        aiohttp.ClientSession(connector=connector) as session,
    ):
        yield Client(url, session, sampler)


def run(test: Callable[[Client], Awaitable[None]], model: SparseTransformer, **changes: Any) -> None:
    async def whole() -> None:
        async with started(model, **changes) as client:
            await test(client)

    asyncio.run(whole())


async def lines(response: aiohttp.ClientResponse) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (await response.text()).splitlines()]


def sampled(found: list[dict[str, Any]]) -> bytes:
    return b"".join(base64.b64decode(line["base64"]) for line in found if "base64" in line)


def test_sample_is_that_of_the_command_line(model: SparseTransformer) -> None:
    async def test(client: Client) -> None:
        asked = {"prompt": "hä", "bytes": 40, "temperature": 0.8, "top_k": 50, "top_p": 0.9, "seed": 5}
        async with client.post(asked) as response:
            assert response.status == 200
            assert response.headers["Content-Type"] == "application/x-ndjson"
            found = await lines(response)
        assert found[0] == {"seed": 5, "bytes": 40}
        assert found[-1] == {"done": True, "sampled": 40}
        options = {"temperature": 0.8, "top_k": 50, "top_p": 0.9}
        assert sampled(found) == alone(model, "hä".encode(), 40, 5, **options)
        async with client.post({"bytes": 3}) as response:
            drawn = await lines(response)
        assert sampled(drawn) == alone(model, b"", 3, drawn[0]["seed"])

    run(test, model)


def test_bytes_come_as_they_are_sampled(model: SparseTransformer, gate: Gate) -> None:
    async def test(client: Client) -> None:
        gate.release(2)
        async with client.post({"bytes": 10, "seed": 1}) as response:
            await response.content.readline()
            first = b""
            while len(first) < 2:
                first += base64.b64decode(json.loads(await response.content.readline())["base64"])
            assert first == alone(model, b"", 2, 1)
            gate.release(8)
            assert (await lines(response))[-1] == {"done": True, "sampled": 10}

    run(test, model)


async def _broken(client: Client, number: int) -> tuple[int, int]:
    """Send one request of eight kinds; return (the expected status, the actual status)."""
    url, post = f"{client.url}sample", client.session.post
    kind = number % 8
    if kind == 1:
        request, status = post(url, data=b'{"prompt": "a', headers=JSON), 400
    elif kind == 2:
        request, status = post(url, data=b" " * 1_000_000, headers=JSON), 413
    elif kind == 3:
        request, status = client.post({"bytes": 10**9, "colour": "red"}), 422
    elif kind == 4:
        request, status = post(url, data=b"{}", headers={"Content-Type": "text/plain"}), 415
    elif kind == 5:
        request, status = client.session.put(url, json={}), 405
    elif kind == 6:
        request, status = client.session.get(f"{client.url}../../etc/passwd"), 404
    elif kind == 7:
        request, status = post(url, data=b"\xff\xfe\x00", headers=JSON), 400
    else:
        request, status = client.post({"prompt": "x" * (number % 60), "bytes": 4, "seed": number}), 200
    async with request as response:
        found = await lines(response)
        assert all(isinstance(line, dict) for line in found)
        assert ("error" in found[-1]) == (response.status != 200)
        return status, response.status


def test_fifty_requests_at_once_are_answered_or_refused(
    model: SparseTransformer, capfd: pytest.CaptureFixture[str]
) -> None:
    async def test(client: Client) -> None:
        found = await asyncio.gather(*(_broken(client, number) for number in range(50)))
        for wanted, status in found:
            assert status == wanted or (wanted, status) == (200, 503), found
        assert sum(status == 200 for _, status in found) >= 3  # the one that is sampled, and those that wait
        await client.until(lambda: not client.sampler.contexts)
        async with client.session.get(f"{client.url}health") as response:
            assert await response.json() == {"status": "ok", "sampling": False, "waiting": 0}
        async with client.post({"prompt": "again", "bytes": 4, "seed": 9}) as response:
            assert sampled(await lines(response)) == alone(model, b"again", 4, 9)

    run(test, model)
    assert "Traceback" not in capfd.readouterr().err


def test_clients_that_leave_at_any_moment_leave_nothing_behind(
    model: SparseTransformer, capfd: pytest.CaptureFixture[str]
) -> None:
    async def test(client: Client) -> None:
        _, _, address, *_ = client.url.split("/")
        host, port = address.split(":")
        head = b"POST /sample HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        whole = json.dumps({"bytes": 60}).encode()
        for number in range(40):
            _, writer = await asyncio.open_connection(host, int(port))
            body = whole[: 5 if number % 4 == 0 else None]
            writer.write(head + b"Content-Length: %d\r\n\r\n" % len(whole) + body)
            await writer.drain()
            await asyncio.sleep(0.003 * (number % 10))
            writer.transport.abort()
        await client.until(lambda: not client.sampler.contexts and not client.sampler.waiting)
        async with client.post({"bytes": 4, "seed": 9}) as response:
            assert sampled(await lines(response)) == alone(model, b"", 4, 9)

    run(test, model)
    assert capfd.readouterr().err == ""


def test_full_row_is_told_with_when_to_come_again(model: SparseTransformer, gate: Gate) -> None:
    async def test(client: Client) -> None:
        async def ask() -> int:
            async with client.post({"bytes": 2}) as response:
                await response.read()
                if response.status == 503:
                    assert int(response.headers["Retry-After"]) >= 1
                return response.status

        first = asyncio.create_task(ask())
        await client.until(lambda: client.sampler.contexts)
        waiting = [asyncio.create_task(ask()) for _ in range(2)]
        await client.until(lambda: client.sampler.waiting == 2)
        assert await ask() == 503
        gate.release(6)
        assert await asyncio.gather(first, *waiting) == [200, 200, 200]

    run(test, model)


def test_client_that_leaves_ends_its_sampling(model: SparseTransformer, gate: Gate) -> None:
    async def test(client: Client) -> None:
        gate.release(1)
        response = await client.post({"bytes": 50})
        await response.content.readline()
        waits = asyncio.create_task(client.post({"bytes": 50}).__aenter__())
        await client.until(lambda: client.sampler.waiting == 1)
        waits.cancel()
        await client.until(lambda: client.sampler.waiting == 0)
        response.close()
        await asyncio.sleep(0.2)
        gate.release(1)  # the step that was under way
        await client.until(lambda: not client.sampler.contexts)
        gate.release(2)
        async with client.post({"bytes": 2, "seed": 4}) as response:
            assert sampled(await lines(response)) == alone(model, b"", 2, 4)

    run(test, model)


def test_request_that_takes_too_long_is_ended(model: SparseTransformer, gate: Gate) -> None:
    async def test(client: Client) -> None:
        gate.release(3)
        begun = asyncio.create_task(client.post({"bytes": 50}).__aenter__())
        await client.until(lambda: client.sampler.contexts)
        async with client.post({"bytes": 50}) as response:
            assert response.status == 503
            assert (await lines(response))[0]["error"] == "took longer than 1 s to begin"
        async with await begun as response:
            found = await lines(response)
        assert len(sampled(found)) == 3
        assert found[-1] == {"error": "took longer than 1 s", "sampled": 3}
        gate.release(1)
        await client.until(lambda: not client.sampler.contexts)

    run(test, model, seconds=1.0)


@pytest.mark.parametrize(
    "error, told",
    [
        (MemoryError("no room"), "sampling failed: MemoryError"),
        (FloatingPointError("logits are not finite"), "the model's logits are not finite"),
    ],
    ids=["memory", "numbers"],
)
def test_failure_while_sampling_is_told_and_the_next_request_goes_well(
    model: SparseTransformer,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    error: Exception,
    told: str,
) -> None:
    def failing(*arguments: Any, **options: Any) -> Iterator[Tensor]:
        yield torch.tensor([65])
        raise error

    async def test(client: Client) -> None:
        monkeypatch.setattr(sampler_module, "generate", failing)
        async with client.post({"bytes": 5}) as response:
            assert (await lines(response))[-1]["error"] == told
        monkeypatch.setattr(sampler_module, "generate", generate)
        async with client.post({"bytes": 5, "seed": 4}) as response:
            assert sampled(await lines(response)) == alone(model, b"", 5, 4)

    run(test, model)
    assert ("MemoryError: no room" in capfd.readouterr().err) is isinstance(error, MemoryError)


def test_names_and_origins_of_others_are_refused(model: SparseTransformer) -> None:
    async def test(client: Client) -> None:
        port = client.url.rstrip("/").rsplit(":", 1)[1]
        refused = [{"Host": "evil.example"}, {"Host": f"127.0.0.1.evil.example:{port}"}, {"Host": "[::1"}, {"Host": ""},
                   {"Host": "1.2.3"}, {"Origin": "http://evil.example"}, {"Origin": "null"},
                   {"Origin": "http://localhost:1"}]  # fmt: skip
        own = f"localhost:{port}"
        accepted = [{"Host": own}, {"Host": f"[::1]:{port}"}, {"Host": own, "Origin": f"http://{own}"},
                    {"Host": "192.0.2.7:80"}]  # fmt: skip
        for headers in refused + accepted:
            async with client.session.get(f"{client.url}health", headers=headers) as response:
                assert response.status == (200 if headers in accepted else 403), headers
                assert "Access-Control-Allow-Origin" not in response.headers

    run(test, model)


def test_page_asks_for_nothing_from_elsewhere(model: SparseTransformer) -> None:
    async def test(client: Client) -> None:
        for path in ("", "serve.css", "serve.js"):
            async with client.session.get(client.url + path) as response:
                assert response.status == 200
                assert "default-src 'none'" in response.headers["Content-Security-Policy"]
                text = await response.text()
                assert "://" not in text and 'src="//' not in text

    run(test, model)


def test_stopping_tells_those_who_wait(model: SparseTransformer, gate: Gate) -> None:
    async def whole() -> None:
        async with aiohttp.ClientSession() as session:
            async with started(model) as client:
                gate.release(1)
                first = await session.post(f"{client.url}sample", json={"bytes": 50})
                await first.content.readline()
                second = asyncio.create_task(session.post(f"{client.url}sample", json={}).__aenter__())
                await client.until(lambda: client.sampler.waiting == 1)
                asyncio.get_running_loop().call_later(0.3, gate.release)
            assert (await lines(first))[-1] == {"error": "the server is stopping", "sampled": 1}
            assert (await second).status == 503

    asyncio.run(whole())
