"""starts.jsonl: each start of a run: when, from which step, on which machines, and what was changed since the last."""

from __future__ import annotations

import json
import os
import platform
import socket
from collections import Counter
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from longstride.data_pipelines.plain_files import open_plain
from longstride.kernels import ConfigError
from longstride.launcher.checkpoints import error_line
from longstride.launcher.config import flattened, load_json_object
from longstride.launcher.data import Run
from longstride.launcher.engine import package_versions
from longstride.launcher.output import file_names, say, version_of
from longstride.launcher.ranks import Ranks
from longstride.launcher.training.recorder import LineFile


def describe_start(run: Run, step: int | None) -> dict[str, Any]:
    """A start, as a line of starts.jsonl; called before config.json is written anew. All ranks must call.

    ``step``: of the checkpoint that the run goes on from; None: it begins anew.
    """
    places = run.ranks.gather_objects((socket.gethostname(), _device_name(run.ranks)))
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "step": step or 0,
        "how": "resume" if step is not None else "from" if run.origin is not None else "new",
        **({"from": run.origin} if step is None and run.origin is not None else {}),
        "hosts": list(dict.fromkeys(host for host, _ in places)),
        "processes": run.ranks.world_size,
        "devices": dict(Counter(device for _, device in places)),
        "device_type": run.ranks.device.type,
        "versions": {
            "longstride": version_of("longstride"),
            "python": platform.python_version(),
            **package_versions(run.config.model),
        },
        "changes": _changes(run) if run.ranks.is_first else {},
    }


def write_start(run: Path, start: dict[str, Any]) -> None:
    """Appends a start; where it cannot be written, that is said, and ends nothing."""
    path = run / file_names.STARTS
    text = json.dumps(start)
    try:
        if os.path.lexists(path):
            with open_plain(path, follow_links=False) as file:  # a power cut may have torn the last line
                file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
                text = text if file.read() in (b"", b"\n") else f"\n{text}"
        lines = LineFile(path, say)
        lines.append(text, "this start")
        lines.close()
    except OSError as error:
        say(f"{error_line(error, path)}; this start is not written down")


def _changes(run: Run) -> dict[str, list[Any]]:
    """By its path, each value of the configuration that is another than at the start before: [old, new]."""
    try:
        before = flattened(load_json_object(run.folder / file_names.CONFIG, follow_links=False))
    except ConfigError:  # there is none, or none that can be told
        return {}
    now = flattened(run.config.to_json())
    paths = dict.fromkeys((*before, *now))
    return {path: [before.get(path), now.get(path)] for path in paths if before.get(path) != now.get(path)}


def _device_name(ranks: Ranks) -> str:
    """The card of this process by its name, or the processor's where it computes on that."""
    if ranks.device.type == "cuda":
        return torch.cuda.get_device_name(ranks.device)
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
