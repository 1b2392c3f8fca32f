"""Checkpoint folders: list those of a run, verify one, decide whether to trust it, and load it into an engine."""

from __future__ import annotations

import hashlib
import re
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.order import StreamState
from longstride.data_pipelines.plain_files import MOST_JSON_BYTES, read_plain
from longstride.kernels import ConfigError
from longstride.launcher.checkpoints.manifest import (
    MANIFEST,
    CheckpointManifest,
    collect_scores,
    find_damage,
    find_foreign,
    rank_scores,
    read_checkpoint_config,
    read_manifest,
)
from longstride.launcher.checkpoints.pickles import read_pickle, refusal_line, refuse_foreign_content, unsafe_content
from longstride.launcher.checkpoints.probe import PROBE, Probe
from longstride.launcher.config import RunConfig
from longstride.launcher.engine import set_random_states
from longstride.launcher.models import is_export
from longstride.launcher.output import AgreedError, counting, file_names
from longstride.launcher.ranks import Ranks, wait_until_visible

DEEPSPEED_TAG = "deepspeed"
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder with a valid manifest and configuration. Its other files are not verified yet."""

    folder: Path
    manifest: CheckpointManifest
    trusted: bool = False  # whether its pickles may run code

    @cached_property
    def config(self) -> RunConfig:
        """The resolved configuration of the run that saved it, with data paths valid from the current folder."""
        return read_checkpoint_config(self.folder).with_data_of(self.folder.parents[1])

    @property
    def probe(self) -> Probe | None:
        """The probe, or None if it was saved without one."""
        record = self.manifest.probe
        return None if record is None else Probe(self.folder / PROBE, record)

    @property
    def stream(self) -> StreamState:
        """The position of the next batch; ConfigError if the manifest holds no valid one."""
        try:
            return StreamState.from_json(self.manifest.stream)
        except DataError as error:
            raise ConfigError(f"{self.folder / MANIFEST}: stream: {error}") from None

    @property
    def layout(self) -> str:
        """A description of the run that saved it: step, ranks, ZeRO stage and precision."""
        manifest = self.manifest
        processes = _processes(manifest.world_size, manifest.sequence_parallel)
        return f"step {manifest.step} was saved by {processes} in ZeRO {manifest.zero_stage}, {manifest.precision}"

    def manifest_digest(self) -> str:
        """Return the SHA-256 of its manifest, which contains those of all its files."""
        return hashlib.sha256(read_plain(self.folder / MANIFEST, MOST_JSON_BYTES, follow_links=False)).hexdigest()

    def newer_refusals(self) -> list[str]:
        """Return a line for each newer folder of its run that has a checkpoint's name but is not one."""
        _, refused = list_checkpoints(self.folder.parent.parent)
        return [refusal.line for refusal in refused if refusal.step > self.manifest.step]

    def agreed(self, ranks: Ranks) -> Checkpoint:
        """Return the first rank's choice on every rank, see ``agreed_checkpoints``. All ranks must call."""
        (checkpoint,) = agreed_checkpoints(self.folder.parent.parent, [self], ranks)
        return checkpoint

    def verify(self) -> None:
        """Raise ConfigError if a file is damaged, or is not in the manifest."""
        if damage := self.find_damage(Ranks()):
            raise ConfigError(*damage)

    def find_damage(self, ranks: Ranks) -> list[str]:
        """Return the damaged and foreign files, a line each. Ranks read shares; all must call and get the same list."""
        names = sorted(self.manifest.files)[ranks.rank :: ranks.world_size]
        damage = find_damage(self.folder, names, self.manifest.files)
        if ranks.is_first:
            damage += find_foreign(self.folder, self.manifest)
        return [line for lines in ranks.gather_objects(damage) for line in lines]

    def check_trust(self, ranks: Ranks) -> None:
        """Raise AgreedError on every rank if a verified file would run code and the checkpoint is not trusted.

        Each rank inspects a share of the files. All ranks must call.
        """
        if self.trusted:
            return
        names = [name for name in sorted(self.manifest.files) if name.endswith(".pt")]
        contents = ((name, unsafe_content(self.folder / name)) for name in names[ranks.rank :: ranks.world_size])
        lines = [f"{self.folder / name}: {refusal_line(content)}" for name, content in contents if content]
        if refusals := [line for share in ranks.gather_objects(lines) for line in share]:
            raise AgreedError("\n".join(refusals))

    def is_repeated_by(self, config: RunConfig, world_size: int) -> bool:
        """Whether a run of ``world_size`` ranks continues bit for bit like the one that saved it."""
        return (self.manifest.world_size, *_layout_keys(self.config)) == (world_size, *_layout_keys(config))

    def conversion(self, config: RunConfig, world_size: int) -> str:
        """Describe the layout that saved it and the layout that a run continues in."""
        manifest, processes = self.manifest, _processes(world_size, config.train.sequence_parallel)
        saved = (manifest.world_size, manifest.zero_stage, manifest.precision)
        if saved == (world_size, config.zero_stage, config.precision):
            return f"{self.layout}; continues with {processes}"
        line = f"{self.layout}; converted for {processes} in ZeRO {config.zero_stage}"
        if config.precision == manifest.precision:
            return line
        scale = ", where the loss scale starts over" if config.precision == "fp16" else ""
        return f"{line}, {config.precision}{scale}"

    def load_generators(self, config: RunConfig, ranks: Ranks, device: torch.device) -> None:
        """Restore this rank's random generators; reseed them if the number of ranks with own contexts has changed."""
        if ranks.data_world_size != self.manifest.world_size // (self.manifest.sequence_parallel or 1):
            seed_generators(config.train.seed, self.manifest.step, ranks)
            return
        path = self.folder / random_name(ranks.data_rank)
        with refuse_foreign_content(path):
            set_random_states(read_pickle(path, trusted=self.trusted), device)


