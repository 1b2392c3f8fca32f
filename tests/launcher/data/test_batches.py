"""Ranks take their batches together, and none ever waits for one that has come to its end."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.order.evaluation import EvaluationBatch
from longstride.data_pipelines.order.workers import LostWorkerError
from longstride.launcher.config import RunConfig, load_config
from longstride.launcher.data.run_data import GlobalBatch, TrainingData, for_model, global_batches
from longstride.launcher.output.messages import AgreedError
from longstride.launcher.ranks.processes import Ranks
from longstride.launcher.stops import StopFlag, StopRequestedError
from tests.harness.configs import small

SECONDS = 60  # a rank that waits for others that do not come breaks the meeting


class Meeting:
    """Collectives of ranks that are threads."""

    def __init__(self, world_size: int) -> None:
        self._values: list[Any] = [None] * world_size
        self._come, self._leave = (threading.Barrier(world_size, timeout=SECONDS) for _ in range(2))

    def replace_collectives(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Has every ``Ranks`` meet here instead of in a process group."""
        monkeypatch.setattr(Ranks, "gather_objects", lambda ranks, value: self._gather(ranks, value))
        monkeypatch.setattr(Ranks, "gather_int64", lambda ranks, values, _: torch.stack(self._gather(ranks, values)))
        monkeypatch.setattr(Ranks, "barrier", lambda ranks: self._gather(ranks, None))

    def _gather(self, ranks: Ranks, value: object) -> list[Any]:
        self._values[ranks.rank] = value
        self._come.wait()
        everyone = list(self._values)
        self._leave.wait()
        return everyone


Take = Callable[[Ranks], Iterator[EvaluationBatch]]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Future[list[int]]]]:
    """A function (W, B, take, U = 1, stop = None) -> each rank's numbers, or what it raised.

    The numbers are what ``look`` finds in each global batch: the rank's sample ids.
    """

    def run(
        world_size: int,
        rows: int,
        take: Take,
        sequence_parallel: int = 1,
        stop: StopFlag | None = None,
        look: Callable[[GlobalBatch[Any]], list[int]] = lambda each: each.part.sample_ids.tolist(),
    ) -> list[Future[list[int]]]:
        meeting = Meeting(world_size)
        meeting.replace_collectives(monkeypatch)

        def one(rank: int) -> list[int]:
            ranks = Ranks(rank, rank, world_size, sequence_parallel)
            all_taken = global_batches(lambda: take(ranks), rows, ranks, torch.device("cpu"), stop)
            return [number for each in all_taken for number in look(each)]

        with ThreadPoolExecutor(world_size) as pool:
            return [pool.submit(one, rank) for rank in range(world_size)]

    return run


def evaluation(config: RunConfig, asked: dict[str, Any], ranks: Ranks) -> Iterator[EvaluationBatch]:
    """A rank's batches of the run's validation split."""
    return TrainingData(config, ranks).evaluation(**asked)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_evaluation_ends_on_all_ranks_with_each_context_once(
    world_size: int, config_file: Path, taken: Callable[..., list[Future[list[int]]]]
) -> None:
    """Few contexts and many, fewer than ranks too, overlapping or not."""
    config = load_config(str(config_file), ["train.micro_batch=2"])
    for limit in (1, 2, 3, 7, 8, None):
        for min_context in (0, 48):
            asked: dict[str, Any] = {"limit": limit, "min_context": min_context, "batch_size": 2}
            ids = [
                each.result()
                for each in taken(world_size, 2, lambda r, a=asked: TrainingData(config, r).evaluation(**a))
            ]
            assert len({len(each) for each in ids}) == 1
            numbers = sorted(number for each in ids for number in each if number >= 0)
            assert len(set(numbers)) == len(numbers)
            assert len(numbers) == limit if limit is not None else len(numbers) > 8


@pytest.mark.parametrize("cut", [(), ("data.separator=10",), ("data.packing=false", "data.hop=48")], ids=str)
def test_tokens_and_content_are_those_of_all_ranks_once(
    cut: tuple[str, ...], config_file: Path, taken: Callable[..., list[Future[list[int]]]]
) -> None:
    """Whether ranks share contexts or not; the data has no line ends, so those in contexts are the separators."""
    config = load_config(str(config_file), ["train.global_batch=4", *cut])
    counts = []
    for each in islice(TrainingData(config, Ranks()).stream(), 60):
        rows = [row[:length] for row, length in zip(each.tokens, each.lengths.tolist(), strict=True)]
        counts += [sum(map(len, rows)), sum(int((row != 10).sum()) for row in rows)]
    tokens, content = sum(counts[::2]), sum(counts[1::2])
    assert (tokens < 60 * 4 * 64) == ("data.packing=false" in cut) and (content < tokens) == (
        "data.separator=10" in cut
    )
    for world_size, sharing in ((1, 1), (2, 1), (2, 2), (4, 2)):
        everyone = taken(
            world_size,
            4 * sharing // world_size,
            lambda ranks: islice(TrainingData(config, ranks).stream(), 60),
            sharing,
            look=lambda each: [each.num_tokens, each.content],
        )
        assert [each.result() for each in everyone] == [counts] * world_size


