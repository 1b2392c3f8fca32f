"""The processes of a run: who they are, how they meet and wait, and what happens when one no longer answers."""

from longstride.launcher.ranks.hangs import Watch
from longstride.launcher.ranks.interfaces import is_loopback, source_address
from longstride.launcher.ranks.processes import (
    Ranks,
    barrier,
    gather_float64,
    gather_int64,
    gather_objects,
    process_group,
    ranks_from_environment,
    sum_int64,
)
from longstride.launcher.ranks.rank_environment import adopt_place
from longstride.launcher.ranks.run_lock import check_unlocked, run_lock
from longstride.launcher.ranks.waiting import first_works, look_until, seen

__all__ = [
    "Ranks",
    "Watch",
    "adopt_place",
    "barrier",
    "check_unlocked",
    "first_works",
    "gather_float64",
    "gather_int64",
    "gather_objects",
    "is_loopback",
    "look_until",
    "process_group",
    "ranks_from_environment",
    "run_lock",
    "seen",
    "source_address",
    "sum_int64",
]
