"""Checks of a model: the properties of all mixers and feed-forwards, and the abilities that they declare.

Letters: B batch, N positions, C width.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from longstride.kernels import ConfigError
from longstride.sparse_model import Division, MixerOutput, ModelConfig, SparseTransformer, Work
from longstride.testing.comparisons import (
    BOUND,
    ConformanceError,
    UndeclaredError,
    require,
    require_close,
    require_equal,
    require_rounding_explains,
)
from longstride.testing.subjects import awake, bound_of, changed, require_method, tokens_of
from longstride.testing.threads import in_sections

STEP = 1e-6  # of difference quotients
OF_MIXERS = ("convolution", "documents", "keys")  # abilities that only mixers need


def types_of(config: ModelConfig, without: str | None = None) -> list[str]:
    """List the types of all parts, or of those that must declare an ability and do not."""
    types: dict[str, None] = {}
    for block in config.blocks():
        for part in block:
            if part is None or (without in OF_MIXERS and part is not block.mixer):
                continue
            if without is None or without not in part.supports:
                types[part.type] = None
    return list(types)


def _require_declared(config: ModelConfig, ability: str) -> None:
    """Raise UndeclaredError if a part does not declare an ability."""
    if types := types_of(config, without=ability):
        raise UndeclaredError(", ".join(types))


class Learned(NamedTuple):
    """The result of a training step."""

    nats: Tensor
    auxiliary_loss: Tensor | None
    statistics: tuple[Tensor, ...]
    gradients: dict[str, Tensor]


def _learn(model: SparseTransformer, tokens: Tensor, is_training: bool = True, **options: Tensor) -> Learned:
    """Compute the loss and all gradients as the trainer does."""
    model.train(is_training)
    model.zero_grad()
    output = model(tokens, return_nats=True, return_extras=True, **options)
    assert isinstance(output, MixerOutput)
    section = model.division.section(tokens.shape[1])
    count = options["real"][:, section].sum() if "real" in options else output.rows.numel()
    loss = output.rows.sum()
    if output.auxiliary_loss is not None:
        loss = loss + output.auxiliary_loss * count
    loss.backward()
    gradients, apart = {}, set() if is_training else _apart(model)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients[name] = parameter.grad
        elif name not in apart:
            raise ConformanceError(f"{name} gets no gradient")
    auxiliary = None if output.auxiliary_loss is None else output.auxiliary_loss.detach()
    return Learned(output.rows.detach(), auxiliary, tuple(part.detach() for part in output.statistics), gradients)


def _apart(model: SparseTransformer) -> set[str]:
    """Return the names of parameters without a gradient in evaluation."""
    parts = (part for part in model.modules() if getattr(part, "learns_apart", False))
    apart = {parameter for part in parts for parameter in part.parameters()}
    return {name for name, parameter in model.named_parameters() if parameter in apart}


def _observe(model: SparseTransformer, statistics: tuple[Tensor, ...]) -> None:
    for part, total in zip(model.observers, statistics, strict=True):
        part.observe(total)


def _require_same(computed: Learned, expected: Learned, bound: float) -> None:
    """Require that all results are close."""
    require_close("nats", computed.nats, expected.nats, bound)
    require((computed.auxiliary_loss is None) == (expected.auxiliary_loss is None), "one has no auxiliary loss")
    if computed.auxiliary_loss is not None and expected.auxiliary_loss is not None:
        require_close("auxiliary loss", computed.auxiliary_loss, expected.auxiliary_loss, bound)
    for number, pair in enumerate(zip(computed.statistics, expected.statistics, strict=True)):
        require_close(f"statistics {number}", *pair, bound)
    for name, gradient in computed.gradients.items():
        require_close(f"gradient of {name}", gradient, expected.gradients[name], bound)


def _require_same_bits(computed: Learned, expected: Learned) -> None:
    """Require that all results have equal bits."""
    require_equal("nats", computed.nats, expected.nats)
    for number, pair in enumerate(zip(computed.statistics, expected.statistics, strict=True)):
        require_equal(f"statistics {number}", *pair)
    for name, gradient in computed.gradients.items():
        require_equal(f"gradient of {name}", gradient, expected.gradients[name])


def configuration(config: ModelConfig) -> None:
    """Check that the configuration survives JSON, and that parts count their operations."""
    saved = json.loads(json.dumps(config.model_dump(mode="json")))
    require(ModelConfig.model_validate(saved) == config, "is not what its JSON says")
    require(hash(config.blocks()) == hash(changed(config).blocks()), "parts must be hashable values")
    for block in awake(config).blocks:
        for part in (block.attention, block.feed_forward):
            if part is not None:
                work = part.work(config.context, 1)
                require(isinstance(work, Work), f"{type(part).__name__}.work must return Work, not {type(work)}")
                require(work.forward >= 0, f"{type(part).__name__}.work counts {work.forward} operations")


@torch.no_grad()
def future(config: ModelConfig) -> None:
    """Check that no row changes with a later token, and that later rows do."""
    model, tokens = awake(config), tokens_of(config)
    new_tokens = (tokens + 1) % min(config.vocabulary, 256)
    before = model(tokens)
    for position in sorted({0, 1, config.context // 2, max(config.context - 2, 0)}):
        after = model(torch.cat([tokens[:, :position], new_tokens[:, position:]], 1))
        what = f"row up to {position}, when tokens from {position} on change,"
        require_close(what, after[:, : position + 1], before[:, : position + 1], bound_of(config))
        if position + 1 < config.context:
            require(not torch.equal(after, before), f"no row reads the tokens from {position} on")


@torch.no_grad()
def lengths(config: ModelConfig) -> None:
    """Check that a context of every length gives the first rows of a longer one."""
    model, tokens = awake(config), tokens_of(config)
    expected = model(tokens)
    for length in range(1, config.context + 1):
        require_close(f"a context of {length}", model(tokens[:, :length]), expected[:, :length], bound_of(config))


def gradients(config: ModelConfig) -> None:
    """Check the gradients of all tensors against a difference quotient of the loss in fp64.

    The direction in each tensor is the sum of the gradient's direction and a random one. One quotient is along all of
    them at once; if it differs, that of each tensor names the wrong gradient. The error of a quotient over 2 STEP is
    that of rounding the two losses; the curvature of the loss adds less.
    """
    model = awake(changed(config, reversible=False) if config.reversible else config)
    tokens, generator = tokens_of(config)[:, : max(config.context - 3, 1)], torch.Generator().manual_seed(3)

    def loss() -> Tensor:
        output = model(tokens, return_nats=True, return_extras=True)
        assert isinstance(output, MixerOutput)
        mean = output.rows.mean()
        return mean if output.auxiliary_loss is None else mean + output.auxiliary_loss

    value = loss()
    value.backward()
    apart = _apart(model)
    parameters = {name: parameter for name, parameter in model.named_parameters() if name not in apart}
    directions, derivatives = {}, {}
    for name, parameter in parameters.items():
        gradient = parameter.grad
        if gradient is None:
            raise ConformanceError(f"{name} gets no gradient")
        direction = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        directions[name] = direction / direction.norm() + gradient / gradient.norm().clamp_min(1e-30)
        derivatives[name] = float((gradient * directions[name]).sum())

    @torch.no_grad()
    def require_quotient(what: str, names: list[str]) -> None:
        originals, losses = [parameters[name].clone() for name in names], []
        for step in (STEP, -STEP, None):
            for name, original in zip(names, originals, strict=True):
                parameters[name].copy_(original if step is None else original + step * directions[name])
            losses.append(0.0 if step is None else loss().item())
        computed, expected = sum(derivatives[name] for name in names), (losses[0] - losses[1]) / (2 * STEP)
        message = f"{what}: the derivative is {computed:.6g}, the difference quotient {expected:.6g}"
        require(abs(computed - expected) <= BOUND * max(1.0, value.item()) / STEP, message)

    try:
        require_quotient("all tensors", list(parameters))
    except ConformanceError:
        for name in parameters:
            require_quotient(name, [name])
        raise


def recomputation(config: ModelConfig) -> None:
    """Check that recomputed activations give equal bits, with dropout."""
    plain = awake(changed(config, dropout=0.2)).float()
    results = []
    for recompute in (None, partial(checkpoint, use_reentrant=True), partial(checkpoint, use_reentrant=False)):
        model = copy.deepcopy(plain)
        model.activation_checkpoint = recompute
        torch.manual_seed(3)
        results.append(_learn(model, tokens_of(config)))
    for again in results[1:]:
        _require_same_bits(again, results[0])


def precision(config: ModelConfig) -> None:
    """Check that rounding explains the errors in fp32 and bf16."""
    tokens, exact_model = tokens_of(config), awake(config)
    buffers = dict(exact_model.named_buffers())
    names = [name for name, _ in exact_model.named_parameters()]

    def exact(values: list[Tensor]) -> Tensor:
        output: Tensor = functional_call(exact_model, dict(zip(names, values, strict=True)), tokens)
        return output

    for dtype in (torch.float32, torch.bfloat16):
        model = copy.deepcopy(exact_model).to(dtype)
        for name, buffer in model.named_buffers():
            if buffer.is_floating_point():
                buffer.data = buffers[name].float()  # as in training

        with torch.no_grad():
            require_rounding_explains("output", model(tokens), exact, list(model.parameters()), dtype)


def resume(config: ModelConfig) -> None:
    """Check that loading the weights and buffers saved after a step gives equal bits."""
    model, tokens = awake(config), tokens_of(config)
    _observe(model, _learn(model, tokens).statistics)
    torch.manual_seed(1)
    loaded = SparseTransformer(config).double()
    loaded.load_state_dict(model.state_dict())
    require_equal("logits of the saved weights", loaded.eval()(tokens), model.eval()(tokens))


def documents(config: ModelConfig) -> None:
    """Check that each document in a context has the outputs and gradients that it has alone.

    This uses evaluation mode, as in training an expert's capacity depends on all rows of a context.
    """
    _require_declared(config, "documents")
    model, tokens, context = awake(config), tokens_of(config), config.context
    edges = [0, context // 3, context // 3 + 1, 3 * context // 4, context], [0, context // 8, 3 * context // 5, context]
    begins = torch.zeros_like(tokens, dtype=torch.bool)
    for row, places in zip(begins, edges, strict=True):
        row[places[:-1]] = True
    packed = _learn(model, tokens, is_training=False, begins=begins)
    nats, total = torch.zeros_like(packed.nats), {name: torch.zeros_like(g) for name, g in packed.gradients.items()}
    for number, places in enumerate(edges):
        for first, last in pairwise(places):
            model.zero_grad()
            rows = model(tokens[number : number + 1, first:last], return_nats=True)
            rows.sum().backward()
            nats[number, first:last] = rows.detach()[0]
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    total[name] += parameter.grad
    require_close("nats of documents", packed.nats, nats, bound_of(config))
    if packed.auxiliary_loss is None:
        for name, gradient in packed.gradients.items():
            require_close(f"gradient of {name}", gradient, total[name], bound_of(config))
    for number, places in enumerate(edges):  # every second document changes
        new_tokens = tokens.clone()
        for first, last in list(pairwise(places))[1::2]:
            new_tokens[number, first:last] = 7 % config.vocabulary
        again = _learn(model, new_tokens, is_training=False, begins=begins)
        for first, last in list(pairwise(places))[::2]:
            what = f"document {first}:{last}, when others change,"
            require_close(what, again.nats[number, first:last], packed.nats[number, first:last], bound_of(config))


def padding(config: ModelConfig) -> None:
    """Check that padding changes no loss, gradient, statistic or buffer."""
    _require_declared(config, "padding")
    context = config.context
    lengths = torch.tensor([context, 17 * context // 40, 1])
    real = torch.arange(context) < lengths[:, None]
    tokens, new_tokens = (tokens_of(config, seed, 3) for seed in (1, 2))
    model = awake(config)
    expected = _learn(model, tokens, real=real)
    _require_same(_learn(model, tokens.where(real, new_tokens), real=real), expected, bound_of(config))
    short = slice(1, 2), slice(int(lengths[1]))
    alone, padded = _learn(model, tokens[short]), _learn(model, tokens[1:2], real=real[1:2])
    require(not padded.nats[:, lengths[1] :].any(), "padding has nats")
    _require_same(padded._replace(nats=padded.nats[:, short[1]]), alone, bound_of(config))
    for number, pair in enumerate(zip(padded.statistics, alone.statistics, strict=True)):
        require_equal(f"counts in statistics {number}", *(statistic[..., -1] for statistic in pair))


def reversible(config: ModelConfig) -> None:
    """Check that reversible blocks give the bits of ordinary recomputation, with dropout."""
    _require_declared(config, "reversible")
    model = awake(changed(config, reversible=True, norm_position="before", dropout=0.2)).float()
    again = copy.deepcopy(model)
    again.activation_checkpoint = partial(checkpoint, use_reentrant=True)
    results = []
    for network in (model, again):
        torch.manual_seed(5)
        results.append(_learn(network, tokens_of(config)))
    _require_same_bits(*results)


def convolution(config: ModelConfig) -> None:
    """Check that a convolution before the mixer has an effect, and reads no later row."""
    _require_declared(config, "convolution")
    with_convolution = changed(config, convolution=config.convolution or 3)
    without = dict(awake(changed(config, convolution=None)).named_parameters())
    gradients = _learn(awake(with_convolution), tokens_of(config)).gradients
    added = [name for name in gradients if name not in without]
    require(bool(added), "model.convolution adds no parameters")
    for name in added:
        require(bool(gradients[name].any()), f"{name} has no effect")
    if not config.convolution:  # else ``future`` has been checked
        future(with_convolution)


def queries(config: ModelConfig) -> None:
    """Check that mixers with queries and keys apply rotary positions, or refuse them."""
    mixers = [block.mixer for block in config.blocks() if block.mixer is not None]
    if without := [mixer.type for mixer in mixers if not mixer.has_queries]:
        raise UndeclaredError(", ".join(dict.fromkeys(without)))
    try:
        turned, plain = (awake(changed(config, rotary=rotary)) for rotary in ({"base": 1000.0}, None))
    except ConfigError:
        return
    is_same = torch.equal(turned(tokens_of(config)), plain(tokens_of(config)))
    require(not is_same, "model.rotary has no effect")


def _sections(config: ModelConfig, *exchanges: Literal["heads", "keys", "auto"]) -> None:
    """Check that two sequence-parallel processes compute the results of one."""
    model, tokens = awake(config), tokens_of(config)
    expected = _learn(copy.deepcopy(model), tokens)

    def section(division: Division) -> Learned:
        part = copy.deepcopy(model)
        part.divide(division)
        return _learn(part, tokens)

    for exchange in exchanges:
        first, second = in_sections(2, section, exchange)
        joined = first._replace(
            nats=torch.cat([first.nats, second.nats], 1),
            statistics=tuple(a + b for a, b in zip(first.statistics, second.statistics, strict=True)),
            gradients={name: gradient + second.gradients[name] for name, gradient in first.gradients.items()},
        )
        _require_same(joined, expected, bound_of(config))


def sections(config: ModelConfig) -> None:
    """Check sequence parallelism with the model's default exchange, and with the exchange of heads."""
    _require_declared(config, "sections")
    _sections(config, "auto", "heads")


