"""`longstride train`: starts the deepspeed launcher around launcher/train.py, and supervises it."""

from __future__ import annotations

import argparse
import time
from contextlib import closing
from pathlib import Path

import torch

from longstride.kernels import ConfigError
from longstride.launcher.cluster.hosts import find_hosts
from longstride.launcher.cluster.placement import HostRanks, LocalRanks, accelerators_here
from longstride.launcher.cluster.restarts import is_done, run_with_restarts, saved_steps
from longstride.launcher.cluster.supervisor import Launch, Outcome, StopRequest, orphan_seconds, supervise
from longstride.launcher.config import RunConfig, load_config
from longstride.launcher.data import FromOptions, check_data, check_output, discard_start, profile_steps
from longstride.launcher.output import say
from longstride.launcher.ranks import check_unlocked


def run(arguments: argparse.Namespace) -> int:
    """Starts the ranks and stays with them to the end; returns the run's exit code.

    Raises:
        ConfigError: the configuration or the run folder is wrong; found here, once, before any rank starts.
        DataError: the data folder is wrong.
    """
    started = time.time()
    config = load_config(arguments.config, arguments.overrides, say)
    if arguments.max_restarts < 0:
        raise ConfigError(f"--max-restarts={arguments.max_restarts}: must be at least 0")
    if arguments.dry_run:
        return _dry_run(config, arguments)
    FromOptions.of(arguments, arguments.resume, elsewhere=arguments.hostfile is not None)
    ranks = _checked_ranks(config, arguments, started)
    output, timeout = Path(config.train.output).absolute(), config.train.timeout_seconds
    with closing(StopRequest()) as request:

        def attempt(launch: Launch) -> Outcome:
            ended = supervise(
                launch, request, timeout, lambda: arguments.replay is not None or is_done(output, config.train.steps)
            )
            if ended.unbegun and request.signal is not None:
                kept = "nothing is kept" if discard_start(output) else "nothing is added to the run"
                if steps := saved_steps(output):
                    kept = f"--resume auto goes on from step {max(steps)}"
                say(f"stopped by {request.signal.name} before the first step; {kept}")
            return ended

        say(f"starting {ranks} …")
        return run_with_restarts(
            output, arguments.resume, arguments.max_restarts, ranks, request, attempt, orphan_seconds(timeout)
        )


def _dry_run(config: RunConfig, arguments: argparse.Namespace) -> int:
    """What `--dry-run` does for as many processes as the options ask for; they need not be to be had here."""
    for option in ("replay", "profile"):
        if value := getattr(arguments, option):
            raise ConfigError(f"--{option}={value}: is of steps that are taken; leave it out, or --dry-run")
    source = FromOptions.of(arguments, arguments.resume)
    hosts = find_hosts(arguments)
    if hosts is not None:
        config.check_hosts(hosts.of_ranks)
        processes = len(hosts.of_ranks)
    else:
        processes = _number_of_processes(arguments.processes) or accelerators_here() or 1
        config.check_world_size(processes)
    from longstride.launcher.planning import dry_run  # which imports deepspeed

    return dry_run.start(config, processes, arguments.resume, source, trusted=arguments.trust_checkpoint)


def _checked_ranks(config: RunConfig, arguments: argparse.Namespace, started: float) -> LocalRanks | HostRanks:
    """The ranks to start, after every check that can be made before a process is started."""
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
    processes = _number_of_processes(arguments.processes)
    if processes is None and not torch.cuda.is_available():
        processes = 1  # the launcher would start one a NUMA node
    ranks = LocalRanks(config, arguments, processes, started)
    check_data(config)
    return ranks


def _number_of_processes(given: int | None) -> int | None:
    """As --processes has it; ConfigError where that is no number of them."""
    if given is not None and given < 1:
        raise ConfigError(f"--processes={given}: must be at least 1")
    return given
