"""The page in a real browser, against `longstride serve` in a process of its own."""

import asyncio
import base64
import json
import math
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from safetensors.torch import load_file, save_file

from longstride.data_pipelines.modalities.wav import mulaw_decode
from tests.harness.chromium import Page, browser
from tests.harness.runs import ROOT
from tests.harness.tiny_models import random_export

pytestmark = pytest.mark.browser

EMBEDDINGS: dict[str, dict[str, Any]] = {
    "text": {"type": "text", "row_width": 64},
    "image": {"type": "image", "height": 16, "width": 24, "channels": 3},
    "audio": {"type": "audio", "row_width": 64},
}


def make_export(folder: Path, kind: str, context: int) -> Path:
    """Export a model of random weights."""
    data = {"modality": kind, "properties": {"rate": 8000} if kind == "audio" else {}}
    return random_export(folder, data, context=context, embedding=EMBEDDINGS[kind])


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[str]:
    command = [sys.executable, "-m", "longstride.launcher.cli", "serve", str(folder), "--port", "0"]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stderr=subprocess.PIPE)
    assert process.stderr is not None
    try:
        yield (await asyncio.wait_for(process.stderr.readline(), 60)).decode().split()[0]
    finally:
        process.send_signal(signal.SIGTERM)
        told = await process.stderr.read()
        assert (await process.wait(), told) == (0, b"")


async def asked(url: str, content: dict[str, Any]) -> bytes:
    """Return the sample of the API."""
    async with aiohttp.ClientSession() as session, session.post(f"{url}sample", json=content) as response:
        found = [json.loads(line) for line in (await response.text()).splitlines()]
    assert found[-1].get("done"), found
    return b"".join(base64.b64decode(line["base64"]) for line in found if "base64" in line)


