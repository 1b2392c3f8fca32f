"""Who may import whom, held by reading the imports of every file."""

import ast
import subprocess
import sys
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BIG_ROOMS = {
    "kernels": set(),
    "sparse_model": {"kernels"},
    "data_pipelines": set(),
    "launcher": {"kernels", "sparse_model", "data_pipelines"},
}
# The rooms inside, each of which may import those before it. Files beside the rooms stand in the same order.
ORDER = {
    "kernels": [
        "errors", "registry", "cache", "forms", "patterns", "plan", "selections", "backends", "op", "attention",
        "selected", "decoding",
    ],
    "sparse_model": [
        "strict", "network", "tiles", "division", "rotary", "part", "norm", "mixers", "feed_forwards",
        "config", "ngrams", "embedding", "output", "block", "transformer", "session", "generation",
    ],
    "data_pipelines": [
        "errors", "plain_files", "formats", "records", "settings", "durable", "palette", "modalities", "stores",
        "shards", "documents", "datasets", "order", "building",
    ],
    "launcher": [
        "verbs", "output", "stops", "config", "files", "pictures", "ranks", "models", "hub", "engine", "data",
        "checkpoints", "identity", "exports", "evaluation", "training", "generation", "compression", "serving",
        "planning", "drawing", "reporting", "train", "cluster", "host", "doctor", "cli", "demo",
    ],
}  # fmt: skip
# Big rooms that have one face, and the rooms inside that have another. All others are imported room by room.
WHOLE = {"kernels": {"patterns", "registry", "selections"}, "sparse_model": set()}
# Where a package may be imported; elsewhere it must not be.
ONLY_IN = {
    "deepspeed": ["launcher"],
    "triton": ["kernels/backends/triton"],
    "webdataset": ["data_pipelines"],
    "mpi4py": ["data_pipelines", "launcher/host.py"],  # which tells whether it finds its library
    "fsspec": ["data_pipelines"],
    "aiohttp": ["data_pipelines", "launcher/serving"],
    "matplotlib": ["launcher"],
    "safetensors": ["launcher"],
    "tqdm": ["launcher"],
    "tensorboard": ["launcher/training/monitors.py"],
    "transformers": ["launcher/hub"],
    "jinja2": ["launcher/reporting"],
    "shtab": ["launcher/cli.py"],
    "lm_eval": ["launcher/generation/lm_eval_model.py", "launcher/generation/likelihood.py"],
    "wandb": ["launcher/training/monitors.py"],
    "PIL": [
        "data_pipelines/modalities/picture.py",
        "launcher/reporting/records.py",
    ],
    "simplejpeg": ["data_pipelines/modalities/picture.py"],
    "soundfile": ["data_pipelines/modalities/decoder.py"],
    "soxr": ["data_pipelines/modalities/audio.py"],
    "zstandard": ["data_pipelines/formats.py"],
    "pyarrow": ["data_pipelines/records.py"],
}
MOST_NAMES = 15  # of a face
# Modules that a face hands out without importing them, as they are heavy.
LATE = {
    "longstride.data_pipelines.stores.remote",
    "longstride.launcher.cluster.hosts",
    "longstride.launcher.drawing.attention",
    "longstride.launcher.drawing.pattern",
    "longstride.launcher.evaluation.evaluate",
    "longstride.launcher.planning.dry_run",
    "longstride.launcher.planning.plan",
}
FILES = [path for room in BIG_ROOMS for path in sorted((ROOT / room).rglob("*.py"))]


def module(path: Path) -> str:
    """The full name of a file's module."""
    name = ".".join(("longstride", *path.relative_to(ROOT).with_suffix("").parts))
    return name.removesuffix(".__init__")


MODULES = {module(path) for path in FILES}


