"""Checkpoints that are whole or not there, and the exact way back from one, in this layout or another."""

from longstride.launcher.checkpoints.checkpoint import (
    Checkpoint,
    agreed_checkpoints,
    first_whole,
    list_checkpoints,
    load_checkpoint,
    load_generators,
    newer_refusals,
    open_checkpoint,
)
from longstride.launcher.checkpoints.manifest import (
    find_damage,
    find_foreign,
    flush_folder,
    read_checkpoint_config,
    write_json,
    write_text,
)
from longstride.launcher.checkpoints.matching import check_matches, needs_conversion, told_conversion, told_layout
from longstride.launcher.checkpoints.probe import PROBE, check_probe, probe_tolerance, read_probe, relative_difference
from longstride.launcher.checkpoints.reshape import load_universal, seed_generators
from longstride.launcher.checkpoints.retention import point_to, remove_leftovers, set_aside_beyond
from longstride.launcher.checkpoints.saved_state import MASTER, SavedState, StreamedState
from longstride.launcher.checkpoints.saving import NotSavedError, Saver, told_error
from longstride.launcher.checkpoints.tensor_file import ALIGNMENT, write_tensors
from longstride.launcher.checkpoints.universal import ready_universal

__all__ = [
    "ALIGNMENT",
    "MASTER",
    "PROBE",
    "Checkpoint",
    "NotSavedError",
    "SavedState",
    "Saver",
    "StreamedState",
    "agreed_checkpoints",
    "check_matches",
    "check_probe",
    "find_damage",
    "find_foreign",
    "first_whole",
    "flush_folder",
    "list_checkpoints",
    "load_checkpoint",
    "load_generators",
    "load_universal",
    "needs_conversion",
    "newer_refusals",
    "open_checkpoint",
    "point_to",
    "probe_tolerance",
    "read_checkpoint_config",
    "read_probe",
    "ready_universal",
    "relative_difference",
    "remove_leftovers",
    "seed_generators",
    "set_aside_beyond",
    "told_conversion",
    "told_error",
    "told_layout",
    "write_json",
    "write_tensors",
    "write_text",
]
