"""Find tile edges, warps and stages for this card: ``python -m benchmarks.attention.tune``.

Some fifteen configurations of each kernel and head width are compiled ahead of time, in a pool of processes that need
no card. Configurations that spill much in a loop, need too much shared memory or repeat products in several warps are
dropped without measuring. The results of the others are compared with those of the current table. Then they are timed
in turns, by events around queued calls. The fastest of each width are printed as a row for
``longstride.kernels.backends.triton.configurations``, with rates by which a plan chooses the fastest in each case.
Width 128 is first, and the file is written after each kernel, so a time limit cuts off the end. ``--device cpu``
rehearses everything: code is compiled for sm_90, and Triton's interpreter runs small sizes.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

if __name__ == "__mp_main__":  # processes of the pool compile
    os.environ.pop("TRITON_INTERPRET", None)
elif "--device=cpu" in sys.argv or ("--device" in sys.argv and sys.argv[sys.argv.index("--device") + 1] == "cpu"):
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

import torch
from torch import Tensor

from benchmarks.attention.timing import DeviceClock, HostClock
from benchmarks.machine import about
from benchmarks.report import new_parser, parse, rounded, write_json
from longstride.kernels.backends.triton import launch_plan, packing
from longstride.kernels.backends.triton.configurations import Configuration, Kernel, candidates, choose, closed_choice
from longstride.kernels.backends.triton.launch import (
    BackwardInputs,
    plan_closed_runs,
    plan_delta,
    plan_forward,
    plan_key_passes,
    plan_query_passes,
)
from longstride.kernels.backends.triton.launch_plan import Planner
from longstride.kernels.patterns import Block, Column, Local, Pattern, Summary
from longstride.kernels.plan import Side

KERNELS: tuple[Kernel, ...] = ("forward", "dkdv", "dq", "closed", "closed_forward")
AHEAD = ("sm_80", "sm_86", "sm_90")  # can be compiled and read without a card
REHEARSED = "sm_90"
# block_q, block_k, warps, stages, and limit of registers per thread
ROWS_OF_QUERIES = [
    *((128, 64, 8, 3), (128, 64, 8, 2), (128, 128, 8, 2), (128, 128, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3)),
    *((64, 128, 4, 2), (64, 64, 4, 2, 128), (128, 32, 4, 3), (32, 32, 4, 2), (16, 16, 1, 2)),
]
FIELDS = {
    "forward": ROWS_OF_QUERIES,
    "dq": ROWS_OF_QUERIES,
    "dkdv": [
        *((64, 128, 8, 2), (64, 128, 8, 3), (128, 128, 8, 2), (32, 128, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3)),
        *((128, 64, 4, 2), (64, 64, 4, 2, 128), (32, 64, 4, 2), (32, 32, 4, 2), (16, 16, 1, 2)),
    ],
    "closed": [
        *((128, 128, 8, 1), (128, 128, 4, 1), (64, 64, 4, 1), (64, 64, 8, 1), (64, 64, 4, 1, 128)),
        *((32, 32, 2, 1), (32, 32, 4, 1), (32, 32, 1, 1)),
    ],
    "closed_forward": [
        *((128, 128, 8, 1), (128, 128, 8, 1, 128), (128, 128, 4, 1), (64, 64, 4, 1), (64, 64, 4, 1, 128)),
        *((64, 64, 8, 1), (32, 32, 2, 1), (32, 32, 4, 1), (32, 32, 4, 1, 128), (32, 32, 1, 1)),
    ],
}
IN_FP32 = [
    *((32, 32, 4, 1), (64, 32, 4, 1), (32, 64, 4, 1), (16, 32, 4, 1), (32, 16, 4, 1), (64, 64, 8, 1), (16, 16, 4, 1)),
]
TOLERANCE = {"bfloat16": 0.02, "float16": 0.01, "float32": 1e-4}  # relative to the norm
MOST_LOCAL = 30  # loads and stores of spilled registers in all loops of a kernel
MOST_REPEATS = 1.2  # of products; in fp32 a few multiply-adds are not part of products
ROUNDS = 5
HOPELESS = 2.0  # times the fastest; slower ones are measured only once
MOST_ROWS = 4  # candidates of a row
ROW_COSTS = 0.01  # share of the time that another candidate must save
NEAR = range(-3, 4)  # rates to try: the measured one times 2^(i / 4)
SCALE = 0.125


Run = Callable[[int], tuple[Tensor, ...]]  # runs a case's launches and returns what they wrote


class Case(NamedTuple):
    """A kernel with its inputs."""

    kernel: Kernel
    pattern: Pattern
    context: int
    dtype: str
    width: int
    heads: int
    device: str


class Trial(NamedTuple):
    """A configuration of a case."""

    case: Case
    configuration: Configuration


class Ahead(NamedTuple):
    """The result of compiling a trial: the reason to drop it, or None, and figures of its machine code."""

    problem: str | None
    code: dict[str, Any] | None


def main(arguments: list[str] | None = None) -> int:
    """Run the tuner; return 1 if no configuration of some kernel ran."""
    started = time.monotonic()
    options = read_options(arguments)
    facts, rows = about(torch.device(options.device)), list[dict[str, Any]]()
    target = REHEARSED if options.device == "cpu" else launch_plan.architecture(torch.device("cuda"))
    groups = trials_of(options, target)
    trials, ran = list[dict[str, Any]](), []
    with ahead_of_time(groups, target, options.processes) as result_of:
        for group in groups:
            if time.monotonic() - started > options.time_limit:
                print(f"no time left for {title(group[0].case)}")
                continue
            measured = measure(group, result_of)
            trials += measured
            candidates = fitted(group, measured)
            ran.append(bool(candidates))
            case = group[0].case
            if candidates:
                row = {"kernel": case.kernel, "dtype": case.dtype, "width": case.width}
                rows.append(row | {"candidates": [candidate._asdict() for candidate in candidates]})
            report(group, measured, candidates)
            write_json(options.output, {**facts, "rows": rows, "trials": trials})
    print(f"wrote {options.output}")
    return 0 if ran and all(ran) else 1


def read_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = new_parser(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS), choices=KERNELS)
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 64, 256])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], choices=sorted(TOLERANCE))
    parser.add_argument("--processes", type=int, default=None, help="compile in so many; all cores but two")
    parser.add_argument("--time-limit", type=float, default=420, help="seconds after which no kernel is begun")
    options = parse(parser, arguments, "tuning")
    options.processes = options.processes or max(1, (os.cpu_count() or 1) - 2)
    return options


def trials_of(options: argparse.Namespace, target: str) -> list[list[Trial]]:
    """Return the trials by dtype, width and kernel."""
    groups = (
        [Trial(case, tiles) for case in cases_of(kernel, dtype, width, options) for tiles in grid(case, target)]
        for dtype in options.dtypes
        for width in options.widths
        for kernel in options.kernels
    )
    return [group for group in groups if group]  # closed runs in fp32 have no kernel


def cases_of(kernel: Kernel, dtype: str, width: int, options: argparse.Namespace) -> Iterator[Case]:
    """Yield cases that fill a card: long runs, blocks, columns and few keys per row; closed runs for their kernels."""
    if options.device == "cpu":
        yield Case(kernel, Block(16) if kernel.startswith("closed") else Local(32), 64, dtype, width, 1, "cpu")
    elif kernel.startswith("closed"):
        if dtype != "float32":  # closed runs in fp32 use the other kernels
            for run in (Block(128), Column(128), Block(64), Block(32)):
                yield Case(kernel, run, 12_288, dtype, width, 64, "cuda")
    else:
        cases: tuple[tuple[Pattern, int, int], ...] = (
            *((Local(1_024), 32_768, 16), (Column(256), 65_536, 16), (Block(128), 12_288, 64)),
            *((Column(128), 12_288, 64), (Summary(128, 8), 12_288, 64), (Column(128), 3_072, 256)),
        )
        for pattern, context, heads in cases:
            yield Case(kernel, pattern, context, dtype, width, heads, "cuda")


def grid(case: Case, target: str) -> list[Configuration]:
    """Return the configurations to try: those of the current table and some fifteen others; two to rehearse."""
    item = getattr(torch, case.dtype).itemsize
    fields: Sequence[tuple[int, ...]] = IN_FP32 if case.dtype == "float32" else FIELDS[case.kernel]
    current = [tiles._replace(rate=1.0) for tiles in candidates(case.kernel, target, item, padded(case.width))]
    tried = list(dict.fromkeys([*current, *(configuration(*values) for values in fields)]))
    if case.device == "cpu":  # one that compiles well, and one whose warps repeat products
        tried = [configuration(64, 64, 4, 2 - case.kernel.startswith("closed")), configuration(64, 64, 16, 1)]
    if not case.kernel.startswith("closed"):
        return tried
    stride = case.pattern.stride  # type: ignore[attr-defined]
    longest = case.context // stride if isinstance(case.pattern, Column) else stride
    return [tiles for tiles in tried if tiles.block_k >= longest]  # a run must fit


def configuration(block_q: int, block_k: int, warps: int, stages: int, maxnreg: int | None = None) -> Configuration:
    """Return a configuration from an entry of the lists above."""
    return Configuration(block_q, block_k, warps, stages, maxnreg=maxnreg)


def padded(width: int) -> int:
    """Return the head width to which kernels pad."""
    return max(16, 1 << (width - 1).bit_length())


@contextlib.contextmanager
def ahead_of_time(groups: list[list[Trial]], target: str, processes: int) -> Iterator[Callable[[Trial], Ahead]]:
    """Compile all trials in order, and yield a function that waits for the result of one."""
    if target not in AHEAD:  # each compiles when it first runs
        yield lambda trial: Ahead(None, None)
        return
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"))
    try:
        futures = {trial: pool.submit(examined, trial, target) for group in groups for trial in group}

        def result_of(trial: Trial) -> Ahead:
            try:
                return futures[trial].result()
            except BrokenProcessPool:  # raised for all unfinished trials
                return Ahead("the process that compiled it died", None)

        yield result_of
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


@functools.cache
def card(target: str) -> Any:
    """Make kernels compile for this card, with launches that do nothing, in a process of the pool."""
    from tests.harness.dry_card import DryCard

    return DryCard(target).install()


def examined(trial: Trial, target: str) -> Ahead:
    """Compile a configuration through the launch path in a process of the pool, and read its machine code."""
    from benchmarks.attention.compiled import read, repeats

    dry = card(target)
    before = len(dry.launched)
    case, tiles = trial.case, trial.configuration
    try:
        with quiet(), only(trial):
            prepared(case._replace(device="cpu"), empty=True)()(0)
        launches = [metadata for name, metadata in dry.launched[before:] if name == f"{case.kernel}_kernel"]
        if not launches:
            return Ahead("does not support such rows", None)
        code = read(dry.binaries[launches[-1].hash], launches[-1].shared, launches[-1].num_warps)
    except Exception as error:  # such as too much shared memory
        return Ahead(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", None)
    width, visits = padded(case.width), code.visits(case.kernel)
    local = sum(loop.local for loop in code.loops)
    most = max((repeats(visit, case.kernel, tiles, width, width) for visit in visits), default=0.0)
    figures = {
        "registers": code.registers,
        "shared_bytes": code.shared_bytes,
        "programs": code.programs(target),
        "local_in_loops": local,
        "repeats": rounded(most),
        "instructions": [visit.instructions for visit in visits],
    }
    if local > MOST_LOCAL:
        return Ahead(f"{local} loads and stores of spilled registers in its loops", figures)
    if most > MOST_REPEATS:
        return Ahead(f"its warps compute products {most:.2f} times", figures)
    return Ahead(None, figures)


def measure(group: list[Trial], result_of: Callable[[Trial], Ahead]) -> list[dict[str, Any]]:
    """Measure a row per trial, in the group's order: results of compiling, problems, and seconds."""
    rows = []
    for case, trials in itertools.groupby(group, key=lambda trial: trial.case):
        compiled = [(trial, result_of(trial)) for trial in trials]
        with quiet():
            seconds, wrong = timed(case, [trial for trial, ahead in compiled if ahead.problem is None])
        for trial, ahead in compiled:
            rows.append(
                {
                    "kernel": case.kernel,
                    "pattern": str(case.pattern),
                    "context": case.context,
                    "dtype": case.dtype,
                    "width": case.width,
                    "heads": case.heads,
                    **{name: value for name, value in trial.configuration._asdict().items() if name != "rate"},
                    "ahead": ahead.code,
                    "problem": ahead.problem or wrong.get(trial),
                    "seconds": rounded(seconds.get(trial)),
                }
            )
    return rows


