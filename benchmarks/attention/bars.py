"""Compare measurements with performance targets: ``python -m benchmarks.attention.bars [FILE …]``.

Reads result files of attention.py and training_step.py, and prints for each device which bars were met, missed or not
measured. If two files of a device have the same case, the later one counts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.report import RESULTS

NOT_MEASURED = "not measured"
KINDS = ("bars", "attention", "training-step")  # by file name, in order of increasing priority
ENWIK8 = {"context": 12_288, "layers": 30, "stride": 128, "summary": 32}
LINEAR = 1.1  # limit of the growth of bytes per position at four times the context


class Measured(NamedTuple):
    """A value with a note."""

    value: float
    note: str = ""


@dataclass(frozen=True)
class Bar:
    """A target: a lower or upper limit of a value."""

    what: str
    limit: float
    form: str  # format of a value
    measure: Callable[[Results], Measured | None]
    at_most: bool = False
    words: str | None = None  # the bar in words, in place of a number

    def row(self, results: Results) -> tuple[str, str, str, str]:
        """Return what, bar, measured, verdict."""
        measured = self.measure(results)
        bar = self.words or f"{'<=' if self.at_most else '>='} {self.form.format(self.limit)}"
        if measured is None:
            return self.what, bar, "–", NOT_MEASURED
        met = measured.value <= self.limit if self.at_most else measured.value >= self.limit
        note = f" ({measured.note})" if measured.note else ""
        return self.what, bar, self.form.format(measured.value) + note, "met" if met else "missed"


class Results:
    """The rows of one device's files."""

    def __init__(self, device_type: str, files: list[dict[str, Any]]) -> None:
        self.device_type = device_type
        rows: dict[tuple, dict[str, Any]] = {}
        for file in files:
            bandwidth = file.get("copy_bytes_per_second")
            for row in file.get("timings", ()):
                key = tuple(row[name] for name in ("pattern", "context", "stride", "summary", "head_width", "dtype"))
                rows[key] = {**row, "copy_bytes_per_second": bandwidth}
        self.timings = list(rows.values())
        self.steps = [{**file, **row} for file in files for row in file.get("steps", ())]

    def timing(self, pattern: str, context: int, stride: int, head_width: int = 64) -> dict[str, Any] | None:
        """Return the row of a case in the dtype of the device's bars, or None."""
        dtype = "bfloat16" if self.device_type == "cuda" else "float32"
        case = {"pattern": pattern, "context": context, "stride": stride, "head_width": head_width, "dtype": dtype}
        matching = (row for row in reversed(self.timings) if all(row[name] == value for name, value in case.items()))
        return next((row for row in matching if row["summary"] == 8), None)


def times_dense(
    kernel: str | None, pattern: str, context: int, stride: int, phase: str, results: Results
) -> Measured | None:
    """Measure how many times faster than dense attention, by one of its kernels or by the fastest."""
    row = results.timing(pattern, context, stride)
    if row is None or row["ratio_to_dense"][phase] is None:
        return None
    fastest = row["ratio_to_dense"][phase]
    theirs = row.get("dense_kernels", {}).get(kernel, {}).get(phase) if kernel else None
    if theirs is None:
        return Measured(fastest) if kernel is None else None
    return Measured(theirs / row["seconds"][phase], f"{fastest:.1f}x {row['dense_kernel'][phase]}, the fastest")


def visited(phase: str, results: Results) -> Measured | None:
    """Measure TFLOP/s on visited tiles of the published sliding window."""
    row = results.timing("local", 32_768, 1_024, 128)
    if row is None or (value := row["tflops_on_visited"][phase]) is None:
        return None
    return Measured(value, f"{row['tflops_on_allowed'][phase]:.0f} on allowed pairs")


def same_bits(results: Results) -> Measured | None:
    """Measure the share of cases with a backward pass that gives the same bits twice."""
    repeats = [row["deterministic"] for row in results.timings if row.get("deterministic") is not None]
    return Measured(sum(repeats) / len(repeats), f"{sum(repeats)} of {len(repeats)} cases") if repeats else None


def bandwidth(phase: str, merged: bool, results: Results) -> Measured | None:
    """Measure the smallest share of the copy bandwidth of heads bounded by bytes, merged ones or others."""
    shares = [
        (row["gigabytes_per_second"][phase] * 1e9 / row["copy_bytes_per_second"], row)
        for row in results.timings
        if row.get("bound", {}).get(phase) == "bytes" and ("merged" in row["pattern"]) == merged
    ]
    if not shares:
        return None
    share, row = min(shares, key=lambda pair: pair[0])
    where = f"{row['pattern']}, n = {row['context']:,}, D = {row['head_width']}"
    return Measured(share, f"the least of {len(shares)}: {where}")


def training_step(checkpointing: bool, batch: int, results: Results) -> Measured | None:
    """Measure how many times faster than dense flash a training step of the enwik8 model is."""
    for row in reversed(results.steps):
        same_model = all(row[name] == value for name, value in {**ENWIK8, "batch": batch}.items())
        if row["variant"] == "sparse" and row["checkpointing"] == checkpointing and same_model:
            ratio = row["times_dense"].get("dense flash")
            return None if ratio is None else Measured(ratio, f"{row['tokens_per_second']:,.0f} tokens/s")
    return None


def longest_step(results: Results) -> Measured | None:
    """Whether a training step of 1,048,576 bytes ran."""
    for row in reversed(results.steps):
        if row["variant"] == "sparse" and row["context"] == 1_048_576:
            peak = f", {row['peak_bytes'] / 2**30:.1f} GiB" if row["peak_bytes"] else ""
            return Measured(1.0, f"{row['layers']} layers: {row['seconds']:.2f} s{peak}")
    return None


