"""Find tile edges, warps and stages for this card: ``python benchmarks/attention/tune.py``.

Of each kernel and head width some fifteen configurations are compiled ahead of time, in a pool of processes that need
no card. Their machine code is read: what spills much inside a loop, needs too much shared memory or has warps that
repeat each other's products is dropped unmeasured. The others are held against the present table's results and timed
in turns, by events around calls that were queued before. Of each width the fastest ones are printed as a row for
``longstride.kernels.backends.triton.configurations``, with rates under which a plan chooses, case by case, what was
fastest. Width 128 comes first, and the file is written as each kernel is done: what a time limit cuts off is at the
end. ``--device cpu`` rehearses the whole: code is made for sm_90, and Triton's interpreter runs it on small sizes.
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

if __name__ in ("__main__", "__mp_main__"):  # as a program, or a process of its pool, from a checkout not installed
    sys.path[0] = str(Path(__file__).resolve().parents[2])
if __name__ == "__mp_main__":  # such a process compiles
    os.environ.pop("TRITON_INTERPRET", None)
elif "--device=cpu" in sys.argv or ("--device" in sys.argv and sys.argv[sys.argv.index("--device") + 1] == "cpu"):
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

import torch
from torch import Tensor

from benchmarks.attention.timing import DeviceClock, HostClock
from benchmarks.machine import about, slug
from benchmarks.report import add_output_arguments, check_output, rounded, write_json
from longstride.kernels.backends.triton import launch_plan
from longstride.kernels.backends.triton.configurations import (
    Configuration,
    Kernel,
    choose,
    closed_choice,
    entry,
)
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
AHEAD = ("sm_80", "sm_86", "sm_90")  # whose machine code can be made and read without a card
REHEARSED = "sm_90"
# block_q, block_k, warps, stages, and most registers a thread
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
    (32, 32, 4, 1),
    (64, 32, 4, 1),
    (32, 64, 4, 1),
    (16, 32, 4, 1),
    (32, 16, 4, 1),
    (64, 64, 8, 1),
    (16, 16, 4, 1),
]
TOLERANCE = {"bfloat16": 0.02, "float16": 0.01, "float32": 1e-4}  # of the norm: operands, other orders of addition
MOST_LOCAL = 30  # loads and stores of what is spilled, in all loops of a kernel
MOST_REPEATS = 1.2  # of products; in fp32 a few multiply-adds are no part of one
ROUNDS = 5
HOPELESS = 2.0  # times the fastest: not worth more than one measurement
MOST_ROWS = 4  # candidates of a row
ROW_COSTS = 0.01  # of the time: one candidate more must save as much
NEAR = range(-3, 4)  # rates that are tried: the measured one times so many fourth roots of 2
SCALE = 0.125


Run = Callable[[int], tuple[Tensor, ...]]  # makes a case's launches, as often as a clock counts; what they wrote


class Case(NamedTuple):
    """What one kernel is timed on."""

    kernel: Kernel
    pattern: Pattern
    context: int
    dtype: str
    width: int
    heads: int
    device: str


class Trial(NamedTuple):
    """One configuration of one case."""

    case: Case
    configuration: Configuration


class Ahead(NamedTuple):
    """What is known of a trial without a card: why it is dropped, or None, and what its machine code says."""

    problem: str | None
    code: dict[str, Any] | None


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 1 where no configuration of some kernel ran."""
    started = time.monotonic()
    options = read_options(arguments)
    facts = about(torch.device(options.device))
    rows: list[dict[str, Any]] = []
    target = REHEARSED if options.device == "cpu" else launch_plan.architecture(torch.device("cuda"))
    groups = trials_of(options, target)
    found: list[dict[str, Any]] = []
    ran = []
    with ahead_of_time(groups, target, options.processes) as known:
        for group in groups:
            if time.monotonic() - started > options.time_limit:
                print(f"no time left for {title(group[0].case)}")
                continue
            measured = measure(group, known)
            found += measured
            fitting = fitted(group, measured)
            ran.append(bool(fitting))
            case = group[0].case
            if fitting:
                row = {"kernel": case.kernel, "dtype": case.dtype, "width": case.width}
                rows.append(row | {"candidates": [one._asdict() for one in fitting]})
            report(group, measured, fitting)
            write_json(options.output, {**facts, "rows": rows, "trials": found})
    print(f"wrote {options.output}")
    return 0 if ran and all(ran) else 1


def read_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS), choices=KERNELS)
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 64, 256])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], choices=sorted(TOLERANCE))
    parser.add_argument("--processes", type=int, default=None, help="compile in so many; all cores but two")
    parser.add_argument("--time-limit", type=float, default=420, help="seconds after which no kernel is begun")
    add_output_arguments(parser)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    check_output(parser, options, f"tuning-{slug(device) if options.device == 'cuda' else 'rehearsal'}.json")
    options.processes = options.processes or max(1, (os.cpu_count() or 1) - 2)
    return options


