"""`longstride lm-eval …`: lm_eval's own command line, where `--model longstride` is an export.

lm_eval has a list of models and no entry points, so that its bare command cannot find one of another package.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from longstride.kernels import ConfigError


def run(words: Sequence[str]) -> int:
    """Runs lm_eval with its own words; returns the exit code.

    Raises:
        ConfigError: lm_eval is not installed, or what the model or a task is given is wrong.
    """
    try:
        import lm_eval.models  # noqa: F401 - it fills the registry, which is left so once it has one model
        from lm_eval.__main__ import cli_evaluate
        from lm_eval.api.registry import model_registry
    except ImportError as error:
        raise ConfigError(f'lm-eval: needs lm_eval ({error}); pip install "longstride[lm_eval]"') from None
    if "longstride" not in model_registry:
        model_registry.register("longstride", target="longstride.launcher.generation.lm_eval_model:LongstrideLM")
    sys.argv = ["lm-eval", *words]  # its parser reads them there
    cli_evaluate()
    return 0
