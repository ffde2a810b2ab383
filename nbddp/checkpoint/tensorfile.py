"""Files of safetensors: tensors by name, and a few words; there is no code in them that could be run."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

if TYPE_CHECKING:
    from pathlib import Path

FORMAT = "safetensors"
"""The format that `read` gives to the content of such a file."""
_LENGTH = 8
_LONGEST_HEADER = 100_000_000


def looks_like_one(head: bytes) -> bool:
    """Whether a file begins as one of safetensors does: with the length of a header, which is JSON."""
    return head[_LENGTH : _LENGTH + 1] == b"{" and 2 <= int.from_bytes(head[:_LENGTH], "little") <= _LONGEST_HEADER


def is_one(path: Path) -> bool:
    """Whether a file is one of safetensors, by its content."""
    with path.open("rb") as file:
        return looks_like_one(file.read(_LENGTH + 1))


def problem(head: bytes, size: int) -> str | None:
    """What is wrong with such a file, as far as its size tells."""
    length = int.from_bytes(head[:_LENGTH], "little")
    return f"is not a complete checkpoint: it is cut off after {size} bytes, in its header" if _LENGTH + length > size else None


def read(path: Path) -> dict[str, Any]:
    """The tensors, mapped, and the metadata; a tensor that was written once for several names is there under all of them.

    Raises:
        SafetensorError: for a file that is damaged.
    """
    with safe_open(path, framework="pt", device="cpu") as file:
        metadata: dict[str, str] = file.metadata() or {}
        tensors = OrderedDict((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118 - it is no mapping
    for name, kept in metadata.items():  # as safetensors.torch.save_model says which names it left out
        if name not in tensors and kept in tensors:
            tensors[name] = tensors[kept]
    return {"format": FORMAT, "metadata": metadata, "tensors": tensors}
