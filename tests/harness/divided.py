"""One pass of a small model by processes that share contexts or experts, which are started once for all tests."""

import atexit
import functools
import multiprocessing
import tempfile
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from longstride.sparse_model import Division, SparseTransformer
from longstride.sparse_model.feed_forwards.experts import Experts
from tests.harness.configs import small

MOST = 4  # processes that share a context
SECONDS = 120.0  # that an exchange, or an answer, may take


@dataclass(frozen=True)
class Pass:
    """A pass that every process computes separately."""

    changes: dict[str, Any] = field(default_factory=dict)  # of the small configuration
    dtype: torch.dtype = torch.float64
    batch: int = 2
    begins: tuple[int, ...] = ()  # of documents that are kept apart, in the first context; None are, where it is empty
    lengths: tuple[int, ...] = ()  # of the contexts, what is behind being padding; all are full, where it is empty
    recompute: bool | None = None  # each block in the backward pass, by torch's checkpoint: reentrant or not
    exchange: Literal["heads", "keys", "auto"] = "heads"
    by_experts: bool = False  # processes divide experts instead, and the contexts of the batch


class Passed(NamedTuple):
    """A process's results of a pass."""

    nats: Tensor  # (B, n)
    auxiliary: Tensor | None
    statistics: tuple[Tensor, ...]
    gradients: dict[str, Tensor | None]  # by the parameter's name
    drawn: float  # what torch's generator draws next


def one_pass(request: Pass, division: Division | None) -> Passed:
    """Run a forward and backward pass of a model in training in which every weight matters.

    Tokens that this process must not depend on are overwritten.
    """
    torch.manual_seed(0)
    model = SparseTransformer(small(**request.changes)).to(request.dtype)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    context = model.config.context
    vocabulary, begins, real = min(256, model.config.vocabulary), None, None
    tokens = torch.randint(vocabulary, (request.batch, context), dtype=torch.uint8)
    if request.begins:
        begins = torch.zeros(request.batch, context, dtype=torch.bool)
        begins[0, list(request.begins)] = True
    if request.lengths:
        real = torch.arange(context) < torch.tensor(request.lengths)[:, None]
    if request.by_experts:
        holders, division = division or Division(), None
        contexts = slice(
            holders.rank * request.batch // holders.size, (holders.rank + 1) * request.batch // holders.size
        )
        tokens = tokens[contexts]
        real = None if real is None else real[contexts]
        hold_experts(model, holders)
    if division is not None:
        model.divide(division)
        section = division.section(context)
        if all(mixer.choice is None for mixer in model.mixers):  # others need whole contexts
            begin = max(0, section.start - model.embedding.reach)
            tokens[:, :begin], tokens[:, section.stop :] = 7 % vocabulary, 8 % vocabulary
    if request.recompute is not None:
        model.activation_checkpoint = functools.partial(checkpoint, use_reentrant=request.recompute)
    objective, lengths = model.config.objective, torch.full((len(tokens),), context) if real is None else real.sum(1)
    corrupted = objective.corrupt(tokens, lengths, torch.arange(len(tokens)), 3, model.config.vocabulary)
    extra = {} if corrupted is None else corrupted._asdict()
    torch.manual_seed(1)
    output = model(tokens, return_nats=True, return_extras=True, begins=begins, real=real, **extra)
    loss = output.rows.sum()
    if output.auxiliary_loss is not None:  # as in training: its mean over the processes counts
        loss = loss + 10 * output.auxiliary_loss / (1 if division is None else division.size)
    loss.backward()
    auxiliary = None if output.auxiliary_loss is None else output.auxiliary_loss.detach()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    if request.by_experts:
        gradients |= gradients_of_held(model)
    return Passed(output.rows.detach(), auxiliary, output.statistics, gradients, float(torch.rand(())))


def hold_experts(model: SparseTransformer, holders: Division) -> None:
    """Let each process hold its share of the experts."""
    for module in model.modules():
        if isinstance(module, Experts):
            parameters = [getattr(module, name) for name in module.by_expert]
            local = (None if x is None else x.detach().chunk(holders.size)[holders.rank] for x in parameters)
            module.hold(holders, [None if x is None else x.clone().requires_grad_() for x in local])


def gradients_of_held(model: SparseTransformer) -> dict[str, Tensor | None]:
    """Return the gradients of this process's experts, among zeros for the others, by the parameters' names."""
    gradients: dict[str, Tensor | None] = {}
    for path, module in model.named_modules():
        if isinstance(module, Experts) and module.holders is not None:
            for name in module.by_expert:
                if (leaf := getattr(module, name)) is not None:
                    shares = leaf.new_zeros(module.holders.size, *leaf.shape)
                    shares[module.holders.rank] = leaf.grad
                    gradients[f"{path}.{name}"] = shares.flatten(0, 1)
    return gradients


def divided(request: Pass, size: int) -> list[Passed]:
    """Run the pass in ``size`` processes, at most ``MOST``."""
    processes = _processes()[:size]
    for process in processes:
        process.send((request, size))
    results = []
    for process in processes:
        assert process.poll(SECONDS), "a process does not answer"
        results.append(process.recv())
    for result in results:
        assert not isinstance(result, str), result
    return results


def joined(results: list[Passed]) -> Passed:
    """Join the results of the processes: concatenate their rows, and add up sums."""
    gradients: dict[str, Tensor | None] = {}
    for name in results[0].gradients:
        shares = [result.gradients[name] for result in results]
        assert all(share is not None for share in shares), f"a process has no gradient of {name}"
        gradients[name] = torch.stack([share for share in shares if share is not None]).sum(0)
    statistics = tuple(torch.stack(x).sum(0) for x in zip(*(result.statistics for result in results), strict=True))
    for result in results:  # to the bit, so that all processes take the same steps
        assert result.drawn == results[0].drawn
        assert (result.auxiliary is None) == (results[0].auxiliary is None)
        if result.auxiliary is not None and results[0].auxiliary is not None:
            assert torch.equal(result.auxiliary, results[0].auxiliary)
    return Passed(
        torch.cat([result.nats for result in results], 1), results[0].auxiliary, statistics, gradients, results[0].drawn
    )


@functools.cache
def _processes() -> list[Connection]:
    """Return a connection to each process. The processes end with this one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "torch._dynamo"])  # which operations of our own import for seconds
    folder = tempfile.TemporaryDirectory()
    meeting_place = Path(folder.name) / "store"  # a file: a port might be taken before they meet
    connections = []
    for rank in range(MOST):
        local, there = context.Pipe()
        context.Process(target=_serve, args=(there, rank, meeting_place), daemon=True).start()
        there.close()
        connections.append(local)

    @atexit.register
    def end() -> None:
        for connection in connections:
            connection.close()
        folder.cleanup()

    return connections


def _serve(requests: Connection, rank: int, meeting_place: Path) -> None:
    """Serve requests until the connection closes; errors are returned as text."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", meeting_place.as_uri(), timedelta(seconds=SECONDS), rank=rank, world_size=MOST
    )
    groups: list[ProcessGroup] = [torch.distributed.new_group(range(size)) for size in range(1, MOST + 1)]
    while True:
        try:
            request, size = requests.recv()
        except EOFError:
            return
        try:
            requests.send(one_pass(request, Division(rank, size, groups[size - 1], request.exchange)))
        except Exception:
            requests.send(traceback.format_exc())
