"""kill -9 at every operation on files of a save: the newest whole checkpoint is gone on from, and nothing is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from longstride.launcher.checkpoints.checkpoint import Checkpoint, list_checkpoints
from longstride.launcher.checkpoints.manifest import find_damage, find_foreign
from tests.harness.processes.forked import ForkServer
from tests.harness.runs import UNEQUAL, metrics

STEPS = 60
CHANGES = ["train.evaluate_every=0", "train.evaluate_contexts=1", "train.schedule=constant"]
SAVING = ["train.checkpoint_every=1", "train.keep_last=1"]  # the hardest to keep: every save removes the one before
ALL = 10**6


class Chain:
    """A run that is killed again and again, each time in the first save, or before the first step, of a resume."""

    def __init__(
        self,
        server: ForkServer,
        config: Path,
        run: Path,
        stage: int,
        steps: int,
        whole: Path | None = None,
        sharing: str = "null",
    ) -> None:
        self._server, self.run, self._steps = server, run, steps
        self._arguments = [
            "--config",
            str(config),
            *CHANGES,
            f"train.steps={steps}",
            f"deepspeed=zero{stage}_fp32",
            f"train.sequence_parallel={sharing}",
            f"train.output={run}",
        ]
        self.newest = 0  # step of the newest whole checkpoint
        if whole is None:
            whole = run.with_name("whole")
            arguments = [*self._arguments, f"train.output={whole}"]
            assert server.run(arguments, 2) == [0, 0], server.stderr()
        self.whole = metrics(whole)

    def kill(self, rank: int, work: str, last: int) -> list[str]:
        """One resume that is killed; the operations that it came to."""
        before = self.newest
        arguments = [*self._arguments, *SAVING, "--resume", "auto"]
        arguments += ["train.checkpoint_in_background=true"] if work == "background" else []
        codes = self._server.run(arguments, 2, {"rank": rank, "work": work, "last": last})
        where = f"rank {rank}, {work}, operation {last}: {codes}\n{self._server.stderr()}"
        assert codes[rank] == -9, where
        if work != "prepare":
            self._check_gone_on_from(before)
        found = self._found()
        assert all(not find_damage(each.folder, each.manifest.files, each.manifest.files) for each in found), where
        assert all(not find_foreign(each.folder, each.manifest) for each in found), where
        self.newest = found[0].manifest.step if found else 0
        assert before <= self.newest <= before + (work != "prepare"), where
        lines = self._whole_lines()
        further = {"prepare": (0,), "save": (1,), "background": (1, 2)}[work]  # the next save ends one under way
        assert len(lines) - before in further, where
        assert lines == self.whole[: len(lines)], where  # bit for bit
        return self._server.operations()

    def finish(self) -> None:
        """Goes on to the end, and finds everything as in the run that nothing disturbed."""
        codes = self._server.run([*self._arguments, "train.checkpoint_every=0", "--resume", "auto"], 2)
        assert codes == [0, 0], self._server.stderr()
        self._check_gone_on_from(self.newest)
        assert metrics(self.run) == self.whole
        names = {path.name for path in (self.run / "checkpoints").iterdir()}
        assert f"step-{self._steps:08d}" in names
        assert not [name for name in names if name.endswith((".partial", ".deleted"))]

    def _check_gone_on_from(self, step: int) -> None:
        line = f"continuing from {self.run / 'checkpoints'}/step-{step:08d}\n"
        assert (line in self._server.stderr()) == (step > 0), self._server.stderr()

    def _whole_lines(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl but for one that the kill cut off."""
        text = (self.run / "metrics.jsonl").read_text()
        lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        return [{key: value for key, value in line.items() if key not in UNEQUAL} for line in lines]

    def _found(self) -> list[Checkpoint]:
        return list_checkpoints(self.run)[0]


@pytest.mark.campaign  # `make hostile` has a sample of the like
def test_save_killed_at_some_operations_loses_nothing(server: ForkServer, config_file: Path, tmp_path: Path) -> None:
    """In the middle of a shard, before the rename, while the older checkpoint is removed, and before the first step."""
    chain = Chain(server, config_file, tmp_path / "run", 2, 5)
    log = chain.kill(0, "save", ALL)
    assert chain.newest == 1
    numbered = list(enumerate(log, start=1))
    opened = next(number for number, line in numbered if "optim_states" in line)
    shard = next(number for number, line in numbered[opened:] if line.startswith("write"))
    assert chain.kill(0, "save", shard)[-1].startswith("write")
    assert chain.newest == 1
    (renamed,) = (number for number, line in enumerate(log, start=1) if line.endswith("/step-00000001"))
    chain.kill(0, "save", renamed)
    assert chain.newest == 1
    assert chain.kill(0, "save", len(log) + 4)[-1].startswith("unlinkat")
    assert chain.newest == 2
    chain.kill(0, "prepare", 1)
    chain.finish()


@pytest.mark.campaign
@pytest.mark.parametrize(("stage", "sharing"), [(1, "null"), (2, "null"), (3, "null"), (2, "2")])
def test_save_killed_at_every_operation_loses_nothing(
    server: ForkServer, config_file: Path, tmp_path: Path, stage: int, sharing: str
) -> None:
    chain = Chain(server, config_file, tmp_path / "run", stage, STEPS, sharing=sharing)
    chain.kill(0, "save", ALL)
    count = 0
    for work, rank in (("save", 0), ("save", 1), ("prepare", 0)):
        for last in range(1, ALL):
            if chain.newest >= STEPS - 3:
                chain.finish()
                folder = tmp_path / f"run{rank}-{last}"
                chain = Chain(server, config_file, folder, stage, STEPS, tmp_path / "whole", sharing)
                chain.kill(0, "save", ALL)
            count += 1
            if len(chain.kill(rank, work, last)) < last:
                break
    chain.finish()
    print(f"ZeRO {stage}: killed at {count} operations")


@pytest.mark.campaign
@pytest.mark.parametrize("stage", [1, 3])
def test_save_in_the_background_killed_at_every_operation_loses_nothing(
    server: ForkServer, config_file: Path, tmp_path: Path, stage: int
) -> None:
    chain = Chain(server, config_file, tmp_path / "run", stage, STEPS)
    count = 0
    for rank in (0, 1):
        last = 1
        while len(chain.kill(rank, "background", last)) >= last and chain.newest < STEPS - 3:
            last += 1
        count += last
    chain.finish()
    print(f"ZeRO {stage}, in the background: killed at {count} operations")
