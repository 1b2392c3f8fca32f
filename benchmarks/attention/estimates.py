"""Rates that a card should reach, estimated from machine code: ``python benchmarks/attention/estimates.py``.

Nothing here was measured. The bars of ``bars.py`` are computed from what ``evidence.py`` read in the kernels and from
what the plans visit, by this model of an H100:

- A *visit* of a tile keeps the tensor units busy for its multiply-adds over MULTIPLY_ADDS (``tensor``). Besides, each
  of the four schedulers issues an instruction a cycle, and exponentials leave at EXPONENTIALS a cycle. The two
  overlap little, as an exponential waits for what precedes it: they are added up (``vector``).
- A program that is alone on its multiprocessor does one after the other: tensor + vector. Where several share it, or
  warps are specialised, the two overlap imperfectly: the root of the sum of their squares.
- A visit takes no less than its rows of the other side need to come from the second-level cache, at CACHE.
- Instructions outside the loops are issued likewise, and the first loads take LATENCY before anything else can begin.
- Programs go to the multiprocessors in the order of launch; the last one to end ends the kernel. A kernel takes no
  less than its compulsory bytes at BANDWIDTH.

``KNOWN`` are published rates. CLOCK and the two ways of overlapping were chosen with them in view, so that the model is
within a tenth of them is a fit, not a test: it says that the model can be right, not that it is for our kernels.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

if __name__ == "__main__":  # as a program from a checkout that is not installed
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import numpy as np

from benchmarks.report import RESULTS, add_output_arguments, check_output, rounded, write_json
from longstride.kernels.backends.triton.configurations import (
    Choice,
    Configuration,
    Kernel,
    candidates,
    chosen,
    closed_choice,
    makespan,
)
from longstride.kernels.backends.triton.packing import Group, Parts, closed_part, groups, row_edge
from longstride.kernels.patterns import Column, Fixed, Local, Pattern
from longstride.kernels.plan import Side, tiles, view

ARCHITECTURE = "sm_90"
MULTIPROCESSORS = 132
CLOCK = 1.65e9  # cycles a second under such load: between the 1.75 of a light one and the 1.45 of large products
MULTIPLY_ADDS = 2_048  # of a multiprocessor's tensor units a cycle, in 16 bits
SCHEDULERS = 4
EXPONENTIALS = 16  # of a multiprocessor a cycle
WARP = 32
LATENCY = 1_500  # cycles until the first rows of a program have arrived
BANDWIDTH = 0.9 * 3.35e12  # bytes a second
CACHE = 5.5e12 / MULTIPROCESSORS / CLOCK  # bytes a cycle, for each multiprocessor
ELEMENT = 2  # bytes


class Known(NamedTuple):
    """A published rate, and what ``generated_code`` read in that kernel's machine code."""

    what: str
    source: str
    tflops: float
    width: int
    block_q: int
    block_k: int
    num_warps: int
    programs: int
    instructions: int
    special: int
    specialised: bool = False


# Forward, 16 bits, no mask, 16,384 positions. Instructions and exponentials of a visit were read once in Triton's
# tutorial, compiled by Triton 3.6.0 for sm_90. It is not ours, and no command here compiles it. That of specialised
# warps was not read: its visit is taken to be the plain one's.
KNOWN = (
    Known(
        "Triton's tutorial, width 128",
        "facebookexperimental/triton#205: 487; pytorch/benchmark#2391: 477",
        487,
        *(128, 128, 128, 8, 1, 492 - 16, 66),
    ),
    Known(
        "Triton's tutorial, width 64",
        "Shah et al. 2024, figure 5: 403",
        403,
        *(64, 128, 64, 4, 2, 518 - 16, 68),
    ),
    Known(
        "a tutorial with specialised warps, width 128",
        "facebookexperimental/triton#206: 612; #205: 526 without overlap of products and exponentials",
        612,
        *(128, 128, 128, 8, 1, 492 - 16, 66, True),
    ),
)
SPECIALISED = Configuration(128, 128, 4, 2, specialized=True)  # a candidate of the forward kernel
# Dense attention, width 64, 16,384 positions, TFLOP/s (Shah et al. 2024, figures 5 and 6). Forward is causal; backward
# is published without a mask alone, which is no slower.
DENSE_FORWARD: dict[str, float] = {"flash 2": 299, "cuDNN": 388}
DENSE_BACKWARD: dict[str, float] = {"cuDNN": 433}


