"""`longstride evaluate`, `probe`, `show pattern|attention|loss` and `report`: what a run has learned."""

from __future__ import annotations

import argparse
from functools import partial

from longstride.launcher.verbs.shared import (
    PRECISIONS,
    Verb,
    add_step_argument,
    add_trust_argument,
    add_weights_argument,
    path,
    place,
    register,
)

VERBS: list[Verb] = []
verb = partial(register, VERBS)


@verb(
    "evaluate",
    "bits per byte over a split",
    "evaluation.evaluate.run",
    "longstride evaluate runs/mine",
    "longstride evaluate runs/mine --step best --min-context 128 --positions by-position.png",
)
def add_evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run", type=path, metavar="RUN|MODEL", help="a run's folder, or an exported model's with --data")
    add_step_argument(parser, "score")
    add("--split", default=None, metavar="NAME", help="score this split (default: the run's validation split)")
    add("--data", type=place, default=None, metavar="DIR|URL", help="score this data folder (default: the run's)")
    add("--batch", type=int, default=None, metavar="B", help="compute B contexts at once (default: micro_batch)")
    add("--precision", choices=PRECISIONS, default=None, help="compute in this precision (default: the run's)")
    add_weights_argument(parser)
    add_trust_argument(parser)
    least = "only score bytes that see at least M earlier ones, if there are so many (default: 0)"
    add("--min-context", type=int, default=0, metavar="M", help=least)
    drawn = "draw the loss by position in the context, and write its numbers to FILE.json"
    add("--positions", type=path, metavar="FILE.png", help=drawn)
    shared = "share each context among U of the processes that a launcher started (default: 1)"
    add("--sequence-parallel", type=int, default=1, metavar="U", help=shared)


@verb(
    "probe",
    "what each layer tells of classes",
    "evaluation.linear_probe.run",
    "longstride probe runs/mine --data data/labelled",
    "longstride probe model --data data/cifar10 --split test --output probe",
)
def add_probe_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run", type=path, metavar="RUN|MODEL", help="a run's folder, or an exported model's")
    labelled = "fit and score classes of this data folder, made with --labels (default: the run's)"
    add("--data", type=place, default=None, metavar="DIR|URL", help=labelled)
    add("--split", default=None, metavar="NAME", help="score this split (default: the run's validation split)")
    add_step_argument(parser, "probe")
    add("--precision", choices=PRECISIONS, default=None, help="compute in this precision (default: the run's)")
    add_weights_argument(parser)
    add_trust_argument(parser)
    written = "make this folder of probe.json and probe.png; nothing is written over (default: only print)"
    add("--output", type=path, default=None, metavar="DIR", help=written)


@verb(
    "show pattern",
    "draw which positions read which",
    "drawing.pattern_page.run",
    "longstride show pattern mine.json --output pattern.png",
    "longstride show pattern enwik8_fixed --query 5000 --html pattern.html",
)
def add_pattern_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    source = "a run's JSON file, the name of one of ds_configs/experiments such as demo, or a run's folder"
    add("source", type=path, metavar="CONFIG|RUN", help=source)
    add("--output", type=path, metavar="FILE.png", help="picture to make")
    page = "page to make, which shows what each query reads (one file)"
    add("--html", type=path, metavar="FILE.html", help=page)
    query = "position whose view is shown, from 0 (default: one below the middle)"
    add("--query", type=int, metavar="P", help=query)
    text = "draw what heads that choose their keys by content read of the first bytes of this file"
    add("--text", type=path, metavar="FILE", help=text)
    add_trust_argument(parser)


@verb(
    "show attention",
    "draw what a model reads",
    "drawing.attention.run",
    "longstride show attention runs/mine --output a.png",
    "longstride show attention model --text my.txt --query 100 200 --output attention.png",
)
def add_attention_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    source = "a run's folder, or an exported model's with --data or --text"
    add("source", type=path, metavar="RUN|MODEL", help=source)
    add("--output", type=path, required=True, metavar="FILE.png", help="picture to make")
    queries = "positions whose views are shown, from 0, six at most (default: four for pictures, else a matrix of all)"
    add("--query", type=int, nargs="+", metavar="P", help=queries)
    add_step_argument(parser, "take")
    number = "context of the validation split that is read, from 0 (default: 0)"
    add("--context-number", type=int, metavar="K", help=number)
    data = "data folder whose validation split is read (default: the run's)"
    add("--data", type=place, metavar="DIR|URL", help=data)
    add("--text", type=path, metavar="FILE", help="file whose first bytes are read, in place of data")
    add_weights_argument(parser)
    add("--head", type=int, metavar="H", help="one head, from 0 (default: the mean of all)")
    add_trust_argument(parser)


@verb(
    "show loss",
    "draw a run's loss over its steps",
    "reporting.loss.run",
    "longstride show loss runs/mine --output loss.png",
    "longstride show loss runs/mine --output ~/pictures/mine.png",
)
def add_loss_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=path, metavar="RUN", help="a run's folder")
    parser.add_argument("--output", type=path, required=True, metavar="FILE.png", help="picture to make")


@verb(
    "report",
    "a page of curves and samples",
    "reporting.run",
    "longstride report runs/mine --output report.html",
    "longstride report runs/mine runs/other --by-position --output both.html",
)
def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("runs", type=path, nargs="+", metavar="RUN", help="run folders, at most twelve, drawn into the same charts")
    add("--output", type=path, required=True, metavar="FILE.html", help="write the page here; nothing is written over")
    written = "show the losses by position that `longstride evaluate --positions` wrote here, too (repeatable)"
    add("--positions", type=path, action="append", default=[], metavar="FILE.json", help=written)
    add("--by-position", action="store_true", help="score each run's validation split by position first, for the page")
    quick = "leave out the plan and the pictures of pattern and attention, which take a minute"
    add("--quick", action="store_true", help=quick)
    add_trust_argument(parser)
