"""Checkpoint files: tensors and plain types only, in a versioned schema, readable with `weights_only=True`.

Written by rank 0, read by ranks and kernels.
"""

from __future__ import annotations

from nbddp.checkpoint.contents import found_in, state_of
from nbddp.checkpoint.door import Place, checkpoint_path, load_checkpoint, load_file, located
from nbddp.checkpoint.fitting import same
from nbddp.checkpoint.folder import SUFFIXES
from nbddp.checkpoint.loading import LOAD_HINT, Loaded, load_state, misfits
from nbddp.checkpoint.names import match, without_wrappers
from nbddp.checkpoint.reading import read
from nbddp.checkpoint.resumable import newest_complete, of_the_end, read_resumable
from nbddp.checkpoint.snapshot import buffer_names, check_plain, model_state, non_finite, plain
from nbddp.checkpoint.writing import FORMAT, VERSION, clear_unfinished, link, write

__all__ = [
    "FORMAT",
    "LOAD_HINT",
    "SUFFIXES",
    "VERSION",
    "Loaded",
    "Place",
    "buffer_names",
    "check_plain",
    "checkpoint_path",
    "clear_unfinished",
    "found_in",
    "link",
    "load_checkpoint",
    "load_file",
    "load_state",
    "located",
    "match",
    "misfits",
    "model_state",
    "newest_complete",
    "non_finite",
    "of_the_end",
    "plain",
    "read",
    "read_resumable",
    "same",
    "state_of",
    "without_wrappers",
    "write",
]