class Refusal(NamedTuple):
    """A folder that has a checkpoint's name but is not one."""

    step: int
    line: str  # what is wrong with it


def checkpoint_folder(run: Path, step: int) -> Path:
    """Return the path of a step's checkpoint."""
    return run / file_names.CHECKPOINTS / f"step-{step:08d}"


def random_name(data_rank: int) -> str:
    """Return the file name of the random generators of a rank, or of the ranks that share its contexts."""
    return f"random-{data_rank:05d}.pt"


def seed_generators(seed: int, step: int, ranks: Ranks) -> None:
    """Reset this rank's random generators, because a run in another layout saved no states for it."""
    text = f"{seed} {step} {ranks.data_world_size} {ranks.data_rank}".encode()
    torch.manual_seed(int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1)


def list_checkpoints(run: Path, *, trusted: bool = False) -> tuple[list[Checkpoint], list[Refusal]]:
    """Return the checkpoints of a run, newest first, and the folders that only have a checkpoint's name."""
    checkpoints: list[Checkpoint] = []
    refused: list[Refusal] = []
    folders = [path for path in (run / file_names.CHECKPOINTS).glob("step-*") if _NAME.fullmatch(path.name)]
    for folder in sorted(folders, key=lambda path: int(path.name[5:]), reverse=True):
        try:
            checkpoints.append(_open_folder(folder, trusted))
        except ConfigError as error:
            refused.extend(Refusal(int(folder.name[5:]), line) for line in str(error).splitlines())
    return checkpoints, refused


def open_checkpoint(run: Path, step: int | Literal["best"] | None, *, trusted: bool = False) -> Checkpoint:
    """Open the checkpoint of a step, the newest one (None), or the one with the lowest validation loss.

    ``trusted`` says whether its pickles may run code.

    Raises:
        ConfigError: there is no such run, step or checkpoint, none was evaluated, or the best one is damaged.
    """
    if not run.is_dir():
        raise ConfigError(f"{run}: no such run folder; name one that `longstride train` wrote")
    if is_export(run):
        rule = "is an exported model, not a run; name the folder that `longstride train` wrote, or score"
        raise ConfigError(f"{run}: {rule} the model with `longstride evaluate {run} --data DIR`")
    checkpoints, refused = list_checkpoints(run, trusted=trusted)
    if step == "best" and checkpoints:
        manifests = [checkpoint.manifest for checkpoint in checkpoints]
        scores = collect_scores(run, checkpoints[0].config.data.validation_split, manifests)
        steps = {manifest.step for manifest in manifests} | {refusal.step for refusal in refused}
        best = rank_scores(score for score in scores.values() if score.step in steps)
        step = best[0].step if best else step
    for checkpoint in checkpoints:
        if step in (None, checkpoint.manifest.step):
            return checkpoint
    if isinstance(step, int) and checkpoint_folder(run, step).is_dir():
        _open_folder(checkpoint_folder(run, step), trusted)  # raises the reason
    available = ", ".join(str(checkpoint.manifest.step) for checkpoint in reversed(checkpoints)) or "none"
    problem = "no checkpoint" if step is None else f"no checkpoint of step {step}"
    if step == "best":
        available += "; give the number of one" if checkpoints else ""
        problem = f"no checkpoint has a validation loss in {file_names.METRICS} or in its manifest"
    lines = [refusal.line for refusal in refused]
    raise ConfigError(f"{run / file_names.CHECKPOINTS}: {problem}; complete ones: {available}", *lines)