def batch(number: int, length: int = 4) -> EvaluationBatch:
    """Two contexts of one number."""
    ids = torch.full((2,), number)
    return EvaluationBatch(torch.zeros(2, 4, dtype=torch.uint8), torch.full((2,), length), torch.zeros(2), ids)


@pytest.mark.parametrize(("shorter", "world_size", "sharing"), [(0, 3, 1), (1, 3, 1), (2, 3, 1), (3, 4, 2)])
def test_rank_with_less_data_is_named_on_all_ranks(
    shorter: int, world_size: int, sharing: int, taken: Callable[..., list[Future[list[int]]]]
) -> None:
    """As where the hosts have different copies of a folder."""

    def take(ranks: Ranks) -> Iterator[EvaluationBatch]:
        yield from (batch(number) for number in range(3 - (ranks.rank == shorter)))

    for each in taken(world_size, 2, take, sharing):
        with pytest.raises(AgreedError, match=f"rank {shorter} of {world_size} finds less data than the others"):
            each.result()


def test_byte_that_the_model_lacks_is_told_by_all_ranks(taken: Callable[..., list[Future[list[int]]]]) -> None:
    """Whose data has no such byte may have a model without it, as of ASCII alone."""

    def take(ranks: Ranks) -> Iterator[EvaluationBatch]:
        yield batch(0)
        content = batch(1)
        content.tokens[ranks.rank, 1] = 126 + ranks.rank
        yield content

    known = taken(2, 2, lambda ranks: for_model(take(ranks), small(vocabulary=128), 0))
    assert [each.result() for each in known] == [[0, 0, 1, 1]] * 2
    for each in taken(2, 2, lambda ranks: for_model(take(ranks), small(vocabulary=127), 0)):
        with pytest.raises(AgreedError, match=r"^model.vocabulary=127: the data contains byte 127; 256 allows any"):
            each.result()


@pytest.mark.parametrize("wrong", [None, batch(5), batch(1, length=3), DataError("damaged")])
def test_ranks_that_share_contexts_take_the_same_or_none_does(
    wrong: EvaluationBatch | DataError | None, taken: Callable[..., list[Future[list[int]]]]
) -> None:
    """Damage that one host's copy has, and that another context stands in for, would be mixed into a context."""

    def take(ranks: Ranks) -> Iterator[EvaluationBatch]:
        if isinstance(wrong, DataError) and ranks.rank == 3:
            raise wrong
        yield wrong if wrong is not None and ranks.rank == 3 else batch(ranks.data_rank)

    for rank, each in enumerate(taken(4, 2, take, 2)):
        if wrong is None:
            assert each.result() == [rank // 2] * 2
            continue
        damaged = isinstance(wrong, DataError)
        with pytest.raises(AgreedError, match="damaged" if damaged else "share a context read different contexts"):
            each.result()


@pytest.mark.parametrize("how", ["lost", "lost in a stop", "lost beside damage"])
def test_lost_worker_of_a_rank_ends_all_ranks_alike(how: str, taken: Callable[..., list[Future[list[int]]]]) -> None:
    def take(ranks: Ranks) -> Iterator[EvaluationBatch]:
        yield batch(0)
        if ranks.rank == 1:
            raise LostWorkerError("loader worker 1 of 1 was ended by SIGKILL")
        if ranks.rank == 2 and how == "lost beside damage":
            raise DataError("damaged")
        if ranks.rank == 2 and how == "lost in a stop":
            stop.reason = "SIGTERM"
        yield batch(1)

    stop = StopFlag()
    wanted: tuple[type[Exception], str] = {
        "lost": (LostWorkerError, "^rank 1: loader worker 1 of 1 was ended by SIGKILL$"),
        "lost in a stop": (StopRequestedError, "^SIGTERM$"),
        "lost beside damage": (AgreedError, "damaged"),  # a restart would meet it again
    }[how]
    for each in taken(3, 2, take, 1, stop):
        with pytest.raises(wanted[0], match=wanted[1]):
            each.result()