def timed(case: Case, trials: list[Trial]) -> tuple[dict[Trial, float], dict[Trial, str]]:
    """Time the trials that give the current table's results, in turns; return seconds, and problems of the others."""
    plan = prepared(case)
    expected = [finite(result) for result in plan()(0)]
    clock = HostClock() if case.device == "cpu" else DeviceClock(torch.device(case.device), 1)
    launches: dict[Trial, Run] = {}
    wrong: dict[Trial, str] = {}
    runs: dict[Trial, list[float]] = {}
    calls: dict[Trial, tuple[int, float]] = {}
    for trial in trials:
        try:
            with only(trial):
                run = plan()
            results = [finite(result) for result in run(0)]
            differences = [float((a - b).norm() / b.norm()) for a, b in zip(results, expected, strict=True)]
            if not all(difference < TOLERANCE[case.dtype] for difference in differences):
                wrong[trial] = f"differs by {max(differences):.2g}"
                continue
            launches[trial] = run
            first = clock.region(launches[trial], 2, 0.0)
            calls[trial] = clock.calls(first.seconds), first.host_seconds
            runs[trial] = [clock.region(launches[trial], *calls[trial]).seconds]
        except Exception as error:
            wrong[trial] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if case.device != "cpu" and runs:
        fastest = min(seconds[0] for seconds in runs.values())
        for _, trial in itertools.product(range(ROUNDS - 1), [t for t in runs if runs[t][0] <= HOPELESS * fastest]):
            runs[trial].append(clock.region(launches[trial], *calls[trial]).seconds)
    return {trial: statistics.median(seconds) for trial, seconds in runs.items()}, wrong


