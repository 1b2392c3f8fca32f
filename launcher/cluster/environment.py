"""What every host of a run must know, as the environment file that the deepspeed launcher hands to all of them.

A shell that ssh opens knows nothing of the one that a person typed in: without PATH the programs beside this Python
are not found, without OMP_NUM_THREADS each rank takes every core. So `longstride train` writes the file into the run
folder, a new one at every start. What a person has written in files of their own (`~/.deepspeed_env`,
`./.deepspeed_env`, or the one named by DS_ENV_FILE) comes over it, line by line. The network interface is not in it:
each rank finds its own (`interfaces.py`), as hosts may name theirs differently.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping
from pathlib import Path

from longstride.kernels import ConfigError

ENVIRONMENT_FILE = "DS_ENV_FILE"  # where the deepspeed launcher looks for the file's name
_USUAL = ".deepspeed_env"
# Handed on where they are set: where programs and libraries are, threads, the kind of device, the use of the network.
_HANDED_ON = re.compile(
    r"PATH|LD_LIBRARY_PATH|VIRTUAL_ENV|OMP_\w+|MKL_NUM_THREADS|DS_ACCELERATOR|(?:GLOO|NCCL|TORCH_NCCL|UCX|FI)_\w+"
)
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def host_environment(environment: Mapping[str, str], home: Path, here: Path) -> dict[str, str]:
    """What every host is told: words of this environment, and over them those of the person's own files.

    Raises:
        ConfigError: a line of such a file is no assignment, which the launcher would answer with a traceback.
    """
    told = {name: value for name, value in sorted(environment.items()) if _HANDED_ON.fullmatch(name)}
    named = environment.get(ENVIRONMENT_FILE)
    files = [home / _USUAL, here / _USUAL] if named is None else [home / named, here / named]
    if named is not None and not any(path.is_file() for path in files):
        raise ConfigError(f"{ENVIRONMENT_FILE}={named}: no such file; name one, or leave the variable out")
    for path in dict.fromkeys(files):
        if path.is_file():
            told |= _read(path)
    return told


def write_host_environment(run: Path, told: Mapping[str, str]) -> Path:
    """Writes a new file ``hosts-N.env`` into the run folder, an assignment a line; returns its absolute path.

    A person's own files may hold secrets, so it is for this user's eyes alone.

    Raises:
        ConfigError: a value cannot be handed on by the launcher as it is.
    """
    for name, value in told.items():
        if "\n" in value or '"' in value:
            raise ConfigError(f"environment: {name} holds a quote or a line's end, which no launcher hands on")
    run.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        path = run.absolute() / f"hosts-{number}.env"
        try:
            with open(path, "x", encoding="utf-8", opener=_for_this_user) as file:
                file.writelines(f"{name}={value}\n" for name, value in told.items())
        except FileExistsError:
            continue
        return path
    raise AssertionError("there is always a next number")


def plain_values(told: Mapping[str, str], *, commas: bool) -> tuple[dict[str, str], list[str]]:
    """What the deepspeed launcher can tell to mpirun, or to srun (no commas), and the names that it cannot.

    It puts quotes around any other value, which no shell would take off again there.
    """
    plain = re.compile(r"[\w@%+=:,./-]*" if commas else r"[\w@%+=:./-]*")
    kept = {name: value for name, value in told.items() if plain.fullmatch(value)}
    return kept, [name for name in told if name not in kept]


def _for_this_user(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _read(path: Path) -> dict[str, str]:
    told = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, sign, value = line.strip().partition("=")
        if not sign or _NAME.fullmatch(name) is None:
            raise ConfigError(f"{path}:{number}: {line.strip()}: must be NAME=value, such as OMP_NUM_THREADS=4")
        told[name] = value
    return told
