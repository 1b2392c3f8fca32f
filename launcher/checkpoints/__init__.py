"""Checkpoints that are either complete or absent, and the exact resume from one, in its own layout or another.

A ``Checkpoint`` knows its folder, manifest, configuration and probe, and whether its pickles are trusted. Imports
deepspeed.
"""

from longstride.launcher.checkpoints.checkpoint import Checkpoint, first_undamaged, list_checkpoints, open_checkpoint
from longstride.launcher.checkpoints.manifest import Score, write_json
from longstride.launcher.checkpoints.restoring import load, restore
from longstride.launcher.checkpoints.saved_state import SavedState, master_weights
from longstride.launcher.checkpoints.saving import NotSavedError, Saver, error_line, rewind_to
