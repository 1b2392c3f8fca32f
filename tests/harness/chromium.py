"""A real browser, driven over its DevTools protocol by mouse and keys."""

import asyncio
import base64
import itertools
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome")
START_SECONDS = 60.0


def browser_path() -> str:
    """Return $CHROMIUM, or the first installed browser."""
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    assert path, "no browser: apt-get install chromium, or name one in $CHROMIUM"
    return path


class Page:
    """An open page."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.told: list[str] = []  # errors and the browser's own complaints
        self.asked: list[str] = []  # URLs that the page went to

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command and return its result."""
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while True:
            message = await self._socket.receive_json(timeout=60)
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            if message.get("method") == "Log.entryAdded":
                self.told.append(message["params"]["entry"]["text"])
            if message.get("method") == "Runtime.exceptionThrown":
                self.told.append(str(message["params"]["exceptionDetails"]))
            if message.get("method") == "Network.requestWillBeSent":
                self.asked.append(message["params"]["request"]["url"])

    async def value(self, expression: str) -> Any:
        """Evaluate an expression in the page and await a promise."""
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, expression: str, seconds: float = 30.0) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not await self.value(f"Boolean({expression})"):
            assert time.monotonic() < end, f"{expression} did not come; the page: {await self.value(_TEXT)}"
            await asyncio.sleep(0.05)

    async def open(self, url: str) -> None:
        """Open a URL and wait until the page is ready."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)
        await self.until("document.body && document.body.dataset.ready")

    async def click(self, selector: str) -> None:
        """Send a mouse click to the middle of an element."""
        box = await self.value(
            f"(() => {{ const e = document.querySelector({selector!r}); e.scrollIntoView({{block: 'center'}});"
            "const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            where = {"x": box[0], "y": box[1], "button": "left", "clickCount": 1}
            await self.call("Input.dispatchMouseEvent", type=kind, **where)

    async def type(self, selector: str, text: str) -> None:
        """Replace the text of a field."""
        await self.click(selector)
        await self.value(f"document.querySelector({selector!r}).select()")
        await self.call("Input.insertText", text=text)

    async def screenshot(self, path: Path) -> None:
        """Write a PNG file."""
        path.write_bytes(base64.b64decode((await self.call("Page.captureScreenshot", format="png"))["data"]))


_TEXT = "document.body.innerText"


@asynccontextmanager
async def browser() -> AsyncIterator[Page]:
    """Start a headless browser with an empty page and a temporary profile."""
    profile = Path(tempfile.mkdtemp(prefix="chromium-"))
    command = [browser_path(), "--headless=new", "--remote-debugging-port=0", f"--user-data-dir={profile}"]
    command += ["--no-first-run", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=900,800"]
    command += ["--disable-background-networking", "--autoplay-policy=no-user-gesture-required"]
    if os.getuid() == 0:
        command.append("--no-sandbox")  # which refuses to be root's
    process = subprocess.Popen([*command, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        address = f"http://127.0.0.1:{await _port(profile, process)}"
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{address}/json/list") as response:
                pages = [entry for entry in await response.json() if entry["type"] == "page"]
            async with session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                yield Page(socket)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        shutil.rmtree(profile, ignore_errors=True)


async def _port(profile: Path, process: subprocess.Popen[bytes]) -> int:
    """Return the port that the browser has written to its profile."""
    end = time.monotonic() + START_SECONDS
    while True:
        assert process.poll() is None and time.monotonic() < end, "the browser did not start"
        try:
            return int((profile / "DevToolsActivePort").read_text().splitlines()[0])
        except (OSError, IndexError):
            await asyncio.sleep(0.05)
