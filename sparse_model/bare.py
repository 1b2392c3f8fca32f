"""A module's own code over its own parameters, without what ``nn.Module`` adds to every call and every name.

One row of a small model is some hundred operations of a few microseconds each: to ask for hooks that are not there, and
to look for parameters by name, takes time that shows.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeVar

from torch import nn
from torch.nn.modules import module as every

Module = TypeVar("Module", bound=nn.Module)


def bare(module: Module) -> Module:
    """The same module to call, as long as nothing is assigned to either: its tensors are shared, not copied.

    A part that has hooks, was compiled, or had its ``forward`` set stays as it is, and is called as ever; so does
    everything where there are hooks of all modules. Hooks that come later are not called.
    """
    return _bare(module, {})


def _bare(module: Any, known: dict[int, Any]) -> Any:
    """``known``: what stands for modules that were met before, by their ids, as a part may stand in several places."""
    if id(module) not in known:
        known[id(module)] = module if module is None or _is_surrounded(module) else _twin(module, known)
    return known[id(module)]


def _twin(module: nn.Module, known: dict[int, Any]) -> nn.Module:
    own = vars(module)
    kind: Any = type(module)
    twin: nn.Module = object.__new__(_called_by(kind, kind.forward))
    children = {name: _bare(child, known) for name, child in own["_modules"].items()}
    # As plain attributes they are found before nn.Module is asked.
    vars(twin).update(own | own["_parameters"] | own["_buffers"] | children, _modules=children)
    return twin


def _is_surrounded(module: nn.Module) -> bool:
    """Whether to call it is more than its class's ``forward``."""
    own = vars(module)
    hooks = (own["_forward_hooks"], own["_forward_pre_hooks"], every._global_forward_hooks)
    return any((*hooks, every._global_forward_pre_hooks, module._compiled_call_impl, "forward" in own))


@lru_cache
def _called_by(kind: Any, forward: Any) -> Any:
    """The class, called by its ``forward`` of now."""
    return type(kind.__name__, (kind,), {"__call__": forward})
