"""Longstride trains deep Sparse Transformers on long sequences of raw bytes.

The packages are at the top of a checkout, and this folder links to them. Thus each has one name, such as
``longstride.kernels``, for Python, type checkers and builds, and only ``longstride`` takes a name in site-packages. A
build that maps folders to names would need an installation before anything can be imported.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path


def stand_aside(name: str) -> None:
    """Import the package of another project in place of a folder of this checkout.

    If the checkout's root is on ``sys.path``, ``import kernels`` finds our folder before the package of that name on
    PyPI, which transformers uses. Our code imports ``longstride.kernels``, so ``kernels`` always means the other
    package. If that is not installed, the name becomes an empty namespace package, and libraries that look for the
    package do not find it.
    """
    elsewhere = [entry for entry in sys.path if not Path(entry, "longstride", name).is_symlink()]  # no checkout
    spec = PathFinder.find_spec(name, elsewhere) or ModuleSpec(name, None, is_package=True)
    module = sys.modules[name] = module_from_spec(spec)
    if spec.loader is not None:
        spec.loader.exec_module(module)
