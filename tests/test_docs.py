"""What the documentation shows is what the code does."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

from longstride.kernels import sparse_attention
from longstride.kernels.patterns import PATTERNS
from longstride.launcher.config import load_config

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
TOUR = ROOT / "docs" / "tour.md"
MADE_BY_THE_READER = {"kernels/patterns/dilated.py", "benchmarks/results/paper-mine.json"}


def script(name: str) -> ModuleType:
    """A script of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_drawings_are_up_to_date() -> None:
    drawings = script("draw").drawings()
    for name, drawing in drawings.items():
        assert (ROOT / "docs/pictures" / name).read_text() == drawing, f"{name}: run python docs/draw.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_exist(page: Path) -> None:
    text = re.sub(r"```python\n.*?```", "", page.read_text(), flags=re.DOTALL)
    rooms = "launcher|kernels|sparse_model|data_pipelines|benchmarks|tests|ds_configs|docs"
    for name in set(re.findall(rf"(?<![\w/.-])((?:{rooms})/[\w/.-]*\w)", text)):
        if name not in MADE_BY_THE_READER:
            assert (ROOT / name).exists(), name


def test_stops_of_the_tour_are_where_it_says() -> None:
    stops = re.findall(r"\[`([\w.]+)`\]\(\.\./([\w/]+\.py)#L(\d+)\)", TOUR.read_text())
    assert len({path for _, path, _ in stops}) >= 8
    for name, path, line in stops:
        text = (ROOT / path).read_text().splitlines()[int(line) - 1]
        assert re.match(rf"\s*(def|class) {name.split('.')[-1]}\b", text), f"{path}:{line}: run python docs/draw.py"


@pytest.mark.parametrize("context", [3, 6, 13, 96])
def test_pattern_of_the_tour_computes_its_mask(context: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern_class = script("draw").pattern_of_the_tour()
    monkeypatch.setitem(PATTERNS, "dilated", pattern_class)
    pattern = pattern_class(window=5, dilation=4)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, context, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
    results = {}
    for backend in ("reference", "cpu"):
        out = sparse_attention(q, k, v, pattern, backend=backend)
        results[backend] = (out, *torch.autograd.grad(out.square().sum(), (q, k, v)))
    for expected, computed in zip(*results.values(), strict=True):
        torch.testing.assert_close(computed, expected, rtol=1e-12, atol=1e-12)


def test_pages_import_by_one_name() -> None:
    bare = re.compile(r"(?:from|import) (?:launcher|kernels|sparse_model|data_pipelines)\b")
    assert not [page.name for page in PAGES if bare.search(page.read_text())]


def test_tables_of_the_configuration_are_up_to_date() -> None:
    made = script("configuration_tables").page()
    assert (ROOT / "docs/configuration.md").read_text() == made, "run python docs/configuration_tables.py"


def test_configurations_that_the_page_shows_are_taken(tmp_path: Path) -> None:
    """Those that extend another one: all else is a part of a file."""
    blocks = re.findall(r"```json\n(\{.*?\})\n```", (ROOT / "docs/configuration.md").read_text(), flags=re.DOTALL)
    shown = [block for block in blocks if '"extends"' in block]
    assert len(shown) == 2
    for block in shown:
        (tmp_path / "shown.json").write_text(block)
        load_config(tmp_path / "shown.json")
