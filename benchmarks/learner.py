"""One model in one process: its weights, optimiser and steps, by the trainer's own code but without its engine.

Letters: B contexts, N positions of a context.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from longstride.launcher.config import TrainConfig
from longstride.launcher.engine.muon import Muon, matrices_in
from longstride.launcher.engine.optimizer import MATRICES, make_optimizer, parameter_groups, rate_factor
from longstride.launcher.engine.states import MOMENTUM, Slice, Vector, table_prefix
from longstride.launcher.engine.tables import HeldTable
from longstride.launcher.ranks import Ranks
from longstride.sparse_model import ModelConfig, SparseTransformer, Table

LARGEST_NORM = 1.0  # of the gradient


class Learner:
    """A network and its optimiser, with fp32 masters of its weights."""

    def __init__(self, model: ModelConfig, train: TrainConfig, device: torch.device, dtype: torch.dtype) -> None:
        """Draw the weights from the run's seed."""
        torch.manual_seed(train.seed)
        self.network = SparseTransformer(model)
        self.train = train
        named = [(f"{path}.rows", part) for path, part in self.network.named_modules() if isinstance(part, Table)]
        self.tables = {name: HeldTable(name, table, train, Ranks(), sharded=False) for name, table in named}
        self.network.to(device, dtype)
        self.weights = dict(self.network.named_parameters())
        self.masters = {name: nn.Parameter(weight.detach().float()) for name, weight in self.weights.items()}
        groups = parameter_groups(self.network, split=train.optimizer is not None)
        self.optimizer = make_optimizer(self.masters, groups, train, half=dtype != torch.float32)
        self.rates = [train.rate_of(group.get("part")) for group in self.optimizer.param_groups]
        if isinstance(self.optimizer, Muon):
            roles = self.network.parameter_roles().items()
            matrices = {
                name: matrices_in(self.masters[name].shape, role.rows) for name, role in roles if role.part == MATRICES
            }
            vectors = [
                Vector(self.masters[name], (MOMENTUM,), ((Slice(name, 0, 0, self.masters[name].numel()),),))
                for name in matrices
            ]
            self.optimizer.lay_out(vectors, matrices, device)

    def state(self) -> dict[str, Any]:
        """Return a copy of the weights, the optimiser's state and the tables."""
        content = {"masters": self.masters, "optimizer": self.optimizer.state_dict()}
        return deepcopy(content | {"tables": {name: table.share() for name, table in self.tables.items()}})

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """Continue from the state of another network whose parameters have the same names and shapes.

        It may lack tables, whose rows then stay as they are.
        """
        assert self.masters.keys() == state["masters"].keys()
        for name, master in self.masters.items():
            self.weights[name].copy_(master.copy_(state["masters"][name]))
        self.optimizer.load_state_dict(state["optimizer"])
        for name in self.tables.keys() & state["tables"].keys():
            prefix = table_prefix(name)
            share = {kind.removeprefix(prefix): tensor for kind, tensor in state["tables"][name].items()}
            self.tables[name].fill(0, 1, share, None)

    def step(self, tokens: Tensor, number: int) -> Tensor:
        """Take the step of this number on (B, N) bytes; return their nats (B, N)."""
        nats, auxiliary, statistics, _ = self.network(tokens, return_nats=True, return_extras=True)
        (nats.mean() if auxiliary is None else nats.mean() + auxiliary).backward()
        for name, master in self.masters.items():
            gradient, self.weights[name].grad = self.weights[name].grad, None
            master.grad = None if gradient is None else gradient.float()
        nn.utils.clip_grad_norm_(self.masters.values(), LARGEST_NORM)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * rate_factor(self.train, number)
        self.optimizer.step()
        with torch.no_grad():
            for name, master in self.masters.items():
                self.weights[name].copy_(master)
        for table in self.tables.values():
            table.reduce(1.0)
            table.step(number, 1.0)
        for part, total in zip(self.network.observers, statistics, strict=True):
            part.observe(total.detach().double())
        return nats.detach()
