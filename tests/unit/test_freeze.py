"""What trains in a stage: `requires_grad`, gradients, tied parameters, and BatchNorm layers that hold still."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nbddp.errors import ConfigError
from nbddp.stage import Stage
from nbddp.worker.freeze import Freezer, held


def network():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.body, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.out.weight = self.embed.weight


def training(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_each_stage_begins_from_what_the_user_had_set():
    model = network()
    model[3].bias.requires_grad_(False)
    freezer, given = Freezer(model), {"0.weight", "0.bias", "1.weight", "1.bias", "3.weight"}
    freezer.apply(None)
    assert training(model) == given
    freezer.apply(Stage(freeze="0.*"))
    assert training(model) == given - {"0.weight", "0.bias"}
    freezer.apply(Stage(train_only="3.*"))
    assert training(model) == {"3.weight", "3.bias"}
    freezer.apply(Stage(epochs=3))
    assert training(model) == given


def test_gradients_of_what_is_frozen_are_dropped_and_others_kept():
    model = network()
    model(torch.randn(8, 4)).sum().backward()
    Freezer(model).apply(Stage(freeze="0.*"))
    assert {name for name, parameter in model.named_parameters() if parameter.grad is None} == {"0.weight", "0.bias"}


def test_one_parameter_under_two_names_is_frozen_and_trained_by_either():
    model = Tied()
    freezer = Freezer(model)
    freezer.apply(Stage(freeze="out.*"))
    assert training(model) == {"embed.bias", "body.weight", "body.bias"}
    assert not model.embed.weight.requires_grad
    freezer.apply(Stage(train_only="out.weight"))
    assert training(model) == {"embed.weight"}
    freezer.apply(None)
    assert len(training(model)) == 5


@pytest.mark.parametrize("stage, message", [(Stage("a", freeze="9.*"), "stage a: the pattern 9.* matches no parameter"), (Stage(freeze="*"), "freezes all")])
def test_what_can_not_be_frozen_is_refused(stage, message):
    with pytest.raises(ConfigError) as caught:
        Freezer(network()).apply(stage)
    assert message in str(caught.value)


def test_a_model_in_eval_mode_trains_and_modes_of_single_modules_stay():
    model = network().eval()
    Freezer(model).apply(None)
    assert all(module.training for module in model.modules())
    model = network()
    model[1].eval()
    freezer = Freezer(model)
    model.train()
    freezer.apply(None)
    assert [module.training for module in model] == [True, False, True, True]


def test_batch_norm_is_held_while_its_parameters_are_frozen_and_if_it_is_wanted():
    model = network()
    freezer = Freezer(model)
    assert freezer.apply(Stage(freeze=["0.*", "1.*"])) == 0
    assert model[1].training
    assert freezer.apply(Stage(freeze=["0.*", "1.*"], freeze_batch_norm=True)) == 1
    assert [module.training for module in model] == [True, False, True, True]
    before = {name: buffer.clone() for name, buffer in model[1].named_buffers()}
    model(torch.randn(8, 4))
    assert all(torch.equal(buffer, before[name]) for name, buffer in model[1].named_buffers())
    assert freezer.apply(Stage(freeze="0.*", freeze_batch_norm=True)) == 0, "its own parameters train"
    assert model[1].training
    assert freezer.apply(None) == 0


def frozen(module):
    return module.requires_grad_(False)


HELD = {
    "parameters frozen": (nn.Sequential(frozen(nn.BatchNorm1d(3)), nn.Linear(3, 3)), 1),
    "parameters train": (nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)), 0),
    "none of its own, in a frozen block": (nn.Sequential(frozen(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False))), nn.Linear(3, 3)), 1),
    "none of its own, in a block that trains": (nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False)), frozen(nn.Linear(3, 3))), 0),
    "none of its own, deep in a frozen block": (nn.Sequential(frozen(nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.BatchNorm1d(3, affine=False))))), 1),
    "a model without parameters": (nn.Sequential(nn.BatchNorm1d(3, affine=False)), 1),
    "other dimensions": (frozen(nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm3d(3), nn.SyncBatchNorm(3))), 3),
    "other norms": (frozen(nn.Sequential(nn.LayerNorm(3), nn.GroupNorm(1, 3), nn.InstanceNorm1d(3))), 0),
}


@pytest.mark.parametrize("case", HELD)
def test_which_layers_are_held(case):
    model, count = HELD[case]
    assert len(held(model)) == count
