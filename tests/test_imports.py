"""Which package may import which: checked by reading the imports of every file."""

import ast
import functools
import subprocess
import sys
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "kernels": set(),
    "sparse_model": {"kernels"},
    "data_pipelines": set(),
    "launcher": {"kernels", "sparse_model", "data_pipelines"},
}
# The subpackages and modules of each package. Each may import those before it.
ORDER = {
    "kernels": [
        "errors", "registry", "cache", "forms", "patterns", "plan", "selections", "backends", "op", "attention",
        "selected", "indexed", "decoding", "recurrences",
    ],
    "sparse_model": [
        "strict", "network", "objectives", "tiles", "division", "rotary", "part", "norm", "ngrams", "mixers",
        "feed_forwards", "config", "embedding", "output", "block", "transformer", "session", "generation",
    ],
    "data_pipelines": [
        "errors", "plain_files", "formats", "records", "settings", "durable", "palette", "modalities", "stores",
        "labels", "shards", "documents", "datasets", "order", "building",
    ],
    "launcher": [
        "verbs", "output", "stops", "folders", "config", "files", "pictures", "ranks", "models", "hub", "engine",
        "data", "checkpoints", "identity", "exports", "evaluation", "training", "generation", "compression",
        "serving", "planning", "drawing", "reporting", "train", "cluster", "host", "doctor", "cli", "demo",
    ],
}  # fmt: skip
# Packages that others import by their `__init__.py`, and the subpackages that have public names of their own. The other
# packages are imported by subpackage.
ONE_INTERFACE = {"kernels": {"indexed", "patterns", "recurrences", "registry", "selections"}, "sparse_model": set()}
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
    "jinja2": ["launcher/exports", "launcher/reporting"],
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
MOST_NAMES = 15  # public ones of a package
# Modules that are public but not imported by their package, as they are heavy.
LATE = {
    "longstride.data_pipelines.stores.remote",
    "longstride.launcher.cluster.hosts",
    "longstride.launcher.drawing.attention",
    "longstride.launcher.drawing.pattern",
    "longstride.launcher.evaluation.evaluate",
    "longstride.launcher.planning.dry_run",
    "longstride.launcher.planning.plan",
}
FILES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def module(path: Path) -> str:
    """Return the full name of a file's module."""
    name = ".".join(("longstride", *path.relative_to(ROOT).with_suffix("").parts))
    return name.removesuffix(".__init__")


MODULES = {module(path) for path in FILES}


@functools.cache
def imported(path: Path) -> set[str]:
    """Return the full names of all modules and names that a file imports, at its top or inside a function."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@functools.cache
def public_names(package: str) -> set[str]:
    """Return the public names of a package: those that its `__init__.py` imports from the package, or defines."""
    names: set[str] = set()
    prefix = f"longstride.{package.replace('/', '.')}"
    top = ast.parse((ROOT / package / "__init__.py").read_text()).body
    for node in [*top, *(inner for outer in top if isinstance(outer, ast.If) for inner in outer.orelse)]:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(prefix):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return {name for name in names if not name.startswith("_")}


def registered_names(package: str) -> set[str]:
    """Return the names in a package's registries: dictionaries in its `__init__.py`, with a line per entry."""
    top = ast.parse((ROOT / package / "__init__.py").read_text()).body
    registries = [node.value for node in top if isinstance(node, ast.Assign | ast.AnnAssign)]
    entries = [entry for value in registries if isinstance(value, ast.Dict) for entry in value.values]
    return {entry.id for entry in entries if isinstance(entry, ast.Name)}


