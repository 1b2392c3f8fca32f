"""Does an exported model compute what the trainer's did? Its loss on the checkpoint's probe, a block at a time.

Only one residual block is in memory at once, and of weights that are used as they are stored none at all.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from longstride.kernels import ConfigError
from longstride.launcher.checkpoints import PROBE, Checkpoint, probe_tolerance, read_probe, relative_difference
from longstride.launcher.engine import AVERAGE
from longstride.launcher.models import DTYPES, Exported, TensorHash, combined, empty_model, placed, runnable
from longstride.sparse_model import ModelConfig, SparseTransformer


def check_files(exported: Exported) -> None:
    """Whether the files hold what was written, by their fingerprint.

    Raises:
        ConfigError: they do not.
    """
    hashes = {name: TensorHash.of(exported.tensor(name)) for name in exported.names}
    if combined(exported.content["model"], hashes) != exported.content["fingerprint"]:
        raise ConfigError(f"{exported.folder}: reads otherwise than it was written: the disk is damaged")


def check_losses(
    exported: Exported, checkpoint: Checkpoint, masters: Callable[[str], Tensor], kind: str, device: torch.device
) -> str:
    """Holds the exported model's loss on the probe against the trainer's; returns a line about what was seen.

    It is computed in the trainer's precision where the exported type holds that precision's weights, and else in the
    exported type. A moving average has other losses than the weights that the probe was taken of: for one, the trained
    weights, which ``masters`` has by name, are held against it by the same means, and the average's own loss is told.

    Raises:
        ConfigError: it is another one by more than rounding.
    """
    saved = checkpoint.manifest.probe
    if saved is None:
        return "probe: not checked, as the checkpoint has none"
    content, trainers = read_probe(checkpoint), str(saved["precision"])
    own = next(name for name, dtype in DTYPES.items() if dtype == exported.dtype)
    if kind == AVERAGE:  # of what the checkpoint holds, in fp32: nothing else has been made of it
        used = trainers
        nats = _probe_nats(exported.config, masters, content, DTYPES[used], device)
    else:
        used = trainers if own in ("fp32", trainers) else own
        nats = _probe_nats(exported.config, exported.tensor, content, DTYPES[used], device)
    config = runnable(exported.config, device, DTYPES[used])
    before = float(saved["loss_nats"])
    difference = relative_difference(nats, before)
    tolerance = probe_tolerance(saved, used, device.type, config.backend)
    if not difference <= tolerance:  # a nan is in no order with anything
        whose = "trained weights'" if kind == AVERAGE else "exported model's"
        raise ConfigError(
            f"{checkpoint.folder}: the {whose} loss on {PROBE} is {nats:.9g} nats, and the trainer's was {before:.9g}, "
            f"{difference:.1e} apart where {tolerance:.0e} is rounding: nothing is exported; --no-check leaves this out"
        )
    apart = "" if nats == before else f" ({difference:.1e} apart, where {tolerance:.0e} is rounding)"
    if kind != AVERAGE:
        return f"probe: {nats:.6f} nats, the trainer's {before:.6f}{apart}"
    average = _probe_nats(exported.config, exported.tensor, content, exported.dtype, device)
    return f"probe: {average:.6f} nats; of the trained weights {nats:.6f}, the trainer's {before:.6f}{apart}"


def _probe_nats(
    config: ModelConfig, tensor: Callable[[str], Tensor], content: Tensor, dtype: torch.dtype, device: torch.device
) -> float:
    """The mean loss of one context (N,) uint8 by a model whose tensors are fetched as they are used."""
    model = streamed_model(runnable(config, device, dtype), tensor, dtype, device)
    with torch.no_grad():
        nats = model(content[None].to(device), return_nats=True)
    return float(nats.double().mean())


def streamed_model(
    config: ModelConfig, tensor: Callable[[str], Tensor], dtype: torch.dtype, device: torch.device
) -> SparseTransformer:
    """A model in evaluation mode whose blocks have no weights of their own: they are fetched for each use."""
    model = empty_model(config)

    def fetched(module: nn.Module, prefix: str) -> dict[str, Tensor]:
        names = module.state_dict().keys()
        return {name: placed(tensor(f"{prefix}.{name}"), device, dtype) for name in names}

    prefixes = {block: f"blocks.{number}" for number, block in enumerate(model.blocks)}

    def computed(block: nn.Module, h: Tensor) -> Tensor:
        out = functional_call(block, fetched(block, prefixes[block]), (h,))
        _give_back()
        return out

    model.activation_checkpoint = computed
    for name, module in model.named_children():
        if name != "blocks":
            module.load_state_dict(fetched(module, name), assign=True)
    return model.eval()


def _give_back() -> None:
    """Has the C library give back what is free: glibc keeps it by the hundred MB, more with every block."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
