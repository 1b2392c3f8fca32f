"""`longstride slurm`: write a batch script that saves the run before its time limit and requeues itself."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
from importlib import resources
from pathlib import Path

from longstride.data_pipelines.durable import make_folders, write_new
from longstride.kernels import ConfigError
from longstride.launcher.cluster.placement import SLURM_WAIT_SECONDS, TRAINING_SCRIPT
from longstride.launcher.config import RunConfig, find_config, load_config
from longstride.launcher.data import WeightSource, check_data, check_output
from longstride.launcher.output import exit_codes

_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d{1,2}))?(?::(\d{1,2}))?", re.ASCII)
_NAME = re.compile(r"[\w.+-]+(?:,[\w.+-]+)*", re.ASCII)
_OPTION = re.compile(r"[a-z][a-z-]*(?:=[^\s#]+)?", re.ASCII)
_RESERVED = {
    *("account", "chdir", "cpus-per-task", "gpus-per-node", "job-name", "nodes", "ntasks", "ntasks-per-node"),
    *("open-mode", "output", "partition", "requeue", "signal", "time"),
}


def run(arguments: argparse.Namespace) -> int:
    """Write the script. --submit also passes it to sbatch; --print only prints it."""
    config = load_config(arguments.config, arguments.overrides)
    check(arguments, config)
    folder = (arguments.output_dir or Path(config.train.output)).absolute()
    name = arguments.job_name or Path(config.train.output).absolute().name
    if _NAME.fullmatch(name) is None:
        raise ConfigError(f"--job-name={name}: must be letters, digits and ._+-; such as {_valid_name(name)}")
    if folder.exists() and not folder.is_dir():
        option = "train.output" if arguments.output_dir is None else "--output-dir"
        raise ConfigError(f"{option}={folder}: is a file, not a folder; name another, such as {folder}-runs")
    script = folder / f"{name}.sbatch"
    text = script_text(arguments, name, script, str(folder / "slurm-%j.log"))
    if arguments.print_only:
        print(text, end="")
        return 0
    if arguments.submit and shutil.which("sbatch") is None:
        raise ConfigError("--submit: sbatch is not on PATH; submit from a host of the cluster, or leave --submit out")
    make_folders(folder)
    try:
        write_new(script, text.encode())
    except FileExistsError:
        raise ConfigError(f"{script}: already exists; submit it, or give another --job-name or --output-dir") from None
    script.chmod(0o755)
    if arguments.submit:
        return subprocess.run(["sbatch", str(script)], check=False).returncode
    print(f"{script}: submit it with `sbatch {shlex.quote(str(script))}`")
    return 0


def script_text(arguments: argparse.Namespace, name: str, script: Path, log: str) -> str:
    """Return the batch script for checked options."""
    directives = {
        "job-name": name,
        "nodes": arguments.nodes,
        "ntasks-per-node": arguments.processes_per_node,
        "time": arguments.time,
        "partition": arguments.partition,
        "account": arguments.account,
        "cpus-per-task": arguments.cpus_per_process,
        # Per node, not per task: each rank takes the GPU of its local rank, so it must see all of them.
        "gpus-per-node": arguments.processes_per_node if arguments.gpus else None,
    }
    lines = [f"#SBATCH --{key}={value}" for key, value in directives.items() if value is not None]
    lines += [f"#SBATCH --{option.removeprefix('--')}" for option in arguments.sbatch]
    # Since SLURM 22.05 srun does not inherit this from the job.
    command = [] if arguments.cpus_per_process is None else [f"--cpus-per-task={arguments.cpus_per_process}"]
    command += [sys.executable, "-u", TRAINING_SCRIPT]
    command += ["--config", str(find_config(arguments.config).absolute()), "--resume", "auto"]
    source = WeightSource.of(arguments, "auto")
    command += [*([] if source is None else source.words()), *arguments.overrides]
    ranks = arguments.nodes * arguments.processes_per_node
    values = {
        "title": f"Trains {find_config(arguments.config).name} as {ranks} ranks on {arguments.nodes} hosts.",
        "script": script.name,
        "directives": "\n".join(lines),
        "folder": str(Path.cwd()),
        "log": log,
        "stop_seconds": str(arguments.stop_seconds),
        "requeue_code": str(exit_codes.REQUEUE),
        "wait_seconds": str(SLURM_WAIT_SECONDS),
        "command": shlex.join(command),
    }
    text = resources.files("longstride.launcher.cluster").joinpath("sbatch.sh").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], text)


def check(arguments: argparse.Namespace, config: RunConfig) -> None:
    """Check the options and the run. The error has a line for each wrong option."""
    problems = [
        f"{option}={value}: must be at least 1"
        for option, value in (
            ("--nodes", arguments.nodes),
            ("--processes-per-node", arguments.processes_per_node),
            ("--cpus-per-process", arguments.cpus_per_process),
            ("--stop-seconds", arguments.stop_seconds),
        )
        if value is not None and value < 1
    ]
    seconds = time_limit_seconds(arguments.time)
    if seconds is None:
        problems.append(f"--time={arguments.time}: must be [days-]hours:minutes:seconds, such as 12:00:00")
    elif seconds <= arguments.stop_seconds + 60:  # SLURM may send the signal a minute earlier
        rule = f"must be more than --stop-seconds {arguments.stop_seconds} and a minute, or the job would stop at once"
        problems.append(f"--time={arguments.time}: {rule}; such as 12:00:00")
    for option, value in (("--partition", arguments.partition), ("--account", arguments.account)):
        if value is not None and _NAME.fullmatch(value) is None:
            shown = " ".join(value.split())
            problems.append(f"{option}={shown}: must be a name; such as {_valid_name(value)}")
    for option in arguments.sbatch:
        if _OPTION.fullmatch(option.removeprefix("--")) is None:
            shown = " ".join(option.split())
            problems.append(f"--sbatch={shown}: must be one option of sbatch; such as qos=long")
        elif option.removeprefix("--").partition("=")[0] in _RESERVED:
            problems.append(f"--sbatch={option}: the script or another option sets this; leave it out")
    # #SBATCH lines are comments, so nothing in them can be quoted.
    for option, path in (("--output-dir", arguments.output_dir or config.train.output), ("this folder", Path.cwd())):
        if re.search(r"[\s\"'\\%]", str(Path(path).absolute())):
            problems.append(f"{option}={path}: must be a path without spaces, quotes and %, for SLURM")
    if problems:
        raise ConfigError(*problems)
    check_output(config.train.output, "auto")
    nodes = [f"host-{number + 1}" for number in range(arguments.nodes)]
    config.check_hosts([node for node in nodes for _ in range(arguments.processes_per_node)])
    check_data(config, elsewhere=True)


def time_limit_seconds(time: str) -> int | None:
    """Convert a time limit of sbatch to seconds; return None if it is malformed.

    Formats: minutes[:seconds], hours:minutes:seconds, days-hours[:minutes[:seconds]].
    """
    match = _TIME.fullmatch(time)
    if match is None:
        return None
    days, first, second, third = match.groups()
    numbers = [int(number or 0) for number in (first, second, third)]
    if days is None and third is None:
        numbers = [0, *numbers[:2]]
    hours, minutes, seconds = numbers
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _valid_name(name: str) -> str:
    return re.sub(r"[^\w.+-]+", "-", name, flags=re.ASCII).strip("-") or "longstride"
