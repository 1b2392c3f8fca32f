"""`make demo`: train on the Python sources of this machine and sample Python, in a few minutes.

Each stage prints and runs a command that a user could type. Each demo writes to a new folder in runs/.
"""

from __future__ import annotations

import gzip
import itertools
import json
import lzma
import shlex
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from longstride.data_pipelines.order import split_bytes
from longstride.data_pipelines.shards import sample_documents
from longstride.kernels import has_bf16_products
from longstride.launcher.output import file_names, say

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "ds_configs" / "experiments" / "demo.json"
DATA = ROOT / "data" / "python-sources"
CPU_PROCESSES = 2
PROMPT = "def read_lines(path):\n    "
MIN_CONTEXT = 128  # bytes before each scored byte: a fair comparison with compressors, which see all before it
SAMPLE_BYTES = 160  # of each evaluation's sample
TEMPERATURE = 0.9  # below 0.8 the model often repeats itself, as it copies
_SHOWN_LINES = 6  # of a sample
PRIMED = " that has read the train split"
PPMD_ORDER_AND_MEMORY = 24, 1 << 30  # it holds all contexts of the sources; with half of it, PPMd forgets them
FILES, FILE_BYTES = 3, 20_000  # number and approximate length of the compressed files


def main() -> None:
    """Run every stage, and print a summary."""
    folder = new_folder(ROOT / "runs")
    started = time.monotonic()
    print(run_stages(folder))
    print(f"  whole demo        {time.monotonic() - started:.0f} s, in {folder}")


def run_stages(folder: Path) -> str:
    """Create shards, a run, a model and pictures; return a summary of the results."""
    trained, exported = folder / "train", folder / "model"
    sources = sysconfig.get_paths()["stdlib"]
    stage("data", "build", sources, "--exclude", "site-packages", "--output", DATA)
    # By default the launcher uses all GPUs, but only one process on a CPU.
    processes = () if torch.cuda.is_available() else ("--processes", CPU_PROCESSES)
    precision = () if torch.cuda.is_available() or has_bf16_products() else ("deepspeed=zero0_fp32",)
    begin = time.monotonic()
    samples = json.dumps({"prompt": PROMPT, "bytes": SAMPLE_BYTES, "temperature": TEMPERATURE})
    places = (f"train.output={trained}", f"data.path={DATA}")
    stage("train", "--config", CONFIG, *processes, *places, f"train.samples={samples}", *precision)
    training_seconds = time.monotonic() - begin
    with ThreadPoolExecutor() as pool:
        others = pool.submit(compressors, DATA)  # a minute of one core, in parallel
        positions = folder / "by-position.png"
        words = ("--batch", 4, "--min-context", MIN_CONTEXT, "--positions", positions)
        held_out = json.loads(stage("evaluate", trained, *words, capture=True))
        stage("export", trained, "--output", exported, "--dtype", "bf16")
        table = compressed_files(folder / "compressed", exported)
        stage("show", "loss", trained, "--output", folder / "loss.png")
        stage("show", "attention", trained, "--output", folder / "attention.png")
        stage("sample", exported, "--prompt", PROMPT, "--bytes", 400, "--temperature", TEMPERATURE)
        sizes = others.result() | {"this model": held_out["bits_per_byte"]}
    parts = by_position(json.loads(positions.with_suffix(".json").read_text()))
    return "\n".join(
        [
            f"\nHeld-out files, in bits per byte (8 before training; it has trained for {training_seconds:.0f} s):",
            *(f"  {name:<36}{bits:.3f}" for name, bits in sizes.items()),
            "\nThree of them, compressed, in bytes:",
            *table,
            "\nBits per byte by position in the context:",
            *parts,
            "\nHow it learned to write. The same prompt, after so many steps:",
            *samples_on_the_way(trained / file_names.SAMPLES),
            "\nMade:",
            f"  shards            {DATA}",
            f"  run, samples      {trained}",
            f"  model             {exported}",
            f"  pictures          {folder}/attention.png (what it reads), loss.png, by-position.png",
            f"\nTry it in a browser:\n\n  longstride serve {exported}\n",
        ]
    )


def samples_on_the_way(folder: Path) -> list[str]:
    """Return lines with the run's samples: the step, and the text after the prompt."""
    lines = []
    for file in sorted(folder.glob("step-*.txt")):
        text = file.read_text(errors="replace").removeprefix(PROMPT).rstrip()
        lines.append(f"  step {int(file.stem.removeprefix('step-'))}:")
        shown = ["".join(sign if sign.isprintable() else "\ufffd" for sign in line) for line in text.splitlines()]
        lines += [f"      | {line[:100]}" for line in shown[:_SHOWN_LINES]]
    return lines


