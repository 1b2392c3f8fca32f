"""Compile the kernels of a session on a card, without the card: ``python -m benchmarks.attention.ahead FILE``.

Time on a card is expensive, and compiling took most of a first session. This program makes the same calls on CPU
tensors, with launches that do nothing (``tests.harness.dry_card``). The compiled code, without intermediate forms, goes
to FILE, a tar that ``benchmarks/gpu_session.sh --compiled FILE`` unpacks. It only works with the same Triton, so run
this with the version of the card's machine, under any Python. All parts take two cores tens of minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import itertools
import os
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

if __name__ in ("__main__", "__mp_main__"):  # as a program, or a process of its pool
    os.environ.pop("TRITON_INTERPRET", None)  # before anything imports triton

import pytest
import torch

from benchmarks.attention import cases, gate, tune
from longstride.kernels.patterns import Dense, Fixed, Pattern, Strided
from tests.harness import backends
from tests.harness.dry_card import DryCard

SUFFIXES = (".cubin", ".json")  # of the files that launching needs
WITHOUT = ("test_more_elements_than_32_bits_count", "test_a_compiled_layer_is_the_layer")  # tens of GiB; needs a card
PARTS = ("tests", "gate", "bars", "beside", "steps", "tuning")


def main(arguments: list[str] | None = None) -> int:
    """Compile and write the file; return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="a .tar.xz to write")
    parser.add_argument("--architecture", default="sm_90", choices=tune.AHEAD)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--processes", type=int, default=2, help="of the tuner's compilations")
    options = parser.parse_args(arguments)
    if options.file.exists() or not options.file.parent.is_dir():
        parser.error(f"{options.file}: must be a new file in a folder that exists")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        DryCard(options.architecture).install()
        for part in options.parts:
            began = time.monotonic()
            for call in calls_of(part, options):
                call()
            print(f"{part}: {time.monotonic() - began:.0f} s", flush=True)
        with tarfile.open(options.file, "x:xz") as tar:
            for path in sorted(path for path in Path(folder).rglob("*") if path.suffix in SUFFIXES):
                tar.add(path, path.relative_to(folder))
    print(f"wrote {options.file}, {options.file.stat().st_size / 2**20:.1f} MiB")
    return 0


def calls_of(part: str, options: argparse.Namespace) -> Iterator[Callable[[], object]]:
    """Yield calls that compile a part of a session."""
    groups = {"bars": cases.bars("cuda"), "beside": cases.beside("cuda")}
    if part == "tests":
        yield from tests()
    elif part == "gate":
        every = itertools.chain.from_iterable(groups.values())
        kinds = sorted({(getattr(torch, group.dtype), group.head_width) for group in every}, key=str)
        for (dtype, width), (context, stride) in itertools.product(kinds, gate.SIZES["cuda"]):
            for pattern in cases.patterns_of(stride, gate.SUMMARY).values():
                yield partial(passes, pattern, (2, 2, context, width), dtype)
    elif part in groups:
        for group in groups[part]:
            shape = group.batch, group.heads, group.context, group.head_width
            for heads in group.patterns().values():
                yield partial(passes, heads, shape, getattr(torch, group.dtype))
    elif part == "steps":  # of training_step.py, with q, k and v cut from one product
        for batch, context, stride in ((4, 12_288, 128), (1, 12_288, 128), (1, 1_048_576, 1_024)):
            others = (Strided(stride), Dense()) if stride == 128 else ()
            for step in (Fixed(stride, 32), *others):
                yield partial(passes, step, (batch, 8, context, 64), torch.bfloat16, heads_in_rows=True)
    else:
        yield partial(tuning, options)


def passes(
    pattern: Pattern | list[Pattern], shape: tuple[int, ...], dtype: torch.dtype, heads_in_rows: bool = False
) -> None:
    """Run a forward and a backward pass, with gradients of the output in both layouts if ``heads_in_rows``."""
    batch, heads, context, width = shape
    rows = (batch, context, heads, width)
    if heads_in_rows:
        cut = torch.empty(batch, context, 3 * heads * width, dtype=dtype).chunk(3, -1)
        inputs = [x.unflatten(-1, (heads, width)).transpose(1, 2) for x in cut]
        gradients = [torch.empty(rows, dtype=dtype).transpose(1, 2), torch.empty(shape, dtype=dtype)]
    else:
        inputs, gradients = [torch.empty(shape, dtype=dtype) for _ in range(3)], [torch.empty(shape, dtype=dtype)]
    leaves = [x.detach().requires_grad_() for x in inputs]
    for gradient in gradients:
        torch.autograd.grad(gate.ours(pattern, "triton")(*leaves), leaves, gradient)


def tests() -> Iterator[Callable[[], object]]:
    """Yield the tests on a card, without computing their expected results."""
    backends.ON_A_CARD = True
    module: Any = importlib.import_module("tests.kernels.test_on_a_card")
    module.assert_within_precision = module.expected = lambda *_: {}
    for name, function in vars(module).items():
        marks = [mark for mark in getattr(function, "pytestmark", ()) if mark.name == "parametrize"]
        if name.startswith("test_") and marks and name not in WITHOUT:
            names = [word.strip() for word in marks[0].args[0].split(",")]
            for case in marks[0].args[1]:
                values = getattr(case, "values", case) if len(names) > 1 else [case]
                yield partial(run_test, function, dict(zip(names, values, strict=True)))


def run_test(function: Callable[..., None], arguments: dict[str, Any]) -> None:
    """Run a test, ignoring its assertions, as no launch computes anything."""
    with pytest.MonkeyPatch.context() as monkeypatch, contextlib.suppress(AssertionError, KeyError, RuntimeError):
        fixtures = {"monkeypatch": monkeypatch} if "monkeypatch" in inspect.signature(function).parameters else {}
        function(**arguments, **fixtures)


def tuning(options: argparse.Namespace) -> None:
    """Compile everything that the tuner tries in 16 bits, in other processes."""
    settings = argparse.Namespace(device="cuda", kernels=tune.KERNELS, widths=[128, 64, 256], dtypes=["bfloat16"])
    groups = tune.trials_of(settings, options.architecture)
    with tune.ahead_of_time(groups, options.architecture, options.processes) as result_of:
        for trial in itertools.chain.from_iterable(groups):
            result_of(trial)


if __name__ == "__main__":
    sys.exit(main())