def finite(result: Tensor) -> Tensor:
    """Copy to fp64, with 0 for -inf, the logsumexp of a query without keys, so that differences are defined."""
    return result.double().nan_to_num(nan=math.nan, neginf=0.0)


def prepared(case: Case, empty: bool = False) -> Callable[[], Run]:
    """Return a function that plans the case's launches with the current configurations, and returns a ``Run``.

    ``empty``: the inputs are uninitialised, as nothing is computed.
    """
    shape = (1, case.heads, case.context, case.width)
    dtype = torch.float32 if launch_plan.INTERPRETED else getattr(torch, case.dtype)  # numpy has no bf16

    def draw() -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=case.device)
        return tensor if empty else tensor.normal_()

    torch.manual_seed(0)
    q, k, v, grad_out = (draw() for _ in range(4))
    patterns = (case.pattern,) * case.heads
    forward = plan_forward(Planner((q, k, v), patterns), SCALE)
    if case.kernel in ("forward", "closed_forward"):

        def planned_forward() -> Run:
            plan = plan_forward(Planner((q, k, v), patterns), SCALE)
            return lambda number: plan.run((q, k, v))

        return planned_forward
    out, lse = (torch.empty_like(v), v.new_empty(v.shape[:3], dtype=torch.float32)) if empty else forward.run((q, k, v))
    inputs = q, k, v, out, grad_out, lse
    planner = Planner(inputs, patterns)
    delta = planner.plan(plan_delta(planner, planner.inputs[3], planner.inputs[4], planner.inputs[5], None))
    per_query = lse.new_empty(*lse.shape, 2) if empty else delta.run(inputs)[0]
    gradients = tuple(torch.empty_like(t) for t in (q, k, v))

    def planned_backward() -> Run:
        if not empty:  # to detect gradients that are not written
            for gradient in gradients:
                gradient.fill_(math.nan)
        all_inputs = (*inputs, per_query, *gradients)
        planner = Planner(all_inputs, patterns)
        tensors, (rows, dq, dk, dv) = tuple(planner.inputs[:6]), planner.inputs[6:]
        read = BackwardInputs(tensors[0], tensors[1], tensors[2], tensors[4], rows)
        choice = closed_choice(planner.candidates("closed"), patterns, case.context)
        if case.kernel.startswith("closed") and choice is not None:
            plan_closed_runs(planner, choice, tensors, None, (dq, dk, dv), SCALE)
        else:  # also for closed runs, if the current table has no kernel for them
            if case.kernel != "dq":
                plan_key_passes(planner, read, "all", (dk, dv), SCALE)
            if case.kernel != "dkdv":
                plan_query_passes(planner, read, "all", dq, SCALE)
        written = {"dkdv": (dk, dv), "dq": (dq,)}.get(case.kernel, (dq, dk, dv))
        plan = planner.plan(*written)
        return lambda number: plan.run(all_inputs)

    return planned_backward


