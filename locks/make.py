"""Makes locks/python3.*.txt: one version of every package, for each Python that Longstride is tested with.

`locks/lowest.txt` serves all of these Pythons: the oldest version of everything that setup.py names, torch aside.

They are constraints (`pip install -c locks/python3.12.txt .`), so they install nothing by themselves: a CPU build of
torch takes none of the CUDA packages in them. `uv`, which resolves for Pythons that are not here, must be installed.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# `clients` has exact versions already, some of them older than what the other extras may have.
EXTRAS = ("dev", "remote", "audio", "formats", "serve", "onnx", "transformers", "lm_eval")
MISSING = {"3.10": {"transformers", "lm_eval"}}  # transformers 5.23 asks for 3.11
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
# The lowest set has the torch of the others: setup.py allows older ones, which are not tested.
UNCHANGED = "torch>=2.13\ntriton>=3.7; platform_system == 'Linux'\n"


def main() -> None:
    """Writes one file a Python, and lowest.txt. Raises CalledProcessError where the packages do not go together."""
    for python in PYTHONS:
        extras = [name for name in EXTRAS if name not in MISSING.get(python, ())]
        write_lock(f"python{python}.txt", python, extras)
    extras = [name for name in EXTRAS if name not in MISSING[PYTHONS[0]]]
    write_lock("lowest.txt", PYTHONS[0], extras, ["-", "--resolution=lowest-direct"], UNCHANGED)


def write_lock(
    name: str, python: str, extras: list[str], options: list[str] | None = None, requirements: str = ""
) -> None:
    """Resolves setup.py with these extras for a Python and those after it. `requirements` are uv's standard input."""
    words = [
        "setup.py",
        *(f"--extra={extra}" for extra in extras),
        "--universal",
        f"--python-version={python}",
        "--no-header",
        "--no-annotate",
        *(options or []),
    ]
    made = subprocess.run(
        [sys.executable, "-m", "uv", "pip", "compile", "--quiet", *words],
        cwd=ROOT,
        input=requirements,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    title = "the lowest versions" if requirements else f"Python {python}"
    pins = [line for line in made.stdout.splitlines() if re.match(r"[A-Za-z0-9._-]+==", line)]
    head = f"# Made by `make locks` for {title}: constraints for pip (-c), with {', '.join(extras)}."
    (ROOT / "locks" / name).write_text("\n".join([head, *pins, ""]))


if __name__ == "__main__":
    main()
