"""The page: its parts in their order, one file that asks for nothing else and obeys no text of a run."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from longstride.launcher.output import counting
from longstride.launcher.reporting import sections
from longstride.launcher.reporting.charts import number
from longstride.launcher.reporting.records import RunRecord
from longstride.launcher.reporting.verbs import Answers
from longstride.launcher.reporting.words import MOST_PAGE_BYTES, Room, absent, shown, table

_MARGIN_BYTES = 20_000  # for what is written around the parts
_MOST_NOTICES = 20
_NAMES = {
    "curves": "Curves",
    "positions": "Loss by position",
    "samples": "Samples",
    "reads": "What reads what",
    "incidents": "Incidents",
    "starts": "Starts and machines",
    "plan": "Plan and measurement",
    "configuration": "Configuration",
}
_ABOUT = {
    "curves": "Pale: each step; solid: the running mean of a fortieth of the run. Dashed: a resume, or in red an "
    "incident. A column of pixels keeps its lowest and its highest value. Drag over a chart for a closer look.",
    "positions": "Where the curve still falls at its right end, the model makes use of a context that long.",
    "samples": "What the model made of the same beginning, on its way.",
    "reads": "The pattern is who may read whom; attention is what the trained model makes of that.",
    "incidents": "Steps that a guard refused, steps that fp16 dropped, and damaged data that was replaced.",
    "starts": "Each time that the run was started, and what was changed in its configuration since the time before.",
    "plan": "What longstride plan says of the configuration, beside the run. Memory is planned for the model and its "
    "optimiser, and measured of the whole first process: on a card what is allocated, else with Python itself.",
    "configuration": "As the last start resolved it, defaults included.",
}


def compose(runs: Sequence[RunRecord], given: list[dict[str, Any]], answers: Sequence[Answers]) -> str:
    """The whole page, of ``MOST_PAGE_BYTES`` at most. ``given``: losses by position from files that were named."""
    named = [*zip(labels(runs), runs, strict=True)]
    style, script = ((Path(__file__).parent / name).read_text() for name in ("report.css", "report.js"))
    parts = {
        "curves": sections.curves(named),
        "positions": sections.positions(named, given, answers),
        "plan": sections.plans(named, answers),
    }
    head = _summary(named)
    used = sum(len(text.encode()) for text in (*parts.values(), head, style, script))
    room = Room(MOST_PAGE_BYTES - used - _MARGIN_BYTES)
    # What is large takes what is left, the most telling first.
    parts["incidents"] = sections.events(named, room)
    parts["starts"] = sections.starts(named, room)
    parts["configuration"] = sections.configuration(named, room)
    parts["samples"] = sections.samples(named, room)
    parts["reads"] = sections.pictures(named, answers, room)
    body = "".join(
        f'<section id="{key}"><h2>{name}</h2><p>{_ABOUT[key]}</p>{parts[key]}</section>' for key, name in _NAMES.items()
    )
    links = "".join(f'<a href="#{key}">{name}</a>' for key, name in _NAMES.items())
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data:; "
        "media-src data:; base-uri 'none'; form-action 'none'"
    )
    title = shown(", ".join(name for name, _ in named), 120)
    # And not the time of now: the same runs make the same page.
    newest = max((run.changed for run in runs), default=0.0)
    told = datetime.fromtimestamp(newest, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">'
        f"<title>{title} · Longstride</title><style>{style}</style></head>\n<body>{head}"
        f'<nav aria-label="parts"><div>{links}</div></nav>\n<main>{body}</main>\n'
        f"<footer>Made by <code>longstride report</code> of what was recorded up to {told}. "
        "One file: it asks for nothing else.</footer>"
        f"<script>{script}</script></body></html>\n"
    )


def labels(runs: Sequence[RunRecord]) -> list[str]:
    """Short names that differ: the last parts of each folder's path, as many as it takes."""
    paths = [run.folder.resolve().parts for run in runs]
    for count in range(1, max(map(len, paths)) + 1):
        names = ["/".join(path[-count:]) for path in paths]
        if len({*names}) == len(names):
            break
    return names


