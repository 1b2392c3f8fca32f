"""Check at the start that all ranks have the same versions, code, data and configuration.

Each host reads its own files, so one may have other data or an older configuration. Later nothing would show it:
gradients of other data, or another learning rate, are summed like any others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import NamedTuple

from longstride.kernels import Problem
from longstride.launcher.config import flattened
from longstride.launcher.data import RunSetup
from longstride.launcher.engine import package_versions
from longstride.launcher.models import ModelData
from longstride.launcher.output import AgreedError
from longstride.launcher.ranks import code_digest

_DATA = "data.path"  # the paths may differ, but not the data
_CODE = "longstride"
# Keys whose values may differ between hosts: paths, how files are read, what is logged, and free text. Another check
# covers the run folder: all ranks must see a file in it.
_LOCAL_KEYS = (
    *("data.workers", "data.prefetch", "data.worker_timeout_seconds", "data.remote.", "train.output", "notes"),
    *(f"deepspeed.{name}" for name in ("aio.", "log_level")),
    # Only the first rank has monitors. Other hosts may lack the account and the package.
    *(f"deepspeed.{name}." for name in ("comet", "csv_monitor", "tensorboard", "wandb")),
)
_LOCAL_KEY_ENDS = (".nvme_path", ".output_file")  # DeepSpeed's offload folders, and the file of its profiler
_MOST_CHARACTERS = 80  # of a value


class RankSetup(NamedTuple):
    """The versions, code, data and configuration of a rank."""

    values: dict[str, object]  # that must be equal, by path; the first that differs is reported
    place: str  # of its data
    splits: dict[str, str]  # the fingerprints of its data's splits


def check_agreement(run: RunSetup, hosts: Sequence[str], replay: int | None = None) -> None:
    """Check that all ranks have the same run. All ranks must call, before they build anything.

    Args:
        run: this rank's.
        hosts: of the ranks in their order.
        replay: the step to replay.

    Raises:
        AgreedError: on every rank, if they differ; see ``difference``.
    """
    config, data, ranks = flattened(run.config.to_json()), run.data, run.ranks
    values: dict[str, object] = {
        **package_versions(run.config.model),  # first, as other differences may follow from it
        _CODE: f"code {code_digest()[:12]}",
        _DATA: data.fingerprint,  # before the number of steps, which may follow from it
        "--resume": run.resume,
        "--from": None if run.source is None else run.source.words()[2:],  # the path may differ
        "--replay": replay,
        "--profile": run.profile_steps,
    }
    local = {_DATA, *(path for path in config if path.startswith(_LOCAL_KEYS) or path.endswith(_LOCAL_KEY_ENDS))}
    values |= {path: value for path, value in config.items() if path not in local}
    digests = ranks.gather_objects(hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest())
    if len({*digests}) == 1:
        return
    setups = ranks.gather_objects(RankSetup(values, run.config.data.path, dict(data.identity.splits)))
    names = [f"rank {rank} on {host.partition(' ')[0]}" for rank, host in enumerate(hosts)]
    for setup, name in zip(setups, names, strict=True):
        if problem := difference(setups[0], setup, names[0], name):
            raise AgreedError(str(problem))


def difference(first: RankSetup, second: RankSetup, first_name: str, second_name: str) -> Problem | None:
    """Describe the first value in which two ranks differ: both values, which rank has which, and what to do.

    Returns None if all are equal, as 1 and 1.0 are.
    """
    paths = (*first.values, *second.values)
    path = next((key for key in paths if first.values.get(key, ...) != second.values.get(key, ...)), None)
    if path is None:
        return None
    if path == _DATA:
        what = ModelData.different_splits(first.splits, second.splits)
        there = f"{shorten(second.place)} has for {second_name}"
        return Problem(path, f"has {what} for {first_name} than {there}; give all hosts the same data", first.place)
    there = f"has {short_json(second.values[path])}" if path in second.values else "leaves it out"
    installed = path in (_CODE, "torch", "deepspeed") or ":" in path  # a class of another package
    remedy = "install the same on all hosts" if installed else "give all ranks the same configuration"
    value = first.values.get(path, ...)
    rule = f"{first_name} {'leaves it out' if value is ... else 'has it'}, and {second_name} {there}; {remedy}"
    return Problem(path, rule, value)


def shorten(text: str) -> str:
    """Cut a text to 80 characters."""
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 1]}…"


def short_json(value: object) -> str:
    """Return a value as JSON of at most 80 characters."""
    return shorten(json.dumps(value, ensure_ascii=False))
