"""The user's step through torch.compile, as a function: the module is not wrapped, so names in its state dict stay as they are."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException

from nbddp.evaluation.errors import StepError
from nbddp.worker.failure import is_collective
from nbddp.worker.trace import error_places, message_of

if TYPE_CHECKING:
    from nbddp.evaluation.step import Step

_TORCH = str(Path(torch.__file__).resolve().parent)
_NEEDED = {
    "InvalidCxxCompiler": "found no C++ compiler: install one (apt-get install g++, or conda install gxx), or name it in CXX",
    "No working C++ compiler": "found no C++ compiler: install one (apt-get install g++, or conda install gxx), or name it in CXX",
    "Python.h": "found no headers of Python to compile against: install them (apt-get install python3-dev)",
    "omp.h": "found no OpenMP to compile against: install it (apt-get install libgomp1, or conda install gxx)",
    "TritonMissing": "needs Triton on a GPU: pip install triton, in the version that this torch asks for",
    "GPUTooOldForTriton": "needs a GPU of compute capability 7.0 or newer",
    "No space left on device": "filled its disk: name a folder with space in --compile-cache-dir",
}
_LONGEST = 300


class CompiledStep:
    """Calls the compiled step; where that fails, finds out whether the step itself is wrong or its compilation.

    What a step returns besides loss, weight and scalars is not returned from here: metrics are computed in validation, and outputs of compiled code that
    nobody takes a gradient from would cost one.
    """

    def __init__(self, step: Step, mode: str | None) -> None:
        def lean(model: nn.Module, batch: Any) -> Any:
            returned = step(model, batch)
            if type(returned) is not dict:
                return returned
            kept = {name: value for name, value in returned.items() if name not in ("output", "target")}
            return {name: value.detach() if isinstance(value, torch.Tensor) and name != "loss" else value for name, value in kept.items()}

        self._step = step
        self._compiled = torch.compile(lean, mode=mode)

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        try:
            return self._compiled(model, batch)
        except Exception as error:  # noqa: BLE001 - the boundary to compiled code, which may raise what the user's step does
            reason = error
        if not in_compiled_code(reason):
            raise reason
        with torch.compiler.set_stance("force_eager"):
            self._step(model, batch)  # an error of the step's own comes with the line that it stands in
        raise explained(reason)


def scope_of_its_own(*functions: Any) -> None:
    """Let the compiler find the globals of a cell's functions where they are.

    It takes those of a function that it meets within another for those of the module that their `__name__` names. A cell's body has a copy of the notebook's
    names, which are not all in this process's `__main__`; without a `__name__`, the function's own are taken.
    """
    main = vars(sys.modules["__main__"])
    for function in functions:
        called = function if hasattr(function, "__globals__") else getattr(type(function), "forward" if isinstance(function, nn.Module) else "__call__", None)
        scope = getattr(called, "__globals__", main)
        if scope is not main and scope.get("__name__") == main.get("__name__", "__main__"):
            del scope["__name__"]


def in_compiled_code(error: Exception) -> bool:
    """Whether an exception comes from the compiler or from code that it made, and not from a line of Python, nor from another rank."""
    if is_collective(error) or isinstance(error, torch.OutOfMemoryError):
        return False
    if isinstance(error, TorchDynamoException):
        return True
    places = error_places(error)
    return bool(places) and (places[-1].file.startswith(_TORCH) or places[-1].name == "call")


def explained(error: Exception) -> Exception:
    """The error of a compiler in words; of other code, as it is."""
    if not isinstance(error, TorchDynamoException):
        return error
    traceback.print_exception(error, file=sys.stderr)  # the rank's log has it whole
    text = message_of(error)
    what = next((remedy for sign, remedy in _NEEDED.items() if sign in text), None)
    if what is None:
        first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
        what = f"failed: {first[:_LONGEST]}; the whole is in this rank's log"
    message = f"torch.compile {what}; without --compile the step runs as it is"
    return StepError(message)
