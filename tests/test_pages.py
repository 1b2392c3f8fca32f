"""README, docs/commands.md and docs/tutorial do what they show: each block runs in an empty folder, by the wheel."""

import json
import re
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from tests.harness.installations import Installation, bare, built, copy_checkout
from tests.harness.pages import agree, blocks, first_difference, run_page
from tests.harness.runs import ROOT

PAGES = sorted((ROOT / "docs" / "tutorial").glob("*.md"))
SHOWN = [ROOT / "README.md", ROOT / "docs" / "commands.md", *PAGES]
REASONS = {"a cluster", "a GPU", "a network", "minutes"}  # why a block is not run


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """Install the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    installation = bare(folder / "python", folder)
    installation.pip("install", built("build_wheel", copy_checkout(folder / "checkout"), folder / "built"))
    return installation


@pytest.mark.pages
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tutorial_prints_what_it_shows(wheel: Installation, page: Path, tmp_path: Path) -> None:
    run_page(page, tmp_path, wheel.environment())
    for picture in re.findall(r"!\[[^\]]*\]\(\.\./pictures/tutorial/([^)]+)\)", page.read_text()):
        assert (tmp_path / picture).is_file(), f"no command of {page.name} makes {picture}"


@pytest.mark.parametrize("page", SHOWN, ids=lambda page: page.stem)
def test_every_block_is_run_or_says_why_not(page: Path) -> None:
    for block in blocks(page.read_text()):
        where = f"{page.name}:{block.line}"
        assert block.language in ("console", "sh", "python", "json"), f"{where}: no test runs `{block.language}`"
        assert block.needs is None or block.needs in REASONS, f"{where}: needs {block.needs}"
        assert block.language not in ("console", "sh") or list(block.commands()), f"{where}: holds no command"


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("step 10: 3.21 bits per byte", "step 20: 3.30 bits per byte", True),
        ("step 10: 3.21 bits per byte", "step 10: 2.30 bits per byte", False),
        ("1,024 bytes of 3 documents", "16 bytes of 12 documents", True),
        ("1,024 bytes of 3 documents", "16 bytes of 12 files", False),
        ("runs/a … done", "runs/a in 3 s: done", True),
        ("(a+b)", "(a+b)", True),
    ],
)
def test_lines_agree_but_for_numbers(shown: str, printed: str, same: bool) -> None:
    assert agree(shown, printed) is same


def test_differences_are_told() -> None:
    assert first_difference(["a 1", "…", "c"], ["a 2", "b", "b", "c"]) is None
    assert first_difference([], ["whatever"]) is None
    assert first_difference(["a", "c"], ["a", "b", "c"]) == "the page shows   c\nthe command says b"
    assert first_difference(["a", "…", "c"], ["a", "b"]) == "the page shows   c\nthe command says no such line"
    assert first_difference(["a"], ["a", "b"]) == "the page does not show b"
    assert first_difference(["a", "…"], ["a", "b"]) is None
    progress = ["longstride: building the engine …", "longstride: compressing: 1,317 of 2,425 bytes, about 8 s left"]
    assert first_difference(["a", "c"], ["a", *progress, "c"]) is None
    assert first_difference(["…", "a 1", "c"], ["a 1", "b", "a 2", "c"]) is None  # not the first that agrees
    assert first_difference(["…", "a 1", "c"], ["a 1", "b", "a 2", "d"]) == "the page shows   c\nthe command says d"
    assert first_difference(["…", "a 1", "…", "a 3"], ["a 1", "b", "a 2"]) is None
    assert first_difference(["a", "…", "a"], ["a"]) == "the page shows   a\nthe command says no such line"


@pytest.mark.pages
@pytest.mark.parametrize("name", ["README.md", "docs/commands.md"])
def test_page_does_what_it_shows(wheel: Installation, tmp_path: Path, name: str) -> None:
    """Run the page in a folder with what it names: some texts, rows, a file, and a run that extends the one before."""
    (tmp_path / "my" / "texts").mkdir(parents=True)
    text = "".join(path.read_text() for path in sorted((ROOT / "docs").rglob("*.md")))[:30_000]
    for number in range(8):
        (tmp_path / "my" / "texts" / f"{number}.txt").write_text(text[number * 1000 :] + text[: number * 1000])
    (tmp_path / "FILE").write_text(text[:200])
    rows = b"".join(json.dumps({"text": text[place : place + 500]}).encode() + b"\n" for place in range(0, 8000, 500))
    (tmp_path / "rows.jsonl.zst").write_bytes(zstandard.compress(rows))
    pyarrow.parquet.write_table(pyarrow.table({"text": [text[:500], text[500:1000]]}), tmp_path / "more.parquet")
    songs = {"extends": "mine.json", "train": {"output": "runs/songs"}}
    (tmp_path / "songs.json").write_text(json.dumps(songs))
    run_page(ROOT / name, tmp_path, wheel.environment())
