"""`longstride report RUN [RUN …] --output report.html`: a page about runs, as one file that needs no network."""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from longstride.kernels import ConfigError
from longstride.launcher.config import flattened
from longstride.launcher.files import check_new, write_new
from longstride.launcher.output import counting, metrics_file
from longstride.launcher.planning import peak_bytes, sum_of_flops
from longstride.launcher.reporting.charts import curves, number, positions, running_mean
from longstride.launcher.reporting.records import (
    MOST_EVENTS,
    Answer,
    PageRun,
    RunHistory,
    ask_all,
    processes_of,
    read_positions,
    read_run,
)
from longstride.launcher.reporting.template import MOST_PAGE_BYTES, Room, pieces

MOST_RUNS = 12  # the number of distinguishable colours
_MARGIN_BYTES = 20_000  # for the template around the parts
_MOST_NOTICES = 20
_MOST_KEYS = 600  # of a configuration
_MOST_STARTS = 40
_MOST_CHANGES = 20  # of a start


def run(arguments: argparse.Namespace) -> int:
    """Run the verb; return its exit code."""
    output = arguments.output
    check_new(output, "--output", ".html", ".htm")
    if arguments.quick and arguments.by_position:
        raise ConfigError("--by-position: needs the model, which --quick does not load; give only one of the two")
    records = read_runs(arguments.runs)
    scored = []
    for path in arguments.positions:
        losses = read_positions(path)
        if losses is None:
            rule = "must be a JSON file that `longstride evaluate RUN --positions FILE.png` wrote next to its picture"
            raise ConfigError(f"--positions={path}: {rule}")
        scored.append(losses)
    answers: list[dict[str, Answer]] = [{} for _ in records]
    if not arguments.quick:
        by_position, trusted = arguments.by_position, arguments.trust_checkpoint
        answers = [ask_all(record, by_position=by_position, trusted=trusted) for record in records]
    write_new(output, compose(records, scored, answers).encode())
    print(output)
    return 0


def read_runs(folders: list[Path]) -> list[RunHistory]:
    """Read the runs of a page.

    Raises:
        ConfigError: as ``read_run``; a run is named twice, there are too many, or their objectives differ.
    """
    if len(folders) > MOST_RUNS:
        raise ConfigError(f"{folders[MOST_RUNS]}: is run {MOST_RUNS + 1}; a page compares at most {MOST_RUNS}")
    for index, folder in enumerate(folders):
        if folder.resolve() in map(Path.resolve, folders[:index]):
            raise ConfigError(f"{folder}: is named twice; name each run once")
    records = [read_run(folder) for folder in folders]
    first, *others = records
    for record in others:
        units = {first.unit, record.unit}
        if len(units) > 1 and not units <= {f"bits per {unit}" for unit in ("byte", metrics_file.NO_BYTE)}:
            rule = f"counts {record.unit}, and {first.folder} {first.unit}, which do not compare"
            raise ConfigError(f"{record.folder}: {rule}; give runs of one objective")
    return records


