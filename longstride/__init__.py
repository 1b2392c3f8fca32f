"""Longstride trains deep Sparse Transformers on long sequences of raw bytes.

The rooms lie at the top of a checkout, and this folder links to them. So each has one name, ``longstride.kernels`` and
so on, for Python, type checkers and builds alike, and only ``longstride`` takes a name in site-packages. The other way,
a build that maps folders to names, needs an installation before anything can be imported.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path


def stand_aside(name: str) -> None:
    """Import the package of another project in place of a folder of this checkout.

    Where the checkout's root is on ``sys.path``, ``import kernels`` finds our folder before the registry's package of
    that name, which transformers uses. Our code says ``longstride.kernels``, so whoever asks for ``kernels`` means the
    other one. Where there is no other one, the name becomes an empty namespace package, as that of any folder without
    an ``__init__.py``: libraries that look for the other one find none.
    """
    elsewhere = [entry for entry in sys.path if not Path(entry, "longstride", name).is_symlink()]  # no checkout
    spec = PathFinder.find_spec(name, elsewhere) or ModuleSpec(name, None, is_package=True)
    module = sys.modules[name] = module_from_spec(spec)
    if spec.loader is not None:
        spec.loader.exec_module(module)
