"""One group of patterns, measured: a row a pattern, as it stands in a result file."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from benchmarks.attention.cases import Group
from benchmarks.attention.figures import OPERATIONS, PHASES, ByPhase, derived, fastest, rounded_all
from benchmarks.attention.gate import ours, same_bits
from benchmarks.attention.peers import Flex, dense_contenders, flex, reason_of
from benchmarks.attention.tiles import allowed_pairs, visited_pairs
from benchmarks.attention.timing import Contender, Inputs, Turns, inputs_of, peak_bytes, take_turns
from benchmarks.report import rounded
from longstride.kernels.patterns import Pattern

GROUP_SECONDS = 6.0  # of a card, for the turns of one group


class Settings(NamedTuple):
    """What is the same for all groups of a run."""

    backend: str
    repeats: int
    dense_limit: int  # positions
    flex_limit: int  # positions
    flex_patterns: tuple[str, ...]  # names
    bandwidth: float  # bytes a second of a copy


class Measured(NamedTuple):
    """A group's rows, and the patterns that could not run, each with its reason."""

    rows: list[dict[str, Any]]
    failures: list[dict[str, Any]]


def measure(group: Group, device: torch.device, settings: Settings) -> Measured:
    """A row a pattern."""
    sets = inputs_of(group, device)
    own, facts, failures = {}, {}, []
    for name, pattern in group.patterns().items():
        one = Contender(ours(pattern, settings.backend))
        try:
            facts[name] = facts_of(one, sets[0], group, device)
            own[name] = one
        except Exception as error:  # the other patterns are worth having all the same
            failures.append({"pattern": name, **group.sizes(), "reason": reason_of(error)})
    patterns = {name: pattern for name, pattern in group.patterns().items() if name in own}
    dense: dict[str, Contender] = {}
    reasons = {"torch": f"beyond --dense-limit {settings.dense_limit}"}
    if group.context <= settings.dense_limit:
        dense, reasons = dense_contenders(sets[0])
    asked = {name: pattern for name, pattern in patterns.items() if name in settings.flex_patterns}
    peers = dict.fromkeys(patterns, Flex(reason="not among --flex-patterns"))
    peers.update({name: flex(pattern, sets[0], settings.flex_limit) for name, pattern in asked.items()})
    contenders = {
        **{f"dense {name}": one for name, one in dense.items()},
        **{f"ours {name}": one for name, one in own.items()},
        **{f"flex {name}": peer.contender for name, peer in peers.items() if peer.contender is not None},
    }
    turns = take_turns(contenders, sets, device, settings.repeats, GROUP_SECONDS)
    dense_figures = dense_of({name: turns[f"dense {name}"] for name in dense}, reasons)
    rows = []
    for name, pattern in patterns.items():
        mine, theirs = turns[f"ours {name}"], turns.get(f"flex {name}")
        seconds, flex_seconds = mine.seconds(), theirs.seconds() if theirs else dict.fromkeys(PHASES)
        rows.append(
            {
                "pattern": name,
                **group.sizes(),
                "repeats": len(mine.runs),
                "seconds": rounded_all(seconds),
                "host_seconds": rounded_all(mine.host_seconds()),
                **dense_figures,
                "flex_seconds": rounded_all(flex_seconds),
                **peers[name].described(),
                **derived(
                    group,
                    seconds,
                    dense_figures["dense_seconds"],
                    flex_seconds,
                    allowed_pairs(pattern, group.context),
                    visited_of(pattern, group, device, settings.backend),
                    settings.bandwidth,
                ),
                **facts[name],
            }
        )
    return Measured(rows, failures)


def facts_of(one: Contender, inputs: Inputs, group: Group, device: torch.device) -> dict[str, Any]:
    """What a card shows besides times: whether bits repeat, and memory."""
    on_card = device.type == "cuda"
    same = same_bits(one.attention, [*inputs.leaves, inputs.grad_out]) if on_card else None
    peak = peak_bytes(one, inputs, device)  # after a first run, which compiles and builds plans
    return {
        "deterministic": same,
        "peak_bytes": peak,
        "bytes_per_position": None if peak is None else rounded(peak / group.context),
    }


def dense_of(turns: dict[str, Turns], reasons: dict[str, str]) -> dict[str, Any]:
    """Dense attention's part of a row: the fastest kernel of each phase, every kernel, and why others are missing."""
    kernels = {name: rounded_all(one.seconds()) for name, one in turns.items()}
    seconds, names = fastest(kernels)
    return {
        "dense_seconds": seconds,
        "dense_kernel": names,
        "dense_kernels": kernels,
        "dense_reasons": reasons,
    }


def visited_of(pattern: Pattern | list[Pattern], group: Group, device: torch.device, backend: str) -> ByPhase:
    """Pairs in visited tiles, by phase; None for backends without tiles."""
    if backend != "triton" and (backend != "auto" or device.type == "cpu"):
        return dict.fromkeys(OPERATIONS)
    dtype = getattr(torch, group.dtype)
    return {
        phase: visited_pairs(pattern, group.context, phase, device=device, dtype=dtype, head_width=group.head_width)
        for phase in OPERATIONS
    }
