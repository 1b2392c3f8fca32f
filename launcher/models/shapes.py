"""What tensors a model has, known from its configuration alone: nothing is built for each of its layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from longstride.kernels import ConfigError
from longstride.sparse_model import ModelConfig, SparseTransformer

_MOST_NAMES = 3  # of many wrong tensors, in a message
_BLOCKS = "blocks."


@dataclass(frozen=True, slots=True)
class Shapes:
    """Names and shapes of a model's parameters and buffers, in the model's own order.

    A configuration is a few hundred bytes that anybody may have written, and can ask for any number of layers of any
    size. So it is held against what is really there, by this, before a module is made or memory taken for it.
    """

    of: dict[str, torch.Size]
    buffers: frozenset[str]  # those of the names that are no parameters

    @classmethod
    def of_model(cls, config: ModelConfig) -> Shapes:
        """Of a configuration; blocks that are alike are made once.

        Raises:
            ConfigError: no machine can hold such a tensor.
        """
        with _Uninitialized():
            model, kinds = SparseTransformer.of_each_kind(config)
        buffers = dict(model.named_buffers()).keys()
        shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        numbers = {kind: f"{_BLOCKS}{number}." for number, kind in enumerate(kinds)}
        of_kind = {
            prefix: [(name.removeprefix(prefix), name) for name in shapes if name.startswith(prefix)]
            for prefix in numbers.values()
        }
        found: dict[str, str] = {}  # by the name in the whole model, that in this one
        first = next((place for place, name in enumerate(shapes) if name.startswith(_BLOCKS)), len(shapes))
        found.update((name, name) for name in list(shapes)[:first])
        for number, block in enumerate(config.blocks()):
            found.update((f"{_BLOCKS}{number}.{rest}", name) for rest, name in of_kind[numbers[block]])
        found.update((name, name) for name in list(shapes)[first:] if not name.startswith(_BLOCKS))
        return cls(
            {name: shapes[known] for name, known in found.items()},
            frozenset(name for name, known in found.items() if known in buffers),
        )

    @property
    def parameters(self) -> int:
        """Numbers in all parameters together."""
        return sum(shape.numel() for name, shape in self.of.items() if name not in self.buffers)

    def check(self, found: dict[str, tuple[int, ...]], what: str, where: str) -> None:
        """Raise ConfigError unless these are the model's tensors, by name and shape.

        ``what`` they are, and ``where`` they are: both stand in the message.
        """
        refuse(self.of.keys() - found.keys(), f"{where}: {what} it lacks")
        refuse(found.keys() - self.of.keys(), f"{where}: {what} it has unknown")
        pairs = ((name, list(found[name]), list(shape)) for name, shape in self.of.items())
        wrong = {f"{name} of {shape} instead of {expected}" for name, shape, expected in pairs if shape != expected}
        refuse(wrong, f"{where}: {what} it has")


def refuse(wrong: set[str], what: str) -> None:
    """Raise ConfigError that names the first of these tensors; nothing where there are none."""
    if wrong:
        more = f" and {len(wrong) - _MOST_NAMES} more" if len(wrong) > _MOST_NAMES else ""
        shown = (name if len(name) <= 160 else f"{name[:159]}…" for name in sorted(wrong)[:_MOST_NAMES])
        raise ConfigError(f"{what} {', '.join(shown)}{more}")


def empty_model(config: ModelConfig) -> SparseTransformer:
    """The network with names and shapes of its parameters, and neither memory nor values: on torch's meta device."""
    with torch.device("meta"), _Uninitialized():
        return SparseTransformer(config)


class _Uninitialized(TorchFunctionMode):
    """Leaves out initial values: on the meta device they would only load torch's compiler, 75 MB of it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return named["tensor"] if "tensor" in named else args[0]
        return func(*args, **named)
