"""The learning rates of the options' schedules and of hooks' schedulers: step by step, and over a checkpoint."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch._dynamo  # the first optimizer of a process imports it, and that sets a variable of the environment
from torch import nn
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from nbddp import checkpoint
from nbddp.config import TrainConfig
from nbddp.evaluation.errors import StepError
from nbddp.worker.schedule import Scheduler, shape


def make(lr=1.0, cls=torch.optim.SGD, **options):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    return model, cls(model.parameters(), lr=lr, **options)


def take(model, optimizer, number):
    """One optimizer step on data of that number."""
    generator = torch.Generator().manual_seed(number)
    optimizer.zero_grad()
    model(torch.randn(5, 3, generator=generator)).square().mean().backward()
    optimizer.step()


def rates(steps, *, hook=None, total=None, values=None, per_epoch=1000, lr=1.0, **options):
    """The rate that each step used."""
    model, optimizer = make(lr)
    scheduler = Scheduler(optimizer, TrainConfig(**options), hook, total_steps=total)
    used = []
    for step in range(1, steps + 1):
        used.append(optimizer.param_groups[0]["lr"])
        take(model, optimizer, step)
        scheduler.after_step()
        if step % per_epoch == 0:
            scheduler.after_epoch(None if values is None else values[step // per_epoch - 1])
    return used


# -- the shapes


def test_the_rate_stays_without_a_schedule():
    assert rates(5, lr=0.3) == [0.3] * 5


def test_a_warm_up_takes_the_first_part_at_step_1_and_the_whole_at_its_last():
    assert rates(6, warmup_steps=4, lr=2.0) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    assert rates(3, warmup_steps=1) == [1.0, 1.0, 1.0]


def test_linear_falls_to_0_after_the_last_step():
    assert rates(4, schedule="linear", total=4) == pytest.approx([1.0, 0.75, 0.5, 0.25])
    assert rates(6, schedule="linear", total=6, warmup_steps=3) == pytest.approx([1 / 3, 2 / 3, 1.0, 0.75, 0.5, 0.25])


def test_linear_and_cosine_are_torchs_own():
    for schedule, reference in [
        ("linear", lambda optimizer: LinearLR(optimizer, 1.0, 0.0, total_iters=7)),
        ("cosine", lambda optimizer: CosineAnnealingLR(optimizer, T_max=7)),
    ]:
        assert rates(7, schedule=schedule, total=7) == pytest.approx(rates(7, hook=reference))


def test_cosine_after_a_warm_up_is_a_half_wave_from_the_peak():
    used = rates(10, schedule="cosine", total=10, warmup_steps=2)
    assert used == pytest.approx([0.5] + [(1 + math.cos(math.pi * k / 9)) / 2 for k in range(9)])


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_no_step_beyond_the_end_gets_a_negative_rate(schedule):
    assert [shape(schedule, step, warmup=2, total=5) for step in (6, 7, 100)] == [0.0] * 3


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("warmup, total", [(0, 1), (1, 1), (5, 5), (4, 5), (0, 1000)])
def test_every_step_of_a_stage_has_a_rate_above_0(schedule, warmup, total):
    used = [shape(schedule, step, warmup=warmup, total=total) for step in range(1, total + 1)]
    assert max(used) == 1.0
    assert min(used) > 0


def test_plateau_lowers_the_rate_to_a_tenth_when_the_value_stalls():
    values = [1.0, 0.5, *[0.6] * 11, 0.4]
    used = rates(14, schedule="plateau", values=values, per_epoch=1)
    assert used == pytest.approx([1.0] * 13 + [0.1])


def test_plateau_counts_as_better_what_the_options_say():
    worse_by_their_rule = [5.0 + step * 0.01 for step in range(13)]
    assert rates(13, schedule="plateau", values=worse_by_their_rule, per_epoch=1, mode="max")[-1] == 1.0
    assert rates(13, schedule="plateau", values=worse_by_their_rule, per_epoch=1, mode="max", min_delta=1.0)[-1] == pytest.approx(0.1)
    assert rates(13, schedule="plateau", values=worse_by_their_rule, per_epoch=1, mode="min")[-1] == pytest.approx(0.1)


def test_plateau_acts_half_way_to_the_early_stop():
    used = rates(8, schedule="plateau", values=[1.0] * 8, per_epoch=1, patience=5)
    assert used == pytest.approx([1.0] * 4 + [0.1] * 3 + [0.01])
    assert rates(3, schedule="plateau", values=[1.0] * 3, per_epoch=1, patience=1) == pytest.approx([1.0, 1.0, 0.1])


def test_plateau_is_left_alone_by_epochs_without_a_value():
    assert rates(30, schedule="plateau", values=[None] * 30, per_epoch=1) == [1.0] * 30


def test_plateau_and_warm_up_go_together():
    used = rates(8, schedule="plateau", warmup_steps=6, values=[1.0] * 8, per_epoch=1, patience=3)
    assert used == pytest.approx([1 / 6, 2 / 6, 3 / 6, 0.1 * 4 / 6, 0.1 * 5 / 6, 0.01, 0.01, 0.001])


def test_groups_keep_the_ratio_of_their_rates():
    model, _ = make()
    optimizer = torch.optim.SGD([{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1].parameters(), "lr": 0.02}])
    scheduler = Scheduler(optimizer, TrainConfig(schedule="cosine", warmup_steps=2), None, total_steps=8)
    for step in range(8):
        first, second = (group["lr"] for group in optimizer.param_groups)
        assert first == pytest.approx(5 * second)
        take(model, optimizer, step)
        scheduler.after_step()


def test_a_rate_that_is_a_tensor_stays_one():
    model, _ = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.5))
    held = optimizer.param_groups[0]["lr"]
    scheduler = Scheduler(optimizer, TrainConfig(schedule="linear"), None, total_steps=4)
    take(model, optimizer, 0)
    scheduler.after_step()
    assert optimizer.param_groups[0]["lr"] is held
    assert float(held) == pytest.approx(0.375)


def test_a_step_that_was_not_applied_does_not_advance():
    model, optimizer = make()
    scheduler = Scheduler(optimizer, TrainConfig(schedule="linear"), None, total_steps=10)
    assert scheduler.state()["steps"] == 0
    take(model, optimizer, 1)
    scheduler.after_step()
    assert scheduler.state()["steps"] == 1
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.9)


# -- refusals


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_schedule_that_falls_needs_an_end(schedule):
    with pytest.raises(StepError, match=f"schedule={schedule} ends with the stage.*max_steps"):
        Scheduler(make()[1], TrainConfig(schedule=schedule), None, total_steps=None)


def test_a_warm_up_fits_into_the_stage():
    with pytest.raises(StepError, match="warmup_steps=9 is more than the 8 steps"):
        Scheduler(make()[1], TrainConfig(warmup_steps=9), None, total_steps=8)
    Scheduler(make()[1], TrainConfig(warmup_steps=9), None, total_steps=None)


def test_an_optimizer_without_a_rate_has_no_schedule():
    _, optimizer = make()
    del optimizer.param_groups[0]["lr"]
    Scheduler(optimizer, TrainConfig(), None, total_steps=8)
    with pytest.raises(StepError, match="SGD has no lr, and schedule=cosine"):
        Scheduler(optimizer, TrainConfig(schedule="cosine"), None, total_steps=8)


def test_a_hook_returns_a_scheduler_of_the_optimizer_it_was_given():
    with pytest.raises(StepError, match=r"scheduler\(optimizer\) returned int"):
        Scheduler(make()[1], TrainConfig(), lambda optimizer: 3, total_steps=8)
    with pytest.raises(StepError, match="StepLR of another optimizer"):
        Scheduler(make()[1], TrainConfig(), lambda optimizer: StepLR(make()[1], 1), total_steps=8)
    with pytest.raises(StepError, match="ReduceLROnPlateau advances by the value of an epoch"):
        Scheduler(make()[1], TrainConfig(), ReduceLROnPlateau, total_steps=8)


@pytest.mark.parametrize("options", [{"schedule": "plateau"}, {"warmup_steps": 3}])
def test_a_hook_and_a_schedule_exclude_each_other(options):
    with pytest.raises(StepError, match="leave schedule and warmup_steps out, or the hook"):
        Scheduler(make()[1], TrainConfig(**options), lambda optimizer: StepLR(optimizer, 1), total_steps=8)


# -- hooks


def test_a_hooks_scheduler_advances_per_step_or_per_epoch():
    assert rates(4, hook=lambda o: ExponentialLR(o, 0.5), per_epoch=2) == [1.0, 0.5, 0.25, 0.125]
    assert rates(4, hook=lambda o: ExponentialLR(o, 0.5), per_epoch=2, scheduler_interval="epoch") == [1.0, 1.0, 0.5, 0.5]
    assert rates(6, hook=lambda o: ReduceLROnPlateau(o, patience=0), per_epoch=2, scheduler_interval="epoch", values=[1.0, 2.0, None])[4:] == [0.1, 0.1]


def test_an_epoch_without_any_update_warns_of_nothing():
    _, optimizer = make()
    scheduler = Scheduler(optimizer, TrainConfig(scheduler_interval="epoch"), lambda o: StepLR(o, 1), total_steps=8)
    scheduler.after_epoch(None)  # warnings are errors in these tests
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


# -- over a checkpoint

HOOKS = {
    "step": lambda o: StepLR(o, 3, 0.5),
    "cosine": lambda o: CosineAnnealingLR(o, T_max=10),
    "lambda": lambda o: LambdaLR(o, lambda step: 1 / (1 + step)),
    "multistep": lambda o: MultiStepLR(o, [2, 6]),
    "one cycle": lambda o: OneCycleLR(o, max_lr=0.5, total_steps=11),
    "sequence": lambda o: SequentialLR(o, [LinearLR(o, 0.1, total_iters=4), CosineAnnealingLR(o, T_max=6)], [4]),
    "chain": lambda o: ChainedScheduler([LinearLR(o, 0.1, total_iters=4), ExponentialLR(o, 0.9)], optimizer=o),
}
OPTIONS = {
    "constant": {},
    "warm-up": {"warmup_steps": 8},
    "linear": {"schedule": "linear", "warmup_steps": 3},
    "cosine": {"schedule": "cosine"},
    "plateau": {"schedule": "plateau", "warmup_steps": 2, "patience": 5},
}
CASES = [pytest.param(None, options, id=name) for name, options in OPTIONS.items()]
CASES += [pytest.param(hook, {}, id=f"hook {name}") for name, hook in HOOKS.items()]
CASES.append(pytest.param(HOOKS["step"], {"scheduler_interval": "epoch"}, id="hook per epoch"))
CASES.append(pytest.param(lambda o: ReduceLROnPlateau(o, patience=1), {"scheduler_interval": "epoch"}, id="hook plateau"))


class Run:
    """A stage in small: model, optimizer, scheduler, steps of which every second ends an epoch."""

    def __init__(self, hook, options, *, lr=0.2, total=10):
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        groups = [{"params": self.model[0].parameters()}, {"params": self.model[1].parameters(), "lr": lr / 4}]
        self.optimizer = torch.optim.AdamW(groups, lr=lr)
        self.scheduler = Scheduler(self.optimizer, TrainConfig(**options), hook, total_steps=total)
        self.rates = []

    def take(self, first, last):
        for step in range(first, last + 1):
            self.rates.append([float(group["lr"]) for group in self.optimizer.param_groups])
            take(self.model, self.optimizer, step)
            self.scheduler.after_step()
            if step % 2 == 0:
                self.scheduler.after_epoch(1.0)
        return self

    def saved(self, tmp_path):
        path = tmp_path / "last.pt"
        content = {"optimizer": self.optimizer.state_dict(), "scheduler": self.scheduler.state()}
        checkpoint.write(path, {"model": checkpoint.model_state(self.model), **checkpoint.plain(content, "the state")})
        return checkpoint.read(path)

    def load(self, content):
        self.model.load_state_dict(content["model"])
        self.optimizer.load_state_dict(copy.deepcopy(content["optimizer"]))
        return self.scheduler.load(content["scheduler"])


@pytest.mark.parametrize("hook, options", CASES)
def test_five_steps_a_checkpoint_and_five_steps_are_ten_steps(hook, options, tmp_path):
    whole = Run(hook, options).take(1, 10)
    resumed = Run(hook, options)
    assert resumed.load(Run(hook, options).take(1, 5).saved(tmp_path))
    resumed.take(6, 10)
    assert resumed.rates == whole.rates[5:]
    for one, other in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_new_rate_wins_over_the_checkpoints(tmp_path):
    for hook, options in [
        (None, {}),
        (None, OPTIONS["linear"]),
        (None, OPTIONS["plateau"]),
        *((hook, {}) for name, hook in HOOKS.items() if name != "one cycle"),
    ]:
        half = Run(hook, options).take(1, 5)
        resumed = Run(hook, options, lr=0.02)
        assert resumed.load(half.saved(tmp_path))
        resumed.take(6, 10)
        half.take(6, 10)
        for slow, fast in zip(resumed.rates, half.rates[5:], strict=True):
            assert slow == pytest.approx([rate / 10 for rate in fast])


def test_a_longer_run_follows_its_own_curve(tmp_path):
    options = {"schedule": "linear"}
    resumed = Run(None, options, total=20)
    assert resumed.load(Run(None, options).take(1, 5).saved(tmp_path))
    assert [rate for rate, _ in resumed.take(6, 20).rates] == pytest.approx([0.2 * (21 - k) / 20 for k in range(6, 21)])


@pytest.mark.parametrize("before", [*OPTIONS, "hook"])
@pytest.mark.parametrize("after", ["constant", "linear", "hook"])
def test_another_schedule_is_entered_at_the_same_step(before, after, tmp_path):
    def run(name):
        return Run(HOOKS["multistep"] if name == "hook" else None, OPTIONS.get(name, {}))

    resumed = run(after)
    same = resumed.load(run(before).take(1, 5).saved(tmp_path))
    assert same == (before == after or (before, after) == ("warm-up", "constant"))
    assert resumed.take(6, 10).rates == run(after).take(1, 10).rates[5:]


def test_a_schedule_can_be_entered_without_a_state():
    for name, options in OPTIONS.items():
        if name != "plateau":
            entered = Run(None, options)
            entered.scheduler.advance(5, 2)
            assert entered.take(6, 10).rates == Run(None, options).take(1, 10).rates[5:], name
    for name, hook in HOOKS.items():
        entered = Run(hook, {})
        entered.scheduler.advance(5, 2)
        for one, other in zip(entered.take(6, 10).rates, Run(hook, {}).take(1, 10).rates[5:], strict=True):
            assert one == pytest.approx(other), name
