"""Checkpoint files: tensors and plain types only, in a versioned schema, readable with `weights_only=True`.

Written by rank 0, read by ranks and kernels.
"""

from __future__ import annotations

from nbddp.checkpoint.loading import LOAD_HINT, checkpoint_path, load_checkpoint, load_state, misfits, state_of
from nbddp.checkpoint.reading import read
from nbddp.checkpoint.resumable import newest_complete, read_resumable
from nbddp.checkpoint.snapshot import buffer_names, check_plain, model_state, non_finite, plain
from nbddp.checkpoint.writing import FORMAT, VERSION, clear_unfinished, link, write

__all__ = [
    "FORMAT",
    "LOAD_HINT",
    "VERSION",
    "buffer_names",
    "check_plain",
    "checkpoint_path",
    "clear_unfinished",
    "link",
    "load_checkpoint",
    "load_state",
    "misfits",
    "model_state",
    "newest_complete",
    "non_finite",
    "plain",
    "read",
    "read_resumable",
    "state_of",
    "write",
]
