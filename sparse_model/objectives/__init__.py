"""Objectives: what a network reads and predicts, `model.objective` in JSON.

To add one: a file with a subclass of ``Objective``, and a member of ``AnyObjective``.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from longstride.sparse_model.objectives.base import Autoregressive, Layout, Objective
from longstride.sparse_model.objectives.classify import Classify
from longstride.sparse_model.objectives.masked import Masked
from longstride.sparse_model.objectives.permuted import Permuted

AnyObjective = Annotated[Autoregressive | Masked | Permuted | Classify, Field(discriminator="type")]