def compose(records: Sequence[RunHistory], scored: list[dict[str, Any]], answers: Sequence[dict[str, Answer]]) -> str:
    """Return the page, of at most ``MOST_PAGE_BYTES``. ``scored``: losses by position from the files of --positions."""
    runs = [PageRun(*fields) for fields in zip(labels(records), range(len(records)), records, answers, strict=True)]
    style, script = (Markup((Path(__file__).parent / name).read_text()) for name in ("report.css", "report.js"))
    charts, losses = Markup(curves(runs)), Markup(positions(runs, scored))
    room = Room(MOST_PAGE_BYTES - _MARGIN_BYTES - sum(len(text.encode()) for text in (charts, losses, style, script)))
    hashes = [f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}" for text in (script, style)]
    policy = (
        f"default-src 'none'; script-src '{hashes[0]}'; style-src '{hashes[1]}'; img-src data:; media-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    configs = [flattened(record.config) if record.config else {} for record in records]
    validated = [min((s.values.min() for s in record.evaluations.values()), default=np.inf) for record in records]
    # Not the present time: the same runs give the same page.
    newest = max((record.changed for record in records), default=0.0)
    return pieces().page(
        runs,
        room,
        {
            "title": ", ".join(run.name for run in runs),
            "policy": Markup(policy),
            "style": style,
            "script": script,
            "updated": datetime.fromtimestamp(newest, timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
            "curves": charts,
            "positions": losses,
            "figures": [_figures(record) for record in records],
            "are_best": [loss == min(validated) < np.inf for loss in validated],
            "most_notices": _MOST_NOTICES,
            "most_events": MOST_EVENTS,
            "starts": [[*map(_start, record.starts[-_MOST_STARTS:])] for record in records],
            "plans": [_plan(run) for run in runs],
            "differences": _differences(configs),
            "configs": [{path: _json(config[path]) for path in [*config][:_MOST_KEYS]} for config in configs],
            "config_sizes": [*map(len, configs)],
        },
    )


def labels(records: Sequence[RunHistory]) -> list[str]:
    """Return short distinct names: the last parts of each folder's path, as many as necessary."""
    paths = [record.folder.resolve().parts for record in records]
    for count in range(1, max(map(len, paths)) + 1):
        names = ["/".join(path[-count:]) for path in paths]
        if len({*names}) == len(names):
            break
    return names


def _figures(record: RunHistory) -> list[tuple[str, str, str]]:
    """Return the name, value and small print of each figure; every run has the same names."""
    figures = []
    evaluated = [(float(series.values.min()), split) for split, series in record.evaluations.items()]
    if evaluated:
        best, split = min(evaluated)
        series = record.evaluations[split]
        step = int(series.steps[series.values.argmin()])
        limit = record.setting("train.evaluate_contexts")
        place = f"{split}, step {step:,}"
        if isinstance(limit, int):
            place += f", at most {limit:,} contexts"
        figures.append(("best validation", f"{best:.4f}", f"{record.unit}, {place}"))
    else:
        why = "not evaluated yet" if record.is_evaluated else "none, as train.evaluate_every is null"
        figures.append(("best validation", "–", why))
    loss = record.train.get("bits")
    mean = "–" if loss is None else f"{running_mean(loss).last:.4f}"
    figures.append(("training loss", mean, f"{record.unit}, running mean"))
    steps = record.setting("train.steps")
    share = f"{record.last_step / steps:.0%} of {steps:,}" if isinstance(steps, int) and steps > 0 else ""
    figures.append(("steps", f"{record.last_step:,}", share))
    rate = record.median("tokens_per_second")
    figures.append(("throughput", "–" if rate is None else number(rate), "tokens a second, median"))
    seconds = record.total("seconds")
    total = "–" if seconds is None else counting.duration(seconds)
    figures.append(("training time", total, "in steps, without evaluations"))
    if (mfu := record.median("mfu")) is not None:
        figures.append(("MFU", f"{mfu:.1%}", "of the peak, by visited tiles"))
    else:
        content = record.total("content")
        what = f"{record.unit.split()[-1]}s"
        figures.append((f"{what} read", "–" if content is None else number(content), "in all steps"))
    return figures


def _start(start: dict[str, Any]) -> dict[str, Any]:
    """Describe a start of a run: its time, machines, versions and changes."""
    devices, hosts, changes = (start.get(name) for name in ("devices", "hosts", "changes"))
    counts = devices.items() if isinstance(devices, dict) else ()
    machines = ", ".join(f"{count} × {name}" for name, count in counts)
    if isinstance(hosts, list) and hosts:
        hidden_hosts = f" and {len(hosts) - 4} more" if len(hosts) > 4 else ""
        machines += f" on {', '.join(map(str, hosts[:4]))}{hidden_hosts}"
    pairs = []
    for path, pair in [*changes.items()] if isinstance(changes, dict) else []:
        old, new = pair if isinstance(pair, list) and len(pair) == 2 else (None, pair)
        pairs.append((path, _json(old), _json(new)))
    return {
        "time": str(start.get("time", "")).replace("T", " ").replace("+00:00", " UTC"),
        "step": start["step"],
        "how": start.get("how", ""),
        "source": _listed(start.get("from")),
        "machines": machines,
        "versions": _listed(start.get("versions")),
        "changes": pairs[:_MOST_CHANGES],
        "num_more": max(0, len(pairs) - _MOST_CHANGES),
    }


def _listed(content: Any) -> str:
    return ", ".join(f"{key} {value}" for key, value in content.items()) if isinstance(content, dict) else ""


def _json(value: Any) -> str:
    """Format a value like a configuration, but a text without quotation marks."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _plan(run: PageRun) -> dict[str, Any]:
    """Return the planned figures of a run next to the measured ones, and why there is no plan."""
    answer = run.answers.get("plan", Answer("", None, "left out by --quick"))
    plan = answer.content if isinstance(answer.content, dict) else {}
    head = f"planned on {plan['device']}, {counting.processes(processes_of(run.record))}" if plan else "planned"
    return {"answer": answer, "head": head, "rows": _plan_rows(run.record, plan)}


def _plan_rows(record: RunHistory, plan: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return the name, the planned and the measured value of each figure."""
    seconds, memory = record.median("seconds"), record.train.get("peak_memory_bytes")
    step, length, attention = (plan.get(part) or {} for part in ("step", "length", "attention"))
    work = sum_of_flops(plan) if plan else 0
    rows = []
    if total := (plan.get("parameters") or {}).get("total"):
        rows.append(("parameters", f"{total:,}", ""))
    measured = counting.memory(float(memory.values.max())) if memory is not None else ""
    rows.append(("peak memory of a process", counting.memory(peak_bytes(plan)) if plan else "", measured))
    rows.append(("a step, median", "", counting.step_duration(seconds) if seconds else ""))
    if work:
        speed = f"{counting.flops(work / seconds)}/s" if seconds else ""
        rows.append(("operations of a step", counting.flops(work), speed))
    if dense := step.get("dense_flops"):
        rows.append(("the same with dense attention", counting.flops(dense), ""))
    if dense_pairs := attention.get("dense_pairs"):
        rows.append(("pairs that attention visits, of dense causal", f"{attention['pairs'] / dense_pairs:.2%}", ""))
    for what, measure in (("by visited tiles", "mfu"), ("of dense attention", "mfu_dense_equivalent")):
        if (mfu := record.median(measure)) is not None:
            rows.append((f"MFU {what}, median", "", f"{mfu:.2%}"))
    planned_steps = length.get("steps") or record.setting("train.steps")
    rows.append(("steps", f"{planned_steps:,}" if isinstance(planned_steps, int) else "", f"{record.last_step:,}"))
    if (total := length.get("tokens")) and (content := record.total("content")) is not None:
        rows.append(("bytes read", f"{'up to ' if length.get('at_most') else ''}{number(total)}", number(content)))
    if epochs := length.get("epochs"):
        rows.append(("epochs", f"{epochs:,.3g}", ""))
    return rows


def _differences(configs: Sequence[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """Return the paths at which the configurations differ, with the value of each."""
    paths = dict.fromkeys(path for config in configs for path in config)
    differing = [path for path in paths if len({repr(config.get(path)) for config in configs}) > 1]
    return [
        (path, [_json(config[path]) if path in config else "–" for config in configs])
        for path in differing[:_MOST_KEYS]
    ]
