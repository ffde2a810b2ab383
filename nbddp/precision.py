"""Autocast: in which dtype the forward passes of a stage compute. Runs in the ranks and, for evaluation, in the kernel."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ParamSpec, Self, TypeVar

import torch

from nbddp.errors import ConfigError
from nbddp.values import read_precision

if TYPE_CHECKING:
    from types import TracebackType

P = ParamSpec("P")
R = TypeVar("R")

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""What float32 is cast to; parameters, gradients and the optimizer's state stay as they are."""

NATIVE_BF16 = 8.0
"""Compute capability from which on GPUs compute in bf16 themselves (Ampere)."""


def autocast_context(precision: str, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """The context that forward passes run in: autocast to bfloat16 or float16, on CPUs and GPUs alike, and for fp32 none.

    fp32 keeps the dtypes of parameters and batches. Autocast leaves float64 and complex tensors alone.

    Raises:
        ValueError: for a precision that is not one of fp32, bf16, fp16.
    """
    if precision == "fp32":
        return contextlib.nullcontext()
    if precision not in DTYPES:
        message = f"precision={precision} is not one of fp32, {', '.join(DTYPES)}"
        raise ValueError(message)
    return torch.autocast(device.type, dtype=DTYPES[precision])


class autocast:
    """Within it, forward passes compute as they do in a run of that precision; a context manager and a decorator, for evaluation in the kernel.

    bf16 and fp16 are torch's autocast: matrix products and convolutions of float32 tensors are in that dtype, and what loses too much there (softmax,
    losses, norms) is in float32. fp32 means no autocast, within one of torch's too. float64 and complex tensors are left alone, so that a float64 model
    computes in float64 in every precision. Parameters keep their dtype in all of them. Gradients are not switched off: ``torch.no_grad()`` does that, and
    ``net.eval()`` sets the mode.

    Attributes:
        precision: fp32, bf16 or fp16, the one in effect.
        device: where tensors are that it applies to.
    """

    def __init__(self, precision: object = "auto", device: torch.device | str | int | None = None) -> None:
        """Say what to compute in.

        Args:
            precision: auto (bf16 on a GPU that computes in it natively, else fp32), bf16, fp16, fp32, Lightning's and accelerate's words for them
                ("bf16-mixed", "no"), a torch dtype, or a Run: the precision in effect in its last stage.
            device: a torch.device, its name, or the index of a GPU; by default the current GPU where there is one, else the CPU.

        Raises:
            ConfigError: for what is none of these, and for a GPU that is not there.
        """
        self.device = read_device(device)
        self.precision = _in_effect(precision, self.device)
        self._entered: list[torch.autocast] = []

    def __enter__(self) -> Self:
        dtype = DTYPES.get(self.precision)
        context = torch.autocast(self.device.type, enabled=False) if dtype is None else torch.autocast(self.device.type, dtype=dtype)
        context.__enter__()
        self._entered.append(context)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._entered.pop().__exit__(kind, error, traceback)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """The function, each call of which runs within a context of its own."""
        given: object = function
        if not callable(given):
            message = f"nbddp.autocast({self.precision!r}) decorates a function, not a {type(given).__name__}"
            raise ConfigError(message)
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            message = f"{function.__name__} runs on after it has returned, outside of the context: write `with nbddp.autocast(...)` inside it"
            raise ConfigError(message)

        @functools.wraps(function)
        def cast(*args: P.args, **kwargs: P.kwargs) -> R:
            with autocast(self.precision, self.device):
                return function(*args, **kwargs)

        return cast

    def __repr__(self) -> str:
        return f"nbddp.autocast({self.precision!r}, {str(self.device)!r})"


def _in_effect(precision: object, device: torch.device) -> str:
    spec = getattr(precision, "spec", None)
    if isinstance(spec, Mapping) and "plan" in spec:  # a Run, of which this layer knows no more
        return str(spec["plan"]["stages"][-1]["precision"])
    if callable(precision):
        message = f'nbddp.autocast takes a precision first, as in @nbddp.autocast("bf16"), not a {type(precision).__name__}'
        raise ConfigError(message)
    word = str(precision).removeprefix("torch.")
    try:
        read = str(read_precision(word))
    except ValueError as error:
        message = f"precision={word} {error}"
        raise ConfigError(message) from None
    if read != "auto":
        return read
    native = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= NATIVE_BF16
    return "bf16" if native else "fp32"


def read_device(device: object) -> torch.device:
    """The CPU, or a GPU that is there; None is the current GPU where there is one, else the CPU.

    Raises:
        ConfigError: for anything else.
    """
    count = torch.cuda.device_count()
    if device is None:
        return torch.device("cuda", torch.cuda.current_device()) if count else torch.device("cpu")
    found: torch.device | None = None
    if isinstance(device, torch.device | str | int) and not isinstance(device, bool):
        with contextlib.suppress(RuntimeError):
            found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if found is None or found.type not in ("cpu", "cuda"):
        message = f"device={device!r} must be cpu, cuda, cuda:0, a torch.device of one of them, or the index of a GPU"
        raise ConfigError(message)
    if found.type == "cpu":
        return torch.device("cpu")
    current = torch.cuda.current_device() if count else 0
    index = current if found.index is None else found.index  # type: ignore[redundant-expr]  # torch's types leave None out
    if index >= count:
        have = f"the visible GPUs are 0..{count - 1}" if count else "this machine has no visible GPU"
        message = f"device={device}: {have}; use device='cpu'" if not count else f"device={device}: {have}"
        raise ConfigError(message)
    return torch.device("cuda", index)
