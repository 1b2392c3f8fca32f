"""The verb `serve`: started and stopped as a person does, and with options that are wrong."""

import json
import os
import signal
import socket
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from longstride.launcher import cli
from longstride.launcher.serving import serve
from tests.harness.runs import free_port
from tests.launcher.conftest import Refusal


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_command_serves_until_it_is_stopped(
    exported: Path, number: signal.Signals, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"http://127.0.0.1:{free_port()}/"
    found: list[dict[str, Any]] = []

    def ask() -> None:
        for _ in range(500):
            try:
                with urllib.request.urlopen(f"{url}model", timeout=10) as response:
                    found.append(json.load(response))
                break
            except OSError:
                time.sleep(0.02)
        os.kill(os.getpid(), number if found else signal.SIGKILL)  # there is nothing else to stop it by

    asking = threading.Thread(target=ask)
    asking.start()
    assert cli.main(["serve", str(exported), "--port", url.rstrip("/").rsplit(":", 1)[1], "--max-bytes", "9"]) == code
    asking.join()
    assert found[0]["context"] == 64
    assert found[0]["limits"] == {"bytes": 9, "waiting": 8, "seconds": 300, "contexts": 8}
    assert str(exported.parent) not in json.dumps(found)
    stopped = "longstride: stopped\n" if code else ""
    assert capsys.readouterr().err == f"{url} serves {exported}; Ctrl-C ends it\n{stopped}"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--port", "70000"], "--port=70000: must be from 0, any that is free, to 65535"),
        (["--max-bytes", "0"], "--max-bytes=0: must be at least 1"),
        (["--queue", "-1"], "--queue=-1: must be 0, nobody waits, or more"),
        (["--allow-host", "http://gpu7"], '--allow-host="http://gpu7": must be a name or an address alone'),
        (["--timeout", "nan"], "--timeout=NaN: must be above 0 and finite"),
        (
            ["--port", "0", "--host", "203.0.113.1"],
            "--host=203.0.113.1: is not an address of this machine; use 127.0.0.1",
        ),
        (
            ["--port", "0", "--host", "no.invalid"],
            "--host=no.invalid: is not an address of this machine; use 127.0.0.1",
        ),
        (["--device", "gpu"], "--device=gpu: cannot be used: "),
    ],
)
def test_wrong_option_is_told_in_one_line(exported: Path, options: list[str], line: str, refusal: Refusal) -> None:
    assert refusal("serve", exported, *options).startswith(line)


@pytest.mark.parametrize(("options", "shared"), [([], False), (["--shared"], True)], ids=str)
def test_contexts_share_products_on_request_alone(
    exported: Path, options: list[str], shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    async def ended(service: Any, sampler: Any, *rest: Any) -> signal.Signals:
        seen.append(sampler._shared)
        return signal.SIGTERM

    monkeypatch.setattr(serve, "_serve", ended)
    assert cli.main(["serve", str(exported), *options]) == 0
    assert seen == [shared]


def test_port_in_use_is_told(exported: Path, refusal: Refusal) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        line = f"--port={port}: is in use; take another, or 0 for any that is free"
        assert refusal("serve", exported, "--port", port) == line


def test_without_aiohttp_the_extra_is_named(exported: Path, monkeypatch: pytest.MonkeyPatch, refusal: Refusal) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert refusal("serve", exported) == 'serve: needs aiohttp; pip install "longstride[serve]"'