def run(folder: Path, test: Callable[[Page, str], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with served(folder) as url, browser() as page:
            await page.open(url)
            await test(page, url)
            assert all(each.startswith((url, "data:", "blob:")) for each in page.asked), page.asked

    asyncio.run(whole())


async def sample(page: Page) -> None:
    """Start sampling by a click, and wait for the end."""
    await page.click("#sample")
    await page.until("document.querySelector('#sample').disabled === false")


def test_text_is_what_the_api_gives(tmp_path: Path) -> None:
    async def test(page: Page, url: str) -> None:
        await page.type("#prompt", "hä ")
        await page.type("#bytes", "400")
        await page.type("#seed", "7")
        await page.type("#top_k", "40")
        await sample(page)
        expected = "hä ".encode() + await asked(url, {"prompt": "hä ", "bytes": 400, "seed": 7, "top_k": 40})
        assert await page.value("document.querySelector('#text').textContent") == expected.decode("utf-8", "replace")
        assert "400 bytes" in await page.value("document.querySelector('#status').textContent")
        await page.screenshot(tmp_path / "text.png")
        assert page.told == []

    run(make_export(tmp_path / "text", "text", 1024), test)


@pytest.mark.parametrize(("context", "count"), [(256, 252), (1024, 256)])
def test_first_click_samples_what_fits_behind_the_prompt(context: int, count: int, tmp_path: Path) -> None:
    async def test(page: Page, url: str) -> None:
        await page.type("#prompt", "def ")
        await sample(page)
        assert await page.value("document.querySelector('#error').innerText") == ""
        assert f"{count} bytes" in await page.value("document.querySelector('#status').textContent")

    run(make_export(tmp_path / "text", "text", context), test)


def test_refusal_is_shown_and_the_next_sample_goes_well(tmp_path: Path) -> None:
    async def test(page: Page, url: str) -> None:
        await page.type("#bytes", "5000")
        await sample(page)
        error = "bytes=5000: must be an integer from 1 to 1024"
        assert await page.value("document.querySelector('#error').innerText") == error
        await page.screenshot(tmp_path / "error.png")
        await page.type("#bytes", "5")
        await sample(page)
        assert await page.value("document.querySelector('#error').innerText") == ""
        assert "5 bytes" in await page.value("document.querySelector('#status').textContent")

    run(make_export(tmp_path / "text", "text", 1024), test)


def test_text_grows_while_it_is_sampled_and_stops_when_asked(tmp_path: Path) -> None:
    async def test(page: Page, url: str) -> None:
        await page.type("#bytes", "60000")
        await page.click("#sample")
        await page.until("document.querySelector('#sampled').textContent.length > 10")
        first = await page.value("document.querySelector('#sampled').textContent.length")
        await page.until(f"document.querySelector('#sampled').textContent.length > {first}")
        await page.click("#stop")
        await page.until("document.querySelector('#sample').disabled === false")
        assert "stopped" in await page.value("document.querySelector('#status').textContent")
        await page.until("fetch('/health').then((r) => r.json()).then((h) => !h.sampling)")
        shown = await page.value("document.querySelector('#sampled').textContent.length")
        assert first < shown < 60_000

    run(make_export(tmp_path / "text", "text", 65_536), test)


def test_picture_is_what_the_api_gives(tmp_path: Path) -> None:
    async def test(page: Page, url: str) -> None:
        await page.type("#seed", "3")
        await sample(page)
        pixels = "canvas.getContext('2d').getImageData(0, 0, 24, 16).data"
        drawn = await page.value(
            f"(() => {{ const canvas = document.querySelector('#canvas'); return [...{pixels}]; }})()"
        )
        rgb = bytes(value for place, value in enumerate(drawn) if place % 4 < 3)
        assert rgb == await asked(url, {"bytes": 1152, "seed": 3})
        await page.screenshot(tmp_path / "image.png")
        assert page.told == []

    run(make_export(tmp_path / "image", "image", 1152), test)


def test_picture_goes_on_below_the_rows_that_are_kept(tmp_path: Path) -> None:
    async def test(page: Page, url: str) -> None:
        await page.value(
            """(async () => {
                const canvas = Object.assign(document.createElement("canvas"), { width: 48, height: 32 });
                const context = canvas.getContext("2d");
                context.fillStyle = "rgb(10, 200, 30)";
                context.fillRect(0, 0, 48, 32);
                const blob = await new Promise((done) => canvas.toBlob(done, "image/png"));
                const files = new DataTransfer();
                files.items.add(new File([blob], "green.png"));
                document.querySelector("#picture").files = files.files;
            })()"""
        )
        await page.type("#rows", "4")
        await page.type("#seed", "3")
        await sample(page)
        prompt = bytes([10, 200, 30]) * (4 * 24)
        sampled = await asked(url, {"prompt_base64": base64.b64encode(prompt).decode(), "seed": 3})
        pixels = "document.querySelector('#canvas').getContext('2d').getImageData(0, 0, 24, 16).data"
        drawn = await page.value(f"[...{pixels}]")
        assert bytes(value for place, value in enumerate(drawn) if place % 4 < 3) == prompt + sampled

    run(make_export(tmp_path / "image", "image", 1152), test)


def test_sound_is_what_the_api_gives_and_can_be_played(tmp_path: Path) -> None:
    async def test(page: Page, url: str) -> None:
        await page.type("#seed", "3")
        assert await page.value("document.querySelector('#rate').value") == "8000"  # as the export says
        await sample(page)
        sampled = await asked(url, {"seed": 3})
        await page.until("document.querySelector('#audio').readyState >= 1")
        assert await page.value("document.querySelector('#audio').duration") == pytest.approx(len(sampled) / 8000)
        # What the page may fetch does not include its own sound, so it is made again by the page's function.
        content = json.dumps(list(sampled))
        file = bytes(await page.value(f"[...new Uint8Array(wav(Uint8Array.from({content}), 8000))]"))
        assert file[44:] == mulaw_decode(torch.tensor(list(sampled), dtype=torch.uint8).numpy()).astype("<i2").tobytes()
        await page.screenshot(tmp_path / "audio.png")
        assert page.told == []

    run(make_export(tmp_path / "audio", "audio", 1024), test)


SCORED = "hä\nx€!"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_scored_character_by_character(scheme: str, tmp_path: Path) -> None:
    async def test(page: Page, url: str) -> None:
        await page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        await page.type("#prompt", SCORED)
        await page.click("#score")
        await page.until("document.querySelector('#scored').hidden === false")
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{url}likelihood", json={"text": SCORED}) as answer,
        ):
            found = await answer.json()
        spans = "[...document.querySelectorAll('#characters span')]"
        assert await page.value(f"{spans}.map((s) => s.textContent)") == list(SCORED)
        bits = [nat / math.log(2) for nat in found["nats"]]
        sums = [bits[0], sum(bits[1:3]), bits[3], bits[4], sum(bits[5:8]), bits[8]]
        shares = await page.value(f"{spans}.map((s) => Number(s.style.getPropertyValue('--share')))")
        assert shares == pytest.approx([min(1, each / 8) for each in sums], abs=6e-4)
        colours = await page.value(f"{spans}.map((s) => getComputedStyle(s).backgroundColor)")
        assert len(set(colours)) > 1
        total = f"{found['bits_per_byte']:.3f} bits per byte over 9 bytes"
        assert await page.value("document.querySelector('#total').textContent") == total
        box = await page.value(
            f"(() => {{ const r = {spans}[4].getBoundingClientRect(); return [r.x + 3, r.y + 6]; }})()"
        )
        await page.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])
        reading = "document.querySelector('#reading').textContent"
        each = " + ".join(f"{bit:.2f}" for bit in bits[5:8])
        assert await page.value(reading) == f"bytes 6 to 8: €, {sums[4]:.2f} bits ({each})"
        await page.value("document.querySelector('#characters').focus()")
        for _ in range(2):
            await page.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowLeft")
        assert await page.value(reading) == f"byte 4: line end, {sums[2]:.2f} bits"
        await page.screenshot(tmp_path / f"scored-{scheme}.png")
        await page.type("#prompt", "a" * 5000)
        await page.click("#score")
        await page.until("document.querySelector('#error').innerText")
        assert "has 5000 bytes; give at most 4096" in await page.value("document.querySelector('#error').innerText")
        assert [each for each in page.told if "422" not in each] == []

    folder = make_export(tmp_path / "text", "text", 1024)
    weights = load_file(folder / "model.safetensors")
    weights["logits.weight"] *= 0.03  # so that bytes have other bits than 8 and more
    save_file(weights, folder / "model.safetensors")
    run(folder, test)


def test_text_of_positions_without_tables_has_its_page(tmp_path: Path) -> None:
    """Export a recipe: the kind of the data decides what the page shows, not the kind of positions."""

    async def test(page: Page, url: str) -> None:
        await page.type("#prompt", "def ")
        await sample(page)
        assert "252 bytes" in await page.value("document.querySelector('#status').textContent")
        assert (await page.value("document.querySelector('#about').textContent")).startswith("Text, ")
        assert page.told == []

    folder = make_export(tmp_path / "text", "text", 256)
    content = json.loads((folder / "config.json").read_text())
    content["model"] |= {"embedding": {"type": "tokens"}, "rotary": {}}
    (folder / "config.json").write_text(json.dumps(content))
    names = {"embedding.positions.0.weight", "embedding.positions.1.weight"}
    weights = load_file(folder / "model.safetensors")
    save_file({name: tensor for name, tensor in weights.items() if name not in names}, folder / "model.safetensors")
    run(folder, test)