def trials_of(options: argparse.Namespace, target: str) -> list[list[Trial]]:
    """What is tried, by dtype, width and kernel."""
    wanted = (
        [Trial(case, one) for case in cases_of(kernel, dtype, width, options) for one in grid(case, target)]
        for dtype in options.dtypes
        for width in options.widths
        for kernel in options.kernels
    )
    return [group for group in wanted if group]  # closed runs of fp32 have no kernel of their own


def cases_of(kernel: Kernel, dtype: str, width: int, options: argparse.Namespace) -> Iterator[Case]:
    """Long runs, blocks, columns and few keys a row, all of which fill a card; closed runs for their kernels."""
    if options.device == "cpu":
        yield Case(kernel, Block(16) if of_runs(kernel) else Local(32), 64, dtype, width, 1, "cpu")
    elif of_runs(kernel):
        if dtype != "float32":  # whose closed runs the other kernels serve
            for pattern in (Block(128), Column(128), Block(64), Block(32)):
                yield Case(kernel, pattern, 12_288, dtype, width, 64, "cuda")
    else:
        yield Case(kernel, Local(1_024), 32_768, dtype, width, 16, "cuda")
        yield Case(kernel, Column(256), 65_536, dtype, width, 16, "cuda")
        yield Case(kernel, Block(128), 12_288, dtype, width, 64, "cuda")
        yield Case(kernel, Column(128), 12_288, dtype, width, 64, "cuda")
        yield Case(kernel, Summary(128, 8), 12_288, dtype, width, 64, "cuda")
        yield Case(kernel, Column(128), 3_072, dtype, width, 256, "cuda")


def grid(case: Case, target: str) -> list[Configuration]:
    """The configurations to try: those of the present table, and some fifteen more; two to rehearse."""
    item = getattr(torch, case.dtype).itemsize
    fields: Sequence[tuple[int, ...]] = IN_FP32 if case.dtype == "float32" else FIELDS[case.kernel]
    made = [configuration(*some) for some in fields]
    own = [one._replace(rate=1.0) for one in getattr(entry(target, item, padded(case.width))[1], case.kernel)]
    found = list(dict.fromkeys([*own, *made]))
    if case.device == "cpu":  # one that compiles well, and one whose warps repeat each other's products
        found = [configuration(64, 64, 4, 2 - of_runs(case.kernel)), configuration(64, 64, 16, 1)]
    if not of_runs(case.kernel):
        return found
    stride = case.pattern.stride  # type: ignore[attr-defined]
    longest = case.context // stride if isinstance(case.pattern, Column) else stride
    return [one for one in found if one.block_k >= longest]  # a whole run must fit


def of_runs(kernel: Kernel) -> bool:
    """Whether a program of a kernel reads a whole closed run at once."""
    return kernel.startswith("closed")


def configuration(block_q: int, block_k: int, warps: int, stages: int, maxnreg: int | None = None) -> Configuration:
    """As the lists above have them."""
    return Configuration(block_q, block_k, warps, stages, maxnreg=maxnreg)


def padded(width: int) -> int:
    """As kernels pad it."""
    return max(16, 1 << (width - 1).bit_length())


# Ahead of time: in processes that need no card


@contextlib.contextmanager
def ahead_of_time(groups: list[list[Trial]], target: str, processes: int) -> Iterator[Callable[[Trial], Ahead]]:
    """A function that says what is known of a trial, and waits for it; all are compiled in the order of the groups."""
    if target not in AHEAD:  # nothing is known: each compiles when it first runs
        yield lambda trial: Ahead(None, None)
        return
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"))
    try:
        futures = {one: pool.submit(examined, one, target) for group in groups for one in group}

        def known(trial: Trial) -> Ahead:
            try:
                return futures[trial].result()
            except BrokenProcessPool:  # of all that were not done
                return Ahead("the process that compiled it died", None)

        yield known
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


@functools.cache
def card(target: str) -> Any:
    """In a process of the pool: from now on kernels compile for this card, and launches do nothing."""
    from tests.harness.dry_card import DryCard

    return DryCard(target).install()


