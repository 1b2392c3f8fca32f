"""`longstride train`: start the deepspeed launcher around launcher/train.py, supervise it, and restart it.

With `--max-restarts N` a run that has lost a process or host is started again on what remains.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

import torch

from longstride.data_pipelines.plain_files import open_plain, read_plain
from longstride.kernels import ConfigError
from longstride.launcher.cluster.hosts import find_hosts
from longstride.launcher.cluster.placement import HostRanks, LocalRanks, NoHostAnswersError, local_accelerators
from longstride.launcher.cluster.supervisor import Launch, Outcome, StopRequest, orphan_seconds, supervise
from longstride.launcher.config import RunConfig, load_config, load_json_object
from longstride.launcher.data import WeightSource, check_data, check_output, discard_start, profile_steps
from longstride.launcher.output import exit_codes, file_names, metrics_file, say
from longstride.launcher.ranks import check_unlocked
from longstride.launcher.stops import StopFile

_FIRST_WAIT_SECONDS = 1.0  # before a restart; doubles with each restart
_LONGEST_WAIT_SECONDS = 60.0
_MOST_IN_VAIN = 3  # attempts in a row without progress
_POLL_SECONDS = 1.0
_UNLOCK_SECONDS = 60.0  # for the system, or a file server, to free the lock of a process that was killed
_STEP_FOLDER = re.compile(r"step-(\d{8,})")
_TAIL_BYTES = 1 << 16  # of metrics.jsonl
_MOST_DIGITS = 32  # of the step in file_names.OVER


def run(arguments: argparse.Namespace) -> int:
    """Check the options, the run folder and the data; start and supervise the ranks; return the run's exit code."""
    started = time.time()
    config = load_config(arguments.config, arguments.overrides, say)
    if arguments.max_restarts < 0:
        raise ConfigError(f"--max-restarts={arguments.max_restarts}: must be at least 0")
    if arguments.processes is not None and arguments.processes < 1:
        raise ConfigError(f"--processes={arguments.processes}: must be at least 1")
    if arguments.dry_run:
        return _dry_run(config, arguments)
    WeightSource.of(arguments, arguments.resume, elsewhere=arguments.hostfile is not None)
    ranks = _checked_ranks(config, arguments, started)
    output, timeout = Path(config.train.output).absolute(), config.train.timeout_seconds
    with closing(StopRequest()) as request:

        def attempt(launch: Launch) -> Outcome:
            ended = supervise(
                launch, request, timeout, lambda: arguments.replay is not None or is_done(output, config.train.steps)
            )
            if ended.ended_before_first_step and request.signal is not None:
                result = "nothing is kept" if discard_start(output) else "nothing is added to the run"
                if steps := saved_steps(output):
                    result = f"--resume auto continues from step {max(steps)}"
                say(f"stopped by {request.signal.name} before the first step; {result}")
            return ended

        say(f"starting {ranks} …")
        return run_with_restarts(
            output, arguments.resume, arguments.max_restarts, ranks, request, attempt, orphan_seconds(timeout)
        )


def _dry_run(config: RunConfig, arguments: argparse.Namespace) -> int:
    """Perform `--dry-run` for the number of processes that the options name; this machine may have fewer devices."""
    for option in ("replay", "profile"):
        if value := getattr(arguments, option):
            raise ConfigError(f"--{option}={value}: needs steps, but --dry-run takes none; leave out one of them")
    source = WeightSource.of(arguments, arguments.resume)
    hosts = find_hosts(arguments)
    if hosts is not None:
        config.check_hosts(hosts.of_ranks)
        processes = len(hosts.of_ranks)
    else:
        processes = arguments.processes or local_accelerators() or 1
        config.check_world_size(processes)
    from longstride.launcher.planning import dry_run  # which imports deepspeed

    return dry_run.start(config, processes, arguments.resume, source, trusted=arguments.trust_checkpoint)


def _checked_ranks(config: RunConfig, arguments: argparse.Namespace, started: float) -> LocalRanks | HostRanks:
    """Return the ranks to start, after every check that needs no process."""
    check_output(config.train.output, arguments.resume, arguments.replay)
    if arguments.replay is None:
        check_unlocked(Path(config.train.output))
    elif arguments.max_restarts:
        raise ConfigError(f"--max-restarts={arguments.max_restarts}: a replay is not started again; leave it out")
    profile_steps(arguments.profile, arguments.replay)
    hosts = find_hosts(arguments)
    if hosts is not None:
        config.check_hosts(hosts.of_ranks)
        check_data(config, elsewhere=True)
        return HostRanks(config, arguments, hosts, started)
    processes = arguments.processes
    if processes is None and not torch.cuda.is_available():
        processes = 1  # the launcher would start one per NUMA node
    ranks = LocalRanks(config, arguments, processes, started)
    check_data(config)
    return ranks


