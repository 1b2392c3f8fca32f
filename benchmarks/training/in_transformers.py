"""Seconds of a training step of a Llama of transformers, with our sparse attention and with sdpa.

``python benchmarks/training/in_transformers.py``: one model with one set of weights takes a step with each attention in
turn, forward, loss, backward and AdamW, so that both meet the same load of the machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a program from a checkout that is not installed
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

from benchmarks.machine import about, in_turns, synchronize
from benchmarks.report import markdown, new_parser, parse, rounded, write_result

PATTERNS = ({"type": "fixed", "stride": 128, "summary": 8}, {"type": "strided", "stride": 128})
HEAD_WIDTH = 64


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = new_parser(__doc__)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 2_048, 8_192])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.set_defaults(device="cuda" if torch.cuda.is_available() else "cpu")
    options = parse(parser, arguments, "in-transformers")
    result = measure(options)
    print(f"{result['device']}\n")
    print(table(result), end="")
    write_result(options, result)
    return 0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of each step of each attention, by threads and context."""
    import transformers

    from longstride.hub import register_attention

    device = torch.device(options.device)
    register_attention()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=options.width,
        intermediate_size=4 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=options.width // HEAD_WIDTH,
        max_position_embeddings=max(options.contexts),
    )
    model = transformers.LlamaForCausalLM(config).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters())
    cases = []
    for threads, context in itertools.product(options.threads, options.contexts):
        torch.set_num_threads(threads)
        tokens = torch.randint(256, (1, context), device=device)
        steps = {name: partial(step, model, name, optimizer, tokens) for name in ("sdpa", *map(json.dumps, PATTERNS))}
        taken = in_turns(steps, 1 + options.repeats, time.perf_counter)  # the first makes plans and buffers
        seconds = {name: list(map(rounded, of_all[1:])) for name, of_all in taken.items()}
        cases.append({"threads": threads, "context": context, "step_seconds": seconds})
    return {
        **about(device),
        "transformers": transformers.__version__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        **{name: getattr(options, name) for name in ("layers", "width", "repeats")},
        "head_width": HEAD_WIDTH,
        "cases": cases,
    }


def step(model: Any, attention: str, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> None:
    """Take one step with sdpa, or with a pattern in JSON."""
    if attention != "sdpa":
        model.config.longstride_pattern = json.loads(attention)
    model.set_attn_implementation("sdpa" if attention == "sdpa" else "longstride")
    model(tokens, labels=tokens, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    synchronize(tokens.device)


def table(result: dict[str, Any]) -> str:
    """Return the table of docs/clients.md: the median seconds of sdpa, and the speed-up of each pattern over it."""
    names = list(map(json.dumps, PATTERNS))
    rows = []
    for case in result["cases"]:
        if case["threads"] != 1:  # other work disturbed those
            continue
        medians = {name: statistics.median(seconds) for name, seconds in case["step_seconds"].items()}
        cells = [f"{case['context']:,}", f"{medians['sdpa']:.2f}"]
        rows.append([*cells, *(f"{medians['sdpa'] / medians[name]:.1f} ×" for name in names)])
    return markdown(["tokens", "sdpa: seconds a step", *(f"`{name}`: speed-up" for name in names)], rows)


if __name__ == "__main__":
    sys.exit(main())
