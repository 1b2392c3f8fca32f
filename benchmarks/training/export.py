"""Peak memory of `longstride export`: a 152M-parameter model saved in ZeRO 3 by four ranks.

``python benchmarks/training/export.py``: four processes save a checkpoint with the trainer's code, after one step on
few positions. Then a fresh process exports each case. Private memory (RssAnon of /proc/PID/status) is read a thousand
times a second from outside; mapped files belong to the system's cache, and do not count. The peak of all resident pages
(VmHWM) is the kernel's. Both are reported as they are, and above what the process held after its imports. The bar: 1.3
× (the largest tensor + the largest file written).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a program from a checkout that is not installed
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
from safetensors import safe_open

from benchmarks.machine import about, resident_bytes, run_ranks
from benchmarks.report import check_output, markdown, new_parser, write_result
from longstride.launcher.config import load_config
from longstride.launcher.models import DTYPES

ROOT = Path(__file__).resolve().parents[2]
BAR = 1.3
POLL_SECONDS = 0.001
CASES = (  # type of the weights, --shard-size, whether the probe is computed
    ("fp32", "5GB", False),
    ("fp32", "50MB", False),
    ("bf16", "50MB", False),
    ("fp32", "5GB", True),
)


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code: 1 if a peak is above its bar."""
    options = read_options(arguments)
    if options.inside:
        return inside(options)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        run = options.run or save_run(options, folder)
        result = measure(options, run, folder)
    print_found(result)
    write_result(options, result)
    return 0 if all(row["within_bar"] for row in result["cases"] if not row["checked"]) else 1


def read_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = new_parser(__doc__)
    parser.add_argument("--config", default="imagenet64_strided", help="a run (default: imagenet64_strided)")
    parser.add_argument("--deepspeed", default="zero3_bf16", help="a file of ds_configs/ (default: zero3_bf16)")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--run", type=Path, default=None, help="export a run that is there, instead of saving one")
    parser.add_argument("--folder", type=Path, default=None, help="where files go for the while (default: /tmp)")
    parser.add_argument("--inside", nargs=4, metavar=("DIR", "DTYPE", "SIZE", "CHECK"), help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="path.to.key=value")
    options = parser.parse_args(arguments)
    if not options.inside:
        check_output(parser, options, "export")
    return options


def save_run(options: argparse.Namespace, folder: Path) -> Path:
    """Let ``options.ranks`` ranks save a checkpoint; return the run's folder."""
    run = folder / "run"
    (run / "checkpoints").mkdir(parents=True)
    fixed = [f"train.output={run}", "train.micro_batch=1", f"train.global_batch={options.ranks}"]
    config = load_config(options.config, [f"deepspeed={options.deepspeed}", *fixed, *options.overrides])
    (run / "config.json").write_text(json.dumps(config.to_json()))
    began = time.monotonic()
    run_ranks([Path(__file__).with_name("export_worker.py"), run / "config.json"], options.ranks)
    print(f"{options.ranks} ranks saved {run} in {time.monotonic() - began:.0f} s", flush=True)
    return run


def measure(options: argparse.Namespace, run: Path, folder: Path) -> dict[str, Any]:
    """Measure all cases."""
    (newest,) = sorted((run / "checkpoints").glob("step-????????"))[-1:]
    manifest = json.loads((newest / "manifest.json").read_text())
    rows = [measure_case(run, folder / f"export-{number}", *case) for number, case in enumerate(CASES)]
    return {
        **about(torch.device("cpu")),
        "config": options.config,
        **{name: manifest[name] for name in ("world_size", "zero_stage", "precision")},
        "checkpoint_bytes": sum(path.stat().st_size for path in newest.rglob("*") if path.is_file()),
        "cases": rows,
    }


