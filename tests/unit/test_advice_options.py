"""What is advised can be written, whatever the run: beside its other options, and one piece of advice beside the other."""

from __future__ import annotations

import re
import tempfile
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from nbddp.advice import RULES, Advice, advise
from nbddp.config import TrainConfig
from nbddp.errors import ConfigError
from nbddp.kernel.line import parse
from nbddp.kernel.run_magics import RunMagics
from nbddp.planning import Machine, make_plan
from nbddp.stage import Stage
from support.timed_run import Step, TimedRun

if TYPE_CHECKING:
    from collections.abc import Mapping


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    """Options of a run, of which any may be given."""
    nproc, accumulate = draw(st.sampled_from([1, 2, 3, 4, 8, 64])), draw(st.sampled_from([1, 1, 2, 3]))
    per_rank = accumulate * draw(st.sampled_from([1, 2, 8, 16, 31, 32, 100]))
    batch = draw(st.sampled_from([{}, {"batch_size": nproc * per_rank}, {"per_rank_batch_size": per_rank}]))
    scaled = {"lr_scale": draw(st.sampled_from(["linear", "sqrt"])), "base_batch_size": 32} if draw(st.booleans()) else {}
    compiled = {"compile": True, **draw(given_some({"compile_mode": "max-autotune", "compile_timeout_s": 60.0}))} if draw(st.booleans()) else {}
    workers = {"num_workers": nproc * draw(st.sampled_from([1, 2, 20])), **draw(given_some({"prefetch_factor": 4, "persistent_workers": False}))}
    more = {
        "optimizer": draw(st.sampled_from(["adamw", "sgd", "lbfgs"])),
        "precision": draw(st.sampled_from(["auto", "fp32", "bf16"])),
        "norm": draw(st.sampled_from(["auto", "keep", "sync"])),
        "max_time": 60.0,
        "max_steps": 500,
        "epochs": draw(st.integers(1, 30)),
        "grad_compression": "bf16",
        "bucket_cap_mb": 1.0,
        "drop_last": bool(compiled) or draw(st.booleans()),
        "clip_norm": 1.0,
        "matmul_precision": "high",
    }
    chosen = draw(given_some(more))
    return {"nproc": nproc, "accumulate": accumulate, **batch, **scaled, **compiled, **(workers if draw(st.booleans()) else {}), **chosen}


def given_some(values: Mapping[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.sets(st.sampled_from(sorted(values))).map(lambda names: {name: values[name] for name in names})


steps = st.builds(
    Step,
    data=st.sampled_from([0.0005, 0.0005, 0.1, 0.5]),
    forward=st.sampled_from([0.01, 0.03, 0.3]),
    backward=st.sampled_from([0.01, 0.05, 0.3]),
    sync=st.sampled_from([0.001, 0.05, 0.3]),
    optimizer=st.sampled_from([0.002, 0.05]),
)
facts = st.fixed_dictionaries(
    {"batch_norm": st.sampled_from([0, 3]), "synced_norm": st.sampled_from([0, 0, 3]), "trainable": st.sampled_from([10, 10**8]), "float32": st.booleans()}
)


def test_whatever_is_advised_can_be_written_beside_the_rest() -> None:
    seen: set[str] = set()
    whatever_is_advised(seen)
    assert seen == {rule.name for rule in RULES}, "the runs were such that every rule held once"


@settings(max_examples=500, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(data=st.data())
def whatever_is_advised(seen: set[str], data: st.DataObject) -> None:
    given_options = data.draw(options(), "options")
    gpu = data.draw(st.sampled_from([None, 7.5, 9.0]), "gpu")
    staged = data.draw(st.booleans(), "stages")
    cores, n_train = data.draw(st.sampled_from([2, 8, 128]), "cores"), data.draw(st.sampled_from([7_000, 1_000_000]), "n_train")
    stages = [Stage("head", epochs=1), Stage("all", epochs=1)] if staged else []
    with tempfile.TemporaryDirectory() as folder:
        try:
            made = TimedRun(Path(folder), gpu=gpu, cores=cores, n_train=n_train, stages=stages, facts=data.draw(facts, "facts"), **given_options)
        except ConfigError:
            assume(False)
        with closing(made) as run:
            run.begin(compile_s=data.draw(st.sampled_from([1.0, 1e4]), "compile_s") if run.config.compile else None)
            ranks = [data.draw(steps, "step")] * run.plan.nproc
            if data.draw(st.booleans(), "one rank differs"):
                ranks[-1] = data.draw(steps, "its step")
            run.train(40, *ranks, starved=data.draw(st.sampled_from([0.0, 0.9])), recompiles=range(5, 20, 3) if run.config.compile else ())
            said = advise(run.state, run.config)
            seen.update(part.rule for part in said)
            changes = [change_of(part, run, stages) for part in said]
    for index, one in enumerate(changes):
        for other in changes[index + 1 :]:
            for name in one.keys() & other.keys():
                assert one[name] == other[name], f"{said} contradict each other"
    machine = Machine(("H100",) * run.plan.nproc if gpu else (), cores, bf16=gpu is not None and gpu >= 8)
    together = {name: value for change in changes for name, value in change.items()}
    for change in [*changes, together]:
        changed = applied(run.config, change)
        assert changed != run.config or staged or not change
        make_plan(changed, n_train=n_train, n_val=0, machine=machine, stages=stages)


def change_of(part: Advice, run: TimedRun, stages: list[Stage]) -> dict[str, Any]:
    """The options that a piece of advice changes; None of an option means that it is left out."""
    assert part.text
    assert not re.search(r"\bnan\b|\binf\b|None|\{", part.text), part.text
    written = part.option
    if written is None:
        return {}
    if written.startswith("%"):
        assert hasattr(RunMagics, written[1:])
        return {}
    if written.startswith("leave out "):
        return {flag[2:].replace("-", "_"): None for flag in written.removeprefix("leave out ").split(", ")}
    if written.startswith("Stage("):
        stage = eval(written, {"Stage": Stage})
        assert stage.name == stages[0].name
        Stage(stage.name, **{**stages[0].options, **stage.options}).config(run.config)
        return dict(stage.options)
    return dict(parse(f"net data {written}").options)


def applied(config: TrainConfig, change: Mapping[str, Any]) -> TrainConfig:
    values = {name: getattr(config, name) for name in config.given} | dict(change)
    return TrainConfig(**{name: value for name, value in values.items() if value is not None})
