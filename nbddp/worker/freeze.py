"""Which parameters train in a stage, and which BatchNorm layers hold still with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from nbddp.stage import trainable

if TYPE_CHECKING:
    from nbddp.stage import Stage


class Freezer:
    """Sets `requires_grad` and modes anew at the beginning of each stage, from what the user had set."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        named = list(model.named_parameters(remove_duplicate=False))
        self._as_given = {name: parameter.requires_grad for name, parameter in named}
        names_of: dict[int, list[str]] = {}
        for name, parameter in named:
            names_of.setdefault(id(parameter), []).append(name)
        self._tied = [names for names in names_of.values() if len(names) > 1]
        if not model.training:
            model.train()
        self._modes = [(module, module.training) for module in model.modules()]

    def apply(self, stage: Stage | None) -> int:
        """Set what trains, and the mode of every module; return how many BatchNorm layers are held.

        Raises:
            ConfigError: for a pattern that matches nothing, and where nothing would train.
        """
        chosen = trainable(self._as_given, stage, tied=self._tied)
        for name, parameter in self._model.named_parameters():
            parameter.requires_grad_(chosen[name])
            if not chosen[name]:
                parameter.grad = None
        for module, mode in self._modes:
            module.training = mode
        layers = held(self._model) if stage is not None and stage.freeze_batch_norm else []
        for layer in layers:
            layer.eval()
        return len(layers)


def held(model: nn.Module) -> list[nn.Module]:
    """BatchNorm layers none of whose parameters trains; of layers without parameters those in a module that has some, and none that trains."""
    found: list[nn.Module] = []
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            owner: nn.Module = module
            path = name
            while not any(True for _ in owner.parameters()) and path:
                path = path.rpartition(".")[0]
                owner = model.get_submodule(path)
            if not any(parameter.requires_grad for parameter in owner.parameters()):
                found.append(module)
    return found