def place_of(name: str) -> tuple[str, str] | None:
    """Return (package, subpackage or module) of a full name, or None if it is not below a package."""
    parts = name.split(".")
    if len(parts) < 3 or parts[0] != "longstride" or parts[1] not in ORDER:
        return None
    return parts[1], parts[2]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_packages_import_only_what_they_may(path: Path) -> None:
    relative = path.relative_to(ROOT).as_posix()
    package = relative.split("/")[0]
    for name in imported(path):
        first, *parts = name.split(".")
        assert first not in PACKAGES, f"{name}: packages are imported as longstride.{name}"
        if first == "longstride" and parts:
            assert parts[0] in PACKAGES[package] | {package}, f"{package} must not import {name}"
        if first in ONLY_IN:
            assert any(f"{relative}/".startswith(f"{place}/") for place in ONLY_IN[first]), f"{name} has no place here"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_subpackages_import_downwards_and_by_public_names(path: Path) -> None:
    importer = place_of(f"{module(path)}.")
    for name in imported(path):
        place = place_of(name)
        if place is None or importer in (place, (place[0], "")):  # a package's `__init__.py` stands above all of it
            continue
        package, inside = place
        is_local = importer is not None and importer[0] == package
        if package in ONE_INTERFACE and not is_local and inside not in ONE_INTERFACE[package]:
            public = {f"longstride.{package}.{public}" for public in public_names(package)}
            assert name in public, f"{name}: is not public"
            continue
        if is_local:
            order = ORDER[package]
            lower, upper = order.index(inside), order.index(importer[1])
            assert lower < upper, f"{importer[1]} stands below {inside}: must not import {name}"
        if (ROOT / package / inside).is_dir() and inside != "backends":  # each backend is a subpackage of its own
            subpackage = f"longstride.{package}.{inside}"
            public = {subpackage, *(f"{subpackage}.{public}" for public in public_names(f"{package}/{inside}"))}
            assert name in public | LATE, f"{name}: is not public"


@pytest.mark.parametrize("path", sorted({path.parent for path in FILES}), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_package_has_few_public_names(path: Path) -> None:
    package = str(path.relative_to(ROOT))
    assert len(public_names(package) - registered_names(package)) <= MOST_NAMES


@pytest.mark.parametrize("package", ORDER)
def test_every_subpackage_has_its_place_in_the_order(package: str) -> None:
    paths = (ROOT / package).rglob("*.py")
    inside = {path.relative_to(ROOT / package).parts[0].removesuffix(".py") for path in paths}
    assert inside - {"__init__"} == set(ORDER[package])


def test_no_module_imports_itself_in_a_circle() -> None:
    """Include imports inside functions: one that closes a circle hides that two files are one."""
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
    packages = ("longstride.kernels", "longstride.sparse_model", "longstride.testing")
    for path in (ROOT / "longstride" / "testing").glob("*.py"):
        for name in imported(path):
            assert name.split(".")[0] in sys.stdlib_module_names | {"torch"} or name.startswith(packages), name


def test_backends_do_not_import_each_other() -> None:
    backends = ROOT / "kernels" / "backends"
    every = {path.stem for path in backends.iterdir()}
    for path in backends.rglob("*.py"):
        backend = path.relative_to(backends).with_suffix("").parts[0]
        for name in imported(path):
            if name.startswith("longstride.kernels.backends."):
                assert name.split(".")[3] not in every - {backend}, f"{path.name} imports {name}"


@pytest.mark.parametrize(
    ("packages", "lacking"),
    [
        (["sparse_model", "testing", "launcher.models"], ["webdataset"]),
        (["data_pipelines.order"], []),
        (["data_pipelines.building", "launcher.folders"], ["torch"]),
        pytest.param(["launcher.hub"], ["webdataset"], marks=pytest.mark.clients),
    ],
    ids=str,
)
def test_packages_import_without_the_dependencies_they_do_not_need(packages: list[str], lacking: list[str]) -> None:
    absent = ["deepspeed", "triton", "mpi4py", "PIL", "aiohttp", "s3fs", "soundfile", "soxr", "zstandard", "pyarrow"]
    lines = [f"import sys\nfor name in {[*absent, 'pytest', *lacking]}: sys.modules[name] = None"]
    lines += [f"import longstride.{package}" for package in packages]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, cwd=ROOT)