@contextlib.contextmanager
def only(trial: Trial) -> Iterator[None]:
    """Make the trial's kernel use only its configuration, and the general forward kernel also for closed runs."""
    table = launch_plan.candidates_on

    def candidates_on(device: torch.device, kernel: Kernel, *case: Any) -> tuple[Configuration, ...]:
        if kernel == trial.case.kernel:
            return (trial.configuration,)
        return () if (trial.case.kernel, kernel) == ("forward", "closed_forward") else table(device, kernel, *case)

    with mock.patch.object(launch_plan, "candidates_on", candidates_on):
        yield


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Discard standard error, where compilers print their failures; the file has them in one line."""
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stderr(nowhere):
        yield


def fitted(group: Sequence[Trial], measured: list[dict[str, Any]]) -> tuple[Configuration, ...]:
    """Choose the fastest configurations of the cases, at most ``MOST_ROWS``, and rates by which plans choose them.

    Plans take the candidate with the fewest computed pairs for its rate. The rates are those near the measured pairs
    per second that lose the least time over all cases.
    """
    both = list(zip(group, measured, strict=True))
    unfit = {trial.configuration for trial, row in both if row["problem"] is not None}  # in any case
    seconds = {
        (trial.case, trial.configuration): row["seconds"]
        for trial, row in both
        if row["seconds"] is not None and trial.configuration not in unfit
    }
    cases = list(dict.fromkeys(case for case, _ in seconds))
    best = {case: min(s for (c, _), s in seconds.items() if c == case) for case in cases}
    winners = list(dict.fromkeys(tiles for (case, tiles), s in seconds.items() if s == best[case]))
    pairs = {(case, tiles): pairs_of(case, tiles) for case, tiles in seconds if tiles in winners}
    speeds = {
        tiles: statistics.geometric_mean(pairs[key] / seconds[key] for key in pairs if key[1] == tiles)
        for tiles in winners
    }

    def lost(rates: dict[Configuration, float]) -> float:
        """Return the sum of log(time / best) over all cases; infinite if no configuration can run a case."""
        total = 0.0
        for case in cases:
            costs = {tiles: pairs[case, tiles] / rate for tiles, rate in rates.items() if (case, tiles) in pairs}
            if not costs:
                return math.inf
            total += math.log(seconds[case, min(costs, key=costs.__getitem__)] / best[case])
        return total

    least, fitting = math.inf, dict[Configuration, float]()
    for size in range(1, min(MOST_ROWS, len(winners)) + 1):
        steps = sorted(itertools.product(NEAR, repeat=size), key=lambda powers: sum(map(abs, powers)))
        for chosen, powers in itertools.product(itertools.combinations(winners, size), steps):
            rates = {tiles: speeds[tiles] * 2 ** (power / 4) for tiles, power in zip(chosen, powers, strict=True)}
            if (price := lost(rates) + ROW_COSTS * size) < least:
                least, fitting = price, rates
    ordered = sorted(fitting.items(), key=lambda pair: -pair[1])
    return tuple(tiles._replace(rate=round(rate / ordered[0][1], 3)) for tiles, rate in ordered)


def pairs_of(case: Case, tiles: Configuration) -> int:
    """Return the pairs that a configuration computes."""
    patterns = (case.pattern,) * case.heads
    if case.kernel == "closed":
        choice = closed_choice((tiles,), patterns, case.context)
        assert choice is not None
        return choice.pairs
    general, runs = ((), (tiles,)) if case.kernel == "closed_forward" else ((tiles,), ())
    rows: Side = "keys" if case.kernel == "dkdv" else "queries"
    passes = packing.groups(patterns, case.context, rows, "all")
    return sum(choice.pairs for choice in choose(general, passes, rows, runs))


def title(case: Case) -> str:
    """Return the title of a case."""
    return f"{case.kernel}, {case.dtype}, width {case.width}"


def report(group: Sequence[Trial], measured: list[dict[str, Any]], candidates: tuple[Configuration, ...]) -> None:
    """Print the fastest configurations of each case, how many did not run, and the row."""
    print(f"\n{title(group[0].case)}")
    both = list(zip(group, measured, strict=True))
    for case in dict.fromkeys(trial.case for trial in group):
        ran = [(row["seconds"], trial.configuration) for trial, row in both if trial.case == case and row["seconds"]]
        dropped = sum(trial.case == case and row["problem"] is not None for trial, row in both)
        print(f"  {case.pattern} at {case.context:,}: {len(ran)} ran, {dropped} were dropped")
        for seconds, tiles in sorted(ran, key=lambda pair: pair[0])[:4]:
            registers = "" if tiles.maxnreg is None else f", maxnreg {tiles.maxnreg}"
            print(f"    {seconds * 1e3:8.3f} ms  {'×'.join(map(str, tiles[:4]))}{registers}")
    for tiles in candidates:
        print(f"  row: {tiles}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
