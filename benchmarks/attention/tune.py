"""Find tile edges, warps, stages and descriptors for this card: ``python benchmarks/attention/tune.py``.

Of each kernel and head width every configuration of a grid runs once in a pool of processes, which compiles it and
holds its result against that of the present table; those that agree are then timed one after another. The fastest ones
and the rates of small tiles go to the terminal, for ``kernels/backends/triton/configurations.py``; all times to JSON.
``--device cpu`` rehearses the whole in Triton's interpreter on small sizes.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple

if __name__ in ("__main__", "__mp_main__"):  # as a program, or a process of its pool, from a checkout not installed
    sys.path[0] = str(Path(__file__).resolve().parents[2])
if "--device=cpu" in sys.argv or ("--device" in sys.argv and sys.argv[sys.argv.index("--device") + 1] == "cpu"):
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

import torch
from torch import Tensor

from benchmarks.machine import about, slug
from benchmarks.report import add_output_arguments, check_output, rounded, write_json
from longstride.kernels.backends.triton import configurations
from longstride.kernels.backends.triton.call import Call, architecture
from longstride.kernels.backends.triton.configurations import Configuration, closed_choice
from longstride.kernels.backends.triton.launch import (
    BackwardInputs,
    forward,
    over_closed_runs,
    over_keys,
    over_queries,
    per_query_of,
)
from longstride.kernels.patterns import Block, Column, Local, Pattern

LARGE = [
    (block_q, block_k, warps, stages, described)
    for block_q, block_k in ((128, 128), (128, 64), (64, 128), (64, 64), (128, 32), (32, 128))
    for warps in (4, 8)
    for stages in (2, 3, 4)
    for described in (False, True)
]
SMALL = [(32, 32, warps, 2, False) for warps in (1, 2, 4)] + [(16, 16, 1, 2, False)]
SQUARES = [(edge, edge, warps, 1, False) for edge in (128, 64, 32) for warps in (2, 4, 8, 16)]
TOLERANCE = 0.02  # of the norm: bf16 operands, other orders of addition
SCALE = 0.125


class Case(NamedTuple):
    """What one kernel is timed on."""

    kernel: str
    pattern: Pattern
    context: int
    width: int
    heads: int
    device: str


class Trial(NamedTuple):
    """One configuration of one case."""

    case: Case
    configuration: Configuration


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 1 where no configuration of some kernel ran."""
    options = read_options(arguments)
    cases = [
        case for width in options.widths for kernel in options.kernels for case in cases_of(kernel, width, options)
    ]
    trials = [Trial(case, one) for case in cases for one in grid(case)]
    started = time.perf_counter()
    problems = checked(trials, options.processes)
    print(f"{len(trials)} configurations compiled and checked in {time.perf_counter() - started:.0f} s")
    found = []
    for trial, problem in zip(trials, problems, strict=True):
        late = time.perf_counter() - started > options.time_limit
        seconds = None if problem or late else seconds_of(trial)
        found.append((trial, "out of time" if late and not problem else problem, seconds))
    write(options.output, found)
    ran = [report(case, found) for case in cases]
    return 0 if all(ran) else 1


def checked(trials: list[Trial], processes: int) -> list[str | None]:
    """What is wrong with each trial; a process that dies takes the trials after it along, not this one."""
    problems: list[str | None] = []
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        for future in [pool.submit(problem_with, trial) for trial in trials]:
            try:
                problems.append(future.result())
            except BrokenProcessPool:
                problems.append("a process died")
    return problems


def read_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--kernels", nargs="+", default=["forward", "dkdv", "dq", "closed"])
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--processes", type=int, default=None, help="compile in so many; as many as there are cores")
    parser.add_argument("--time-limit", type=float, default=420, help="seconds after which nothing more is timed")
    add_output_arguments(parser)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    check_output(parser, options, f"tuning-{slug(device) if options.device == 'cuda' else 'rehearsal'}.json")
    options.processes = options.processes or os.cpu_count()
    return options


def cases_of(kernel: str, width: int, options: argparse.Namespace) -> Iterator[Case]:
    """Long runs and short columns that fill a card, blocks of three sizes for closed runs; small ones to rehearse."""
    if options.device == "cpu":
        yield Case(kernel, Block(16) if kernel == "closed" else Local(32), 64, width, 1, "cpu")
    elif kernel == "closed":
        for stride in (128, 64, 32):
            yield Case(kernel, Block(stride), 98_304, width, 16, "cuda")
    else:
        yield Case(kernel, Local(1_024), 32_768, width, 16, "cuda")
        yield Case(kernel, Column(128), 12_288, width, 64, "cuda")


def grid(case: Case) -> Iterator[Configuration]:
    """The configurations to try; a few of them to rehearse."""
    if case.device == "cpu":
        fields = [(32, 32, 1, 1, False)] if case.kernel == "closed" else [(32, 16, 1, 1, False), (16, 32, 1, 1, True)]
    elif isinstance(case.pattern, Block):  # a whole block must fit
        fields = [square for square in SQUARES if square[0] >= case.pattern.stride]
    else:
        fields = LARGE + SMALL
    for block_q, block_k, warps, stages, described in fields:
        yield Configuration(block_q, block_k, warps, stages, 1.0, described)


