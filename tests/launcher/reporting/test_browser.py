"""A report of a real run in a real browser: each part is there without an error, at any width, light and dark."""

import asyncio
import json
import wave
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from longstride.launcher import cli
from longstride.launcher.reporting.template import MOST_PAGE_BYTES
from tests.harness.chromium import Page, browser
from tests.harness.runs import Run, configuration, spawn_series
from tests.launcher.conftest import Make

pytestmark = pytest.mark.browser

WIDTHS = (1280, 390)
SCHEMES = ("light", "dark")


@pytest.fixture(scope="module")
def report(shared: Callable[[str, Make], Path], data: Path) -> Path:
    """The page of a run of two processes that a guard skipped a step of, and that was gone on with."""

    def make(folder: Path) -> None:
        config = folder / "run.json"
        config.write_text(json.dumps(configuration(data, folder / "run")))
        words = ["--config", str(config), 'train.guards.non_finite="skip"', "train.log_every=1"]
        spoilt = {"SPOIL": "loss,1,3,3,1"}
        longer = ["train.steps=12", "train.learning_rate=0.002", "--resume", "auto"]
        for ended in spawn_series([Run(words, 2, spoilt), Run([*words, *longer], 2)]):
            assert ended.codes == [0, 0], ended.stderr
        samples = folder / "run" / "samples"
        samples.mkdir(exist_ok=True)
        (samples / "step-00000004.txt").write_text("sparse <b>stride</b>")
        with wave.open(str(samples / "step-00000008.wav"), "wb") as sound:
            sound.setparams((1, 1, 8000, 0, "NONE", ""))
            sound.writeframes(bytes(4000))
        output = folder / "report.html"
        assert cli.main(["report", str(folder / "run"), "--by-position", "--output", str(output)]) == 0

    return shared("reported", make) / "report.html"


def in_browser(work: Callable[[Page], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        async with browser() as page:
            await work(page)

    asyncio.run(run())


async def look(page: Page, report: Path, width: int, scheme: str) -> None:
    """Opens the page as one who has set such a width and colours sees it."""
    feature = {"name": "prefers-color-scheme", "value": scheme}
    await page.call("Emulation.setEmulatedMedia", features=[feature])
    await page.call(
        "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 500
    )
    await page.open(report.as_uri())


def test_report_has_each_part_without_an_error(report: Path) -> None:
    assert report.stat().st_size <= MOST_PAGE_BYTES

    async def read(page: Page) -> None:
        for width in WIDTHS:
            for scheme in SCHEMES:
                await look(page, report, width, scheme)
                assert await page.value("document.documentElement.scrollWidth <= innerWidth")
                assert await page.value("innerWidth") == width
                ground = await page.value("getComputedStyle(document.body).backgroundColor")
                assert (ground == "rgb(14, 18, 23)") == (scheme == "dark")
        assert page.told == []
        assert [url for url in page.asked if not url.startswith(("file:", "data:"))] == []
        charts = await page.value(
            "[...document.querySelectorAll('.chart figcaption')].map(e => e.firstChild.data.trim())"
        )
        assert charts[:5] == ["Loss", "Learning rate", "Gradient norm", "Throughput", "Step time"]
        assert "Loss by position" in charts
        pictures = "[...document.querySelectorAll('#reads img')].map(e => e.complete && e.naturalWidth > 300)"
        assert await page.value(pictures) == [True, True]
        rows = "(id => [...document.querySelectorAll(`#${id} tbody tr`)].map(r => [...r.cells].map(c => c.innerText)))"
        assert await page.value("document.querySelector('#samples pre').innerText") == "sparse <b>stride</b>"
        sound = (
            "new Promise(done => { const a = document.querySelector('#samples audio');"
            "a.onloadedmetadata = () => done(a.duration); a.onerror = () => done(a.error.message); a.load() })"
        )
        assert await page.value(sound) == 0.5
        incidents = await page.value(f"{rows}('incidents')")
        assert [row[:2] for row in incidents] == [["3", "guard"]] and incidents[0][2].startswith(
            "skip: the loss is nan"
        )
        starts = await page.value(f"{rows}('starts')")
        assert [row[1:3] for row in starts] == [["0", "new"], ["8", "resume"]]
        assert "train.learning_rate 0.003 0.002" in starts[1][5]
        plan = {row[0]: row[1:] for row in await page.value(f"{rows}('plan')")}
        assert plan["steps"] == ["12", "12"]
        assert all("–" not in row for what, row in plan.items() if "operations of a step" in what)
        evaluations = await page.value(
            "JSON.parse(document.querySelector('.chart script').textContent).curves.find(c => c.style == 'dots').x"
        )
        assert evaluations == [4, 8, 12]

    in_browser(read)


def test_charts_are_read_and_enlarged_by_the_pointer(report: Path) -> None:
    async def point(page: Page) -> None:
        await look(page, report, 1280, "light")
        box = await page.value(
            "(() => { const r = document.querySelector('.axes').getBoundingClientRect();"
            "return [r.x, r.y, r.width, r.height] })()"
        )

        async def mouse(kind: str, share: float) -> None:
            where = {"x": box[0] + share * box[2], "y": box[1] + box[3] / 2}
            await page.call("Input.dispatchMouseEvent", type=kind, button="left", buttons=1, clickCount=1, **where)

        await mouse("mouseMoved", 1.0 - 1e-3)
        assert (await page.value("document.querySelector('.tip').innerText")).startswith("step 12")
        before = await page.value("document.querySelector('.axes .x').textContent")
        for kind, share in (("mousePressed", 0.5), ("mouseMoved", 0.8), ("mouseReleased", 0.8)):
            await mouse(kind, share)
        left, _, width, _ = map(
            float, (await page.value("document.querySelector('.plot').getAttribute('viewBox')")).split()
        )
        assert (left, width) == (pytest.approx(500, abs=2), pytest.approx(300, abs=2))
        assert await page.value("document.querySelector('.axes .x').textContent") != before
        await page.click(".back")
        assert await page.value("document.querySelector('.plot').getAttribute('viewBox')") == "0 0 1000 1000"
        assert await page.value("document.querySelector('.axes .x').textContent") == before
        assert page.told == []

    in_browser(point)


def test_charts_stand_without_a_script(report: Path) -> None:
    async def read(page: Page) -> None:
        await page.call("Emulation.setScriptExecutionDisabled", value=True)
        await page.call("Page.enable")
        await page.call("Page.navigate", url=report.as_uri())
        await asyncio.sleep(1.0)
        found = "document.querySelectorAll('.chart .plot path.line').length"
        assert await page.value(found) >= 5
        height = "document.querySelector('.plot path.line').getBoundingClientRect().height"
        assert await page.value(height) > 50
        assert await page.value("document.body.dataset.ready ?? 'no script'") == "no script"

    in_browser(read)
