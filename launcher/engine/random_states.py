"""The states of a rank's random generators: dropout draws from them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def random_states(device: torch.device) -> dict[str, Tensor]:
    """The states as they are, of the CPU's generator and of the device's."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["device"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Puts back what ``random_states`` gave."""
    torch.set_rng_state(states["cpu"])
    if "device" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["device"], device)
