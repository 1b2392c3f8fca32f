"""Start a run at step 0 or at one of its checkpoints, and record each start.

Each host reads its own files, so one may have other data or an older configuration. Later nothing would show it:
gradients of other data, or another learning rate, are summed like any others. So all ranks first check that they agree.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from longstride.data_pipelines.durable import flush_folder, naming
from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.plain_files import open_plain
from longstride.kernels import ConfigError, Problem
from longstride.launcher.checkpoints import (
    Checkpoint,
    error_line,
    first_undamaged,
    list_checkpoints,
    open_checkpoint,
    rewind_to,
    write_json,
)
from longstride.launcher.config import RunConfig, flattened, load_json_object
from longstride.launcher.data import RunSetup, TrainingData, check_output, resolve_steps
from longstride.launcher.engine import check_engine, package_versions, prepare_accelerator
from longstride.launcher.identity import check_matches
from longstride.launcher.models import ModelData
from longstride.launcher.output import AgreedError, file_names, metrics_file, say, version_of
from longstride.launcher.ranks import Ranks, code_digest, processor_name, wait_until_visible
from longstride.launcher.training.guards import GuardMemory, PlateauMemory
from longstride.launcher.training.recorder import LineFile
from longstride.launcher.training.samples import num_sampled

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
_MARK = ".start-"  # prefix of the file by which all ranks check that they share the run folder


class Start(NamedTuple):
    """The checkpoints from which a run may resume, best first; without any it begins anew."""

    candidates: Sequence[Checkpoint] = ()
    refused: Sequence[str] = ()  # a line for each folder that is not a checkpoint


def set_up(config: RunConfig, ranks: Ranks, resume: str, replay: str | None = None) -> RunSetup:
    """Return the setup of a run, after every check that needs neither a process group nor its checkpoints.

    ``resume`` and ``replay`` are values of the options.
    """
    prepare_accelerator(config)
    check_engine(config, ranks)
    check_output(config.train.output, resume, replay)  # before the data, which may take a while
    data = TrainingData(config, ranks)
    if config.train.samples_every:
        num_sampled(config, data.identity)
    return RunSetup(resolve_steps(config, data, ranks), ranks, data, resume=resume, epochs=config.train.epochs)


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


def choose_start(run: RunSetup) -> Start:
    """Check the data and find the checkpoints of a run; write nothing. ConfigError or DataError if they do not fit."""
    run.data.stream()  # raises DataError
    if run.ranks.local_rank == 0:  # once per host
        run.data.check()
    if run.ranks.is_first and run.data.unusual_setting:
        say(f"notice: {run.data.unusual_setting}")
    return _read_start(run)


def _read_start(run: RunSetup) -> Start:
    """Find the checkpoints in the run folder; see ``choose_start``."""
    check_output(run.config.train.output, run.resume)
    if run.resume == "never":
        return Start()
    if run.resume == "auto":
        checkpoints, refusals = list_checkpoints(run.folder, trusted=run.trusted)
        start = Start(checkpoints, [refusal.line for refusal in refusals])
    else:
        step: int | Literal["best"] = "best" if run.resume == "best" else int(run.resume)
        start = Start([open_checkpoint(run.folder, step, trusted=run.trusted)])
    for checkpoint in start.candidates[:1]:
        _check_fits(run, checkpoint)
    if not start.candidates and start.refused:
        raise ConfigError("no checkpoint can be read:", *start.refused)
    return start


def _check_fits(run: RunSetup, checkpoint: Checkpoint) -> None:
    """Raise ConfigError if the manifest and configuration of a checkpoint do not fit a run."""
    check_matches(checkpoint, run.config, run.data.identity)
    last_step = run.config.train.last_step
    if checkpoint.manifest.step > last_step:  # the message uses the unit in which the user set the length
        rule = f"the checkpoint {checkpoint.folder} is already beyond it"
        if run.epochs is None:
            raise ConfigError.at("train.steps", last_step, rule)
        raise ConfigError.at("train.epochs", run.epochs, f"comes to step {last_step}, and {rule}")
    try:
        run.data.stream(checkpoint.stream)
        GuardMemory.model_validate(checkpoint.manifest.guards or {})
        PlateauMemory.model_validate(checkpoint.manifest.plateau or {})
    except (ConfigError, DataError) as error:
        raise ConfigError(*(f"{checkpoint.folder}: {line}" for line in str(error).splitlines())) from None


def begin(run: RunSetup) -> Checkpoint | None:
    """Verify the checkpoints; return the first intact one, or None to begin anew. All ranks must call.

    The folder is read again, as the run that had its lock may have saved since ``choose_start``. The first rank decides
    for all.

    Raises:
        AgreedError: on every rank, if they share no run folder, it is in use, no candidate is intact, or the chosen one
            does not fit or must be trusted first.
    """
    check_shared(run.folder, run.ranks)
    start = run.ranks.run_on_first(lambda: _read_start(run))
    chosen, damaged = first_undamaged(run.folder, start.candidates, run.ranks)
    damaged = [*start.refused, *damaged]
    if chosen is None and start.candidates:
        raise AgreedError("\n".join(["no checkpoint is complete:", *damaged]))
    if chosen is not None and chosen.folder != start.candidates[0].folder:  # an older one has not been checked
        older = chosen
        run.ranks.run_on_first(lambda: _check_fits(run, older))
    if run.ranks.is_first:
        for line in damaged:
            say(f"passed over: {line}")
        saved = {} if chosen is None else chosen.manifest.versions
        for name, source in run.config.model.foreign_code().items():
            if saved.get(name, source) != source:
                say(f"notice: {name} comes from {source}, but the checkpoint was made with {saved[name]}")
    return chosen


def check_shared(run: Path, ranks: Ranks) -> None:
    """Raise AgreedError on every rank unless all see what the first one writes to a run folder. All ranks must call."""
    if ranks.world_size == 1:
        return
    # A new name defeats cached listings.
    name = ranks.gather_objects(f"{_MARK}{uuid.uuid4().hex}")[0]
    if ranks.is_first:
        for leftover in run.glob(f"{_MARK}*"):  # from a process that was killed
            leftover.unlink()
        (run / name).touch()
    ranks.barrier()
    is_visible = wait_until_visible(lambda: (run / name).exists() or None, time.monotonic())
    blind = [host for host in ranks.gather_objects(None if is_visible else socket.gethostname()) if host]
    if ranks.is_first:
        (run / name).unlink()
    if blind:
        rule = f"{blind[0]} does not see what the first process writes there; name a folder that all hosts share"
        raise AgreedError(str(Problem("train.output", rule, str(run))))


def prepare_folder(run: RunSetup, chosen: Checkpoint | None) -> None:
    """Write config.json and the start, and move aside whatever is beyond the step from which the run starts.

    Nothing is deleted: it gets another name. All ranks must call.
    """
    start = describe_start(run, chosen.manifest.step if chosen else None)
    if run.ranks.is_first:
        step = chosen.manifest.step if chosen else 0
        (run.folder / file_names.CHECKPOINTS).mkdir(parents=True, exist_ok=True)
        # Lines are cut last, so that after a crash the newest checkpoint still has all of its lines.
        with naming(run.folder / file_names.METRICS):
            moved = [*rewind_to(run.folder, step), metrics_file.cut_metrics(run.folder, step)]
        (run.folder / file_names.OVER).unlink(missing_ok=True)
        write_json(run.folder / file_names.CONFIG, run.config.to_json())
        write_json(run.folder / file_names.DATA, run.data.identity.to_json())
        write_start(run.folder, start)
        flush_folder(run.folder)
        if chosen is None:
            # Flush the name of the new folder, and of the folders above it, which may be new too.
            for parent in run.folder.absolute().parents:
                with suppress(PermissionError):  # a folder may be searchable but not readable
                    flush_folder(parent)
                if parent.is_mount():
                    break
        if chosen and step >= run.config.train.last_step:
            longer = f"train.epochs={2 * run.epochs:g}" if run.epochs else f"train.steps={2 * step}"
            say(f"{run.folder} is finished: {chosen.folder.name} is its last; --resume auto {longer} continues")
        elif chosen:
            say(f"continuing from {chosen.folder}")
        for path in filter(None, moved):
            say(f"kept later data as {path}")
    run.ranks.barrier()


def describe_start(run: RunSetup, step: int | None) -> dict[str, Any]:
    """Describe a start for starts.jsonl, before config.json is replaced. All ranks must call.

    ``step`` is that of the checkpoint from which the run resumes; None for a new run.
    """
    device = run.ranks.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()
    places = run.ranks.gather_objects((socket.gethostname(), name))
    changes = {}
    if run.ranks.is_first:
        with suppress(ConfigError):  # there is no readable config.json
            before = flattened(load_json_object(run.folder / file_names.CONFIG, follow_links=False))
            now = flattened(run.config.to_json())
            paths = dict.fromkeys((*before, *now))
            changes = {path: [before.get(path), now.get(path)] for path in paths if before.get(path) != now.get(path)}
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "step": step or 0,
        "how": "resume" if step is not None else "from" if run.origin is not None else "new",
        **({"from": run.origin} if step is None and run.origin is not None else {}),
        "hosts": list(dict.fromkeys(host for host, _ in places)),
        "processes": run.ranks.world_size,
        "devices": dict(Counter(device for _, device in places)),
        "device_type": device.type,
        "versions": {
            "longstride": version_of("longstride"),
            "python": platform.python_version(),
            **package_versions(run.config.model),
        },
        "changes": changes,
    }


def write_start(run: Path, start: dict[str, Any]) -> None:
    """Append a start to starts.jsonl. A failure is reported and ends nothing."""
    path = run / file_names.STARTS
    text = json.dumps(start)
    try:
        if os.path.lexists(path):
            with open_plain(path, follow_links=False) as file:  # after a power cut the last line may be incomplete
                file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
                text = text if file.read() in (b"", b"\n") else f"\n{text}"
        lines = LineFile(path, say)
        lines.append(text, "this start")
        lines.close()
    except OSError as error:
        say(f"{error_line(error, path)}; this start is not recorded")
