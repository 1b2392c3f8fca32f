"""Shared by decoding.py and sampling.py: options of measuring position by position, and growth with the context."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.report import exponent, parse


def add_options(parser: argparse.ArgumentParser, contexts: Sequence[int], calls: int, repeats: int) -> None:
    """Add the options, with their defaults."""
    parser.add_argument("--contexts", type=int, nargs="+", default=list(contexts))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default=None, help="float32 on the CPU, else bfloat16")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--calls", type=int, default=calls, help="positions a repeat")
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--threads", type=int, default=None, help="as torch has them")


def read_options(parser: argparse.ArgumentParser, arguments: list[str] | None, stem: str) -> argparse.Namespace:
    """Parse the options, with device and dtype as torch objects; the result file is ``stem`` and the device's name."""
    options = parse(parser, arguments, stem)
    options.device = torch.device(options.device)
    options.dtype = getattr(torch, options.dtype or ("float32" if options.device.type == "cpu" else "bfloat16"))
    return options


def growth_of(timings: list[dict[str, Any]], keys: Sequence[str]) -> dict[str, dict[str, float | None]]:
    """Compute exponents of these figures in the context, for each pattern, from the smallest to the largest context.

    None if there is one context, or a figure is 0.
    """
    growth: dict[str, dict[str, float | None]] = {}
    for name in dict.fromkeys(row["pattern"] for row in timings):
        rows = [row for row in timings if row["pattern"] == name]
        growth[name] = {key: exponent(*((row["context"], row[key]) for row in (rows[0], rows[-1]))) for key in keys}
    return growth


def growth_cell(ends: dict[str, float | None]) -> str:
    """Format a pattern's exponents."""
    return "".join("      –" if value is None else f"{value:>7.2f}" for value in ends.values())