def memory_growth(pattern: str, results: Results) -> Measured | None:
    """Measure bytes per position at 1,048,576 positions relative to 262,144, forward and backward: 1 is linear."""
    short, long = results.timing(pattern, 262_144, 512), results.timing(pattern, 1_048_576, 1_024)
    if short is None or long is None or None in (short["bytes_per_position"], long["bytes_per_position"]):
        return None
    if (short["heads"], short["batch"]) != (long["heads"], long["batch"]):
        return None
    growth = long["bytes_per_position"] / short["bytes_per_position"]
    return Measured(growth, f"{long['peak_bytes'] / 2**30:.1f} GiB at 1,048,576, {long['heads']} heads")


def runs(pattern: str, results: Results) -> Measured | None:
    """Whether forward and backward ran at 1,048,576 positions."""
    row = results.timing(pattern, 1_048_576, 1_024)
    if row is None:
        return None
    both = row["seconds"]["both"]
    return Measured(float(both is not None), f"{both * 1e3:,.1f} ms" if both is not None else "")


X = "{:.1f}x"
SHARE = "{:.0%}"
MERGED = ("strided merged", "fixed merged")
GPU_BARS = (
    Bar("local 1,024, n = 32,768, D = 128, forward, visited tiles", 480, "{:.0f} TFLOP/s", partial(visited, "forward")),
    Bar(
        "local 1,024, n = 32,768, D = 128, backward, visited tiles", 340, "{:.0f} TFLOP/s", partial(visited, "backward")
    ),
    Bar("backward gives the same bits twice", 1, SHARE, same_bits),
    Bar("column, n = 12,288, l = 128, forward", 17, X, partial(times_dense, "flash", "column", 12_288, 128, "forward")),
    Bar("column, n = 65,536, l = 256, forward", 90, X, partial(times_dense, "flash", "column", 65_536, 256, "forward")),
    Bar("fixed merged, c = 8, n = 12,288, both", 8, X, partial(times_dense, None, "fixed merged", 12_288, 128, "both")),
    *(
        Bar(f"bound by bytes, {parts}, {phase}, of a copy", limit, SHARE, partial(bandwidth, phase, parts == "merged"))
        for parts in ("one part", "merged")
        for phase, limit in (("forward", 0.7), ("backward", 0.6))
    ),
    Bar("enwik8 training step over dense flash, checkpointing", 1.5, X, partial(training_step, True, 4)),
    Bar("enwik8 training step over dense flash, none", 1.5, X, partial(training_step, False, 4)),
    Bar("enwik8 training step over dense flash, batch 1", 1.5, X, partial(training_step, False, 1)),
    Bar("training step of 1,048,576 bytes", 1, "{:.0f}", longest_step, words="runs"),
    *(Bar(f"{name}, n = 1,048,576, both", 1, "{:.0f}", partial(runs, name), words="runs") for name in MERGED),
    *(
        Bar(f"{name}, bytes a position, 1,048,576 over 262,144", LINEAR, "{:.3f}", partial(memory_growth, name), True)
        for name in MERGED
    ),
)
CPU_BARS = (
    # The same kernel on both sides, so only noise differs.
    Bar(
        "dense, n = 12,288, both",
        0.95,
        X,
        partial(times_dense, None, "dense", 12_288, 128, "both"),
        words="no slower, to 5%",
    ),
    *(
        Bar(f"{what}, n = 12,288, l = 128, both", limit, X, partial(times_dense, None, name, 12_288, 128, "both"))
        for what, name, limit in (
            ("local", "local", 18),
            ("column", "column", 26),
            ("block", "block", 24),
            ("summary, c = 8", "summary", 10),
            ("fixed merged, c = 8", "fixed merged", 8),
        )
    ),
)


def main(arguments: list[str] | None = None) -> int:
    """Print the tables; return 2 if the files cannot be read together."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="default: those of one --device in --results")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of result files")
    parser.add_argument("--device", default="", help="a part of the device's name")
    options = parser.parse_args(arguments)
    try:
        paths = options.files or [path for kind in KINDS for path in sorted(options.results.glob(f"{kind}-*.json"))]
        print("\n\n".join(tables([json.loads(path.read_text()) for path in paths], options.device)))
    except (OSError, ValueError, KeyError) as error:
        print(f"bars: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


def tables(files: list[dict[str, Any]], device: str = "") -> list[str]:
    """Return a table for each device with ``device`` in its name; without any, all bars as not measured."""
    devices: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for file in files:
        if device.lower() in file["device"].lower():
            devices.setdefault((file["device"], file["device_type"]), []).append(file)
    if not devices:
        return [table(device or "no device", Results(kind, [])) for kind in ("cuda", "cpu")]
    return [table(name, Results(kind, device_files)) for (name, kind), device_files in devices.items()]


def table(device: str, results: Results) -> str:
    """Return all bars of a device's type, and how many have each verdict."""
    rows = [bar.row(results) for bar in (GPU_BARS if results.device_type == "cuda" else CPU_BARS)]
    titles = ("what", "bar", "measured", "verdict")
    widths = [max(len(row[column]) for row in (titles, *rows)) for column in range(len(titles))]
    lines = ["  ".join(map(str.ljust, row, widths)) for row in (titles, *rows)]
    verdicts = [row[-1] for row in rows]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in ("met", "missed", NOT_MEASURED))
    return "\n".join([device, *(line.rstrip() for line in lines), counts])


if __name__ == "__main__":
    sys.exit(main())
