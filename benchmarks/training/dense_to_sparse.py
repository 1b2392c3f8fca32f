"""Bits per byte of a small Llama of transformers that learns with dense attention and continues with a sparse pattern.

``python benchmarks/training/dense_to_sparse.py``: the text is Python's own sources, some files of which are held out.
The model learns with sdpa. Then one copy continues with sdpa, and one with the pattern, for as many steps on equal
bytes.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a program from a checkout that is not installed
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
from torch import Tensor

from benchmarks.machine import about
from benchmarks.report import markdown, new_parser, parse, rounded, write_result

HELD_OUT_EVERY = 10  # files
MOST_BYTES = 4_000_000  # of training and of held-out text
EVALUATED = 16  # contexts


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = new_parser(__doc__)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--dense-steps", type=int, default=300)
    parser.add_argument("--more-steps", type=int, default=50)
    parser.add_argument("--pattern", type=json.loads, default={"type": "fixed", "stride": 32, "summary": 4})
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parse(parser, arguments, "dense-to-sparse")
    result = measure(options)
    print(table(result), end="")
    write_result(options, result)
    return 0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return bits per byte on held-out text at each point."""
    import transformers

    from longstride.hub import register_attention

    torch.set_num_threads(options.threads)
    register_attention()
    training, held_out = sources()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=options.width,
        intermediate_size=3 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        max_position_embeddings=options.context,
    )
    config.longstride_pattern = options.pattern
    start = time.perf_counter()
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    train(model, training, options, range(options.dense_steps))
    bits = {"dense": evaluate(model, held_out, options)}
    dense, sparse = model, copy.deepcopy(model)
    sparse.set_attn_implementation("longstride")
    bits["sparse, before any step"] = evaluate(sparse, held_out, options)
    for name, copied in (("dense, more steps", dense), ("sparse, more steps", sparse)):
        train(copied, training, options, range(options.dense_steps, options.dense_steps + options.more_steps))
        bits[name] = evaluate(copied, held_out, options)
    return {
        **about(torch.device("cpu")),
        "transformers": transformers.__version__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        **{name: getattr(options, name) for name in ("layers", "width", "context", "batch", "pattern")},
        **{name: getattr(options, name) for name in ("dense_steps", "more_steps")},
        "seconds": rounded(time.perf_counter() - start),
        "bits_per_byte": {name: rounded(value) for name, value in bits.items()},
    }


def sources() -> tuple[Tensor, Tensor]:
    """Return the bytes of the standard library's files for training, and of the files held out."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    parts = []
    for is_held_out in (False, True):
        selected = [path for i, path in enumerate(paths) if (i % HELD_OUT_EVERY == 0) == is_held_out]
        text = b"".join(path.read_bytes() for path in selected)[:MOST_BYTES]
        parts.append(torch.frombuffer(bytearray(text), dtype=torch.uint8).long())
    return parts[0], parts[1]


def train(model: Any, text: Tensor, options: argparse.Namespace, steps: range) -> None:
    """Take steps whose contexts depend only on their numbers."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    model.train()
    for number, step in enumerate(steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (number + 1) / 20)
        generator = torch.Generator().manual_seed(step)
        firsts = torch.randint(len(text) - options.context, (options.batch,), generator=generator).tolist()
        tokens = torch.stack([text[first : first + options.context] for first in firsts])
        model(tokens, labels=tokens, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def evaluate(model: Any, text: Tensor, options: argparse.Namespace) -> float:
    """Return the bits per byte of evenly spaced held-out contexts."""
    model.eval()
    firsts = torch.linspace(0, len(text) - options.context, EVALUATED).long().tolist()
    nats = []
    with torch.no_grad():
        for first in firsts:
            tokens = text[first : first + options.context][None]
            nats.append(float(model(tokens, labels=tokens, use_cache=False).loss))
    return sum(nats) / len(nats) / math.log(2)


def table(result: dict[str, Any]) -> str:
    """Return the table of docs/clients.md."""
    rows = [[name, f"{value:.3f}"] for name, value in result["bits_per_byte"].items()]
    return markdown(["attention", "held-out bits per byte"], rows)


if __name__ == "__main__":
    sys.exit(main())
