"""One file that holds pickle streams and the memory behind them, as `torch.save` writes it and `torch.load` maps it.

Written in the kernel, read in the ranks. Everything in the container is a tensor or a plain type, so that it opens with ``weights_only=True``;
the streams inside are unpickled by `nbddp.bundle.loader`.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from nbddp.bundle.cells import CellSource
from nbddp.errors import BundleError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from nbddp.bundle.packing import Packed

FORMAT = "nbddp bundle"
VERSION = 1
ALIGNMENT = 64
# Smaller blobs go into one common record: each record of a torch archive costs some microseconds when opened.
SMALL = 64 << 10
CHUNK = 4 << 20


@dataclass
class Archive:
    """The content of one archive file.

    Attributes:
        streams: pickle streams, as uint8 tensors.
        records: the memory, as uint8 tensors: large blobs one by one, the small ones together.
        blobs: int64 of shape (blobs, 3): record, offset in it and length in bytes.
        places: int64 of shape (views, 3): archive (0 is this one), blob (-1 is empty) and offset in bytes of each view.
        archives: hashes of the other archives that are referred to, numbered from 1.
        cells: sources of the notebook cells that the code in the bundle comes from, by file name.
    """

    streams: dict[str, torch.Tensor]
    records: list[torch.Tensor]
    blobs: torch.Tensor
    places: torch.Tensor
    archives: list[str]
    cells: dict[str, CellSource]

    @classmethod
    def of(cls, packed: Packed, cells: Mapping[str, CellSource] | None = None) -> Archive:
        """Lay out what was packed; memory on the CPU is not copied, and must not change before it is written."""
        records: list[torch.Tensor] = []
        arena = bytearray()
        table: list[tuple[int, int, int]] = []
        for blob in packed.blobs:
            if blob.nbytes >= SMALL:
                records.append(blob.tensor())
                table.append((len(records), 0, blob.nbytes))
            else:
                table.append((0, len(arena), blob.nbytes))
                arena += blob.tensor().numpy().data
                arena += bytes(-len(arena) % ALIGNMENT)
        return cls(
            streams={name: _as_tensor(data) for name, data in packed.streams.items()},
            records=[_as_tensor(arena), *records],
            blobs=torch.tensor(table, dtype=torch.int64, device="cpu").reshape(-1, 3),
            places=torch.from_numpy(np.array(packed.places, dtype=np.int64).reshape(-1, 3)),
            archives=packed.archives,
            cells=dict(cells or {}),
        )

    @property
    def nbytes(self) -> int:
        """Bytes that the file will take, without the few of its directory."""
        return sum(tensor.nbytes for tensor in (*self.streams.values(), *self.records, self.blobs, self.places))

    def digest(self) -> str:
        """Return a hash of all content, 40 hexadecimal digits of SHA-256 over the SHA-256 of 4 MiB chunks, computed on all cores.

        It is taken of the bytes each time: version counters of tensors do not see what numpy writes into the same memory.
        """
        parts = [*self.streams.values(), *self.records, self.blobs, self.places]
        views = [part.reshape(-1).view(torch.uint8).numpy().data for part in parts]
        outline = json.dumps([FORMAT, VERSION, list(self.streams), [view.nbytes for view in views], self.archives])
        total = hashlib.sha256(outline.encode())
        chunks = (view[start : start + CHUNK] for view in views for start in range(0, view.nbytes, CHUNK))
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            for digest in pool.map(_sha256, chunks):
                total.update(digest)
        return total.hexdigest()[:40]

    def write(self, path: Path) -> int:
        """Write the file under a temporary name and move it into place, mode 0600; return its bytes. On failure nothing is left behind."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
        content = {**vars(self), "format": FORMAT, "version": VERSION, "cells": {name: asdict(cell) for name, cell in self.cells.items()}}
        crc32 = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            # The folder is private already; a file made beforehand with the right mode would be truncated here, upon which ext4 flushes it when it is closed.
            torch.save(content, temporary)
            temporary.chmod(0o600)
            temporary.replace(path)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
            message = f"writing {path} failed: {str(error).splitlines()[0]}; free some space with nbddp.prune(), or choose another place with --run-root"
            raise BundleError(message) from error
        finally:
            torch.serialization.set_crc32_options(crc32)
            temporary.unlink(missing_ok=True)
        return path.stat().st_size

    @classmethod
    def read(cls, path: Path) -> Archive:
        """Map the file copy-on-write: all processes that do so share its pages until they write to them."""
        try:
            content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except FileNotFoundError:
            message = f"{path} is gone; it was there when the run was made, so prune() or another hand removed it. Run the cell again"
            raise BundleError(message) from None
        except Exception as error:  # noqa: BLE001 - torch raises whatever the bytes of a damaged file lead it to
            message = f"{path} is damaged, and no bundle any more ({type(error).__name__}): the model and the hooks of its run can't be rebuilt"
            raise BundleError(message) from None
        if not isinstance(content, dict) or content.pop("format", None) != FORMAT or not isinstance(version := content.pop("version", None), int):
            message = f"{path} is not a bundle of nbddp"
            raise BundleError(message)
        if version > VERSION:
            message = f"{path} is not a bundle that this version of nbddp reads; use the version that wrote it"
            raise BundleError(message)
        try:
            content["cells"] = {name: CellSource(**cell) for name, cell in content["cells"].items()}
            archive = cls(**content)
            sound = archive._sound()
        except (KeyError, TypeError, AttributeError):
            sound = False
        if not sound:
            message = f"{path} is damaged: it lacks what a bundle holds"
            raise BundleError(message)
        return archive

    def _sound(self) -> bool:
        """Whether everything is of its type."""
        bytes_ = [*self.streams.values(), *self.records]
        tables = (self.blobs, self.places)
        whole = all(part.dtype is torch.uint8 and part.ndim == 1 for part in bytes_) and all(isinstance(name, str) for name in self.archives)
        return whole and all(table.dtype is torch.int64 and table.ndim == 2 and table.shape[1] == 3 for table in tables)

    def storages(self) -> list[torch.UntypedStorage]:
        """Return one storage per blob, in the mapped file."""
        whole = [record.untyped_storage() for record in self.records]
        return [whole[record] if record else whole[0][offset : offset + length] for record, offset, length in self.blobs.tolist()]


def _as_tensor(data: bytes | bytearray) -> torch.Tensor:
    if not data:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    # torch warns about read-only memory.
    return torch.frombuffer(bytearray(data) if isinstance(data, bytes) else data, dtype=torch.uint8)


def _sha256(chunk: memoryview) -> bytes:
    return hashlib.sha256(chunk).digest()