def examined(trial: Trial, target: str) -> Ahead:
    """In a process of the pool: compile a configuration through the launch path, and read its machine code."""
    from benchmarks.attention.generated_code import read, repeats

    dry = card(target)
    before = len(dry.launched)
    case, one = trial.case, trial.configuration
    try:
        with quiet(), only(trial):
            prepared(case._replace(device="cpu"), empty=True)()(0)
        launches = [metadata for of, metadata in dry.launched[before:] if of == f"{case.kernel}_kernel"]
        if not launches:
            return Ahead("cannot serve such rows", None)
        code = read(dry.binaries[launches[-1].hash], launches[-1].shared, launches[-1].num_warps)
    except Exception as error:  # too much shared memory, registers or patience: one line in the file
        return Ahead(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", None)
    width, visits = padded(case.width), code.visits(case.kernel)
    local, most = (
        sum(loop.local for loop in code.loops),
        max((repeats(v, case.kernel, one, width, width) for v in visits), default=0.0),
    )
    said = {
        "registers": code.registers,
        "shared_bytes": code.shared_bytes,
        "programs": code.programs(target),
        "local_in_loops": local,
        "repeats": rounded(most),
        "instructions": [visit.instructions for visit in visits],
    }
    if local > MOST_LOCAL:
        return Ahead(f"{local} loads and stores of what is spilled in its loops", said)
    if most > MOST_REPEATS:
        return Ahead(f"its warps compute products {most:.2f} times", said)
    return Ahead(None, said)


# On the card


def measure(group: list[Trial], known: Callable[[Trial], Ahead]) -> list[dict[str, Any]]:
    """A row a trial, in the group's order: what was known ahead, what is wrong with it, and its seconds."""
    rows = []
    for case, trials in itertools.groupby(group, key=lambda trial: trial.case):
        asked = [(trial, known(trial)) for trial in trials]
        with quiet():
            seconds, wrong = timed(case, [trial for trial, ahead in asked if ahead.problem is None])
        for trial, ahead in asked:
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
    """Seconds of each trial that gives the present table's results, in turns, and what is wrong with the others."""
    planned = prepared(case)
    wanted = [finite(result) for result in planned()(0)]
    clock = HostClock() if case.device == "cpu" else DeviceClock(torch.device(case.device), 1)
    launches: dict[Trial, Run] = {}
    wrong: dict[Trial, str] = {}
    runs: dict[Trial, list[float]] = {}
    calls: dict[Trial, tuple[int, float]] = {}
    for trial in trials:
        try:
            with only(trial):
                run = planned()
            found = [finite(result) for result in run(0)]
            differences = [float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True)]
            if not all(one < TOLERANCE[case.dtype] for one in differences):
                wrong[trial] = f"differs by {max(differences):.2g}"
                continue
            launches[trial] = run
            first = clock.region(launches[trial], 2, 0.0)
            calls[trial] = clock.calls(first.seconds), first.host_seconds
            runs[trial] = [clock.region(launches[trial], *calls[trial]).seconds]
        except Exception as error:
            wrong[trial] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if case.device != "cpu" and runs:
        fastest = min(some[0] for some in runs.values())
        for _, trial in itertools.product(range(ROUNDS - 1), [t for t in runs if runs[t][0] <= HOPELESS * fastest]):
            runs[trial].append(clock.region(launches[trial], *calls[trial]).seconds)
    return {trial: statistics.median(some) for trial, some in runs.items()}, wrong


def finite(result: Tensor) -> Tensor:
    """A copy in fp64. The logsumexp of a query without keys is -inf: of two such, no difference can be taken."""
    return result.double().nan_to_num(nan=math.nan, neginf=0.0)