def compressors(data: Path) -> dict[str, float]:
    """Return the bits per byte of compressors on the held-out bytes, alone and after reading the train split.

    All files are in one stream. PPMd is left out, with a message, if pyppmd is not installed.
    """
    before, held_out = content(data, "train"), content(data, "validation")
    with ThreadPoolExecutor(2) as pool:
        primed, primer = pool.map(lambda text: len(lzma.compress(text, preset=9)), (before + held_out, before))
    sizes = {
        "gzip -9": len(gzip.compress(held_out, 9)),
        "xz -9": len(lzma.compress(held_out, preset=9)),
        f"xz -9{PRIMED}": primed - primer,
    }
    try:
        from pyppmd import Ppmd7Encoder
    except ImportError:
        say('demo: PPMd is left out, as pyppmd is not installed; pip install -e ".[demo]" adds it')
    else:
        for name, texts in (("PPMd", [held_out]), (f"PPMd{PRIMED}", [before, held_out])):
            encoder = Ppmd7Encoder(*PPMD_ORDER_AND_MEMORY)
            *_, last = [len(encoder.encode(text)) for text in texts]
            sizes[name] = last + len(encoder.flush())
    return {name: 8 * size / len(held_out) for name, size in sizes.items()}


def content(data: Path, split: str) -> bytes:
    """Return all bytes of a split."""
    return b"".join(map(bytes, split_bytes(data, split)))


def by_position(scored: dict[str, Any]) -> list[str]:
    """Return lines with the loss of each eighth of the context, from the numbers of `longstride evaluate`.

    An eighth that is only scored in the first context is left out.
    """
    columns = scored["positions"]
    bins = list(zip(columns["first"], columns["end"], columns["bytes"], columns["bits_per_byte"], strict=True))
    context, lines = bins[-1][1], []
    for eighth in range(8):
        first, end = eighth * context // 8, (eighth + 1) * context // 8
        inside = [(count, bits) for start, _, count, bits in bins if first <= start < end]
        total = sum(count for count, _ in inside)
        if total > end - first:
            lines.append(f"  {first:>6,} to {end - 1:<6,} {sum(count * bits for count, bits in inside) / total:.3f}")
    return lines


def compressed_files(folder: Path, model: Path) -> list[str]:
    """Compress some held-out files and decompress them; return a table of their sizes."""
    folder.mkdir()
    documents = sample_documents(DATA, "validation", 24)
    lines, totals = [f"  {'':<24}{'bytes':>8}{'longstride':>12}{'xz -9':>8}{'gzip -9':>9}"], [0, 0, 0, 0]
    for document in sorted(documents, key=lambda document: abs(len(document.content) - FILE_BYTES))[:FILES]:
        file, content = folder / document.key, document.content.tobytes()
        file.write_bytes(content)
        packed, back = file.with_name(f"{file.name}.lsz"), file.with_name(f"{file.name}.back")
        stage("compress", file, "--model", model, "--output", packed)
        stage("decompress", packed, "--model", model, "--output", back)
        if back.read_bytes() != content:
            sys.exit(f"longstride: demo: {packed} was not decompressed to the original file")
        others = len(lzma.compress(content, preset=9)), len(gzip.compress(content, 9))
        sizes = [len(content), packed.stat().st_size, *others]
        totals = [total + size for total, size in zip(totals, sizes, strict=True)]
        lines.append(sizes_line(file.name, sizes))
    return [*lines, sizes_line("together", totals)]


def sizes_line(name: str, sizes: Sequence[int]) -> str:
    """Format a line of the table of sizes."""
    return f"  {name:<24}" + "".join(f"{size:>{width},}" for size, width in zip(sizes, (8, 12, 8, 9), strict=True))


def stage(*words: object, capture: bool = False) -> str:
    """Run `longstride WORDS …`; return its standard output if ``capture``, else print it. End the demo if it fails."""
    command = [sys.executable, "-m", "longstride.launcher.cli", *map(str, words)]
    print(f"\n$ longstride {shlex.join(map(str, words))}", flush=True)
    result = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE if capture else None, text=True)
    if result.returncode:  # it has printed the reason
        sys.exit(f"longstride: demo: {words[0]} failed with exit code {result.returncode}")
    return result.stdout or ""


def new_folder(parent: Path) -> Path:
    """Create the first of demo-1, demo-2, … that does not exist yet."""
    for number in itertools.count(1):
        with suppress(FileExistsError):
            folder = parent / f"demo-{number}"
            folder.mkdir(parents=True)
            return folder
    raise AssertionError


if __name__ == "__main__":
    main()
