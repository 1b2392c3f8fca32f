"""Check at the start that all ranks have the same versions, code, data and configuration.

Each host reads its own files, so one may have other data or an older configuration. Later nothing would show it:
gradients of other data, or another learning rate, are summed like any others.
"""

from __future__ import annotations

from collections.abc import Sequence

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
_Setup = tuple[dict[str, object], str, dict[str, str]]  # values by path, and the place and the splits of the data


def check_agreement(run: RunSetup, hosts: Sequence[str], replay: int | None = None) -> None:
    """Check that all ranks have the same run, and raise AgreedError on every rank if not. All ranks must call.

    ``hosts`` are those of the ranks in their order, and ``replay`` is the step to replay.
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
    (first, *_), *_ = setups = ranks.gather_objects((values, run.config.data.path, dict(data.identity.splits)))
    names = [f"rank {rank} on {host.partition(' ')[0]}" for rank, host in enumerate(hosts)]
    for setup, name in zip(setups, names, strict=True):
        for path in (*first, *setup[0]):
            if first.get(path, ...) != setup[0].get(path, ...):  # 1 and 1.0 are equal
                raise AgreedError(str(_problem(path, setups[0], setup, names[0], name)))


def _problem(path: str, first: _Setup, second: _Setup, first_name: str, second_name: str) -> Problem:
    """Describe how two ranks differ at a path: both values, which rank has which, and what to do."""
    (values, place, splits), (other_values, other_place, other_splits) = first, second
    if path == _DATA:
        what = ModelData.different_splits(splits, other_splits)
        there = f"{other_place} has for {second_name}"
        return Problem(path, f"has {what} for {first_name} than {there}; give all hosts the same data", place)
    there = f"has {Problem.format_value(other_values[path])}" if path in other_values else "leaves it out"
    installed = path in (_CODE, "torch", "deepspeed") or ":" in path  # a class of another package
    remedy = "install the same on all hosts" if installed else "give all ranks the same configuration"
    value = values.get(path, ...)
    rule = f"{first_name} {'leaves it out' if value is ... else 'has it'}, and {second_name} {there}; {remedy}"
    return Problem(path, rule, value)
