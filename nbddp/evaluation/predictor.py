"""The outputs of a model for all samples, as the validation step of a run makes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torch import nn

from nbddp.evaluation.errors import StepError
from nbddp.evaluation.evaluator import evaluating
from nbddp.evaluation.outputs import Outputs
from nbddp.evaluation.step import read_result
from nbddp.precision import autocast_context

if TYPE_CHECKING:
    import torch

    from nbddp.data import Micro
    from nbddp.evaluation.hooks import Hooks


def predict(model: nn.Module, hooks: Hooks, batches: Iterable[tuple[Any, Micro]], n: int, *, precision: str, device: torch.device) -> Any:
    """The outputs of `n` samples, joined over the batches.

    Args:
        model: the module, bare.
        hooks: those of the run.
        batches: in the order of the samples.
        n: number of samples.
        precision: what the steps run in.
        device: where model and batches are.

    Raises:
        StepError: there are no outputs, or they can't be joined.
    """
    __tracebackhide__ = True
    of_loss = hooks.validation_name == "loss"
    source, output_of = ("the model", model_output) if of_loss else (hooks.validation_name, _step_output(hooks))
    outputs = Outputs(n, source)
    with evaluating(model):
        for batch, share in batches:
            with autocast_context(precision, device):
                output = output_of(model, batch)
            if output is None:
                remedy = "its forward returns one" if of_loss else "return {'loss': loss, 'output': output}"
                message = f"{source} returned no output, which is what is predicted: {remedy}"
                raise StepError(message)
            outputs.add(output, share.weight)
    return outputs.whole


def _step_output(hooks: Hooks) -> Callable[[nn.Module, Any], Any]:
    def output_of(model: nn.Module, batch: Any) -> Any:
        __tracebackhide__ = True
        return read_result(hooks.validation_step(model, batch), hooks.validation_name, training=False).output

    return output_of


def model_output(model: nn.Module, batch: Any) -> Any:
    """What the model makes of the inputs in a batch, without a loss.

    A batch of several parts is `(*inputs, target)`, as in training, unless `forward` needs all of them; one of a single part, and one that is no sequence,
    is the input.
    """
    __tracebackhide__ = True
    parts = list(batch) if isinstance(batch, list | tuple) else [batch]
    if len(parts) > 1 and not (_takes(model, len(parts)) and not _takes(model, len(parts) - 1)):
        parts = parts[:-1]
    return model(*parts)


def _takes(model: nn.Module, count: int) -> bool:
    """Whether `forward` can be called with so many arguments; where it does not tell, it can."""
    try:
        inspect.signature(model.forward).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:  # of a function written in C
        return True
    return True
