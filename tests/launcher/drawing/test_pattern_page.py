"""The page of a configuration's patterns: its numbers are the masks', and a browser shows them."""

import asyncio
import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from longstride.kernels import ConfigError
from longstride.kernels.patterns import BigBird, Pattern, pattern_to_json
from longstride.launcher import cli
from longstride.launcher.drawing import pattern_page as page_module
from longstride.launcher.drawing.pattern_page import part_json, pattern_page, pieces
from tests.harness.chromium import browser
from tests.harness.oracles import example_patterns, mask_of, two_sided_patterns

CONTEXT = 360
PATTERNS = [
    *(pattern.for_head(1) for pattern in example_patterns()),
    *(BigBird(4, 2, 1, 2, context=CONTEXT, index=1, causal=False) if isinstance(each, BigBird) else each.for_head(1)
      for each in two_sided_patterns()),
]  # fmt: skip


def value(found: list[list[int]], row: int) -> int:
    first, begin, rise = [piece for piece in found if piece[0] <= row][-1]
    return begin + (row - first) * rise


def folded(fold: list[int], row: int) -> int:
    period, step, stride, shift = fold
    return row // period * step + row % period * stride + shift


def bound(numbers: list[int], row: int, period: int) -> int:
    step, offset, least, most, grain = numbers
    rest = row % period
    return row // period * step + min(max(rest - rest % grain + offset, least), most)


def positions_in(part: dict[str, Any], query: int) -> list[int]:
    """What a part in the page says of a query, as its docstring has it."""
    row = query
    if "row_fold" in part:
        row = folded(part["row_fold"], query)
    elif "row_pieces" in part:
        row = value(part["row_pieces"], query)
    if "bounds" in part:
        low, high = (bound(part["bounds"][end], row, part["bounds"]["period"]) for end in ("low", "high"))
    else:
        low, high = (value(part[end], row) for end in ("low", "high"))
    columns = range(low, high)
    if "key_fold" in part:
        return [folded(part["key_fold"], column) for column in columns]
    return [value(part["key_pieces"], column) for column in columns] if "key_pieces" in part else list(columns)


def rows_of(pattern: Pattern) -> list[list[int]]:
    return [row.nonzero().flatten().tolist() for row in mask_of(pattern, CONTEXT)]


def written(folder: Path, attention: Any, **changes: Any) -> Path:
    model = {"context": CONTEXT, "layers": 1, "heads": 4, "width": 32, "embedding": {"type": "tokens"}, "rotary": {}}
    if isinstance(attention, dict) and not attention.get("causal", True):
        model["objective"] = {"type": "masked"}
    path = folder / "model.json"
    path.write_text(json.dumps({"model": {**model, "attention": attention, **changes}}))
    return path


def data_of(page: str) -> dict[str, Any]:
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    content: dict[str, Any] = json.loads(found)
    return content


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_numbers_in_the_page_are_the_mask(pattern: Pattern) -> None:
    parts = json.loads(json.dumps([part_json(part, CONTEXT) for part in pattern.parts()]))
    found = [sorted(key for part in parts for key in positions_in(part, query)) for query in range(CONTEXT)]
    assert found == rows_of(pattern)


@pytest.mark.parametrize("vector", [[], [7], [0, 1, 2, 5, 5, 5, 9, 8, 7], [3, 3, 4, 6, 8, 10]], ids=str)
def test_pieces_are_the_vector(vector: list[int]) -> None:
    found = pieces(torch.tensor(vector, dtype=torch.int64))
    assert [value(found, row) for row in range(len(vector))] == vector
    assert len(found) <= max(1, len(vector) // 2 + 1)


def test_page_is_one_small_file_that_asks_for_nothing(tmp_path: Path) -> None:
    page = pattern_page(Path("music_1m"), query=99)
    content = data_of(page)
    assert len(page) < 40_000 and content["context"] == 2**20 and content["query"] == 99
    assert "http:" not in page and "https:" not in page and "$" + "data" not in page
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy.startswith("default-src 'none'") and f"script-src 'sha256-{digest}'" in policy
    hostile = tmp_path / "<b>&<script>alert(1)<!--.json"
    written(tmp_path, {"type": "dense"}).rename(hostile)
    page = pattern_page(hostile)
    assert "<b>" not in page and "<!--" not in page and page.count("<script") == 2 and "&lt;b&gt;&amp;" in page
    assert data_of(page)["name"].startswith(hostile.stem)


def test_page_of_chosen_keys_or_irregular_patterns_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="its heads choose their keys by content; draw --output"):
        pattern_page(written(tmp_path, {"type": "routing", "clusters": 4, "window": 8}))
    monkeypatch.setattr(page_module, "MOST_BYTES", 1000)
    with pytest.raises(ConfigError, match="its patterns have no closed form, and take"):
        pattern_page(Path("paper_small"))


