"""Product-key memories by their number of values: ``python -m benchmarks.feed_forwards.product_keys``.

A training step of a small model with one memory, its optimiser included, by the processor time of one thread: the least
of some steps. Values are held outside the optimiser, as in training, or are parameters of AdamW like any other, which
computes gradients and two moments of all of them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.learner import Learner
from benchmarks.machine import about
from benchmarks.report import markdown, new_parser, parse, positive, rounded, write_json, write_result
from longstride.launcher.config import TrainConfig
from longstride.sparse_model import ModelConfig, SparseTransformer

LEAST_STEPS, SPENT = 4, 10.0  # measured steps, and their seconds
CONTEXT, BATCH = 512, 4
NETWORK: dict[str, Any] = {
    "context": CONTEXT, "layers": 4, "heads": 4, "width": 128, "attention": {"type": "local", "window": 64},
    "embedding": {"type": "tokens"}, "rotary": {}, "dropout": 0.0,
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = new_parser(__doc__)
    parser.add_argument(
        "--keys", type=positive(int), nargs="+", default=[256, 512, 1024], help="values are their squares"
    )
    options = parse(parser, arguments, "product-keys")
    torch.set_num_threads(1)
    result = about(torch.device("cpu")) | {"threads": 1, "costs": []}
    for keys in options.keys:
        for held in (True, False):
            result["costs"].append({"keys": keys, "held": held} | cost(keys, held))
            print(result["costs"][-1], flush=True)
            write_json(options.output, result)
    write_result(options, result)
    return 0


def cost(keys: int, held: bool) -> dict[str, Any]:
    """Measure a training step with a memory of keys² values, held outside of the optimiser or not."""
    memory = {"type": "product_keys", "keys": keys, "query_width": 64}
    model = ModelConfig.model_validate(NETWORK | {"feed_forward": [*3 * [{"type": "dense"}], memory]})
    step = held_step(model) if held else dense_step(model)
    random = torch.Generator().manual_seed(0)
    seconds: list[float] = []
    while len(seconds) <= LEAST_STEPS or sum(seconds) < SPENT:
        tokens = torch.randint(256, (BATCH, CONTEXT), generator=random)
        start = time.process_time()
        step(tokens)
        seconds.append(time.process_time() - start)
    return {"seconds": rounded(min(seconds[1:])), "parameters": SparseTransformer.num_parameters(model)}


def held_step(model: ModelConfig) -> Callable[[Tensor], Any]:
    """Return a function that takes a step as training does."""
    settings = {"output": "run", "steps": 1_000, "global_batch": BATCH, "micro_batch": BATCH, "learning_rate": 1e-3}
    learner = Learner(model, TrainConfig.model_validate(settings), torch.device("cpu"), torch.float32)
    return lambda tokens: learner.step(tokens, 0)


def dense_step(model: ModelConfig) -> Callable[[Tensor], Any]:
    """Return a function that takes a step in which values are parameters like any other."""
    network = SparseTransformer(model)
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)

    def step(tokens: Tensor) -> None:
        network(tokens, return_nats=True).mean().backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def table(result: dict[str, Any]) -> str:
    """Format one device's result."""
    lines = []
    for row in (row for row in result["costs"] if row["held"]):
        (dense,) = (each for each in result["costs"] if each["keys"] == row["keys"] and not each["held"])
        slots, parameters = f"{row['keys'] ** 2:,}", f"{row['parameters']:,}"
        lines.append([slots, parameters, f"{row['seconds']:.2f}", f"{dense['seconds']:.2f}"])
    rows = markdown(["values", "parameters", "a step, s", "with values as AdamW's parameters, s"], lines)
    title = f"{result['device']}, one thread, torch {result['torch']}, {result['date']}. "
    layers = (
        f"{NETWORK['layers']} layers of width {NETWORK['width']}, one with a memory, {BATCH * CONTEXT:,} positions:"
    )
    return f"{title}{layers}\n\n{rows}"


if __name__ == "__main__":
    sys.exit(main())
