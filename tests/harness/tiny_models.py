"""Tiny exported models of every modality, trained briefly on synthetic data."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from longstride.data_pipelines.modalities.wav import mulaw_encode
from longstride.launcher.models.exported import load_model
from longstride.sparse_model import ModelConfig, SparseTransformer

RATE = 8000  # Hz, of the sounds
HEIGHT, WIDTH = 8, 8  # of the pictures
EMBEDDINGS: dict[str, dict[str, Any]] = {
    "text": {"type": "text", "row_width": 24},
    "image": {"type": "image", "height": HEIGHT, "width": WIDTH, "channels": 3},
    "audio": {"type": "audio", "row_width": 24},
}
PROPERTIES: dict[str, dict[str, int]] = {
    "text": {},
    "image": {"height": HEIGHT, "width": WIDTH, "channels": 3, "resized": 0},
    "audio": {"rate": RATE},
}
CONTEXT = HEIGHT * WIDTH * 3


def plain_config(**changes: Any) -> ModelConfig:
    """Return the configuration of a small text model, with changes."""
    content = {
        "context": 64, "layers": 1, "heads": 2, "width": 32, "attention": {"type": "local", "window": 8},
        "embedding": {"type": "text", "row_width": 8},
    }  # fmt: skip
    return ModelConfig.model_validate(content | changes)


def content_of(modality: str, size: int, seed: int) -> bytes:
    """Make bytes of a file of the modality: words, pictures of two colours end to end, or a chord in mu-law."""
    random = np.random.default_rng(seed)
    if modality == "text":
        words = random.choice(["sparse", "dense", "stride", "byte", "long", "tränen"], size)
        return " ".join(words).encode()[:size]
    if modality == "audio":
        time = np.arange(size) / RATE
        chord = sum(np.sin(2 * np.pi * frequency * time) for frequency in random.uniform(100, 900, 3))
        return mulaw_encode((chord * 8000 + random.normal(size=size) * 50).astype(np.int16)).tobytes()
    pictures = [_picture(random) for _ in range(-(-size // CONTEXT))]
    return b"".join(pictures)[:size]


def _picture(random: np.random.Generator) -> bytes:
    upper, lower = random.integers(0, 256, (2, 3))
    split = np.arange(HEIGHT)[:, None, None] < random.integers(2, HEIGHT - 1)
    return np.broadcast_to(np.where(split, upper, lower), (HEIGHT, WIDTH, 3)).astype(np.uint8).tobytes()


def tiny_export(
    folder: Path, modality: str, steps: int = 0, seed: int = 0, model: dict[str, Any] | None = None, **data: Any
) -> Path:
    """Write an export of a network with one block; ``model`` changes the configuration.

    ``data`` replaces fields of config.json's ``data``.
    """
    torch.manual_seed(seed)
    config = ModelConfig.model_validate(
        {
            "context": CONTEXT, "layers": 1, "heads": 2, "width": 32, "attention": {"type": "strided", "stride": 24},
            "embedding": EMBEDDINGS[modality], "backend": "cpu",
            **(model or {}),
        }
    )  # fmt: skip
    network = SparseTransformer(config)
    optimizer = torch.optim.Adam(network.parameters(), 0.01)
    for step in range(steps):
        content = content_of(modality, 8 * config.context, 1000 + step)
        rows = np.frombuffer(content, dtype=np.uint8).reshape(8, config.context)
        optimizer.zero_grad()
        network(torch.from_numpy(rows.copy()), return_nats=True).mean().backward()
        optimizer.step()
    folder.mkdir()
    weights = {name: tensor.contiguous() for name, tensor in network.state_dict().items()}
    save_file(weights, folder / "model.safetensors")
    described = {"modality": modality, "properties": PROPERTIES[modality], **data}
    content = {"format": 1, "model": config.model_dump(mode="json"), "data": described}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def random_export(folder: Path, data: dict[str, Any] | None = None, **changes: Any) -> Path:
    """Write an export of a small model with random parameters, which generates arbitrary bytes.

    ``data`` is what config.json says of the training data; nothing is text.
    """
    torch.manual_seed(0)
    config = plain_config(**changes)
    weights = {name: torch.randn_like(tensor) for name, tensor in SparseTransformer(config).state_dict().items()}
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    content = {"format": 1, "model": config.model_dump(mode="json"), **({"data": data} if data else {})}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def add_hub_files(folder: Path) -> None:
    """Add the files that transformers needs to an export."""
    from longstride.launcher.exports.for_hubs import hub_fields, hub_files  # late: imports deepspeed

    content = json.loads((folder / "config.json").read_text())
    model = ModelConfig.model_validate(content["model"])
    (folder / "config.json").write_text(json.dumps(content | hub_fields(model) | {"dtype": "float32"}))
    for name, text in hub_files(model).items():
        (folder / name).write_text(text)


def assert_next_logits(folder: Path, program: Callable[[torch.Tensor], torch.Tensor], *sizes: tuple[int, int]) -> None:
    """Assert that a program of tokens (B, n) gives an export's next logits, as exactly as the export itself.

    If its objective is not causal, they are those in place, and some tokens are masks. For batches of these sizes
    (B, n), the error against the export in fp64 is at most four times that of its fp32.
    """
    exact, network = load_model(folder, dtype=torch.float64), load_model(folder)
    errors, bars, shift = [], [], int(exact.config.objective.causal)
    for batch, length in sizes:
        generator = torch.Generator().manual_seed(length)
        tokens = torch.randint(min(256, exact.config.vocabulary), (batch, length), generator=generator)
        if not shift:
            tokens[:, ::5] = exact.config.vocabulary
        with torch.no_grad():
            expected, actual = (model(F.pad(tokens, (0, shift)))[:, shift:] for model in (exact, network))
            output = program(tokens)
        assert output.shape == expected.shape and output.dtype == torch.float32
        errors.append(float((output - expected).abs().max()))
        bars.append(4 * float((actual - expected).abs().max()))
    assert torch.tensor(errors).max() <= max(bars)  # where one is a nan it is no more
