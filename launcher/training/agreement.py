"""Whether all ranks were given the same run: versions, code, data and configuration, held together at the start.

Each host reads its own files, so one of them may have other data or an older configuration. Nothing later would tell:
gradients of other data, or steps of another rate, are added up like any others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import NamedTuple

from longstride.kernels import Problem
from longstride.launcher.config import flattened
from longstride.launcher.data import Run
from longstride.launcher.engine import package_versions
from longstride.launcher.models import ModelData
from longstride.launcher.output import AgreedError
from longstride.launcher.ranks import code_digest

_DATA = "data.path"  # where it lies may differ; what lies there may not
_CODE = "longstride"
# What a host may have otherwise: where files lie there, how it reads them, what it logs, and free text. The run folder
# is known by a file that all ranks must see in it.
_OWN = (
    *("data.workers", "data.prefetch", "data.worker_timeout_seconds", "data.remote.", "train.output", "notes"),
    *(f"deepspeed.{name}" for name in ("aio.", "log_level")),  # how its disk is best read; what it says
    # Monitors are the first rank's: others may have no account, and no package.
    *(f"deepspeed.{name}." for name in ("comet", "csv_monitor", "tensorboard", "wandb")),
)
_OWN_ENDS = (".nvme_path", ".output_file")  # of DeepSpeed's folders for what leaves memory, and of its profiler
_MOST_CHARACTERS = 80  # of a value


class Given(NamedTuple):
    """What a rank was given."""

    alike: dict[str, object]  # all that must be the same, by its path, in the order in which differences are told
    place: str  # of its data
    splits: dict[str, str]  # the fingerprints of its data's splits


def check_agreement(run: Run, hosts: Sequence[str], replay: int | None = None) -> None:
    """Whether all ranks were given the same run. All ranks must call, before they build anything.

    ``hosts``: of the ranks in their order. ``replay``: the step to be replayed.

    Raises:
        AgreedError: on every rank, where they were not; see ``difference``.
    """
    config, data, ranks = flattened(run.config.to_json()), run.data, run.ranks
    alike: dict[str, object] = {
        **package_versions(run.config.model),  # first: they decide what the rest means
        _CODE: f"code {code_digest()[:12]}",
        _DATA: data.fingerprint,  # before the steps, which may follow from it
        "--resume": run.resume,
        "--from": None if run.source is None else run.source.words()[2:],  # the folder may lie elsewhere
        "--replay": replay,
        "--profile": run.profile_steps,
    }
    own = {_DATA, *(path for path in config if path.startswith(_OWN) or path.endswith(_OWN_ENDS))}
    alike |= {path: value for path, value in config.items() if path not in own}
    digests = ranks.gather_objects(hashlib.sha256(json.dumps(alike, sort_keys=True).encode()).hexdigest())
    if len({*digests}) == 1:
        return
    everyone = ranks.gather_objects(Given(alike, run.config.data.path, dict(data.identity.splits)))
    names = [f"rank {rank} on {host.partition(' ')[0]}" for rank, host in enumerate(hosts)]
    for given, name in zip(everyone, names, strict=True):
        if problem := difference(everyone[0], given, names[0], name):
            raise AgreedError(str(problem))


def difference(first: Given, second: Given, first_name: str, second_name: str) -> Problem | None:
    """The first thing that two ranks were given otherwise: both values, who has which, and what to do.

    None where all is equal: a number may be written 1 or 1.0.
    """
    paths = (*first.alike, *second.alike)
    path = next((each for each in paths if first.alike.get(each, ...) != second.alike.get(each, ...)), None)
    if path is None:
        return None
    if path == _DATA:
        what = ModelData.different_splits(first.splits, second.splits)
        there = f"{_cut(second.place)} has for {second_name}"
        return Problem(path, f"has {what} for {first_name} than {there}; give all hosts the same data", first.place)
    there = _cut(json.dumps(second.alike[path], ensure_ascii=False)) if path in second.alike else "left out"
    installed = path in (_CODE, "torch", "deepspeed") or ":" in path  # a class of another package
    remedy = "install the same on all hosts" if installed else "give all ranks the same configuration"
    here = first.alike.get(path, ...)
    rule = f"{'is left out' if here is ... else 'is so'} for {first_name}, and {there} for {second_name}; {remedy}"
    return Problem(path, rule, here)


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 1]}…"
