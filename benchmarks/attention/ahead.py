"""Compile ahead what a session on a card launches, without the card: ``python benchmarks/attention/ahead.py FILE``.

Time on a card is dear, and compiling took most of a first session's. Here the same calls are made on tensors of a CPU,
and launches do nothing (``tests.harness.dry_card``). What Triton compiled, without its intermediate forms, goes into
FILE, a tar, which ``benchmarks/gpu_session.sh --compiled FILE`` unpacks. It is of use to the same Triton alone, so run
this with the version that the card's machine has, under any Python. All of it takes two cores tens of minutes.
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

if __name__ in ("__main__", "__mp_main__"):  # as a program, or a process of its pool, from a checkout not installed
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    os.environ.pop("TRITON_INTERPRET", None)  # before anything imports triton

import pytest
import torch

from benchmarks.attention import cases, gate, tune
from longstride.kernels.patterns import Dense, Fixed, Pattern, Strided
from tests.harness import backends
from tests.harness.dry_card import DryCard

KEPT = (".cubin", ".json")  # what is needed to launch
WITHOUT = ("test_more_elements_than_32_bits_count", "test_a_compiled_layer_is_the_layer")  # tens of GiB; a card's own
PARTS = ("tests", "gate", "bars", "beside", "steps", "tuning")


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0."""
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
            for path in sorted(path for path in Path(folder).rglob("*") if path.suffix in KEPT):
                tar.add(path, path.relative_to(folder))
    print(f"wrote {options.file}, {options.file.stat().st_size / 2**20:.1f} MiB")
    return 0


def calls_of(part: str, options: argparse.Namespace) -> Iterator[Callable[[], object]]:
    """What compiles a part of a session."""
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
            for one in group.patterns().values():
                yield partial(passes, one, shape, getattr(torch, group.dtype))
    elif part == "steps":  # those of training_step.py, whose q, k and v are cut from one product
        for batch, context, stride in ((4, 12_288, 128), (1, 12_288, 128), (1, 1_048_576, 1_024)):
            more = (Strided(stride), Dense()) if stride == 128 else ()
            for step in (Fixed(stride, 32), *more):
                yield partial(passes, step, (batch, 8, context, 64), torch.bfloat16, heads_in_rows=True)
    else:
        yield partial(tuning, options)


def passes(
    pattern: Pattern | list[Pattern], shape: tuple[int, ...], dtype: torch.dtype, heads_in_rows: bool = False
) -> None:
    """A forward and a backward pass; gradients of the output come in either layout."""
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
    """The tests on a card; what they hold results against is left out."""
    backends.ON_A_CARD = True
    module: Any = importlib.import_module("tests.kernels.test_on_a_card")
    module.assert_within_precision = module.expected = lambda *_: {}
    for name, function in vars(module).items():
        marks = [mark for mark in getattr(function, "pytestmark", ()) if mark.name == "parametrize"]
        if name.startswith("test_") and marks and name not in WITHOUT:
            names = [word.strip() for word in marks[0].args[0].split(",")]
            for values in marks[0].args[1]:
                yield partial(run_test, function, dict(zip(names, values if len(names) > 1 else [values], strict=True)))


def run_test(function: Callable[..., None], given: dict[str, Any]) -> None:
    """One test, whose assertions mean nothing here: no launch has computed anything."""
    with pytest.MonkeyPatch.context() as monkeypatch, contextlib.suppress(AssertionError, KeyError, RuntimeError):
        more = {"monkeypatch": monkeypatch} if "monkeypatch" in inspect.signature(function).parameters else {}
        function(**given, **more)


def tuning(options: argparse.Namespace) -> None:
    """All that the tuner tries in 16 bits, in processes of their own."""
    settings = argparse.Namespace(device="cuda", kernels=tune.KERNELS, widths=[128, 64, 256], dtypes=["bfloat16"])
    groups = tune.trials_of(settings, options.architecture)
    with tune.ahead_of_time(groups, options.architecture, options.processes) as known:
        for trial in itertools.chain.from_iterable(groups):
            known(trial)


if __name__ == "__main__":
    sys.exit(main())
