"""Makes locks/python3.*.txt: one version of every package, for each Python that Longstride is tested with.

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


def main() -> None:
    """Writes one file a Python. Raises CalledProcessError where the packages do not go together."""
    for python in PYTHONS:
        extras = [name for name in EXTRAS if name not in MISSING.get(python, ())]
        words = [
            "setup.py",
            *(f"--extra={name}" for name in extras),
            "--universal",
            f"--python-version={python}",
            "--no-header",
            "--no-annotate",
        ]
        made = subprocess.run(
            [sys.executable, "-m", "uv", "pip", "compile", "--quiet", *words],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        pins = [line for line in made.stdout.splitlines() if re.match(r"[A-Za-z0-9._-]+==", line)]
        head = f"# Made by `make locks` for Python {python}: constraints for pip (-c), with {', '.join(extras)}."
        (ROOT / "locks" / f"python{python}.txt").write_text("\n".join([head, *pins, ""]))


if __name__ == "__main__":
    main()
