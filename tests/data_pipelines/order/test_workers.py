"""Processes that read ahead: their order, how far ahead, and what is said of one that is lost."""

import contextlib
import itertools
import os
import signal
from functools import partial

import psutil
import pytest

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.order.workers import LostWorkerError, side_by_side


def numbers(first, wrong_at=None, error=DataError):
    """(number, process) without end, or until what is wrong."""
    for number in itertools.count(first):
        if number == wrong_at:
            raise error("so it is")
        yield number, os.getpid()


def test_steps_have_an_item_of_each_process_in_order():
    with contextlib.closing(side_by_side([partial(numbers, 0), partial(numbers, 100)], 2, 60.0)) as steps:
        taken = list(itertools.islice(steps, 50))
        assert [[number for number, _ in step] for step in taken] == [[each, 100 + each] for each in range(50)]
        pids = {pid for step in taken for _, pid in step}
        assert len(pids) == 2 and os.getpid() not in pids
    assert not any(map(psutil.pid_exists, pids))


@pytest.mark.parametrize(("error", "raised"), [(DataError, DataError), (KeyError, RuntimeError)])
def test_an_error_comes_in_its_turn(error, raised):
    with contextlib.closing(side_by_side([partial(numbers, 0), partial(numbers, 0, 3, error)], 8, 60.0)) as steps:
        assert len(list(itertools.islice(steps, 3))) == 3
        with pytest.raises(raised, match="so it is"):
            next(steps)


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGKILL, "was ended by SIGKILL, as where memory is short"),
        (signal.SIGXCPU, "was ended by SIGXCPU"),
        (signal.SIGSTOP, "sent nothing for 0.2 s"),
    ],
)
def test_a_lost_process_is_named(number, said):
    with contextlib.closing(side_by_side([partial(numbers, 0)], 1, 0.2)) as steps:
        ((_, pid),) = next(steps)
        os.kill(pid, number)
        with pytest.raises(LostWorkerError) as lost:
            list(steps)
    assert str(lost.value).startswith(f"loader worker 0 (process {pid}) {said}")
    assert not psutil.pid_exists(pid)