def _digest(text: str) -> str:
    """By which a policy knows an inline script or style."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _summary(runs: sections.Runs) -> str:
    """The heading, and the figures that one looks for first."""
    notices = [f"{name}: {notice}" if len(runs) > 1 else notice for name, record in runs for notice in record.notices]
    told = "".join(absent(notice) for notice in notices[:_MOST_NOTICES])
    if len(runs) == 1:
        name, record = runs[0]
        about = f'<p class="about">{shown(notes, 600)}</p>' if (notes := record.setting("notes")) else ""
        tiles = "".join(
            f'<div class="tile{" first" if place == 0 else ""}"><small>{shown(what)}</small><b>{value}</b>'
            f"<small>{shown(more)}</small></div>"
            for place, (what, value, more) in enumerate(_figures(record))
        )
        return (
            f"<header><h1>{shown(name)}</h1><p>{shown(record.folder)}</p>{about}"
            f'<div class="tiles">{tiles}</div>{told}</header>'
        )
    figures = [_figures(record) for _, record in runs]
    best = min((_best(record) for _, record in runs), default=float("inf"))
    rows = []
    for colour, ((name, record), values) in enumerate(zip(runs, figures, strict=True)):
        cells = {what: value for what, value, _ in values}
        is_best = _best(record) == best and best < float("inf")
        rows.append(
            [
                f'<i class="dots run-{colour}"></i> {shown(name)}',
                *(f"<b>{cell}</b>" if is_best and place == 0 else cell for place, cell in enumerate(cells.values())),
            ]
        )
    names = [what for what, _, _ in figures[0]]
    heading = ' <span class="and">and</span> '.join(shown(name, 60) for name, _ in runs[:3])
    more = f' <span class="and">and {len(runs) - 3} more</span>' if len(runs) > 3 else ""
    numbers = [*range(1, len(names) + 1)]
    compared = table(["run", *names], rows, numbers)
    return f"<header><h1>{heading}{more}</h1><p>{len(runs)} runs beside each other</p>{compared}{told}</header>"


def _best(record: RunRecord) -> float:
    return min((float(series.values.min()) for series in record.evaluations.values()), default=float("inf"))


def _figures(record: RunRecord) -> list[tuple[str, str, str]]:
    """What, its value, and more of it in small; the same ones for every run."""
    figures = []
    evaluated = [(float(series.values.min()), split) for split, series in record.evaluations.items()]
    if evaluated:
        best, split = min(evaluated)
        series = record.evaluations[split]
        step = int(series.steps[series.values.argmin()])
        figures.append(("best validation", f"{best:.4f}", f"{record.unit}, {split}, step {step:,}"))
    else:
        why = "not evaluated yet" if record.is_evaluated else "none, as train.evaluate_every is null"
        figures.append(("best validation", "–", why))
    loss = record.train.get("bits")
    mean = "–" if loss is None else f"{sections.smoothed(loss).last:.4f}"
    figures.append(("training loss", mean, f"{record.unit}, running mean"))
    steps = record.setting("train.steps")
    share = f"{record.last_step / steps:.0%} of {steps:,}" if isinstance(steps, int) and steps > 0 else ""
    figures.append(("steps", f"{record.last_step:,}", share))
    rate = record.train.get("tokens_per_second")
    median = "–" if rate is None else number(float(np.median(rate.values)))
    figures.append(("throughput", median, "tokens a second, median"))
    seconds = record.train.get("seconds")
    total = "–" if seconds is None else counting.duration(float(seconds.values.mean()) * record.last_step)
    figures.append(("training time", total, "in steps, without evaluations"))
    mfu = record.train.get("mfu")
    if mfu is not None:
        figures.append(("MFU", f"{float(np.median(mfu.values)):.1%}", "of the peak, by visited tiles"))
    else:
        content = record.train.get("content")
        read = "–" if content is None else number(float(content.values.mean()) * record.last_step)
        figures.append((f"{'pixels' if record.unit == 'bits per pixel' else 'bytes'} read", read, "in all steps"))
    return figures
