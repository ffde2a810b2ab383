"""The hook `on_epoch_end`: runs on rank 0, and what it reports reaches all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from nbddp.evaluation.errors import StepError
from nbddp.evaluation.metrics import described, real_number
from nbddp.evaluation.ranks import Ranks
from nbddp.evaluation.step import RECORDED

HOOK = "on_epoch_end"


@dataclass(frozen=True)
class EpochState:
    """What `on_epoch_end(state)` is called with, at the end of each epoch: after its validation, before its checkpoint.

    It runs on rank 0 while the other ranks wait, on that rank's copies and not on the objects of the kernel. `epoch` and `step` count from 1 over the whole
    run, `stage` from 0. `loss` is the mean over the epoch's samples, `values` what the validation of this epoch recorded (empty where there was none), `lr`
    that of the first parameter group in the epoch's last step. `model` is in train mode, and every module has its mode back afterwards. Changes to the
    options in `optimizer.param_groups` (lr, weight_decay, ...) reach all ranks; changes to the weights do not, and on more than one rank end the run at the
    next checkpoint, where replicas are compared.
    """

    epoch: int
    step: int
    stage: int
    stage_name: str
    loss: float
    values: Mapping[str, float]
    lr: float
    model: nn.Module = field(repr=False)
    optimizer: torch.optim.Optimizer = field(repr=False)
    reported: dict[str, float] = field(default_factory=dict)
    _taken: frozenset[str] = field(default=frozenset(), repr=False)

    def report(self, **values: Any) -> None:
        """Record real numbers, or tensors of one element, of this epoch; `monitor` may name one of them. Of two with the same name the later counts.

        Raises:
            StepError: not a real number, or the name is recorded already.
        """
        for name, value in values.items():
            if not name.isidentifier():
                message = f"{HOOK} reports {name!r}: a name is made of letters, digits and underscores"
                raise StepError(message)
            if name in self._taken or name in self.values:
                message = f"{HOOK} reports {name}, which is recorded already: give it another name"
                raise StepError(message)
            number = real_number(value)
            if number is None:
                message = f"{HOOK} reports {name}: {described(value)}; it must be a real number, or a tensor with one"
                raise StepError(message)
            self.reported[name] = number


class HookFailed(Exception):
    """The hook raised on rank 0. Raised on every rank, so that all can still write the weights of the epoch; then `end` ends the run."""

    def __init__(self, error: BaseException | None, ranks: Ranks) -> None:
        super().__init__(HOOK)
        self._error, self._ranks = error, ranks

    def end(self) -> None:
        """Raise what the hook raised, on rank 0; the others wait, and end with it.

        Raises:
            BaseException: the user's.
        """
        if self._error is not None:
            raise self._error from self._error.__cause__  # not as if it had come of handling this one
        self._ranks.gather_objects(None)


class EpochEnd:
    """Calls the hook. All ranks make the call together."""

    def __init__(self, hook: Callable[[EpochState], Any], ranks: Ranks) -> None:
        self._hook, self._ranks = hook, ranks

    def call(
        self,
        *,
        epoch: int,
        step: int,
        stage: int,
        stage_name: str,
        loss: float,
        values: Mapping[str, float],
        lr: float,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        taken: frozenset[str] = frozenset(),
    ) -> dict[str, float]:
        """Run the hook on rank 0 and return what it reported, on every rank; blocks. `taken` are names that the loop records of an epoch itself.

        Raises:
            HookFailed: on every rank, where it raised.
        """
        taken |= {"loss", *RECORDED, "duration_s"}
        sent: tuple[dict[str, float], list[dict[str, Any]] | None, bool] = ({}, None, False)
        failure: BaseException | None = None
        if self._ranks.rank == 0:
            state = EpochState(epoch, step, stage, stage_name, loss, dict(values), lr, model, optimizer, _taken=taken)
            before = _options(optimizer)
            try:
                self._run(state)
            except BaseException as error:  # noqa: BLE001 - the user's, of any kind: raised again once the epoch's weights are written
                failure = error
            after = before if failure else _options(optimizer)
            sent = state.reported, None if after == before else after, failure is not None
        reported, options, failed = self._ranks.gather_objects(sent)[0]
        if failed:
            raise HookFailed(failure, self._ranks)
        if options is not None and self._ranks.rank != 0:
            for group, new in zip(optimizer.param_groups, options, strict=True):
                _set_options(group, new)
        return reported

    def _run(self, state: EpochState) -> None:
        """The user's code; afterwards modules are in the modes, and parameters without the gradients, that the next step expects."""
        modes = [(module, module.training) for module in state.model.modules()]
        groups = len(state.optimizer.param_groups)
        training = [parameter.requires_grad for parameter in state.model.parameters()]
        with torch.enable_grad():
            self._hook(state)
        if len(state.optimizer.param_groups) != groups:
            message = f"{HOOK} adds parameter groups to the optimizer of rank 0 alone: a stage with an optimizer of its own can have others"
            raise StepError(message)
        if [parameter.requires_grad for parameter in state.model.parameters()] != training:
            message = f"{HOOK} changes requires_grad on rank 0 alone: a stage can freeze, nbddp.Stage(freeze=...)"
            raise StepError(message)
        for module, mode in modes:
            module.training = mode
        for parameter in state.model.parameters():
            parameter.grad = None


def _options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The options of each parameter group as plain values: a learning rate may be a tensor."""
    return [
        {name: value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def _set_options(group: dict[str, Any], new: dict[str, Any]) -> None:
    for name, value in new.items():
        old = group.get(name)
        if isinstance(old, torch.Tensor) and not isinstance(value, torch.Tensor):
            old.fill_(value)  # in place, since captured kernels read it
        else:
            group[name] = value
