"""Draw samples of the model during training, into RUN/samples: `train.samples_every`.

The first rank samples from a separate network that has the engine's weights but not its hooks, sequence sections and
compiled blocks. The other ranks wait. Sampling has its own random generators, so it does not change training.
"""

from __future__ import annotations

import time
from contextlib import nullcontext

import deepspeed
import numpy as np
import torch
from deepspeed import DeepSpeedEngine

from longstride.data_pipelines.durable import naming, write_over
from longstride.kernels import ConfigError
from longstride.launcher.checkpoints import error_line
from longstride.launcher.config import RunConfig
from longstride.launcher.data import RunSetup
from longstride.launcher.models import ModelData
from longstride.launcher.output import counting, file_names
from longstride.launcher.ranks import Ranks
from longstride.launcher.stops import StopFlag
from longstride.launcher.training.recorder import Recorder
from longstride.sparse_model import SparseTransformer, generate

_USUAL_PICTURES = 4
_SHOWN_CHARACTERS = 100  # of a text, in the progress line


def write_samples(run: RunSetup, engine: DeepSpeedEngine, recorder: Recorder, step: int) -> None:
    """Draw and write ``train.samples`` after a step. All ranks must call. A failure is reported and ends nothing."""
    network = undivided_network(engine, run.config, run.ranks)
    words = run.ranks.run_on_first(lambda: _sampled(network, run, engine.device, recorder, step))
    recorder.say(f"step {step}: {words}")


def _sampled(
    network: SparseTransformer | None, run: RunSetup, device: torch.device, recorder: Recorder, step: int
) -> str:
    """Draw and write the samples of a step, on the first rank; return the outcome in words."""
    assert network is not None
    begin, settings, data = time.monotonic(), run.config.train.samples, run.data.identity
    folder = run.folder / file_names.SAMPLES
    try:
        drawn = draw(network, run.config, data, device, step, run.stop)
        if drawn is None:
            return "no samples, because the run is stopping"
        suffix, contents = _encode(drawn, data)
        paths = [folder / f"step-{step:08d}{f'-{number}' if number else ''}{suffix}" for number in range(len(contents))]
        with naming(folder):
            folder.mkdir(exist_ok=True)
        for path, content in zip(paths, contents, strict=True):
            write_over(path, content)
    except OSError as error:
        return f"samples could not be written: {error_line(error, folder)}"
    except (FloatingPointError, RuntimeError) as error:  # logits that are not finite, out of memory
        return f"no samples: {(str(error).splitlines() or [type(error).__name__])[0]}"
    recorder.samples(step, data, drawn, paths)
    seconds = time.monotonic() - begin
    took = f", in {counting.duration(seconds)}" if seconds >= 1 else ""
    if data.modality.shown_as == "text":
        text = drawn[0].tobytes()[len(settings.prompt.encode()) :].decode(errors="replace")
        shown = "".join(character if character.isprintable() else " " for character in text)
        return f"sample {' '.join(shown.split())[:_SHOWN_CHARACTERS]!r}; {paths[0]}{took}"
    return f"samples {', '.join(map(str, paths))}{took}"


def _encode(drawn: np.ndarray, data: ModelData) -> tuple[str, list[bytes]]:
    """Return the suffix of the files and the content of each."""
    if data.modality.shown_as != "text":
        return data.modality.output_suffix or "", list(data.modality.sample_files(drawn, data.file_properties))
    texts = [sample.tobytes() for sample in drawn]
    if len(texts) > 1:
        texts = [b"".join(f"=== sample {n} ===\n".encode() + text + b"\n" for n, text in enumerate(texts, 1))]
    return ".txt", texts


def num_sampled(config: RunConfig, data: ModelData) -> tuple[int, int]:
    """Return the number of samples, and of tokens of each after the prompt; ConfigError if they do not fit."""
    settings, context = config.train.samples, config.model.context
    prompt, size = settings.prompt.encode(), data.modality.document_bytes(data.properties)
    room, rule = context - len(prompt), None
    if prompt and data.modality.shown_as != "text":
        rule = f"only applies to text, and the data are {data.modality.words}; leave it out"
    elif beyond := [byte for byte in prompt if byte >= config.model.vocabulary]:
        rule = f"contains byte {beyond[0]}, but the model's bytes are 0 to {config.model.vocabulary - 1}"
    elif room < 1:
        rule = f"has {len(prompt)} bytes; must leave room in the context of {context}"
    if rule is not None:
        raise ConfigError.at("train.samples.prompt", settings.prompt[:40], rule)
    count = settings.count or (_USUAL_PICTURES if data.modality.shown_as == "picture" else 1)
    if size is not None:
        if settings.bytes is not None:
            rule = f"the size of {data.modality.words} is fixed, {size} bytes; leave it out"
            raise ConfigError.at("train.samples.bytes", settings.bytes, rule)
        if size // data.token_bytes > context:
            rule = f"one of the {data.modality.words} has {size // data.token_bytes} tokens, and the context {context}"
            raise ConfigError.at("train.samples_every", config.train.samples_every, f"{rule}; give 0")
        return count, size // data.token_bytes
    if settings.bytes is not None and settings.bytes > room:
        rule = f"prompt and sample must fit in the context of {context}; at most {room}"
        raise ConfigError.at("train.samples.bytes", settings.bytes, rule)
    return count, settings.bytes or min(data.modality.sample_bytes or context, room)


def draw(
    network: SparseTransformer,
    config: RunConfig,
    data: ModelData,
    device: torch.device,
    step: int,
    stop: StopFlag | None = None,
) -> np.ndarray | None:
    """Draw samples after their prompt by the seed and the step: (S, bytes) uint8. Return None at a stop request."""
    settings = config.train.samples
    count, length = num_sampled(config, data)
    prompt = torch.from_numpy(data.tokens(settings.prompt.encode()).astype(np.int64)).to(device).expand(count, -1)
    generator = torch.Generator(device).manual_seed((settings.seed + 1_000_003 * step) % 2**63)
    columns = [prompt.cpu().numpy()]
    tokens = generate(
        network, prompt, length, temperature=settings.temperature, top_p=settings.top_p, generator=generator
    )
    for token in tokens:
        if stop is not None and stop.reason is not None:
            return None
        columns.append(token.cpu().numpy()[:, None])
    return data.content(np.concatenate(columns, 1))


def undivided_network(engine: DeepSpeedEngine, config: RunConfig, ranks: Ranks) -> SparseTransformer | None:
    """Return the model in evaluation mode with the engine's weights; None on ranks other than the first.

    All ranks must call. With ZeRO 3 the weights are copies, gathered one by one; otherwise they share the engine's
    memory.
    """
    sharded, state = config.zero_stage == 3, {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters(parameter) if sharded else nullcontext():
            if ranks.is_first:
                state[name] = parameter.detach().clone() if sharded else parameter.detach()
    state |= dict(engine.module.named_buffers())
    state |= engine.held.whole()
    if not ranks.is_first:
        return None
    with torch.device("meta"):
        network = SparseTransformer(config.model, initialize=False)
    network.load_state_dict(state, assign=True)
    network.use_attention(engine.module.attention_from)
    return network.requires_grad_(False).eval()
