"""How long mixers remember a byte: ``python -m benchmarks.memories.recall``.

The copy-first-input task of Vecoven et al. (2020, section 4.1), in bytes. A context is a byte of 16 values, as many
further random bytes as the distance says, and the first byte again. Only this last byte is learned and scored, where
chance is 4 bits. Networks of two mixers alone, 100 channels wide, differ in the mixer. Each trains for the same seconds
of processor time on one thread, by Adam at 1e-3, 100 contexts a step.

Rows are written to the result file as they finish. A second call continues the file: it trains only the missing rows.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.machine import about
from benchmarks.report import append_row, has_row, markdown, new_parser, open_rows, positive, rounded
from longstride.sparse_model import ModelConfig, SparseTransformer

MIXERS: dict[str, dict[str, Any]] = {
    "nBRC": {"type": "recurrent", "cell": "nbrc"},
    "BRC": {"type": "recurrent", "cell": "brc"},
    "delta rule": {"type": "delta", "key_ratio": 1, "value_ratio": 1},
    "dense attention": {"type": "dense"},
}
VALUES, BATCH, RATE = 16, 100, 1e-3
HELD_OUT = 1_000  # contexts


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = new_parser(__doc__)
    parser.add_argument("--mixers", nargs="+", choices=MIXERS, default=list(MIXERS), metavar="MIXER")
    parser.add_argument("--distances", type=positive(int), nargs="+", default=[300], help="random bytes in between")
    parser.add_argument("--seconds", type=positive(float), default=180.0, help="of every training")
    parser.add_argument("--seeds", type=positive(int), default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    open_rows(options, "recall", about(torch.device("cpu")) | {"threads": 1})
    for seed, distance, name in itertools.product(range(options.seeds), options.distances, options.mixers):
        row = {"mixer": name, "distance": distance, "seed": seed, "seconds": options.seconds}
        if not has_row(options.output, row):
            append_row(options.output, row | trained(MIXERS[name], distance, options.seconds, seed))
    return 0


def contexts(count: int, distance: int, generator: torch.Generator) -> Tensor:
    """Draw contexts (count, distance + 2) of bytes, each of which ends with its first byte."""
    drawn = torch.randint(VALUES, (count, distance + 1), generator=generator, dtype=torch.uint8)
    return torch.cat([drawn, drawn[:, :1]], 1)


def network(mixer: dict[str, Any], distance: int) -> SparseTransformer:
    """Make a network of two mixers."""
    content = {
        "context": distance + 2, "layers": 2, "order": "s2", "heads": 4, "width": 100, "vocabulary": VALUES,
        "attention": mixer, "embedding": {"type": "learned"},
    }  # fmt: skip
    return SparseTransformer(ModelConfig.model_validate(content))


def trained(mixer: dict[str, Any], distance: int, seconds: float, seed: int) -> dict[str, Any]:
    """Train a network, and score the last byte of contexts that it has not seen."""
    torch.manual_seed(seed)
    model = network(mixer, distance)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    drawn, held_out = (torch.Generator().manual_seed(2 * seed + part) for part in range(2))
    steps, begin = 0, time.process_time()
    while time.process_time() - begin < seconds:
        tokens = contexts(BATCH, distance, drawn)
        loss = F.cross_entropy(last_logits(model, tokens), tokens[:, -1].long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
    with torch.no_grad():
        tokens = contexts(HELD_OUT, distance, held_out)
        logits = torch.cat([last_logits(model, batch) for batch in tokens.split(BATCH)])
    targets = tokens[:, -1].long()
    bits = F.cross_entropy(logits, targets).item() / math.log(2)
    accuracy = (logits.argmax(1) == targets).double().mean().item()
    return {"steps": steps, "bits": rounded(bits), "accuracy": rounded(accuracy)}


def last_logits(model: SparseTransformer, tokens: Tensor) -> Tensor:
    """Return the logits of the last byte of each context, (B, V)."""
    logits = model(tokens)
    assert isinstance(logits, Tensor)
    return logits[:, -1]


def table(result: dict[str, Any]) -> str:
    """Format one device's result."""
    lines: list[list[str]] = []
    for row in result["rows"]:
        values = f"{row['seconds']:,.0f}", f"{row['steps']:,}", f"{row['bits']:.3f}", f"{row['accuracy']:.0%}"
        lines.append([row["mixer"], str(row["distance"]), *values])
    columns = ["mixer", "bytes in between", "seconds", "steps", "bits of the byte", "accuracy"]
    return f"{result['device']}, one thread, torch {result['torch']}, {result['date']}:\n\n{markdown(columns, lines)}"


if __name__ == "__main__":
    sys.exit(main())
