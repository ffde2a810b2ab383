"""Errors of the worker itself, which the kernel shows as the public ones of `nbddp.errors`."""

from __future__ import annotations


class ReplicasDiffer(RuntimeError):
    """Parameters that should be the same bits on every rank are not."""

    def __init__(self, rank: int, names: str, count: int) -> None:
        super().__init__(
            f"the replicas of the model differ: {count} parameter{'s' if count > 1 else ''} of rank {rank} ({names}) are not those of rank 0; "
            "a step that changes parameters outside the optimizer, or draws other random numbers on each rank, does this"
        )
        self.rank = rank
