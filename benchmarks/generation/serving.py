"""Eight requests to a server: one after another, at once, and at once to a server that shares products.

Run ``python benchmarks/generation/serving.py --threads 1``.

Servers with random models and their clients run in threads of this process. The requests have equal prompts and
lengths, and different seeds. First a gate checks that requests at once get the same bytes as one after another. For a
server with ``--shared``, requests with other bytes are counted. Seconds are processor time of server and clients
together, as other programs then matter less. All ways take turns within every repeat, and a time is the least over
repeats. The table goes to the terminal, all figures to JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a program from a checkout that is not installed
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

from benchmarks.machine import about, slug
from benchmarks.report import add_output_arguments, check_output, rounded, write_json
from tests.harness.served import served
from tests.harness.tiny_models import tiny_export

REQUESTS = 8
PROMPT = b"a prompt"
# Sizes of the networks: that of the demo, and larger ones.
SIZES = {"small": (4, 128), "middle": (6, 256), "large": (8, 512)}  # layers, width
CONTEXT, STRIDE, HEADS = 1024, 32, 4


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code: 1 if the gate fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--bytes", type=int, default=200, help="a request")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None, help="as torch has them")
    add_output_arguments(parser)
    options = parser.parse_args(arguments)
    device = torch.device("cpu")
    check_output(parser, options, f"serving-{slug(device)}.json")
    if options.threads:
        torch.set_num_threads(options.threads)
    rows = []
    print(f"{REQUESTS} requests of {options.bytes} bytes; bytes a second: one after another, at once, at once --shared")
    for name in options.models:
        row = measured(name, options)
        if row is None:
            print(f"{name}: at once, a request has other bytes than alone", file=sys.stderr)
            return 1
        rows.append(row)
        figures = "".join(f"{row[way]:>9,.0f}" for way in ("after", "at_once", "shared"))
        print(
            f"{name:<8}{figures}   {row['times']:.2f}x by --shared, {row['other_bytes']} of {REQUESTS} with other bytes"
        )
    content = {"requests": REQUESTS, "bytes": options.bytes, "repeats": options.repeats, "timings": rows}
    write_json(options.output, {**about(device), **content})
    print(f"\nwrote {options.output}")
    return 0


def measured(name: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """Measure bytes a second of one model; None if the gate fails."""
    layers, width = SIZES[name]
    attention = {"type": "strided", "stride": STRIDE}
    changes = {"context": CONTEXT, "layers": layers, "heads": HEADS, "width": width, "attention": attention}
    with tempfile.TemporaryDirectory() as folder:
        export = tiny_export(Path(folder) / "model", "text", model=changes)
        with served(export) as apart, served(export, shared=True) as shared, ThreadPoolExecutor(REQUESTS) as pool:

            def ask(seed: int, url: str = apart) -> bytes:
                return answer(url, seed, options.bytes)

            ways: dict[str, Callable[[], Any]] = {
                "after": lambda: [ask(seed) for seed in range(REQUESTS)],
                "at_once": lambda: list(pool.map(ask, range(REQUESTS))),
                "shared": lambda: list(pool.map(lambda seed: ask(seed, shared), range(REQUESTS))),
            }
            found = {way: act() for way, act in ways.items()}
            if found["after"] != found["at_once"]:
                return None
            seconds: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(options.repeats):
                for way, act in ways.items():
                    begun = time.process_time()
                    act()
                    seconds[way].append(time.process_time() - begun)
    speeds = {way: rounded(options.bytes * REQUESTS / min(times)) for way, times in seconds.items()}
    times = rounded(min(seconds["at_once"]) / min(seconds["shared"]))
    other = sum(one != same for one, same in zip(found["shared"], found["after"], strict=True))
    sizes = {"layers": layers, "width": width, "context": CONTEXT}
    return {"model": name, **sizes, **speeds, "times": times, "other_bytes": other}


def answer(url: str, seed: int, count: int) -> bytes:
    """Send a request and return the generated bytes."""
    body = {"model": "model", "prompt": PROMPT.decode(), "max_tokens": count, "seed": seed}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as response:
        return bytes(json.load(response)["choices"][0]["bytes_base64"], "ascii")


if __name__ == "__main__":
    sys.exit(main())