def test_page_and_picture_are_made_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = written(tmp_path, {"type": "fixed", "stride": 8, "summary": 4})
    picture, page = tmp_path / "a.png", tmp_path / "a.html"
    assert cli.main(["show", "pattern", str(source), "--output", str(picture), "--html", str(page)]) == 0
    assert capsys.readouterr().out.splitlines() == [str(page), str(picture)]
    assert data_of(page.read_text())["patterns"][0]["words"].startswith("fixed")


def test_page_says_which_patterns_read_later_positions(tmp_path: Path) -> None:
    window = {"type": "local", "window": 30}
    for causal, share in ((True, "16"), (False, "15.7")):
        content = data_of(pattern_page(written(tmp_path, window | ({} if causal else {"causal": False}))))
        (pattern,) = content["patterns"]
        assert (pattern["causal"], pattern["share"]) == (causal, share)


def test_every_vector_of_a_large_pattern_is_short() -> None:
    longest = part_json(BigBird(64, 3, 1, 1, index=0).parts()[-1], 2**16)
    assert isinstance(longest["low"], list) and len(longest["low"]) <= 2**16 // 64 + 1


@pytest.mark.browser
def test_a_browser_shows_what_a_query_reads(tmp_path: Path) -> None:
    async def look() -> None:
        async with browser() as page:
            for number, pattern in enumerate(PATTERNS):
                settings = {key: each for key, each in pattern_to_json(pattern).items() if key != "index"}
                (folder := tmp_path / str(number)).mkdir()
                source, file = written(folder, settings), folder / "page.html"
                file.write_text(pattern_page(source, query=40))
                await page.open(file.as_uri())
                shown = data_of(file.read_text())["patterns"]
                head = getattr(pattern, "index", None) or 0
                wanted = rows_of(pattern)
                assert len(shown) > head, shown
                found = await page.value(f"Array.from({{length: {CONTEXT}}}, (_, q) => positionsRead({head}, q))")
                assert found == wanted, pattern
                assert page.told == []
            # A page of two patterns, as a person uses it.
            kinds = [{"type": "local", "window": 128}, {"type": "fixed", "stride": 128, "summary": 8}]
            config, file = tmp_path / "two.json", tmp_path / "two.html"
            model = {"context": 1024, "layers": 2, "attention": kinds}
            config.write_text(json.dumps({"extends": "demo", "model": model}))
            file.write_text(pattern_page(config, query=712))
            await page.call(
                "Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=2, mobile=True
            )
            await page.open(file.as_uri())
            told = "document.getElementById('told').textContent"
            assert (await page.value(told)).startswith("Query 712 (row 5, column 72) reads 128 of the 713 positions")
            assert await page.value("document.documentElement.scrollWidth <= 390")
            await page.click("#patterns label:nth-of-type(2) input")
            parts = "document.getElementById('parts').innerText"
            assert (await page.value(parts)).splitlines()[0] == "block: 73 keys, 640–712"
            await page.call("Emulation.clearDeviceMetricsOverride")
            await page.value("document.getElementById('matrix').focus()")
            for kind in ("keyDown", "keyUp"):
                await page.call("Input.dispatchKeyEvent", type=kind, key="ArrowDown", code="ArrowDown")
            assert (await page.value(told)).startswith("Query 713 ")
            await page.type("#query", "0")
            assert (await page.value(told)).startswith("Query 0 (row 0, column 0) reads 1 of the 1 positions")
            box = await page.value(
                "(() => { const e = document.getElementById('matrix'); e.scrollIntoView({block: 'center'});"
                "const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; })()"
            )
            await page.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])
            assert re.match(r"Query 51\d ", await page.value(told))
            await page.click("#matrix")
            assert "held" in await page.value(told)
            dark = [{"name": "prefers-color-scheme", "value": "dark"}]
            before = await page.value("document.getElementById('matrix').toDataURL()")
            await page.call("Emulation.setEmulatedMedia", features=dark)
            await page.until(f"document.getElementById('matrix').toDataURL() != '{before}'")
            assert page.told == []
            assert all(url.startswith(("file:", "data:")) for url in page.asked)

    asyncio.run(look())