def imported(path: Path) -> set[str]:
    """Full names of every module or name that a file imports, at its top or inside a function."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def face(room: str) -> set[str]:
    """The names that a room hands out: what its `__init__.py` imports from the room, or defines."""
    names: set[str] = set()
    top = ast.parse((ROOT / room / "__init__.py").read_text()).body
    for node in [*top, *(inner for outer in top if isinstance(outer, ast.If) for inner in outer.orelse)]:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"longstride.{room.replace('/', '.')}"):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return {name for name in names if not name.startswith("_")}


def entries(room: str) -> set[str]:
    """The names that stand in a registry of its face: a dictionary, which grows by a line for each."""
    top = ast.parse((ROOT / room / "__init__.py").read_text()).body
    values = [node.value for node in top if isinstance(node, ast.Assign | ast.AnnAssign)]
    return {
        each.id
        for value in values
        if isinstance(value, ast.Dict)
        for each in value.values
        if isinstance(each, ast.Name)
    }


def room_of(name: str) -> tuple[str, str] | None:
    """(big room, room or file inside) of a full name; None for what is not inside a big room."""
    parts = name.split(".")
    if len(parts) < 3 or parts[0] != "longstride" or parts[1] not in ORDER:
        return None
    return parts[1], parts[2]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_rooms_import_only_what_they_may(path: Path) -> None:
    relative = path.relative_to(ROOT).as_posix()
    room = relative.split("/")[0]
    for name in imported(path):
        first, *rest = name.split(".")
        assert first not in BIG_ROOMS, f"{name}: rooms are imported as longstride.{name}"
        if first == "longstride" and rest:
            assert rest[0] in BIG_ROOMS[room] | {room}, f"{room} must not import {name}"
        if first in ONLY_IN:
            assert any(f"{relative}/".startswith(f"{place}/") for place in ONLY_IN[first]), f"{name} has no place here"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_rooms_inside_import_downwards_and_by_faces(path: Path) -> None:
    here = room_of(f"{module(path)}.")
    for name in imported(path):
        there = room_of(name)
        if there is None or here in (there, (there[0], "")):  # the face of a big room stands above all of it
            continue
        big, inside = there
        if big in WHOLE and (here is None or here[0] != big) and inside not in WHOLE[big]:
            assert name in {f"longstride.{big}.{each}" for each in face(big)}, f"{name}: past the face"
            continue
        if here is not None and here[0] == big:
            order = ORDER[big]
            assert order.index(inside) < order.index(here[1]), (
                f"{here[1]} stands below {inside}: must not import {name}"
            )
        if (ROOT / big / inside).is_dir() and inside != "backends":  # of which each is a room of its own
            room = f"longstride.{big}.{inside}"
            names = {room, *(f"{room}.{each}" for each in face(f"{big}/{inside}"))}
            assert name in names | LATE, f"{name}: past the face"


@pytest.mark.parametrize("path", sorted({path.parent for path in FILES}), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_face_is_narrow(path: Path) -> None:
    room = str(path.relative_to(ROOT))
    assert len(face(room) - entries(room)) <= MOST_NAMES


@pytest.mark.parametrize("big", ORDER)
def test_every_room_has_its_place_in_the_order(big: str) -> None:
    inside = {path.relative_to(ROOT / big).parts[0].removesuffix(".py") for path in (ROOT / big).rglob("*.py")}
    assert inside - {"__init__"} == set(ORDER[big])


def test_no_module_imports_itself_in_a_circle() -> None:
    """Nor lazily: an import inside a function that closes a circle hides that two files are one."""
    arrows: dict[str, set[str]] = defaultdict(set)
    for path in FILES:
        for name in imported(path):
            target = name if name in MODULES else name.rpartition(".")[0]
            if target in MODULES and target != module(path):
                arrows[module(path)].add(target)
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_the_conformance_suite_imports_what_it_checks() -> None:
    rooms = ("longstride.kernels", "longstride.sparse_model", "longstride.testing")
    for path in (ROOT / "longstride" / "testing").glob("*.py"):
        for name in imported(path):
            assert name.split(".")[0] in sys.stdlib_module_names | {"torch"} or name.startswith(rooms), name


def test_backends_do_not_import_each_other() -> None:
    backends = ROOT / "kernels" / "backends"
    every = {path.stem for path in backends.iterdir()}
    for path in backends.rglob("*.py"):
        here = path.relative_to(backends).with_suffix("").parts[0]
        for name in imported(path):
            if name.startswith("longstride.kernels.backends."):
                assert name.split(".")[3] not in every - {here}, f"{path.name} imports {name}"


@pytest.mark.parametrize(
    "room",
    [
        "sparse_model",
        "testing",
        "data_pipelines.order",
        "data_pipelines.building",
        "launcher.models",
        pytest.param("launcher.hub", marks=pytest.mark.clients),
    ],
)
def test_a_room_imports_without_the_packages_it_does_not_need(room: str) -> None:
    absent = ["deepspeed", "triton", "mpi4py", "PIL", "aiohttp", "s3fs", "soundfile", "soxr", "zstandard", "pyarrow"]
    absent += ["pytest"]
    absent += ["torch"] if room == "data_pipelines.building" else []
    absent += [] if room.startswith("data_pipelines") else ["webdataset"]
    script = f"import sys\nfor name in {absent}: sys.modules[name] = None\nimport longstride.{room}"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)
