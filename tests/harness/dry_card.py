"""A simulated GPU: kernels compile for it through the project's own launch path, and launches do nothing.

Tensors stay on the CPU. Use it in separate processes without TRITON_INTERPRET, as its patches are permanent.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from longstride.kernels.backends import triton as backend
from longstride.kernels.backends.triton import launch_plan

SHARED_BYTES = {"sm_80": 163 * 1024, "sm_86": 99 * 1024, "sm_90": 227 * 1024}  # a program's most
PROCESSORS = {"sm_80": 108, "sm_86": 84, "sm_90": 132}


class DryCard:
    """A driver for triton. ``launched`` has the name and the metadata of each launch, in order.

    With ``compiles=False`` no kernel is compiled: ``compiled`` has the names of those that would be, and ``launched``
    the name, the grid and the arguments of each launch. ``binaries`` has the machine code of each compiled kernel that
    was launched, by its hash in the metadata.
    """

    def __init__(self, architecture: str, *, compiles: bool = True) -> None:
        self.architecture = architecture
        self.compiles = compiles
        self.compiled: list[str] = []
        self.launched: list[tuple[Any, ...]] = []
        self.binaries: dict[str, bytes] = {}
        self._loaded: bytes | None = None  # not yet launched
        self.utils = self  # triton asks it for what follows

    def install(self) -> DryCard:
        """Install the card for the rest of the process."""
        triton.runtime.driver.set_active(self)
        if not self.compiles:
            self._stand_in_for_compiled_kernels()
        backend.why_not = lambda q, k, v: None
        backend.PLANS.clear()  # of another card
        launch_plan.architecture = lambda device: self.architecture
        launch_plan.num_processors = lambda device: PROCESSORS[self.architecture]
        torch.cuda.device = lambda device: contextlib.nullcontext()  # type: ignore[assignment,misc,return-value]
        return self

    def _stand_in_for_compiled_kernels(self) -> None:
        card = self

        class Uncompiled:
            function, packed_metadata = object(), ()

            def __init__(self, name: str) -> None:
                self.run = lambda *arguments: card.launched.append((name, arguments[0], arguments[9:]))

            def launch_metadata(self, *arguments: Any) -> None:
                pass

        def do_compile(kernel: Any, key: Any, *_: Any) -> Uncompiled:
            card.compiled.append(kernel.__name__)
            compiled = kernel.device_caches[0][0][key] = Uncompiled(kernel.__name__)
            return compiled

        triton.JITFunction._do_compile = do_compile

    # A driver

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", int(self.architecture.removeprefix("sm_")), 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """Return a launcher of one kernel that only records the launch."""

        def note(*arguments: Any) -> None:
            self.launched.append((source.name, metadata))
            if self._loaded is not None:
                self.binaries[metadata.hash], self._loaded = self._loaded, None

        return note

    # Its utilities

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[None, object, int, int, int]:
        """Return a module, a function, its registers, its spills, and its maximum number of threads."""
        self._loaded = binary
        return None, object(), 0, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Return the properties that triton reads."""
        return {
            "max_shared_mem": SHARED_BYTES[self.architecture],
            "multiprocessor_count": PROCESSORS[self.architecture],
        }
