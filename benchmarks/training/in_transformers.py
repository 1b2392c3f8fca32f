"""Seconds of a training step of a Llama of transformers, with our sparse attention and with sdpa.

``python benchmarks/training/in_transformers.py``: one model with one set of weights takes a step with each attention in
turn, forward, loss, backward and AdamW, so that both meet the same load of the machine. Each step has its seconds, and
the processor seconds of all threads, which other programs move less.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a program from a checkout that is not installed
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

from benchmarks.machine import about, slug
from benchmarks.report import check_output, markdown, new_parser, rounded, write_json

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
    options = parser.parse_args(arguments)
    check_output(parser, options, f"in-transformers-{slug(default_device())}.json")
    result = measure(options)
    write_json(options.output, result)
    print(f"{result['device']}\n")
    print(table(result), end="")
    print(f"\nwrote {options.output}")
    return 0


def default_device() -> torch.device:
    """Return the GPU if there is one, otherwise the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds and processor seconds of each step of each attention, by threads and context."""
    import transformers

    from longstride.hub import register_attention

    device = default_device()
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
        steps = steps_in_turn(model, optimizer, tokens, options.repeats)
        kinds = zip(("step_seconds", "step_processor_seconds"), (0, 1), strict=True)
        of_kinds = {kind: {name: [rounded(step[i]) for step in steps[name]] for name in steps} for kind, i in kinds}
        cases.append({"threads": threads, "context": context, **of_kinds})
    return {
        **about(device),
        "transformers": transformers.__version__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        **{name: getattr(options, name) for name in ("layers", "width", "repeats")},
        "head_width": HEAD_WIDTH,
        "cases": cases,
    }


def steps_in_turn(
    model: Any, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, repeats: int
) -> dict[str, list[tuple[float, float]]]:
    """Take steps with each attention in turn, and return what each took."""
    steps: dict[str, list[tuple[float, float]]] = {name: [] for name in ("sdpa", *map(json.dumps, PATTERNS))}
    for turn in range(1 + repeats):
        for name, taken in steps.items():
            if name == "sdpa":
                model.set_attn_implementation("sdpa")
            else:
                model.config.longstride_pattern = json.loads(name)
                model.set_attn_implementation("longstride")
            step = step_seconds(model, optimizer, tokens)
            if turn:  # the first makes plans and buffers
                taken.append(step)
    return steps


def step_seconds(model: Any, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> tuple[float, float]:
    """Take one step, and return its seconds and its processor seconds."""
    start = time.perf_counter(), time.process_time()
    model(tokens, labels=tokens, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if tokens.is_cuda:
        torch.cuda.synchronize(tokens.device)
    return time.perf_counter() - start[0], time.process_time() - start[1]


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