def agreed_checkpoints(run: Path, checkpoints: Sequence[Checkpoint], ranks: Ranks) -> list[Checkpoint]:
    """Return the first rank's checkpoints, in its order, on every rank. All ranks must call.

    ``checkpoints`` and their trust are read on the first rank only, since another host may list the folder as it was a
    little earlier. The other ranks open the folders by name.

    Raises:
        AgreedError: on every rank, if a folder does not become visible on one of them.
    """
    if ranks.world_size == 1:
        return list(checkpoints)

    def see(expected: Checkpoint) -> bool | None:
        """Return whether the folder has this content; None: not yet."""
        with suppress(ConfigError):
            return _open_folder(expected.folder, expected.trusted) == expected or None
        return None

    listed = [(checkpoint.folder.name, checkpoint.manifest, checkpoint.trusted) for checkpoint in checkpoints]
    since, missing = time.monotonic(), None
    agreed = [
        Checkpoint(run / file_names.CHECKPOINTS / name, manifest, trusted)
        for name, manifest, trusted in ranks.gather_objects(listed if ranks.is_first else [])[0]
    ]
    for checkpoint in agreed:
        if wait_until_visible(partial(see, checkpoint), since) is None:
            rule = f"differs on {socket.gethostname()} from what the first process reads; all hosts must share {run}"
            missing = f"{checkpoint.folder}: {rule}"
            break
    if lines := dict.fromkeys(line for line in ranks.gather_objects(missing) if line):
        raise AgreedError("\n".join(lines))
    return agreed


def first_undamaged(run: Path, checkpoints: Sequence[Checkpoint], ranks: Ranks) -> tuple[Checkpoint | None, list[str]]:
    """Return the first undamaged one of the first rank's checkpoints, and the damage of those before it.

    The result is the same on every rank. All ranks must call.

    Raises:
        AgreedError: on every rank, if one rank does not see them, or the undamaged one would have to be trusted.
    """
    damaged: list[str] = []
    for checkpoint in agreed_checkpoints(run, checkpoints, ranks):
        damage = checkpoint.find_damage(ranks)
        if not damage:
            checkpoint.check_trust(ranks)
            return checkpoint, damaged
        damaged += damage
    return None, damaged


def _open_folder(folder: Path, trusted: bool) -> Checkpoint:
    """Open the checkpoint in a folder and verify its configuration, which is read before all other files.

    ConfigError if the manifest or configuration is missing or damaged, or the folder is named for another step.
    """
    manifest = read_manifest(folder)
    # A copy under a higher step would stay the newest: every resume would start from it, and retention would count it.
    if folder.name != (name := f"step-{manifest.step:08d}"):
        rule = f"holds step {manifest.step}, which does not match its name; rename it {name}, or move it elsewhere"
        raise ConfigError(f"{folder}: {rule}")
    damage = find_damage(folder, [file_names.CONFIG], manifest.files)
    if damage:
        raise ConfigError(*damage)
    return Checkpoint(folder, manifest, trusted)


def _layout_keys(config: RunConfig) -> tuple[object, ...]:
    """Return the settings that decide where a rank's numbers are, and in which order they are summed."""
    section, train = config.deepspeed, config.train
    zero, accumulation = section.get("zero_optimization", {}), section.get("data_types", {}).get("grad_accum_dtype")
    orders = [zero.get(key) or None for key in ("round_robin_gradients", "parameter_alignment", "sub_group_size")]
    optimizer = train.optimizer and train.optimizer.type
    groups = train.sequence_parallel, train.expert_parallel, train.trained_parts
    return (config.zero_stage, config.precision, *groups, optimizer, accumulation, *orders)


def _processes(count: int, sequence_parallel: int | None) -> str:
    shared = "" if sequence_parallel is None else f" ({sequence_parallel} to a context)"
    return f"{counting.processes(count)}{shared}"
