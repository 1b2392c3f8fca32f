"""The processes of a run: who they are, how they meet and wait, and what happens when one no longer answers."""

from longstride.launcher.ranks.hangs import Watch
from longstride.launcher.ranks.interfaces import is_loopback, source_address
from longstride.launcher.ranks.processes import Ranks, process_group
from longstride.launcher.ranks.rank_environment import adopt_place
from longstride.launcher.ranks.run_lock import check_unlocked, run_lock
from longstride.launcher.ranks.waiting import wait_until_visible

__all__ = [
    "Ranks",
    "Watch",
    "adopt_place",
    "check_unlocked",
    "is_loopback",
    "process_group",
    "run_lock",
    "source_address",
    "wait_until_visible",
]
