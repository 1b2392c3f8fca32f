"""Longstride as users install it: a wheel, an editable install, or a bare checkout, each in a separate Python.

The packages that Longstride needs are those of the tests' environment, reached by a path. That environment's own
``longstride`` is not visible: Python reads no ``.pth`` files of a folder that is reached by a path.
"""

import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.harness.runs import ROOT

ROOMS = ("kernels", "sparse_model", "data_pipelines", "launcher", "ds_configs")
BUILD = "from setuptools import build_meta; import sys; getattr(build_meta, sys.argv[1])(sys.argv[2])"
# Imports `kernels` first, and notes at the end whose that still is, and which files stand under several names.
WATCH = """
import atexit, json, os, sys, tempfile

import kernels

def note():
    ours = {}  # by file, its modules
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file is None:
            continue
        within = file.rsplit("site-packages/", 1)[-1]  # the checkout of the tests may be called longstride too
        if "longstride" in within or name.startswith("longstride"):
            ours.setdefault(os.path.realpath(file), {})[id(module)] = name
    files = {file: list(names.values()) for file, names in ours.items()}
    with open(tempfile.mkstemp(".json", dir=os.environ["WATCHED"])[0], "w") as out:
        json.dump({"argv": sys.argv, "files": files, "kernels": sys.modules["kernels"].__file__}, out)

if "WATCHED" in os.environ:
    atexit.register(note)
"""


@dataclass(frozen=True)
class Installation:
    """A Python that has Longstride in some way, and the folder in which its programs start."""

    prefix: Path
    folder: Path

    @property
    def python(self) -> Path:
        return self.prefix / "bin" / "python"

    @property
    def packages(self) -> Path:
        """The path of its site-packages."""
        (path,) = self.prefix.glob("lib/python*/site-packages")
        return path

    def environment(self) -> dict[str, str]:
        """Return the environment of its programs, with its own PATH and without the tests' PYTHONPATH."""
        inherited = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "RANK")}
        return inherited | {"OMP_NUM_THREADS": "1", "PATH": f"{self.prefix / 'bin'}:{os.environ['PATH']}"}

    def run(self, *command: object, **variables: str) -> bytes:
        """Run a program, which must succeed, and return its standard output."""
        environment = {**self.environment(), **variables}
        words = [str(word) for word in command]
        done = subprocess.run(words, cwd=self.folder, env=environment, capture_output=True, timeout=300)
        assert done.returncode == 0, f"{words}\n{done.stdout.decode(errors='replace')}{done.stderr.decode()}"
        return done.stdout

    def pip(self, verb: str, *words: object) -> None:
        """Run ``pip VERB`` with these words, whatever the tests' environment has."""
        alone = ["--no-deps", "--ignore-installed", "--no-build-isolation"] if verb == "install" else ["--yes"]
        self.run(self.python, "-m", "pip", verb, "--quiet", *alone, *words)


@dataclass(frozen=True)
class Process:
    """The modules that a process had imported when it ended."""

    argv: list[str]
    files: dict[str, list[str]]  # of Longstride: by file, the names of its modules
    kernels: str  # the file of the module of that name


def watch(installation: Installation, folder: Path) -> Callable[[], list[Process]]:
    """Make the installation's processes import ``kernels`` first; return a function that lists those that have ended.

    The variable ``WATCHED`` of the processes must name ``folder``.
    """
    folder.mkdir()
    (installation.packages / "watch_imports.py").write_text(WATCH)
    (installation.packages / "watch_imports.pth").write_text("import watch_imports\n")
    return lambda: [Process(**json.loads(path.read_text())) for path in folder.glob("*.json")]


def bare(prefix: Path, folder: Path) -> Installation:
    """Make a Python with the packages of the tests' Python, but Longstride only if ``folder`` is its checkout."""
    venv.create(prefix, symlinks=True)
    installation = Installation(prefix, folder)
    others = [entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))]
    (installation.packages / "others.pth").write_text("\n".join(others) + "\n")
    return installation


def copy_checkout(target: Path) -> Path:
    """Copy what a build reads, without the products of earlier builds and imports."""
    target.mkdir()
    left_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in (*ROOMS, "longstride"):
        shutil.copytree(ROOT / name, target / name, symlinks=True, ignore=left_out)
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, target)
    return target


def built(hook: str, source: Path, target: Path) -> Path:
    """Run a build hook of the project (PEP 517), and return the one file that it makes."""
    target.mkdir(exist_ok=True)
    subprocess.run([sys.executable, "-W", "ignore", "-c", BUILD, hook, str(target)], cwd=source, check=True)
    (path_built,) = (path for path in target.iterdir() if path.is_file())
    return path_built


def foreign_kernels(packages: Path) -> None:
    """Write a stand-in of the registry's package ``kernels``, which has a ``kernels.backends`` like ours."""
    package = packages / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text("from kernels.backends import FOREIGN\n")
    (package / "backends.py").write_text("FOREIGN = True\n")
