"""What the documentation shows is what the code does."""

import importlib.util
import os
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from longstride.data_pipelines.building import build
from longstride.launcher.config import load_config
from longstride.testing.cache import CACHE_PROPERTIES
from longstride.testing.models import MODEL_PROPERTIES
from longstride.testing.patterns import PATTERN_PROPERTIES
from tests.harness.installations import copy_checkout
from tests.harness.pages import blocks, run_page
from tests.harness.tiny_models import random_export

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
TOUR = ROOT / "docs" / "tour.md"
LIBRARY = ROOT / "docs" / "library.md"
MADE_BY_THE_READER = {"kernels/patterns/dilated.py", "benchmarks/results/paper-mine.json"}


def script(name: str) -> ModuleType:
    """Import a script of docs/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_drawings_are_up_to_date() -> None:
    drawings = script("draw").drawings()
    for name, drawing in drawings.items():
        assert (ROOT / "docs/pictures" / name).read_text() == drawing, f"{name}: run python docs/draw.py"


def anchors(markdown: str) -> set[str]:
    """Return the anchors of a page's headings: lower case, hyphens for blanks, no punctuation."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", markdown, flags=re.M | re.S), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", page.read_text()):
        if "://" in target:
            continue
        path = page.parent / target if target else page
        assert path.exists(), target
        if anchor and path.suffix == ".md":
            assert anchor in anchors(path.read_text()), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_exist(page: Path) -> None:
    text = re.sub(r"```python\n.*?```", "", page.read_text(), flags=re.DOTALL)
    folders = "launcher|kernels|sparse_model|data_pipelines|benchmarks|tests|ds_configs|docs"
    for name in set(re.findall(rf"(?<![\w/.-])((?:{folders})/[\w/.-]*\w)", text)):
        if name not in MADE_BY_THE_READER:
            assert (ROOT / name).exists(), name


def test_stops_of_the_tour_are_where_it_says() -> None:
    stops = re.findall(r"\[`([\w.]+)`\]\(\.\./([\w/]+\.py)#L(\d+)\)", TOUR.read_text())
    assert len({path for _, path, _ in stops}) >= 8
    for name, path, line in stops:
        text = (ROOT / path).read_text().splitlines()[int(line) - 1]
        assert re.match(rf"\s*(def|class) {name.split('.')[-1]}\b", text), f"{path}:{line}: run python docs/draw.py"


def test_tour_does_what_it_shows(tmp_path: Path) -> None:
    """Follow the tour in a copy of the checkout: the pattern's file, its two lines in the registry, every command."""
    checkout = copy_checkout(tmp_path / "checkout")
    for name in ("tests", "docs", "benchmarks"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    (checkout / ".venv").symlink_to(Path(sys.executable).parent.parent)
    registry = checkout / "kernels/patterns/__init__.py"
    text, page = registry.read_text(), TOUR.read_text()
    lines = {
        "from longstride.kernels.patterns.dilated import Dilated": "from longstride.kernels.patterns.fixed",
        '"dilated": Dilated,': '"dense": Dense,',
    }
    for line, before in lines.items():
        assert f"`{line}`" in page and text.count(before) == 1
        text = text.replace(before, f"{line}\n{before}")
    registry.write_text(text)
    run_page(TOUR, checkout, {**os.environ, "PYTHONPATH": str(checkout)})
    assert (checkout / "mask.png").is_file()


def library_folder(folder: Path) -> Path:
    """Make what docs/library.md finds in its folder: data and an exported model."""
    (folder / "texts").mkdir()
    for number in range(3):
        (folder / "texts" / f"{number}.md").write_text((ROOT / "README.md").read_text() * 2)
    build([folder / "texts"], folder / "data", validation_fraction=0)
    random_export(folder / "model")
    return folder


def library_namespaces(page: Path, needs: str | None = None) -> list[dict[str, Any]]:
    """Run the Python blocks of a page that need this package, or none; return the names that each leaves."""
    namespaces = []
    for block in blocks(page.read_text()):
        if block.language == "python" and block.needs == needs:
            names: dict[str, Any] = {"__name__": "__main__"}
            exec(compile("\n" * (block.line - 1) + block.text, page, "exec"), names)
            namespaces.append(names)
    return namespaces


def test_library_does_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that need packages of others are in tests/clients/test_library.py."""
    monkeypatch.chdir(library_folder(tmp_path))
    _, loop, _, exported, suite = library_namespaces(LIBRARY)
    assert loop["loss"] < 3 and (tmp_path / "model.pt").is_file()
    assert exported["nats"].shape == (1, 4) and len(exported["sample"]) == 20
    assert suite["results"]["documents"] == "not declared by routing"
    tables = "".join(re.findall(r"^\|(.*?)\|", LIBRARY.read_text(), flags=re.MULTILINE))
    assert all(name in tables for name in (*PATTERN_PROPERTIES, *MODEL_PROPERTIES, *CACHE_PROPERTIES))
    assert {block.needs for block in blocks(LIBRARY.read_text())} == {None, "accelerate", "lightning", "torchdata"}


def test_pages_import_by_one_name() -> None:
    bare = re.compile(r"(?:from|import) (?:launcher|kernels|sparse_model|data_pipelines)\b")
    assert not [page.name for page in PAGES if bare.search(page.read_text())]


def test_tables_of_the_configuration_are_up_to_date() -> None:
    page = script("configuration_tables").page()
    assert (ROOT / "docs/configuration.md").read_text() == page, "run python docs/configuration_tables.py"


def test_configurations_of_the_page_are_valid(tmp_path: Path) -> None:
    """Check those that extend another configuration; the others are parts of a file."""
    blocks = re.findall(r"```json\n(\{.*?\})\n```", (ROOT / "docs/configuration.md").read_text(), flags=re.DOTALL)
    shown = [block for block in blocks if '"extends"' in block]
    assert len(shown) == 2
    for block in shown:
        (tmp_path / "shown.json").write_text(block)
        load_config(tmp_path / "shown.json")
