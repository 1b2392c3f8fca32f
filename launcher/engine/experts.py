"""Expert parallelism (GShard, Lepikhin et al. 2020): P neighbouring ranks divide the experts of each layer.

Rows travel to their experts, and weights stay. The experts are therefore removed from the model before the engine is
built: to DeepSpeed, parameters that differ between ranks are none of its own.

Letters: W ranks, P of them divide the experts, D = W / P have the same ones, E experts of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed
from torch import Tensor

from longstride.launcher.config import TrainConfig
from longstride.launcher.engine import states
from longstride.launcher.engine.muon import Muon, matrices_in
from longstride.launcher.engine.optimizer import make_optimizer, parameter_groups, rate_factor
from longstride.launcher.models import AVERAGE
from longstride.launcher.ranks import Ranks
from longstride.sparse_model import Experts, SparseTransformer


class ParallelExperts:
    """E / P experts of each layer, with fp32 weights and the optimiser of the other parameters. See ``Held``.

    The model computes with leaves in its own precision. Their gradients are summed in fp32.
    """

    kind = "experts"

    def __init__(self, model: SparseTransformer, train: TrainConfig, ranks: Ranks, dtype: torch.dtype) -> None:
        """Move the experts out of a model, whose ranks then exchange rows. The process group must exist."""
        self._train, self._ranks = train, ranks
        size = train.expert_parallel or 1
        self._holders, self._replicas = ranks.expert_groups(size)
        groups = parameter_groups(model, split=train.optimizer is not None, apart=train.trained_parts)
        self.shapes: dict[str, torch.Size] = {}  # of all experts of a layer
        self._masters: dict[str, Tensor] = {}
        self._leaves: dict[str, Tensor] = {}
        self._gradients: dict[str, Tensor] = {}
        for path, module in model.named_modules():
            if not isinstance(module, Experts):
                continue
            local: list[Tensor | None] = []
            for name in module.by_expert:
                parameter = getattr(module, name)
                local.append(None if parameter is None else self._take(f"{path}.{name}", parameter, dtype))
            module.hold(self._holders, local)
        groups = [group._replace(names=[name for name in group.names if name in self._masters]) for group in groups]
        half = dtype != torch.float32
        self._optimizer = make_optimizer(self._masters, filter(lambda group: group.names, groups), train, half=half)
        if isinstance(self._optimizer, Muon):
            matrices = {name: matrices_in(shape) for name, shape in self.shapes.items() if len(shape) > 1}
            self._optimizer.lay_out(self.vectors(), matrices, ranks.device)

    def _take(self, name: str, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """Store this rank's experts of a parameter; return them as a leaf that collects gradients."""
        self.shapes[name] = parameter.shape
        share = parameter.detach().chunk(self._holders.size)[self._holders.rank]
        self._masters[name] = share.to(self._ranks.device, torch.float32, copy=True)
        leaf = self._leaves[name] = self._masters[name].detach().to(dtype).requires_grad_()

        def collect(leaf: Tensor) -> None:
            gradient, leaf.grad = leaf.grad, None
            assert gradient is not None
            if name in self._gradients:
                self._gradients[name] += gradient
            else:
                self._gradients[name] = gradient.float()

        leaf.register_post_accumulate_grad_hook(collect)
        return leaf

    @torch.no_grad()
    def reduce(self, scale: float) -> Tensor:
        """Sum the gradients of losses times ``scale`` over the ranks; return the sum of all their squares, fp32.

        Rows of P ranks have arrived here, so each gradient is already summed over these.
        """
        squares = torch.zeros(1, device=self._ranks.device)
        for name in self._masters:
            gradient = self._gradients[name]
            if self._holders.size < self._ranks.world_size:
                torch.distributed.all_reduce(gradient, group=self._replicas)
            gradient.div_(scale * self._ranks.world_size)
            squares += torch.linalg.vector_norm(gradient).square_()
        return self._holders.sum(squares)[0]

    @torch.no_grad()
    def step(self, number: int, factor: float) -> None:
        """Take step ``number`` + 1 with the reduced gradients times ``factor``."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._train.rate_of(group.get("part")) * rate_factor(self._train, number)
        for name, master in self._masters.items():
            master.grad = self._gradients[name].mul_(factor)
        self._optimizer.step()
        for master in self._masters.values():
            master.grad = None
        self._gradients.clear()
        self._copy_to_leaves()

    def freeze(self, frozen: bool) -> None:
        """Collect no gradients from now on, or collect them again."""
        for leaf in self._leaves.values():
            leaf.requires_grad_(not frozen)

    def forget(self) -> None:
        """Drop the gradients of a step that is not taken."""
        self._gradients.clear()

    @property
    def numel(self) -> int:
        """The numbers of all experts."""
        return sum(shape.numel() for shape in self.shapes.values())

    def local(self) -> Iterator[Tensor]:
        """Yield this rank's weights."""
        yield from self._leaves.values()

    def whole(self) -> dict[str, Tensor]:
        """Return all experts by the names of the model's parameters, on every rank. All ranks must call."""
        size = self._holders.size
        if size == 1:
            return {name: leaf.detach() for name, leaf in self._leaves.items()}
        copies = ((name, leaf.detach().expand(size, *leaf.shape)) for name, leaf in self._leaves.items())
        return {name: self._holders.swap(copy).flatten(0, 1) for name, copy in copies}

    def vectors(self) -> list[states.Vector]:
        """Return where this rank's experts lie in the complete parameters, in the order of the optimiser's state."""
        vectors, names = [], {master: name for name, master in self._masters.items()}
        for group in self._optimizer.param_groups:
            for master in group["params"]:
                size = master.numel()
                place = states.Slice(names[master], 0, self._holders.rank * size, (self._holders.rank + 1) * size)
                vectors.append(states.Vector(master, states.moments_of(group, master.dim()), ((place,),)))
        return vectors

    def share(self) -> dict[str, Tensor]:
        """Return what this rank saves, fp32: its experts as "NAME:fp32", and the optimiser's state as "NAME:KIND".

        Of the ranks with the same experts only the first saves them.
        """
        if self._ranks.rank >= self._holders.size:
            return {}
        tensors: dict[str, Tensor] = {}
        for name, master in self._masters.items():
            kinds = {states.MASTER: master} | self._optimizer.state.get(master, {})
            tensors |= {f"{name}:{kind}": tensor.detach().float().cpu() for kind, tensor in kinds.items()}
        return tensors

    @torch.no_grad()
    def fill(self, masters: Sequence[Tensor], moments: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Load weights and the optimiser's state for each of ``vectors``, and drop gradients."""
        self.forget()
        self._optimizer.state.clear()
        for number, (vector, master) in enumerate(zip(self.vectors(), masters, strict=True)):
            vector.master.copy_(master)
            state = {kind: tensor.to(vector.master.device) for kind, tensor in moments.get(number, {}).items()}
            if self._train.ema_decay is None:  # else a stale average would be saved
                state.pop(AVERAGE, None)
            self._optimizer.state[vector.master] = state
        self._copy_to_leaves()

    def _copy_to_leaves(self) -> None:
        """Round the fp32 weights to the model's precision; in fp32 both are one memory."""
        for name, master in self._masters.items():
            self._leaves[name].detach().copy_(master)
