"""``python docs/report_picture.py REPORT.html``: docs/pictures/report.png, a report on a desk and on a phone.

The page is of a real run: `longstride report RUN --output REPORT.html`. It takes chromium, see
tests/harness/chromium.py.
"""

from __future__ import annotations

import asyncio
import base64
import io
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from PIL import Image  # noqa: E402  the path comes first

from tests.harness.chromium import Page, browser  # noqa: E402

OUTPUT = ROOT / "docs" / "pictures" / "report.png"
HEIGHT = 1200
DESK, PHONE = 1180, 390  # pixels wide
GAP = 24
COLOURS = 256


async def seen(page: Page, report: Path, width: int, scheme: str) -> Image.Image:
    """The top of the page at a width, by light or dark."""
    await page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    size = {"width": width, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": width == PHONE}
    await page.call("Emulation.setDeviceMetricsOverride", **size)
    await page.open(report.resolve().as_uri())
    taken = await page.call("Page.captureScreenshot", format="png")
    return Image.open(io.BytesIO(base64.b64decode(taken["data"]))).convert("RGB")


async def main(report: Path) -> None:
    """Writes both beside each other."""
    picture = Image.new("RGB", (DESK + GAP + PHONE, HEIGHT), "white")
    async with browser() as page:
        await page.call("Emulation.setScrollbarsHidden", hidden=True)
        picture.paste(await seen(page, report, DESK, "light"), (0, 0))
        picture.paste(await seen(page, report, PHONE, "dark"), (DESK + GAP, 0))
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(OUTPUT, optimize=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
