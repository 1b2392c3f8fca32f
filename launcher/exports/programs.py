"""`longstride export MODEL --format pt2|onnx`: export the forward pass of a model for other runtimes.

The program holds weights and dense masked attention, like the reference backend: memory and time grow with the square
of the length. It runs without Longstride, for any batch and any length up to the context.

Letters: B batch, n tokens, V vocabulary.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.nn import functional as F

from longstride.data_pipelines.durable import complete_folder, naming
from longstride.kernels import ConfigError
from longstride.launcher.files import check_free
from longstride.launcher.models import Exported, load_model
from longstride.sparse_model import SparseTransformer

OPSET = 20  # the first of ONNX with all operators that torch emits
# Mixers, besides attention over patterns, whose shapes can depend on a symbolic length. Hashing and routing search
# sorted lists, for which ONNX has no operator.
_TRACED = {"pt2": ("linformer", "lsh", "match", "routing"), "onnx": ("linformer", "match")}
_LENGTHS = (1, 2, 33, 256)  # of the contexts for the check
_TOLERANCE = 1e-4  # relative to the largest logit


class PlacedLogits(nn.Module):
    """The network with logits at the places of transformers: place i has those of the token after token i.

    If the objective is not causal, it has those of token i, where V stands for a masked token.
    """

    def __init__(self, network: SparseTransformer) -> None:
        super().__init__()
        self.network = network

    def forward(self, input_ids: Tensor) -> Tensor:
        """Map (B, n) int64, n ≥ 1, to (B, n, V) fp32; NaN where the context has no row."""
        network, shift = self.network, int(self.network.config.objective.causal)
        h = network.embedding(F.pad(input_ids, (0, shift)))
        before = F.pad(input_ids, (network.reach, 0), value=-1)  # before the beginning
        rows = network.forward_cached(h, [None] * len(network.blocks), 0, before)
        logits: Tensor = network.logits(network.norm(rows))[:, shift:].float()
        predicted = torch.arange(shift, input_ids.shape[1] + shift, device=input_ids.device)
        # Runtimes without size bounds would go on with positions that start over.
        return logits.masked_fill((predicted >= network.config.context)[:, None], torch.nan)


def traced_program(folder: str | Path, format: str = "pt2", *, trust_code: bool = False) -> ExportedProgram:
    """Trace the forward pass of an exported model, ``PlacedLogits``, by `torch.export` in fp32 on the CPU.

    Its input is ``input_ids`` (B, n) int64, B ≥ 1 and 1 ≤ n < context, or n ≤ context if the objective is not causal.
    Its output is (B, n, V) fp32. ``format`` is pt2 or onnx. ``trust_code`` lets parts of the model from other packages
    be imported.

    Raises:
        ConfigError: the folder is no export, or its model has parts that cannot be traced for every length, or predicts
            classes.
    """
    config = Exported(folder, trust_code=trust_code).config
    config.require_tokens()
    kinds = [block.mixer.type for block in config.blocks() if block.mixer is not None]
    if unsupported := sorted({*kinds} - {"patterns", *_TRACED[format]}):
        also = "".join(f", {name}" for name in _TRACED[format])
        rule = f"attention of type {unsupported[0]} cannot be traced for all lengths; these can: patterns{also}"
        raise ConfigError(f"--format={format}: {rule}")
    network = load_model(folder, dtype=torch.float32, trust_code=trust_code).requires_grad_(False)
    linformers = [mixer for kind, mixer in zip(kinds, network.mixers, strict=True) if kind == "linformer"]
    for mixer in network.mixers:
        mixer.backend = "reference"
    for part in [network.shared, *linformers] if linformers else ():
        for mixtures in () if part is None else part.parameters(recurse=False):
            mixtures.data = F.pad(mixtures, (0, 1))  # torch excludes the length at which a slice has all columns
    program, longest = PlacedLogits(network), config.context - config.objective.causal
    example = torch.zeros(3, min(7, longest), dtype=torch.int64)
    program(example)  # builds tables before tracing, since they must not contain symbols
    sizes = {0: Dim("batch", min=1), 1: Dim("length", min=1, max=longest)}
    with torch.no_grad():
        traced = torch.export.export(program, (example,), dynamic_shapes={"input_ids": sizes})
    for module in traced.graph_module.modules():
        for node in getattr(module, "graph", torch.fx.Graph()).nodes:
            node.meta.pop("stack_trace", None)  # contains file names of this machine
    return traced


def export_program(model: Path, output: Path, format: str, check: bool = True, *, trust_code: bool = False) -> str:
    """Write an export's program as `model.pt2` or `model.onnx` into a new folder; return a line about it and its check.

    With ``check``, its logits are compared with the model's if its runtime is installed.

    Raises:
        ConfigError: the model cannot be traced, a package is missing, the output exists, or logits differ by more than
            rounding.
    """
    check_free(output)
    if format == "onnx":
        for package in ("onnx", "onnxscript"):
            if importlib.util.find_spec(package) is None:
                rule = f"needs the package {package}, which is not installed"
                raise ConfigError(f'--format=onnx: {rule}; pip install "longstride[onnx]"')
    traced = traced_program(model, format, trust_code=trust_code)
    with complete_folder(output) as folder:
        path = folder / f"model.{format}"
        with naming(path):
            if format == "onnx":
                _write_onnx(traced, path)
            else:  # through memory, because torch's own writer ends the process on a full disk
                content = io.BytesIO()
                torch.export.save(traced, content)
                path.write_bytes(content.getbuffer())
        line = "not checked, as --no-check asks"
        if check and format == "onnx" and importlib.util.find_spec("onnxruntime") is None:
            line = "not checked, as onnxruntime is not installed"
        elif check:
            line = _check_logits(model, _load_program(path, format), trust_code)
        size = sum(file.stat().st_size for file in folder.iterdir())
    return f"{output / path.name}: {size:,} bytes; {line}"


def _write_onnx(traced: ExportedProgram, path: Path) -> None:
    """Translate by torch, and remove what names files of this machine."""
    quiet = logging.root.manager.disable
    logging.disable(logging.WARNING)  # messages for the translator's authors
    with warnings.catch_warnings(), contextlib.ExitStack() as after:
        after.callback(logging.disable, quiet)
        warnings.simplefilter("ignore")
        translated = torch.onnx.export(
            traced, dynamo=True, opset_version=OPSET, input_names=["input_ids"], output_names=["logits"], verbose=False
        )
    assert translated is not None
    for node in translated.model.graph.all_nodes():
        node.metadata_props.clear()
    for value in (*translated.model.graph.inputs, *translated.model.graph.outputs):
        assert value.shape is not None
        value.shape[0], value.shape[1] = "batch", "length"
    translated.save(path)


def _load_program(path: Path, format: str) -> Callable[[Tensor], Tensor]:
    """Load a written program with its runtime."""
    if format == "pt2":
        module: Any = torch.export.load(path).module()
        return lambda tokens: module(tokens)
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda tokens: torch.from_numpy(session.run(["logits"], {"input_ids": tokens.numpy()})[0])


def _check_logits(model: Path, program: Callable[[Tensor], Tensor], trust_code: bool) -> str:
    """Compare a program's logits with the model's; return a line about it."""
    network = load_model(model, dtype=torch.float32, trust_code=trust_code)
    generator, differences, longest = torch.Generator().manual_seed(0), [], 0
    config, shift = network.config, int(network.config.objective.causal)
    for batch, length in enumerate(sorted({min(n, config.context - shift) for n in _LENGTHS}), 1):
        tokens = torch.randint(config.vocabulary + 1 - shift, (batch, length), generator=generator)  # masks too
        with torch.no_grad():
            expected = network(F.pad(tokens, (0, shift)))[:, shift:]
            actual = program(tokens)
        differences.append((actual - expected).abs().max() / expected.abs().max().clamp_min(1))
        longest = length
    difference = float(torch.stack(differences).max())  # nan if one of them is
    if not difference <= _TOLERANCE:
        rule = f"by {difference:.1e} of the largest, and rounding explains {_TOLERANCE:.0e}; nothing is exported"
        raise ConfigError(f"{model}: the program's logits differ from the model's {rule}; --no-check skips this")
    return f"logits up to {longest} tokens are the model's, within {difference:.1e} of the largest"
