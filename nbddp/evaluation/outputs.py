"""The outputs of all samples as one, whatever they are made of: tensors, and dicts, sequences, namedtuples and dataclasses of tensors."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from nbddp.evaluation.errors import StepError
from nbddp.evaluation.metrics import like, widened


class Outputs:
    """Takes in the outputs of batches, in the order of the samples, of which there are `n`; on the CPU.

    `whole` has the structure of the first output, with tensors of shape (n, ...). Half precision is widened to float32.
    """

    def __init__(self, n: int, source: str) -> None:
        self._n, self._source = n, source
        self._at = 0
        self._columns: dict[str, torch.Tensor] = {}
        self.whole: Any = None

    def add(self, output: Any, count: int) -> None:
        """Take in the output of a batch of `count` samples.

        Raises:
            StepError: it holds something other than tensors over the samples, or differs from those before in more than the number of samples.
        """
        found: dict[str, torch.Tensor] = {}

        def take(tensor: torch.Tensor, name: str) -> torch.Tensor:
            self._check_length(tensor, name, count)
            found[name] = widened(tensor.detach())
            return tensor

        self._mapped(output, "output", take)
        if not found:
            message = f"{self._source} returned an output without a tensor in it, a {type(output).__name__}: there is nothing to join"
            raise StepError(message)
        if not self._at:
            self._begin(output, found)
        if found.keys() != self._columns.keys():
            now, before = (", ".join(each) or "nothing" for each in (found, self._columns))
            message = f"{self._source} returned {now}, and before that {before}: outputs are joined, so that each batch has the same"
            raise StepError(message)
        for name, tensor in found.items():
            column = self._columns[name]
            if tensor.shape[1:] != column.shape[1:] or tensor.dtype != column.dtype:
                was, now = (f"{tuple(each.shape[1:])} {str(each.dtype).removeprefix('torch.')}" for each in (column, tensor))
                message = (
                    f"{self._source} returned an {name} of {now} per sample, and before that of {was}: outputs are joined, so that all have one shape and dtype"
                )
                raise StepError(message)
            column[self._at : self._at + count].copy_(tensor)
        self._at += count

    def _begin(self, output: Any, found: dict[str, torch.Tensor]) -> None:
        """Make room for all samples."""
        self._columns = {name: torch.empty((self._n, *tensor.shape[1:]), dtype=tensor.dtype, device="cpu") for name, tensor in found.items()}
        self.whole = self._mapped(output, "output", lambda _, name: self._columns[name])

    def _check_length(self, tensor: torch.Tensor, name: str, count: int) -> None:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            message = f"{self._source} returned an {name} that is no dense tensor: .to_dense(), .dequantize() or a padded tensor can be joined"
            raise StepError(message)
        if not tensor.ndim or len(tensor) != count:
            message = (
                f"{self._source} returned an {name} of shape {tuple(tensor.shape)} for a batch of {count}: its first dimension must be that of the samples"
            )
            raise StepError(message)

    def _mapped(self, value: Any, name: str, function: Callable[[torch.Tensor, str], torch.Tensor]) -> Any:
        """The same structure with other tensors; None stays None."""
        if isinstance(value, torch.Tensor):
            return function(value, name)
        if value is None:
            return None
        if isinstance(value, Mapping):
            items = {key: self._mapped(item, f"{name}[{key!r}]", function) for key, item in value.items()}
            return like(value, items)
        if isinstance(value, list | tuple):
            fields = getattr(value, "_fields", None)
            parts = [self._mapped(item, f"{name}[{i}]" if fields is None else f"{name}.{fields[i]}", function) for i, item in enumerate(value)]
            return type(value)(*parts) if fields is not None else type(value)(parts)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            other: Any = copy.copy(value)
            for field in dataclasses.fields(value):
                object.__setattr__(other, field.name, self._mapped(getattr(value, field.name), f"{name}.{field.name}", function))
            return other
        rule = "outputs are joined, so that they are tensors, or dicts, sequences and dataclasses of tensors"
        message = f"{self._source} returned an {name} that is a {type(value).__name__}: {rule}"
        raise StepError(message)