def keys(config: ModelConfig) -> None:
    """Check sequence parallelism with the exchange of keys."""
    _require_declared(config, "sections")
    _require_declared(config, "keys")
    _sections(config, "keys")


def weights(config: ModelConfig) -> None:
    """Check that weights for pictures sum to 1 (with sinks less), or 0 without keys, and cover no later position."""
    model, context = awake(config), config.context
    h = torch.randn(1, context, config.width, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    queries, later = torch.arange(context), torch.ones(context, context, dtype=torch.bool).triu(1)
    require_method(model, "weights")
    with torch.no_grad():
        contexts = model.block_contexts(tokens_of(config, 1)[:1])
        for block, block_context in zip(model.blocks, contexts, strict=True):
            if block.mixer is None:
                continue
            weigh = block.mixer.weights(h, block_context)
            for head in range(config.heads):
                rows = weigh(queries, head)
                require(rows.shape == (context, context), f"weights {tuple(rows.shape)} of {context} positions")
                require(not rows[later].any(), f"head {head} weighs later positions")
                total = rows.sum(1)
                if config.sinks:
                    require(bool(((total >= 0) & (total < 1)).all()), f"weights of head {head} sum to 1 or more")
                else:
                    require_close(f"sums of the weights of head {head}", total, total.round())


MODEL_PROPERTIES: dict[str, Callable[[ModelConfig], None]] = {
    "configuration": configuration,
    "future": future,
    "lengths": lengths,
    "gradients": gradients,
    "recomputation": recomputation,
    "precision": precision,
    "resume": resume,
    "documents": documents,
    "padding": padding,
    "reversible": reversible,
    "convolution": convolution,
    "queries": queries,
    "sections": sections,
    "keys": keys,
    "weights": weights,
}