@dataclass(frozen=True)
class Pace:
    """What one visit of a tile asks of a multiprocessor, in cycles."""

    tensor: float
    vector: float
    cache: float

    def cycles(self, overlapping: bool) -> float:
        """Between this visit and the next one of any program on the multiprocessor."""
        busy = math.hypot(self.tensor, self.vector) if overlapping else self.tensor + self.vector
        return max(busy, self.cache)


def pace(multiply_adds: float, instructions: float, special: float, num_warps: int, loaded: float) -> Pace:
    """That of a visit which loads so many bytes.

    Args:
        multiply_adds: of all warps.
        instructions: of a warp, without matrix products.
        special: exponentials among them.
        num_warps: of the program.
        loaded: bytes of rows of the other side.
    """
    vector = instructions * num_warps / SCHEDULERS + special * WARP * num_warps / EXPONENTIALS
    return Pace(multiply_adds / MULTIPLY_ADDS, vector, loaded / CACHE)


def predicted(known: Known) -> float:
    """TFLOP/s of a kernel that was measured elsewhere."""
    multiply_adds = 2 * known.block_q * known.block_k * known.width
    loaded = 2 * known.block_k * known.width * ELEMENT
    visit = pace(multiply_adds, known.instructions, known.special, known.num_warps, loaded)
    seconds = visit.cycles(known.programs > 1 or known.specialised) / CLOCK
    return 2 * multiply_adds / seconds * MULTIPROCESSORS / 1e12


# A launch


