"""A conformance suite for patterns, mixers and feed-forwards, our own and those of other packages.

``check(pattern)`` and ``check(model)`` test the properties that every part must have, print each, and raise
``ConformanceError`` at the first that fails. They run on a CPU and need no test framework.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from longstride.kernels.patterns import Pattern
from longstride.sparse_model import ModelConfig
from longstride.testing.cache import CACHE_PROPERTIES
from longstride.testing.comparisons import ConformanceError, UndeclaredError
from longstride.testing.models import MODEL_PROPERTIES, types_of
from longstride.testing.patterns import PATTERN_PROPERTIES


def check(part: Pattern | ModelConfig | Mapping[str, Any]) -> dict[str, str]:
    """Check a pattern, or all mixers and feed-forwards of a model, and print each property.

    An ability that all parts declare in ``supports`` must hold. Undeclared abilities are listed as such.

    Args:
        part: a pattern, or the configuration of a model that has the part. A small model is enough and takes seconds:
            a context of about 40 positions, two layers, an even number of heads.

    Returns:
        Each property with "holds" or "not declared by …".

    Raises:
        ConformanceError: the first property that does not hold, by name.
        ConfigError: the configuration is wrong.
    """
    is_pattern = isinstance(part, Pattern) and not isinstance(part, type)
    subject: Any = part if is_pattern else ModelConfig.model_validate(part)
    name = str(part) if is_pattern else ", ".join(types_of(subject))
    properties: Mapping[str, Callable[[Any], None]] = (
        PATTERN_PROPERTIES if is_pattern else MODEL_PROPERTIES | CACHE_PROPERTIES
    )
    results: dict[str, str] = {}
    for title, holds in properties.items():
        try:
            with torch.random.fork_rng(devices=[]):
                holds(subject)
            results[title] = "holds"
        except UndeclaredError as undeclared:
            results[title] = f"not declared by {undeclared}"
        except Exception as error:
            raise ConformanceError(f"{name}: {title}: {error or type(error).__name__}") from error
        print(f"{title:<16}{results[title]}")
    return results
