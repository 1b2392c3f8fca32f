"""A dense transformer in plain torch, like nanoGPT: the baseline of `benchmarks/recipe.py`.

``python -m benchmarks.training.plain_transformer LAYERS WIDTH HEADS CONTEXT RATE --data DIR`` trains it on bytes for a
number of seconds and prints its score. It has learned positions, LayerNorms, GELU, torch's fused attention, tied
embeddings, AdamW with weight decay on matrices, clipping, warm-up and cosine; bf16 weights with fp32 masters.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longstride.data_pipelines.order import split_bytes

STEP_BYTES = 4_096
WARMUP_SHARE = 0.03


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.query_key_value, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, h: Tensor) -> Tensor:
        """Map (B, N, C) to (B, N, C)."""
        rows = self.query_key_value(self.norms[0](h)).unflatten(-1, (3, self.heads, -1))
        q, k, v = rows.permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.projection(out.transpose(1, 2).flatten(2))
        return h + self.contract(F.gelu(self.expand(self.norms[1](h))))


class PlainTransformer(nn.Module):
    """Predicts each byte from those before it."""

    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(257, width), nn.Embedding(context, width)  # 256: the beginning
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                scale = 1 / math.sqrt(2 * layers) if "projection" in name or "contract" in name else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return nats of each of (B, N) bytes."""
        before = F.pad(tokens[:, :-1], (1, 0), value=256)
        h = self.norm(self.blocks(self.tokens(before) + self.positions.weight[: tokens.shape[1]]))
        logits = F.linear(h, self.tokens.weight[:256]).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none").view(tokens.shape)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("layers", "width", "heads", "context"):
        parser.add_argument(name, type=int)
    parser.add_argument("rate", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=80.0)
    parser.add_argument("--data", type=Path, required=True, help="a data folder")
    parser.add_argument("--held-out", type=int, default=442_368, metavar="BYTES", help="to score, evenly spread")
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    model = PlainTransformer(options.layers, options.width, options.heads, options.context)
    print(json.dumps(train(model, options)))
    return 0


def train(model: PlainTransformer, options: argparse.Namespace) -> dict[str, float]:
    """Train for the given seconds, and score."""
    context = options.context
    text, held_out = (
        torch.frombuffer(bytearray(b"".join(map(bytes, split_bytes(options.data, split)))), dtype=torch.uint8)
        for split in ("train", "validation")
    )
    masters = [nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
    weights = list(model.bfloat16().parameters())
    matrices = [master for master in masters if master.dim() == 2]
    vectors = [master for master in masters if master.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=options.rate, betas=(0.9, 0.95), fused=True)
    places = torch.randperm(len(text) // context) * context
    batch, steps, seconds = STEP_BYTES // context, 0, 0.0
    while seconds < options.seconds:
        share = seconds / options.seconds
        cosine = 0.5 * (1 + math.cos(math.pi * share))
        for group in optimizer.param_groups:
            group["lr"] = options.rate * min(1.0, (share + 1e-3) / WARMUP_SHARE) * cosine
        begin = time.perf_counter()
        chosen = places[torch.arange(steps * batch, (steps + 1) * batch) % len(places)]
        model(torch.stack([text[place : place + context] for place in chosen]).long()).mean().backward()
        for master, weight in zip(masters, weights, strict=True):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            for master, weight in zip(masters, weights, strict=True):
                weight.copy_(master)
        steps, seconds = steps + 1, seconds + time.perf_counter() - begin
    count = options.held_out // context
    rows = torch.stack([held_out[place * (len(held_out) // count) :][:context] for place in range(count)]).long()
    with torch.no_grad():
        nats = sum(model(some).double().sum().item() for some in rows.split(16))
    return {
        "seed": options.seed,
        "bits_per_byte": round(nats / rows.numel() / math.log(2), 4),
        "bytes": steps * STEP_BYTES,
        "seconds": round(seconds, 2),
        "steps": steps,
    }


if __name__ == "__main__":
    sys.exit(main())
