"""Options of `longstride new`, `longstride config schema` and `longstride completion`."""

from __future__ import annotations

import argparse

from longstride.launcher.options.shared import path, place

SIZES = ("tiny", "small", "base")  # that `longstride new` has recipes of


def add_new_arguments(parser: argparse.ArgumentParser) -> None:
    """What is written, and for which data and machine."""
    add = parser.add_argument
    add("name", metavar="NAME", help="name of the run: writes NAME.json, to train into runs/NAME")
    folder = "fit this folder of `longstride data build` or `index` (default: data/NAME)"
    add("--data", type=place, metavar="DIR", help=folder)
    kind = "refuse data of another modality than this (default: take what the folder says)"
    add("--modality", metavar="text|image|audio", help=kind)
    size = "tiny: minutes of two cores; small: an hour or more of a large card; base: eight of them (default: tiny)"
    add("--size", default=SIZES[0], metavar="|".join(SIZES), help=size)
    add("--output", type=path, metavar="FILE.json", help="write this new file (default: NAME.json)")
    many = "fit a run of so many processes (default: one for each GPU, or by the cores)"
    add("--processes", metavar="W", help=many)
    memory = "fit so much memory of each GPU, for a run on another machine (default: as found on this one)"
    add("--memory", metavar="GIB", help=memory)


def add_schema_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the schema goes."""
    what = "write it to this new file, for `$schema` of configurations (default: print it)"
    parser.add_argument("--output", type=path, default=None, metavar="FILE.json", help=what)


def add_completion_arguments(parser: argparse.ArgumentParser) -> None:
    """The shell."""
    parser.add_argument("shell", choices=("bash", "zsh"), help="shell that the script is for")