def prepared(case: Case, empty: bool = False) -> Callable[[], Run]:
    """A function that plans the case's launches by the configurations in force, and gives one that makes them.

    That one returns what kernels wrote. ``empty``: the inputs are uninitialised, where nothing is run.
    """
    shape = (1, case.heads, case.context, case.width)
    dtype = torch.float32 if launch_plan.INTERPRETED else getattr(torch, case.dtype)  # numpy has no bf16

    def drawn() -> Tensor:
        found = torch.empty(shape, dtype=dtype, device=case.device)
        return found if empty else found.normal_()

    torch.manual_seed(0)
    q, k, v, grad_out = (drawn() for _ in range(4))
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
        if not empty:  # a gradient that is not written is found out
            for gradient in gradients:
                gradient.fill_(math.nan)
        all_inputs = (*inputs, per_query, *gradients)
        planner = Planner(all_inputs, patterns)
        tensors, (rows, dq, dk, dv) = tuple(planner.inputs[:6]), planner.inputs[6:]
        read = BackwardInputs(tensors[0], tensors[1], tensors[2], tensors[4], rows)
        choice = closed_choice(planner.candidates("closed"), patterns, case.context)
        if case.kernel.startswith("closed") and choice is not None:
            plan_closed_runs(planner, choice, tensors, None, (dq, dk, dv), SCALE)
        else:  # of closed runs too what the present table may do without
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
    """Have the trial's kernel use its configuration alone, and the general forward kernel serve closed runs as well."""
    table = launch_plan.candidates_on

    def candidates_on(device: torch.device, kernel: Kernel, *case: Any) -> tuple[Configuration, ...]:
        if kernel == trial.case.kernel:
            return (trial.configuration,)
        return () if (trial.case.kernel, kernel) == ("forward", "closed_forward") else table(device, kernel, *case)

    with mock.patch.object(launch_plan, "candidates_on", candidates_on):
        yield


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Compilers speak on standard error of what they cannot do; the file says it in one line."""
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stderr(nowhere):
        yield


# What is chosen, said and written


def fitted(group: Sequence[Trial], measured: list[dict[str, Any]]) -> tuple[Configuration, ...]:
    """The fastest configuration of each case, with rates by which plans choose it there; of many, those that matter.

    Plans take the candidate with the fewest computed pairs for its rate. Of all rates near the measured pairs a second
    those are taken that lose least time over all cases.
    """
    both = list(zip(group, measured, strict=True))
    unfit = {trial.configuration for trial, row in both if row["problem"] is not None}  # in a case that it may meet
    seconds = {
        (trial.case, trial.configuration): row["seconds"]
        for trial, row in both
        if row["seconds"] is not None and trial.configuration not in unfit
    }
    cases = list(dict.fromkeys(case for case, _ in seconds))
    best = {case: min(s for (c, _), s in seconds.items() if c == case) for case in cases}
    winners = list(dict.fromkeys(one for (case, one), s in seconds.items() if s == best[case]))
    pairs = {(case, one): pairs_of(case, one) for case, one in seconds if one in winners}
    logs: dict[Configuration, list[float]] = {one: [] for one in winners}
    for (case, one), number in pairs.items():
        logs[one].append(math.log(number / seconds[case, one]))
    speeds = {one: math.exp(statistics.mean(some)) for one, some in logs.items()}

    def lost(rates: dict[Configuration, float]) -> float:
        """Of the logarithm of the time, over all cases; infinite where none of them can serve one."""
        found = 0.0
        for case in cases:
            priced = [(pairs[case, one] / rate, one) for one, rate in rates.items() if (case, one) in pairs]
            if not priced:
                return math.inf
            found += math.log(seconds[case, min(priced, key=lambda pair: pair[0])[1]] / best[case])
        return found

    least, fitting = math.inf, dict[Configuration, float]()
    for size in range(1, min(MOST_ROWS, len(winners)) + 1):
        steps = sorted(itertools.product(NEAR, repeat=size), key=lambda some: sum(map(abs, some)))
        for some, near in itertools.product(itertools.combinations(winners, size), steps):
            rates = {one: speeds[one] * 2 ** (step / 4) for one, step in zip(some, near, strict=True)}
            if (price := lost(rates) + ROW_COSTS * size) < least:
                least, fitting = price, rates
    ordered = sorted(fitting.items(), key=lambda pair: -pair[1])
    return tuple(one._replace(rate=round(rate / ordered[0][1], 3)) for one, rate in ordered)


def pairs_of(case: Case, one: Configuration) -> int:
    """Pairs that a configuration computes."""
    patterns = (case.pattern,) * case.heads
    if case.kernel == "closed":
        choice = closed_choice((one,), patterns, case.context)
        assert choice is not None
        return choice.pairs
    general, runs = ((), (one,)) if case.kernel == "closed_forward" else ((one,), ())
    rows: Side = "keys" if case.kernel == "dkdv" else "queries"
    return sum(choice.pairs for choice in choose(general, patterns, case.context, rows, "all", runs))


def title(case: Case) -> str:
    """One line for people."""
    return f"{case.kernel}, {case.dtype}, width {case.width}"


def report(group: Sequence[Trial], measured: list[dict[str, Any]], fitting: tuple[Configuration, ...]) -> None:
    """Print the fastest configurations of each case, how many did not run, and the row."""
    print(f"\n{title(group[0].case)}")
    both = list(zip(group, measured, strict=True))
    for case in dict.fromkeys(trial.case for trial in group):
        ran = [(row["seconds"], trial.configuration) for trial, row in both if trial.case == case and row["seconds"]]
        dropped = sum(trial.case == case and row["problem"] is not None for trial, row in both)
        print(f"  {case.pattern} at {case.context:,}: {len(ran)} ran, {dropped} were dropped")
        for seconds, one in sorted(ran, key=lambda pair: pair[0])[:4]:
            print(f"    {seconds * 1e3:8.3f} ms  {shown(one)}")
    for one in fitting:
        print(f"  row: {one}")
    sys.stdout.flush()


def shown(one: Configuration) -> str:
    """Edges, warps and stages, and what is not the default."""
    more = [f"{name} {value}" for name, value in list(one._asdict().items())[5:] if value != one._field_defaults[name]]
    return ", ".join(["×".join(map(str, one[:4])), *more])


if __name__ == "__main__":
    sys.exit(main())
