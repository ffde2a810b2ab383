"""What a panel keeps between two checks is what it would find anew."""

from __future__ import annotations

import socket
import threading

import pytest
from torch import nn

from nbddp import norm
from nbddp.config import TrainConfig
from nbddp.errors import ConfigError, NbddpError
from nbddp.kernel import norms
from nbddp.kernel.machine import visible_devices
from nbddp.kernel.panel_known import Decisions, Devices
from nbddp.planning import Machine, make_plan
from nbddp.process import ProcessId
from nbddp.rundir import RunDir

CPU, GPUS = Machine((), cores=4), Machine(("H100",) * 2, cores=8, bf16=True)
OPTIONS = [
    {"norm": kind, "nproc": nproc, "batch_size": batch}
    for kind in ("auto", "keep", "layer", {"1": "group"}, {"nothing": "sync"})
    for nproc in (1, 2)
    for batch in (64, 32, 64, 4)
]


def net():
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4), nn.BatchNorm1d(4))


def plan_of(config, machine=CPU):
    return make_plan(config, n_train=512, n_val=0, machine=machine)


def asked(decide, options, model):
    config = TrainConfig(**options)
    try:
        return decide(config, model, plan_of(config), asked=True)
    except NbddpError as error:
        return str(error)


def test_decisions_are_those_that_would_be_made_anew():
    model, remembered = net(), Decisions()
    for options in OPTIONS:
        assert asked(remembered, options, model) == asked(norms.decide, options, model), options
    norm.swap_norm(model, "group")
    remembered.forget()
    assert remembered.layers(model) == {}
    for options in OPTIONS:
        assert asked(remembered, options, model) == asked(norms.decide, options, model), options


def test_a_model_is_looked_through_once_for_each_answer(monkeypatch):
    model, remembered, looks, decide = net(), Decisions(), [], norms.decide
    monkeypatch.setattr(norms, "decide", lambda *args, **keywords: (looks.append(args), decide(*args, **keywords))[1])
    for batch in (64, 32, 128):
        asked(remembered, {"nproc": 2, "batch_size": batch}, model)
    assert len(looks) == 1
    for batch in (64, 32, 32):
        asked(remembered, {"nproc": 2, "batch_size": batch, "norm": "keep"}, model)
    assert len(looks) == 3, "what is said is of the batch"
    assert remembered.layers(model) == {"1": False, "3": False}


def test_gpus_are_looked_at_elsewhere_and_what_is_found_is_said_after_that(tmp_path):
    plan = plan_of(TrainConfig(nproc=1), GPUS)
    run = RunDir.create(tmp_path, "other")
    run.write_spec({"host": socket.gethostname(), "kernel": ProcessId.current().to_json(), "visible_devices": visible_devices(), "plan": plan.to_json()})
    changed = threading.Event()
    devices = Devices(changed.set)
    assert devices(plan_of(TrainConfig(nproc=1)), tmp_path) == [], "ranks on the CPU hold no GPU"
    assert devices(plan, tmp_path) == []
    assert changed.wait(20)
    with pytest.raises(ConfigError, match=f"GPU 0 held by run {run.id}"):
        devices(plan, tmp_path)
