"""Who may import whom, held by reading the imports of every file."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = {
    "kernels": set(),
    "sparse_model": {"kernels"},
    "data_pipelines": set(),
    "launcher": {"kernels", "sparse_model", "data_pipelines"},
}
# Where a package may be imported; elsewhere it must not be.
ONLY_IN = {
    "deepspeed": ["launcher"],
    "triton": ["kernels/backends/triton"],
    "webdataset": ["data_pipelines"],
    "mpi4py": ["data_pipelines"],
    "fsspec": ["data_pipelines"],
    "aiohttp": ["data_pipelines", "launcher/server"],
    "matplotlib": ["launcher"],
    "safetensors": ["launcher"],
    "tqdm": ["launcher"],
    "transformers": ["launcher/hub_model.py", "launcher/hub_tokenizer.py"],
    "PIL": ["data_pipelines/modalities/picture.py"],
    "soundfile": ["data_pipelines/modalities/decoder.py"],
    "soxr": ["data_pipelines/modalities/resampler.py"],
}


def imported(path: Path) -> set[str]:
    """Full names of every module that a file imports, at its top or inside a function."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


FILES = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_rooms_import_only_what_they_may(path: Path) -> None:
    relative = path.relative_to(ROOT).as_posix()
    room = relative.split("/")[0]
    for name in imported(path):
        top = name.split(".")[0]
        if top in ROOMS:
            assert top in ROOMS[room] | {room}, f"{room} must not import {name}"
        if top in ONLY_IN:
            assert any(f"{relative}/".startswith(f"{place}/") for place in ONLY_IN[top]), f"{name} has no place here"


def test_backends_do_not_import_each_other() -> None:
    backends = ROOT / "kernels" / "backends"
    for path in backends.rglob("*.py"):
        own = path.relative_to(backends).with_suffix("").parts[0]
        for name in imported(path):
            if name.startswith("longstride.kernels.backends."):
                assert name.split(".")[2] == own, f"{path.name} imports {name}"


@pytest.mark.parametrize("room", ["sparse_model", "data_pipelines"])
def test_a_room_imports_without_the_packages_it_does_not_need(room: str) -> None:
    absent = ["deepspeed", "triton", "mpi4py", "PIL", "aiohttp", "s3fs", "soundfile", "soxr"]
    absent += ["webdataset"] if room == "sparse_model" else []
    script = f"import sys\nfor name in {absent}: sys.modules[name] = None\nimport {room}"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)
