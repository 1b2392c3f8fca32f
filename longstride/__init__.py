"""Longstride trains deep Sparse Transformers on long sequences of raw bytes.

Its rooms lie at the top of a checkout. This folder has links to them, so each is imported as ``longstride.kernels`` and
so on, installed or not, and only ``longstride`` takes a name in site-packages.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path


def stand_aside(name: str) -> None:
    """Load the package of another project that a folder of this checkout hides.

    Where the checkout's root is on ``sys.path``, ``import kernels`` finds our folder instead of the registry's package
    of that name, which transformers uses. Our rooms are imported by ``longstride.`` alone, so whoever asks for
    ``kernels`` wants the other one.

    Raises:
        ModuleNotFoundError: no other package has that name.
    """
    root = Path(__file__).parent.parent.resolve()
    elsewhere = [entry for entry in sys.path if Path(entry or ".").resolve() != root]
    spec = PathFinder.find_spec(name, elsewhere)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"no package {name!r}; Longstride's is longstride.{name}", name=name)
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
