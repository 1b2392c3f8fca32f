"""Options of `longstride evaluate`, `longstride show` and `longstride report`."""

from __future__ import annotations

import argparse
from pathlib import Path

from longstride.launcher.options.shared import (
    PRECISIONS,
    WEIGHTS,
    add_step_argument,
    add_trust_argument,
    add_weights_argument,
)


def add_evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `longstride evaluate`."""
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="run folder that holds the checkpoint")
    add_step_argument(parser, "score")
    add("--split", default=None, metavar="NAME", help="score this split (default: the run's validation split)")
    add("--data", default=None, metavar="DIR|URL", help="score this data folder (default: the run's)")
    add("--batch", type=int, default=None, metavar="B", help="compute B contexts at once (default: micro_batch)")
    add("--precision", choices=PRECISIONS, default=None, help="compute in this precision (default: the run's)")
    add_weights_argument(parser)
    add_trust_argument(parser)
    seen = "score bytes that see at least M earlier bytes, where there are so many (default: 0)"
    add("--min-context", type=int, default=0, metavar="M", help=seen)
    drawn = "draw the loss by position in the context, and write its numbers to FILE.json"
    add("--positions", type=Path, metavar="FILE.png", help=drawn)
    shared = "share each context among U of the processes that a launcher started (default: 1)"
    add("--sequence-parallel", type=int, default=1, metavar="U", help=shared)


def add_show_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `longstride show`."""
    add = parser.add_argument
    add("what", choices=("pattern", "attention", "loss"), help="which picture to draw")
    source = "pattern: a run's JSON, or the name of one of ds_configs/experiments, or with --text a run folder; "
    add("source", type=Path, metavar="CONFIG|RUN", help=f"{source}attention, loss: a run folder")
    add("--output", type=Path, required=True, metavar="PNG", help="write the picture here; nothing is written over")
    view = "show what the query at position P reads; for attention repeatable (default: some far apart)"
    add("--query", type=int, action="append", metavar="P", help=view)
    text = "pattern: show what heads that choose their keys by content read of this file"
    add("--text", type=Path, metavar="FILE", help=text)
    add_step_argument(parser, "attention: take")
    context = "attention: feed context K of the validation split (default: 0)"
    add("--context-number", type=int, metavar="K", help=context)
    weights = "attention: take weights as trained, or their moving average (default: trained)"
    add("--weights", choices=WEIGHTS, help=weights)
    add("--head", type=int, metavar="H", help="attention: show head H alone (default: the mean of all)")
    add_trust_argument(parser)


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `longstride report`."""
    add = parser.add_argument
    add(
        "runs",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="run folders, at most twelve, drawn into the same charts",
    )
    add("--output", type=Path, required=True, metavar="FILE.html", help="write the page here; nothing is written over")
    written = "show the losses by position that `longstride evaluate --positions` wrote here, too (repeatable)"
    add("--positions", type=Path, action="append", default=[], metavar="FILE.json", help=written)
    add("--by-position", action="store_true", help="score each run's validation split by position first, for the page")
    quick = "leave out the plan and the pictures of pattern and attention, which take a minute"
    add("--quick", action="store_true", help=quick)
    add_trust_argument(parser)