def run_with_restarts(
    run: Path,
    resume: str,
    max_restarts: int,
    placement: LocalRanks | HostRanks,
    request: StopRequest,
    supervise: Callable[[Launch], Outcome],
    stop_seconds: float,
) -> int:
    """Launch the ranks until the run ends in a way that a restart cannot fix; return the exit code.

    ``supervise`` runs a launch to its end. ``stop_seconds`` is how long ranks that have lost their launcher may take to
    save and end.
    """
    furthest = Progress(saved=0 if resume == "never" else read_progress(run).saved, recorded=0)
    restarts, in_vain, wait = max_restarts, 0, _FIRST_WAIT_SECONDS
    launch, placed = placement.launch(resume), ""
    resume = "auto" if resume == "never" else resume
    ended, attempted = supervise(launch), True
    while True:
        if ended.code not in exit_codes.RESTARTABLE or max_restarts == 0:
            if ended.code == exit_codes.HUNG:  # the traceback of UNFORESEEN has been printed
                say(f"ended: {ended.description}")
            return ended.code
        if attempted:
            before, furthest = furthest, Progress(*map(max, furthest, read_progress(run)))
            in_vain, wait = (0, _FIRST_WAIT_SECONDS) if furthest != before else (in_vain + 1, wait)
            if ended.has_begun:  # it has moved aside whatever was beyond the step from which it resumed
                resume = "auto"
        if in_vain == _MOST_IN_VAIN:
            step = furthest.saved
            rule = f"{in_vain} attempts in a row did not get beyond step {step}; no more restarts"
            say(f"ended: {ended.description}; {rule}")
            return ended.code
        if restarts == 0:
            say(f"ended: {ended.description}; all {max_restarts} restarts are used")
            return ended.code
        try:
            if not wait_for_stop(request, wait):
                restarts, wait = restarts - 1, min(2 * wait, _LONGEST_WAIT_SECONDS)
                placed = placement.shrink()
            vacate(run, launch.stop_file, request, stop_seconds, placement.end_elsewhere)
            if request.signal is not None:
                return exit_codes.STOPPED if request.at_once else exit_codes.REQUEUE
            launch = placement.launch(resume)
        except NoHostAnswersError as error:
            say(f"ended: {ended.description}; {error}; restarts left: {restarts}")
            # A network may take long to come back. The ranks may train on, so this is not an attempt without progress.
            ended, attempted, wait = Outcome(exit_codes.HUNG, str(error)), False, _LONGEST_WAIT_SECONDS
            continue
        except ConfigError as error:  # the loss left too little; this is not the user's mistake, so not exit code 2
            say(f"ended: {ended.description}; {error}")
            return ended.code
        steps = saved_steps(run)
        where = "the best step" if resume == "best" else f"step {resume}"
        if resume == "auto":
            where = f"step {max(steps)}" if steps else "the start"
        say(f"ended: {ended.description}; continuing from {where} {placed}; restarts left: {restarts}")
        ended, attempted = supervise(launch), True


def wait_for_stop(request: StopRequest, seconds: float) -> bool:
    """Wait before a restart; return early, and True, if a stop is requested."""
    end = time.monotonic() + seconds
    while request.signal is None and (remaining := end - time.monotonic()) > 0:
        request.listen(remaining)
    request.tell()
    return request.signal is not None


def vacate(
    run: Path, stop_file: Path, request: StopRequest, stop_seconds: float, end_elsewhere: Callable[[], None]
) -> None:
    """Wait until no rank of a launch writes to the run folder any more, or until the user asks to leave at once.

    Rank 0 holds the lock of the folder. Its stop file makes it save within ``stop_seconds``, and all ranks end.
    ``end_elsewhere`` ends the remaining ranks on other hosts. ConfigError means that another run writes there.
    """

    def comes_free(seconds: float) -> bool:
        end = time.monotonic() + seconds
        while True:
            with suppress(ConfigError):
                check_unlocked(run)
                return True
            if request.at_once or (remaining := end - time.monotonic()) <= 0:
                return False
            request.listen(min(remaining, _POLL_SECONDS))
            request.tell()  # the stop file has been written

    file = StopFile(stop_file)
    try:
        free = comes_free(0)
        if not free:
            file.write("the loss of its launcher")
            free = comes_free(stop_seconds)
        if not request.at_once:
            end_elsewhere()  # even if the lock is free, as ranks other than 0 may remain
        if not free and not comes_free(_UNLOCK_SECONDS) and not request.at_once:
            check_unlocked(run)
    finally:
        file.remove()


class Progress(NamedTuple):
    """The newest steps in the files of a run folder; 0 before the first."""

    saved: int
    recorded: int


def read_progress(run: Path) -> Progress:
    """Read the newest steps of a run from the names of its checkpoints and the last lines of metrics.jsonl."""
    try:
        with open_plain(run / file_names.METRICS, follow_links=False) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read(_TAIL_BYTES).splitlines(keepends=True)
    except OSError:
        lines = []
    recorded = max((line["step"] for line in map(metrics_file.parse_line, lines) if line), default=0)
    return Progress(max(saved_steps(run), default=0), recorded)


def saved_steps(run: Path) -> list[int]:
    """Return the steps that have a checkpoint folder, without reading its content."""
    try:
        names = [path.name for path in (run / file_names.CHECKPOINTS).iterdir()]
    except OSError:
        return []
    return [int(match[1]) for match in map(_STEP_FOLDER.fullmatch, names) if match]


def is_done(run: Path, last_step: int | None) -> bool:
    """Whether the last step of a run is saved, or the one after which `train.stop_when` ended it.

    ``last_step`` is None for a run whose length is set in epochs. Then its config.json has the number of steps. If the
    step is known, config.json is not read: an earlier start with fewer steps may have written it.
    """
    saved = saved_steps(run)
    with suppress(OSError, ValueError):
        if int(read_plain(run / file_names.OVER, _MOST_DIGITS, follow_links=False)) in saved:
            return True
    if last_step is None:
        try:
            last_step = load_json_object(run / file_names.CONFIG, follow_links=False)["train"]["steps"]
        except (ConfigError, KeyError, TypeError):
            return False
    return last_step in saved
