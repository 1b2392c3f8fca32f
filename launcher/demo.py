"""`make demo`: trains on the Python sources of this machine and samples Python, in a few minutes.

Each stage prints and runs a command that a user could type. Each demo writes to a new folder in runs/.
"""

from __future__ import annotations

import gzip
import json
import lzma
import shlex
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import torch

from longstride.data_pipelines.order import split_bytes
from longstride.launcher.output import say

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "ds_configs" / "experiments" / "demo.json"
DATA = ROOT / "data" / "python-sources"
CPU_PROCESSES = 2
PROMPT = "def read_lines(path):\n    "


class StageError(RuntimeError):
    """The command of a stage failed, and has printed why."""


def main() -> int:
    """Runs every stage; returns the exit code."""
    folder = new_folder(ROOT / "runs")
    started = time.monotonic()
    try:
        report = run_stages(folder)
    except StageError as error:
        say(f"demo: {error}")
        return 1
    print(report)
    print(f"  whole demo        {time.monotonic() - started:.0f} s, in {folder}")
    return 0


def run_stages(folder: Path) -> str:
    """Makes shards, a run, a model and pictures; returns the lines that say where they are.

    Raises:
        StageError: a command failed.
    """
    trained, exported = folder / "train", folder / "model"
    sources = sysconfig.get_paths()["stdlib"]
    stage("data", "build", sources, "--exclude", "site-packages", "--output", DATA)
    # The launcher takes all GPUs by itself; on a CPU the number of processes must be given.
    processes = () if torch.cuda.is_available() else ("--processes", CPU_PROCESSES)
    begin = time.monotonic()
    stage("train", "--config", CONFIG, *processes, f"train.output={trained}", f"data.path={DATA}")
    training_seconds = time.monotonic() - begin
    held_out = json.loads(stage("evaluate", trained, "--batch", 16, capture=True))
    stage("export", trained, "--output", exported)
    stage("sample", exported, "--prompt", PROMPT, "--temperature", 0.8)
    stage("show", "loss", trained, "--output", folder / "loss.png")
    stage("show", "pattern", CONFIG, "--output", folder / "pattern.png")
    return "\n".join(
        [
            "\nMade:",
            f"  shards            {DATA}",
            f"  run, checkpoints  {trained}  (trained for {training_seconds:.0f} s)",
            f"  model             {exported}",
            f"  pictures          {folder / 'loss.png'}, {folder / 'pattern.png'}",
            f"  held-out files    {held_out['bits_per_byte']:.3f} bits per byte (8 before training); on the same bytes",
            f"                    {compressors()}",
        ]
    )


def compressors() -> str:
    """Bits per byte of general compressors on the held-out bytes, all files in one stream."""
    held_out = b"".join(bytes(piece) for piece in split_bytes(DATA, "validation"))
    sizes = {"gzip -9": len(gzip.compress(held_out, 9)), "xz -9": len(lzma.compress(held_out, preset=9))}
    return ", ".join(f"{name} {8 * size / len(held_out):.3f}" for name, size in sizes.items())


def stage(*words: object, capture: bool = False) -> str:
    """Runs `longstride WORDS …`; returns its standard output if ``capture``, else prints it.

    Raises:
        StageError: the command failed.
    """
    command = [sys.executable, "-m", "longstride.launcher.cli", *map(str, words)]
    print(f"\n$ longstride {shlex.join(map(str, words))}", flush=True)
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE if capture else None, text=True)
    if ended.returncode:
        raise StageError(f"{words[0]} failed with exit code {ended.returncode}")
    return ended.stdout or ""


def new_folder(parent: Path) -> Path:
    """Makes the first of demo-1, demo-2, … that does not exist yet."""
    number = 1
    while True:
        folder = parent / f"demo-{number}"
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1


if __name__ == "__main__":
    sys.exit(main())