# One kernel alone


def problem_with(trial: Trial) -> str | None:
    """Run a configuration once, which compiles it for all processes: what is wrong with it, or None."""
    try:
        with quiet():
            run, results = prepared(trial.case)
            run()
            wanted = [result.double().clone() for result in results()]
            with only(trial):
                run()
            found = [result.double() for result in results()]
    except Exception as error:  # too much shared memory, registers or patience: one line in the file
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    differences = [float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True)]
    return None if all(one < TOLERANCE for one in differences) else f"differs by {max(differences):.2g}"


def seconds_of(trial: Trial) -> float:
    """Median seconds of one launch."""
    run, _ = prepared(trial.case)
    with only(trial):
        run()
        if trial.case.device == "cpu":
            started = time.perf_counter()
            run()
            return time.perf_counter() - started
        import triton.testing

        return triton.testing.do_bench(run, warmup=20, rep=100, return_mode="median") / 1e3


def prepared(case: Case) -> tuple[Callable[[], object], Callable[[], list[Tensor]]]:
    """A function that launches the case's kernel, and one that gives what it wrote."""
    generator = torch.Generator(case.device).manual_seed(0)
    shape = (1, case.heads, case.context, case.width)
    q, k, v, grad_out = (torch.randn(shape, generator=generator, device=case.device).bfloat16() for _ in range(4))
    patterns = (case.pattern,) * case.heads
    if case.kernel == "forward":
        found: list[Tensor] = []

        def run_forward() -> None:
            found[:] = forward(q, k, v, patterns, SCALE)

        return run_forward, lambda: found
    out, lse = forward(q, k, v, patterns, SCALE)
    call = Call(q, v, patterns)
    q, k, v, out, grad_out = (call.readable(t) for t in (q, k, v, out, grad_out))
    inputs = BackwardInputs(q, k, v, grad_out, per_query_of(call, out, grad_out, lse, None))
    dq, dk, dv = (torch.full_like(t, float("nan")) for t in (q, k, v))

    def run_backward() -> None:
        if case.kernel == "dkdv":
            over_keys(call, inputs, "all", (dk, dv), SCALE)
        elif case.kernel == "dq":
            over_queries(call, inputs, "all", dq, SCALE)
        else:
            choice = closed_choice(call.candidates("closed"), patterns, case.context)
            if choice is None:  # what the present table does without
                over_keys(call, inputs, "all", (dk, dv), SCALE)
                over_queries(call, inputs, "all", dq, SCALE)
            else:
                over_closed_runs(call, choice, (q, k, v, out, grad_out, lse), None, (dq, dk, dv), SCALE)

    written = {"dkdv": [dk, dv], "dq": [dq]}.get(case.kernel, [dq, dk, dv])
    return run_backward, lambda: written


@contextlib.contextmanager
def only(trial: Trial) -> Iterator[None]:
    """Have the trial's kernel use its configuration alone."""
    name = architecture(torch.device(trial.case.device))
    table = configurations.ARCHITECTURES.get(name, configurations.SAFE)
    rows = {key: row._replace(**{trial.case.kernel: (trial.configuration,)}) for key, row in table.items()}
    configurations.ARCHITECTURES[name] = rows
    try:
        yield
    finally:
        configurations.ARCHITECTURES[name] = table


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Compilers speak on standard error of what they cannot do; the file says it in one line."""
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stderr(nowhere):
        yield


# What is said and written


def report(case: Case, found: list[tuple[Trial, str | None, float | None]]) -> bool:
    """Print the fastest configurations of a case; False where there is none."""
    own = sorted((s, trial.configuration) for trial, _, s in found if trial.case == case and s is not None)
    failed = sum(trial.case == case and problem is not None for trial, problem, _ in found)
    print(f"\n{case.kernel}, width {case.width}, {case.pattern} at {case.context:,}: {len(own)} ran, {failed} did not")
    for seconds, one in own[:5]:
        print(f"  {seconds * 1e3:8.3f} ms  {tuple(one[:4])}{' described' if one.described else ''}")
    for edge in (64, 32, 16):
        small = [pair for pair in own if max(pair[1][:2]) == edge]
        if small:
            seconds, one = small[0]
            print(f"  edge {edge}: {tuple(one[:4])}, rate {own[0][0] / seconds:.2f}")
    return bool(own)


def write(output: Path, found: list[tuple[Trial, str | None, float | None]]) -> None:
    """All times as JSON."""
    device = found[0][0].case.device
    trials = [
        {
            "kernel": trial.case.kernel,
            "pattern": str(trial.case.pattern),
            "context": trial.case.context,
            "width": trial.case.width,
            "heads": trial.case.heads,
            **dict(itertools.islice(trial.configuration._asdict().items(), 4)),
            "described": trial.configuration.described,
            "problem": problem,
            "seconds": rounded(seconds),
        }
        for trial, problem, seconds in found
    ]
    write_json(output, {**about(torch.device(device)), "trials": trials})
    print(f"wrote {output}")


if __name__ == "__main__":
    sys.exit(main())