def measure_case(run: Path, output: Path, dtype: str, size: str, check: bool) -> dict[str, Any]:
    """Export in a separate process, and watch its memory."""
    words = ["--run", str(run), "--inside", str(output), dtype, size, "check" if check else "no"]
    command = [sys.executable, str(ROOT / "benchmarks/training/export.py"), *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            Path(f"/proc/{process.pid}/clear_refs").write_text("5")  # VmHWM begins anew
            before = {field: resident_bytes(field, process.pid) for field in ("RssAnon", "VmRSS")}
            watch = Watch(process.pid)
            began = time.monotonic()
            print("go", file=process.stdin, flush=True)
            line = process.stdout.readline()
            seconds = time.monotonic() - began
            peak_private, peak_resident = watch.close(), resident_bytes("VmHWM", process.pid)
            assert line, "the export failed"
        finally:
            process.kill()
    files = sorted(output.glob("*.safetensors"))
    largest_tensor = max(tensor_bytes(file) for file in files)
    largest_file = max(file.stat().st_size for file in files)
    bar = BAR * (largest_tensor + largest_file)
    return {
        "dtype": dtype,
        "shard_size": size,
        "checked": check,
        "seen": json.loads(line),
        "files": len(files),
        "weight_bytes": sum(file.stat().st_size for file in files),
        "largest_tensor_bytes": largest_tensor,
        "largest_file_bytes": largest_file,
        "bar_bytes": int(bar),
        "start_private_bytes": before["RssAnon"],
        "peak_private_bytes": peak_private,
        "above_start_private_bytes": peak_private - before["RssAnon"],
        "start_resident_bytes": before["VmRSS"],
        "peak_resident_bytes": peak_resident,
        "above_start_resident_bytes": peak_resident - before["VmRSS"],
        "within_bar": peak_private - before["RssAnon"] <= bar,
        "seconds": round(seconds, 2),
    }


class Watch(threading.Thread):
    """Reads a process's private memory until it is closed."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid, self.peak, self._is_done = pid, 0, threading.Event()
        self.start()

    def run(self) -> None:
        """Record the peak."""
        while not self._is_done.wait(POLL_SECONDS):
            self.peak = max(self.peak, resident_bytes("RssAnon", self._pid))

    def close(self) -> int:
        """Return the peak, in bytes."""
        self._is_done.set()
        self.join()
        return max(self.peak, resident_bytes("RssAnon", self._pid))


def tensor_bytes(path: Path) -> int:
    """Return the bytes of a file's largest tensor in fp32, as in the checkpoint."""
    with safe_open(path, "pt") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118  no dictionary
    return 4 * max(torch.Size(shape).numel() for shape in shapes)


def inside(options: argparse.Namespace) -> int:
    """Run the watched process: import everything, wait for a line, export, and wait to be read."""
    from longstride.launcher.exports.export import Options, export, parse_size

    output, dtype, size, check = options.inside
    assert dtype in DTYPES
    print("ready", flush=True)
    sys.stdin.readline()
    how = Options(dtype=dtype, shard_bytes=parse_size(size), check=check == "check")
    _, report = export(options.run, None, Path(output), how)
    print(json.dumps(report), flush=True)
    sys.stdin.readline()
    return 0


def print_found(result: dict[str, Any]) -> None:
    """Print a table, in MB."""
    what = f"ZeRO {result['zero_stage']}, {result['precision']}, {result['world_size']} ranks"
    print(f"{result['config']}, {what}: a checkpoint of {result['checkpoint_bytes'] / 1e6:,.0f} MB; all in MB\n")
    titles = ["type", "shard size", "files", "probe", "largest file", "bar", "private, above start", "private"]
    names = ("largest_file", "bar", "above_start_private", "peak_private", "peak_resident")
    rows = []
    for row in result["cases"]:
        cells = [row["dtype"], row["shard_size"], row["files"], "yes" if row["checked"] else "no"]
        rows.append([*cells, *(f"{row[f'{name}_bytes'] / 1e6:,.0f}" for name in names)])
    print(markdown([*titles, "resident"], rows), end="")


if __name__ == "__main__":
    sys.exit(main())
