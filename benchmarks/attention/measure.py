"""Measure a group of patterns: a row per pattern for a result file, with its pairs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.attention.cases import Group
from benchmarks.attention.figures import OPERATIONS, PHASES, ByPhase, derived, fastest, rounded_all
from benchmarks.attention.gate import ours, same_bits
from benchmarks.attention.peers import Flex, dense_contenders, flex, reason_of
from benchmarks.attention.timing import Contender, Inputs, Turns, inputs_of, peak_bytes, take_turns
from benchmarks.report import rounded
from longstride.kernels.backends.triton.packing import Parts, groups
from longstride.kernels.patterns import Pattern
from longstride.kernels.plan import Side, num_pairs

GROUP_SECONDS = 6.0  # on a card, for the turns of one group


def measure(
    group: Group, device: torch.device, options: argparse.Namespace, bandwidth: float
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Measure a group with the benchmark's options, on a device that copies so many bytes a second.

    Returns:
        A row per pattern, and the patterns that could not run with the reasons.
    """
    sets = inputs_of(group, device)
    contenders, facts, failures = {}, {}, []
    for name, pattern in group.patterns().items():
        contender = Contender(ours(pattern, options.backend))
        try:
            facts[name] = facts_of(contender, sets[0], group, device)
            contenders[f"ours {name}"] = contender
        except Exception as error:  # the other patterns are still useful
            failures.append({"pattern": name, **group.sizes(), "reason": reason_of(error)})
    patterns = {name: pattern for name, pattern in group.patterns().items() if name in facts}
    dense: dict[str, Contender] = {}
    reasons = {"torch": f"beyond --dense-limit {options.dense_limit}"}
    if group.context <= options.dense_limit:
        dense, reasons = dense_contenders(sets[0])
    peers = {
        name: flex(pattern, sets[0], options.flex_limit)
        if name in options.flex_patterns
        else Flex(reason="not among --flex-patterns")
        for name, pattern in patterns.items()
    }
    contenders = {f"dense {name}": contender for name, contender in dense.items()} | contenders
    contenders |= {f"flex {name}": peer.contender for name, peer in peers.items() if peer.contender is not None}
    turns = take_turns(contenders, sets, device, options.repeats, GROUP_SECONDS)
    dense_figures = dense_of({name: turns[f"dense {name}"] for name in dense}, reasons)
    rows = []
    for name, pattern in patterns.items():
        our_turns, flex_turns = turns[f"ours {name}"], turns.get(f"flex {name}")
        seconds = our_turns.seconds()
        flex_seconds = flex_turns.seconds() if flex_turns else dict.fromkeys(PHASES)
        rows.append(
            {
                "pattern": name,
                **group.sizes(),
                "repeats": len(our_turns.runs),
                "seconds": rounded_all(seconds),
                "host_seconds": rounded_all(our_turns.host_seconds()),
                **dense_figures,
                "flex_seconds": rounded_all(flex_seconds),
                **peers[name].fields(),
                **derived(
                    group,
                    seconds,
                    dense_figures["dense_seconds"],
                    flex_seconds,
                    allowed_pairs(pattern, group.context),
                    visited_of(pattern, group, device, options.backend),
                    bandwidth,
                ),
                **facts[name],
            }
        )
    return rows, failures


def facts_of(contender: Contender, inputs: Inputs, group: Group, device: torch.device) -> dict[str, Any]:
    """Return whether bits repeat, and memory, on a card."""
    on_card = device.type == "cuda"
    same = same_bits(contender.attention, [*inputs.leaves, inputs.grad_out]) if on_card else None
    peak = peak_bytes(contender, inputs, device)  # after a first run, which compiles and builds plans
    return {
        "deterministic": same,
        "peak_bytes": peak,
        "bytes_per_position": None if peak is None else rounded(peak / group.context),
    }


def dense_of(turns: dict[str, Turns], reasons: dict[str, str]) -> dict[str, Any]:
    """Return dense attention's fields of a row: the fastest kernel by phase, all kernels, and reasons of others."""
    kernels = {name: rounded_all(kernel_turns.seconds()) for name, kernel_turns in turns.items()}
    seconds, names = fastest(kernels)
    return {
        "dense_seconds": seconds,
        "dense_kernel": names,
        "dense_kernels": kernels,
        "dense_reasons": reasons,
    }


def visited_of(pattern: Pattern | list[Pattern], group: Group, device: torch.device, backend: str) -> ByPhase:
    """Return the pairs in visited tiles by phase; None for backends without tiles."""
    if backend != "triton" and (backend != "auto" or device.type == "cpu"):
        return dict.fromkeys(OPERATIONS)
    dtype = getattr(torch, group.dtype)
    return {
        phase: visited_pairs(pattern, group.context, phase, device=device, dtype=dtype, head_width=group.head_width)
        for phase in OPERATIONS
    }


def patterns_by_head(pattern: Pattern | Sequence[Pattern]) -> tuple[Pattern, ...]:
    """Return the patterns of heads that differ, or the pattern of the first head."""
    return (pattern.for_head(0),) if isinstance(pattern, Pattern) else tuple(pattern)


def allowed_pairs(pattern: Pattern | Sequence[Pattern], context: int) -> int:
    """Return the query-key pairs that the pattern allows, for one head; the mean of heads that differ."""
    heads = patterns_by_head(pattern)
    return sum(num_pairs(head, context) for head in heads) // len(heads)


def visited_pairs(
    pattern: Pattern | Sequence[Pattern],
    context: int,
    phase: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    head_width: int,
) -> int | None:
    """Return the pairs in the tiles that the Triton kernels of a phase visit, per head; None if those cannot run.

    The backward pass visits tiles twice, with four products for dK and dV and three for dQ, so their mean is counted.
    The kernel of closed runs visits each once.
    """
    try:
        from longstride.kernels.backends.triton.configurations import Kernel, choose, closed_choice
        from longstride.kernels.backends.triton.launch_plan import INTERPRETED, candidates_on
    except ImportError:
        return None
    if device.type == "cpu" and not INTERPRETED:
        return None
    padded = max(16, 1 << (head_width - 1).bit_length())
    heads = patterns_by_head(pattern)

    def of(kernel: Kernel, rows: Side, parts: Parts) -> int:
        candidates = candidates_on(device, kernel, dtype.itemsize, padded)
        of_runs = candidates_on(device, "closed_forward", dtype.itemsize, padded) if kernel == "forward" else ()
        choices = choose(candidates, groups(heads, context, rows, parts), rows, of_runs)
        return sum(choice.pairs for choice in choices) // len(heads)

    if phase == "forward":
        return of("forward", "queries", "all")
    closed = closed_choice(candidates_on(device, "closed", dtype.itemsize, padded), heads, context)
    parts: Parts = "all" if closed is None else "open"
    once = 0 if closed is None else closed.pairs // len(heads)
    return once + round((4 * of("dkdv", "keys", parts) + 3 * of("dq", "queries", parts)) / 7)