class Evidence:
    """The rows of one version of Triton in a file that ``evidence.py`` wrote."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows

    def of(self, kernel: Kernel | Literal["specialized"], choice: Choice, width: int, shape: str) -> dict[str, Any]:
        """The row of a launch.

        Raises:
            LookupError: the file has no such row.
        """
        one = choice.configuration
        wanted = {"kernel": kernel, "dtype": "bfloat16", "width": width, "shape": shape}
        wanted |= {name: getattr(one, name) for name in ("block_q", "block_k", "num_warps", "num_stages", "maxnreg")}
        for row in self._rows:
            if all(row[name] == value for name, value in wanted.items()):
                return row
        raise LookupError(f"no evidence of {wanted}: run benchmarks/attention/evidence.py again")


def shape_of(group: Group) -> str:
    """How the rows and columns of a pass lie, as ``evidence.py`` names it."""
    natural = all(segment.row_order is None and segment.column_order is None for head in group for segment in head)
    return "merged" if max(map(len, group)) > 1 else "natural" if natural else "folded"


def seconds_of_pass(
    row: dict[str, Any], kernel: Kernel, choice: Choice, group: Group, rows: Side, width: int, batch: int
) -> float:
    """Of one launch over all heads of a pass, from its row of evidence."""
    tile_rows, tile_columns = choice.configuration.tile_sizes(rows)
    num_warps = choice.configuration.ordinary().num_warps  # that multiply
    products = {"forward": 2, "closed_forward": 2, "dkdv": 4, "dq": 3, "closed": 5}[kernel]
    multiply_adds = products * tile_rows * tile_columns * width * row["repeats"]
    by_cost = sorted(row["visits"], key=lambda visit: visit["instructions"])
    loaded = 2 * tile_columns * width * ELEMENT
    full, partial = (
        pace(
            multiply_adds,
            one["instructions"] - sum(one["products"].values()),
            one["special"],
            num_warps,
            loaded,
        )
        for one in (by_cost[0], by_cost[-1])
    )
    specialised = row.get("specializes", False)
    shared = row["programs"] > 1 or specialised
    # A closed run is one visit, and all that its program does.
    around = 0.0 if kernel.startswith("closed") else row["outside"] * num_warps / SCHEDULERS
    durations = []
    for head in group:
        edge = row_edge(head, tile_rows, choice.aligned)
        visits = [tiles(segment, tile_rows, tile_columns, edge) for segment in head]
        for number in range(len(visits[0].count)):
            without_mask = sum(int(one.full_last[number] - one.full_first[number]) for one in visits)
            masked = sum(int(one.count[number]) for one in visits) - without_mask
            busy = around + without_mask * full.cycles(shared) + masked * partial.cycles(shared)
            alone = LATENCY + around + without_mask * full.cycles(specialised) + masked * partial.cycles(specialised)
            durations.append(max(busy * row["programs"], alone))
    if rows == "queries":  # late queries begin first
        durations.reverse()
    else:  # the longest of all heads do
        durations.sort(reverse=True)
    return makespan(np.array(durations * batch), MULTIPROCESSORS * row["programs"]) / CLOCK


# A call


@dataclass(frozen=True)
class Case:
    """One pattern at one size."""

    what: str
    pattern: Pattern
    context: int
    width: int
    heads: int
    batch: int = 1

    @property
    def patterns(self) -> tuple[Pattern, ...]:
        """One a head."""
        return tuple(self.pattern.for_head(head) for head in range(self.heads))

    def forward(self, evidence: Evidence) -> float:
        """Seconds."""
        of_runs = self._candidates("closed_forward")
        choices = chosen(self._candidates("forward"), self.patterns, self.context, "queries", "all", of_runs)
        return self._passes(evidence, "forward", "queries", "all", choices, 4)

    def specialised(self, evidence: Evidence) -> tuple[float, float] | None:
        """Seconds of the forward kernel whose warps specialise, and operations on the pairs that it visits.

        None where the Triton that the evidence is of makes no such warps.
        """
        (choice,) = chosen((SPECIALISED,), self.patterns, self.context, "queries", "all")
        (group,) = groups(self.patterns, self.context, "queries", "all")
        row = evidence.of("specialized", choice, self.width, shape_of(group))
        if not row["specializes"]:
            return None
        seconds = seconds_of_pass(row, "forward", choice, group, "queries", self.width, self.batch)
        return seconds, 4.0 * self.width * self.batch * choice.pairs

    def backward(self, evidence: Evidence) -> float:
        """Seconds: delta, passes over keys and over queries; and closed runs, at once."""
        closed = closed_choice(self._candidates("closed"), self.patterns, self.context)
        parts: Parts = "all" if closed is None else "open"
        busy = 0.0
        if groups(self.patterns, self.context, "queries", parts):
            busy += self._bytes(2) / BANDWIDTH  # delta reads the output and its gradient
            over: tuple[tuple[Kernel, Side], ...] = (("dkdv", "keys"), ("dq", "queries"))
            for kernel, rows in over:
                choices = chosen(self._candidates(kernel), self.patterns, self.context, rows, parts)
                busy += self._passes(evidence, kernel, rows, parts, choices, 6)
        if closed is not None:
            runs = [closed_part(pattern, self.context) for pattern in self.patterns]
            group = tuple((view(run, self.context, "keys"),) for run in runs if run is not None)
            row = evidence.of("closed", closed, self.width, shape_of(group))
            seconds = seconds_of_pass(row, "closed", closed, group, "keys", self.width, self.batch)
            busy += max(seconds, self._bytes(8) / BANDWIDTH)
        return busy

    def visited(self, phase: str) -> float:
        """Floating-point operations on the pairs in visited tiles, as ``attention.py`` counts them."""
        kernel: Kernel = "forward" if phase == "forward" else "dq"
        choices = chosen(self._candidates(kernel), self.patterns, self.context, "queries", "all")
        factor = 4 if phase == "forward" else 10
        return factor * self.width * self.batch * sum(choice.pairs for choice in choices)

    def dense(self, rates: dict[str, float], kernel: str, factor: int) -> float:
        """Seconds of dense causal attention at a published rate."""
        pairs = self.context * (self.context + 1) / 2
        return factor * self.width * self.batch * self.heads * pairs / rates[kernel] / 1e12

    def _candidates(self, kernel: Kernel) -> tuple[Configuration, ...]:
        return candidates(kernel, ARCHITECTURE, ELEMENT, self.width)

    def _passes(
        self, evidence: Evidence, kernel: Kernel, rows: Side, parts: Parts, choices: tuple[Choice, ...], tensors: int
    ) -> float:
        """Seconds of passes that read and write so many tensors each."""
        busy = 0.0
        for choice, group in zip(choices, groups(self.patterns, self.context, rows, parts), strict=True):
            used: Kernel = "closed_forward" if choice.closed else kernel
            row = evidence.of(used, choice, self.width, shape_of(group))
            seconds = seconds_of_pass(row, used, choice, group, rows, self.width, self.batch)
            busy += max(seconds, self._bytes(tensors) / BANDWIDTH)
        return busy

    def _bytes(self, tensors: int) -> float:
        return tensors * ELEMENT * self.batch * self.heads * self.context * self.width


WINDOW = Case("local 1,024, n = 32,768, D = 128", Local(1_024), 32_768, 128, heads=32)
COLUMN = Case("column, n = 12,288, l = 128, D = 64", Column(128), 12_288, 64, heads=64)
FIXED = Case("fixed merged, c = 8, n = 12,288, l = 128, D = 64", Fixed(128, 8), 12_288, 64, heads=64)


def estimates(evidence: Evidence) -> Iterator[tuple[str, float, float, str]]:
    """What, bar, estimate, unit."""
    yield f"{WINDOW.what}, forward", 480, WINDOW.visited("forward") / WINDOW.forward(evidence) / 1e12, "TFLOP/s"
    if specialised := WINDOW.specialised(evidence):
        seconds, operations = specialised
        yield f"{WINDOW.what}, forward, specialised warps (a candidate)", 480, operations / seconds / 1e12, "TFLOP/s"
    yield f"{WINDOW.what}, backward", 320, WINDOW.visited("backward") / WINDOW.backward(evidence) / 1e12, "TFLOP/s"
    dense = COLUMN.dense(DENSE_FORWARD, "flash 2", 4)
    yield f"{COLUMN.what}, forward", 17, dense / COLUMN.forward(evidence), "× flash 2"
    dense = FIXED.dense(DENSE_FORWARD, "cuDNN", 4) + FIXED.dense(DENSE_BACKWARD, "cuDNN", 10)
    yield f"{FIXED.what}, both", 8, dense / (FIXED.forward(evidence) + FIXED.backward(evidence)), "× cuDNN"


def main(arguments: list[str] | None = None) -> int:
    """Print how the model does on what is known, and what it says of our kernels; write both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evidence", type=Path, default=RESULTS / f"evidence-{ARCHITECTURE}.json")
    parser.add_argument("--triton", default="3.6.0", help="whose machine code")
    add_output_arguments(parser)
    options = parser.parse_args(arguments)
    check_output(parser, options, f"estimates-{ARCHITECTURE}.json")
    for one in KNOWN:
        print(f"{one.what}: {predicted(one):.0f} TFLOP/s by the model, {one.tflops} measured ({one.source})")
    try:
        evidence = Evidence(json.loads(options.evidence.read_text())["tritons"][options.triton]["kernels"])
        found = list(estimates(evidence))
    except (OSError, KeyError, LookupError) as error:
        print(f"estimates: {options.evidence}: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    print("\nestimates, not measurements:")
    for what, bar, value, unit in found:
        print(f"{what}: {value:.1f} {unit} (bar {bar})")
    content: dict[str, Any] = {
        "estimated": True,
        "triton": options.triton,
        "known": [{**one._asdict(), "model_tflops": rounded(predicted(one))} for one in KNOWN],
        "estimates": [
            {"what": what, "bar": bar, "estimate": rounded(value), "unit": unit} for what, bar, value, unit in found
        ],
    }
    write_json(options.output, content)
    print(f"wrote {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
