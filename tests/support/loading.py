"""Models that files are loaded into, and what tests of loading look at: every bit, and the words of a refusal."""

from __future__ import annotations

import functools
import re
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nbddp.checkpoint import load_checkpoint
from nbddp.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    Norm = Callable[[int], nn.Module]

compiled = functools.partial(torch.compile, backend="eager")
"""torch.compile without a compiler, which would take seconds to import."""


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int, norm: Norm = nn.BatchNorm2d) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), norm(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), norm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class ResNet(nn.Module):
    """Images (N, 3, H, W) to classes; `norm` makes a layer for a number of channels."""

    def __init__(self, classes: int = 5, norm: Norm = nn.BatchNorm2d) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), norm(8), nn.ReLU())
        self.layers = nn.Sequential(Block(8, norm), Block(8, norm))
        self.head = nn.Linear(8, classes)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.layers(self.stem(x)).mean((2, 3)))


class Transformer(nn.Module):
    """One block, with the embedding tied to the head."""

    def __init__(self, words: int = 11, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.block = nn.TransformerEncoderLayer(width, 2, 16, batch_first=True)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(4), persistent=False)
        self.register_buffer("positions", torch.arange(4))

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.block(self.embed(x), src_mask=self.mask))


class Recurrent(nn.Module):
    """A bidirectional LSTM of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, num_layers=2, bidirectional=True)
        self.out = nn.Linear(8, 2)


MODELS: dict[str, Callable[[], nn.Module]] = {"resnet": ResNet, "transformer": Transformer, "lstm": Recurrent}


def bits(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Everything in a model that loading could change, also what no state dict holds."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: (id(tensor), tensor.dtype, tensor.requires_grad, tensor.detach().clone()) for name, tensor in tensors}


def unchanged(model: nn.Module, before: Mapping[str, tuple[Any, ...]]) -> bool:
    """Whether a model is what it was, as `bits` tells."""
    after = bits(model)
    return after.keys() == before.keys() and all(
        after[name][:3] == before[name][:3] and torch.equal(after[name][3].nan_to_num(7), before[name][3].nan_to_num(7)) for name in before
    )


def same(one: nn.Module | Mapping[str, Any], other: nn.Module | Mapping[str, Any]) -> bool:
    """Whether two models, or state dicts, have the same entries in the same order."""
    mine, theirs = (thing.state_dict() if isinstance(thing, nn.Module) else thing for thing in (one, other))
    return list(mine) == list(theirs) and all(torch.equal(mine[name], theirs[name]) for name in mine)


def refused(path: Path, model: nn.Module, **how: bool) -> str:
    """The message of a refusal, after which the model is what it was."""
    before, modes = bits(model), [module.training for module in model.modules()]
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path, model, **how)
    assert unchanged(model, before)
    assert [module.training for module in model.modules()] == modes
    return str(caught.value)


def table(message: str) -> list[str]:
    """The lines of a refusal below the first one."""
    return [re.sub(r" +", " ", line.strip()) for line in message.splitlines()[1:]]


def lightning(state: Mapping[str, Any], **hyper_parameters: object) -> dict[str, Any]:
    """What Lightning's Trainer.save_checkpoint writes."""
    return {
        **{"epoch": 3, "global_step": 120, "pytorch-lightning_version": "2.5.1", "state_dict": state, "loops": {"fit_loop": {"state_dict": {}}}},
        "callbacks": {"ModelCheckpoint{'monitor': None}": {"best_model_score": torch.tensor(0.3), "best_model_path": "x.ckpt"}},
        "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}],
        **{"lr_schedulers": [], "hparams_name": "kwargs", "hyper_parameters": hyper_parameters},
    }


def prefixed(state: Mapping[str, Any], prefix: str) -> OrderedDict[str, Any]:
    """A state dict with something in front of every name."""
    return OrderedDict((prefix + name, value) for name, value in state.items())
