"""The processes of a run: their identities, collectives and waits, and what happens when one stops answering."""

from longstride.launcher.ranks.hangs import Watchdog
from longstride.launcher.ranks.processes import (
    FakeRanks,
    LoneDivision,
    Ranks,
    check_unlocked,
    leave,
    process_group,
    run_lock,
)
from longstride.launcher.ranks.rank_environment import (
    adopt_launcher_variables,
    code_digest,
    is_loopback,
    processor_name,
    source_address,
)
from longstride.launcher.ranks.waiting import wait_until_visible
