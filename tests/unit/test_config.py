"""Every option: what it takes, what it refuses and in which words, and that it survives being written down."""

from __future__ import annotations

import json
import typing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbddp.config import SYNONYMS, TrainConfig
from nbddp.errors import ConfigError

COUNT = "must be greater than or equal to 1"
NOT_NEGATIVE = "must be greater than or equal to 0"
EVERY = r"must be a number of epochs \(2\), of steps \(500 steps\) or of minutes \(10 min\), at least 1"
ONE_EPOCH_OR_STEP = r"must be a number of epochs \(2\) or of steps \(500 steps\)"
INTEGER = "must be a valid integer"
NUMBER = "must be a valid number"
BOOLEAN = "must be a valid boolean"
STRING = "must be a valid string"


def count(default):
    """A whole number from 1 on."""
    return default, [(3, 3), ("3", 3), (3.0, 3)], [(0, COUNT), (-1, COUNT), ("x", INTEGER), (1.5, INTEGER), (True, "must be a number"), ([1], INTEGER)]


def count_from_zero(default):
    return default, [(0, 0), (3, 3), ("4", 4)], [(-1, NOT_NEGATIVE), ("x", INTEGER), (1.5, INTEGER), (False, "must be a number")]


def positive(default):
    greater = "must be greater than 0"
    wrong = [(0, greater), (-1.0, greater), (float("nan"), greater), (float("inf"), "must be a finite number"), ("x", NUMBER), (True, "must be a number")]
    return default, [(0.5, 0.5), ("2", 2.0), (3, 3.0)], wrong


def not_negative(default):
    wrong = [(-1e-9, NOT_NEGATIVE), (float("nan"), NOT_NEGATIVE), (float("inf"), "must be a finite number"), ("x", NUMBER), (True, "must be a number")]
    return default, [(0, 0.0), (0.5, 0.5), ("1e-3", 1e-3)], wrong


def flag(default):
    words = [(word, True) for word in ("true", "Yes", "on", "1")] + [(word, False) for word in ("false", "No", "off", "0")]
    return default, [(True, True), (False, False), *words], [("maybe", BOOLEAN), (2, BOOLEAN), (None, BOOLEAN)]


def one_of(default, *words):
    return default, [(word, word) for word in words], [("elsewhere", "must be "), (3, "must be ")]


def text(default):
    return default, [("some", "some")], [(3, STRING), (["a"], STRING)]


# Field -> default, (given, kept) pairs that are right, (given, message) pairs that are wrong.
FIELDS = {
    "nproc": (None, [(2, 2), ("2", 2), ("auto", None), ("none", None)], [(0, COUNT), ("x", INTEGER), (True, "must be a number")]),
    "devices": (
        "auto",
        [("cpu", "cpu"), ("auto", "auto"), ("0,2", (0, 2)), ("1", (1,)), (1, (1,)), ([0, 1], (0, 1)), ((3,), (3,))],
        [(value, "must be auto, cpu or distinct GPU indices such as 0,1") for value in ("gpu", "0,0", "", "0,", [], [True], -1, 1.5, None, "0-3")],
    ),
    "backend": one_of("auto", "auto", "nccl", "gloo"),
    "batch_size": count(None),
    "per_rank_batch_size": count(None),
    "val_batch_size": count(None),
    "accumulate": count(1),
    "epochs": count(1),
    "max_steps": count(None),
    "max_time": (
        None,
        [(90, 90.0), ("90 s", 90.0), ("10 min", 600.0), ("2h", 7200.0), (1.5, 1.5), ("1.5 hours", 5400.0), ("3 minutes", 180.0)],
        [(value, r"must be a duration: seconds \(90\), or 90 s, 10 min, 2 h") for value in ("soon", "3 days", True, "-5 s", [])]
        + [(0, "must be greater than 0"), (-1.0, "must be greater than 0"), (float("nan"), "must be greater than 0")],
    ),
    "shuffle": flag(True),
    "drop_last": flag(True),
    "val_split": (
        None,
        [(0.1, 0.1), ("0.25", 0.25)],
        [(0, "must be greater than 0"), (1, "must be less than 1"), (1.5, "must be less than 1"), ("x", NUMBER), (True, "must be a number")],
    ),
    "num_workers": count_from_zero(0),
    "prefetch_factor": count(2),
    "persistent_workers": flag(True),
    "pin_memory": (None, [(True, True), ("false", False), ("auto", None)], [("maybe", BOOLEAN), (2, BOOLEAN)]),
    "seed": count_from_zero(0),
    "optimizer": one_of("adamw", "adam", "adamw", "sgd", "adagrad", "rmsprop", "lbfgs"),
    "lr": not_negative(None),
    "weight_decay": not_negative(None),
    "momentum": not_negative(None),
    "fused": flag(False),
    "lr_scale": (None, [("linear", "linear"), ("sqrt", "sqrt")], [("cubic", "must be 'linear' or 'sqrt'"), (2, "must be ")]),
    "base_batch_size": count(None),
    "warmup_steps": count_from_zero(0),
    "schedule": (
        "constant",
        [(word, word) for word in ("constant", "linear", "cosine", "plateau")],
        [("step", "must be 'constant', 'linear', 'cosine' or 'plateau'"), (None, "must be ")],
    ),
    "scheduler_interval": one_of("step", "step", "epoch"),
    "clip_norm": positive(None),
    "on_nan": one_of("warn", "warn", "skip", "stop"),
    "precision": (
        "auto",
        [(word, "fp32") for word in ("fp32", "32", 32, "32-true", "float32", "no")]
        + [(word, "bf16") for word in ("bf16", "bf16-mixed", "bfloat16", "BF16")]
        + [(word, "fp16") for word in ("fp16", "16", 16, "16-mixed", "float16")]
        + [("auto", "auto")],
        [
            ("bf61", "must be one of auto, bf16, fp16, fp32 .*Did you mean bf16"),
            (True, "must be one of auto"),
            (None, "must be one of auto"),
            ("64-true", r"is the model's own matter: net.double\(\)"),
        ],
    ),
    "matmul_precision": one_of("highest", "highest", "high", "medium"),
    "cudnn_benchmark": flag(True),
    "compile": flag(False),
    "compile_mode": (
        None,
        [("reduce-overhead", "reduce-overhead"), ("max-autotune", "max-autotune")],
        [("fast", "must be 'default', 'reduce-overhead', 'max-autotune' or 'max-autotune-no-cudagraphs'"), (1, "must be ")],
    ),
    "compile_cache_dir": (None, [("cache", Path("cache")), (Path("/tmp/x"), Path("/tmp/x"))], [(3, "must be a path"), (True, "must be a path")]),
    "compile_timeout_s": positive(3600.0),
    "find_unused_parameters": flag(False),
    "static_graph": flag(False),
    "gradient_as_bucket_view": flag(True),
    "bucket_cap_mb": positive(25.0),
    "grad_compression": (
        None,
        [("bf16", "bf16"), ("fp16", "fp16"), ("powersgd", "powersgd")],
        [("zip", "must be 'bf16', 'fp16' or 'powersgd'"), (True, "must be ")],
    ),
    "norm": (
        "auto",
        [
            *[(kind, kind) for kind in ("auto", "keep", "sync", "batch", "layer", "group", "none")],
            *[("Layer", "layer"), ("identity", "none"), (True, "sync"), (False, "keep"), ("SyncBatchNorm", "sync"), ("layer_norm", "layer")],
            ({"a.*": "GroupNorm", "*": "auto"}, {"a.*": "group", "*": "auto"}),
        ],
        [
            ("head.*:layer", r"must be a kind, or pattern=value: write head\.\*=layer"),
            ("snc", "must be one of auto, keep, sync, .*Did you mean sync"),
            ({"a.*": "x"}, "norm=x must be one of"),
            (3, STRING),
        ],
    ),
    "val_every": (
        "1 epoch",
        [(2, "2 epochs"), ("500 steps", "500 steps"), ("1 step", "1 step"), (" 3  epochs ", "3 epochs")],
        [("10 min", ONE_EPOCH_OR_STEP), (0, EVERY), (True, EVERY), ("soon", EVERY), (1.5, EVERY), (None, EVERY)],
    ),
    "monitor": text("val_loss"),
    "mode": one_of("min", "min", "max"),
    "min_delta": not_negative(0.0),
    "patience": count(None),
    "checkpoint_every": (
        "1 epoch",
        [(2, "2 epochs"), ("1", "1 epoch"), ("500 steps", "500 steps"), ("10 min", "10 min"), ("3 minutes", "3 min")],
        [(0, EVERY), ("-1 epochs", EVERY), (True, EVERY), ("10 s", EVERY), ([], EVERY)],
    ),
    "keep_last": count(1),
    "resume": text(None),
    "init": text("current"),
    "load": one_of("auto", "auto", "last", "best", "none"),
    "launcher": ("local", [("local", "local")], [("pbs", "must be 'local', 'slurm', 'htcondor' or 'torchrun'")]),
    "nnodes": (1, [(1, 1)], [(0, COUNT)]),
    "max_restarts": (0, [(0, 0)], [(-1, NOT_NEGATIVE)]),
    "slurm": (None, [], [(3, STRING)]),
    "requeue": (False, [(False, False)], [("maybe", BOOLEAN)]),
    "extra_submit_lines": (None, [], [(3, STRING)]),
    "prologue": (None, [], [(3, STRING)]),
    "pass_env": (None, [], [(3, STRING)]),
    "run_root": (None, [("runs", Path("runs")), (Path("/x"), Path("/x"))], [(3, "must be a path")]),
    "name": text(None),
    "process_group_timeout_s": positive(600.0),
    "hang_after_s": positive(120.0),
    "on_kernel_exit": one_of("auto", "auto", "stop", "continue"),
    "wandb": (
        None,
        [
            ("project=digits", {"project": "digits"}),
            ("project=digits, group=lab,mode=offline", {"project": "digits", "group": "lab", "mode": "offline"}),
            ({"project": "digits", "tags": ["a", "b"], "name": 7, "group": None}, {"project": "digits", "tags": "a+b", "name": "7"}),
        ],
        [
            ("digits", "digits.* key=value.* project=digits,group=lab"),
            ("project=a,project=b", "gives project twice: keep one"),
            ("group=lab", "needs a project: project=NAME"),
            ("project=a,grup=b", "has the unknown key grup; the keys are .*Did you mean group"),
            ("project=a,mode=ofline", "has mode=ofline.* must be one of online, offline, disabled.*Did you mean offline"),
            ({"project": True}, "has project=True.* must be a text"),
            (3, "key=value pairs such as project=digits,group=lab, or a mapping of them"),
        ],
    ),
    "tensorboard": (None, [("runs", Path("runs")), (Path("/x"), Path("/x"))], [(3, "must be a path")]),
}

# Without these, a value that is right by itself breaks a rule with another field's default.
BESIDE = {
    "fused": {"optimizer": "adamw"},
    "momentum": {"optimizer": "sgd"},
    "lr_scale": {"base_batch_size": 256},
    "base_batch_size": {"lr_scale": "linear"},
}

# What a later version brings: refused, whatever the value.
LATER = {
    "launcher": ["slurm", "htcondor", "torchrun"],
    "nnodes": [2],
    "max_restarts": [1],
    "slurm": ["--time=1:00"],
    "requeue": [True],
    "extra_submit_lines": ["x = 1"],
    "prologue": ["module load x"],
    "pass_env": ["HOME"],
}

CASES = [(name, value, kept) for name, (_, right, _) in FIELDS.items() for value, kept in right]


def test_every_field_is_in_the_table_with_its_default():
    assert {name: default for name, (default, _, _) in FIELDS.items()} == {name: field.default for name, field in TrainConfig.model_fields.items()}
    config = TrainConfig()
    assert config.given == frozenset()
    assert config.changes() == {}
    assert config.to_json() == {}


def test_every_field_says_what_it_is():
    for name, field in TrainConfig.model_fields.items():
        assert field.description, name
        assert field.json_schema_extra["group"], name


@pytest.mark.parametrize("name, value, kept", CASES)
def test_what_is_right_is_kept_and_survives_being_written_down(name, value, kept):
    config = TrainConfig(**{name: value}, **BESIDE.get(name, {}))
    assert getattr(config, name) == kept
    assert type(getattr(config, name)) is type(kept)
    assert name in config.given
    assert TrainConfig(**json.loads(json.dumps(config.to_json()))) == config
    assert (name in config.changes()) == (kept != FIELDS[name][0])


@pytest.mark.parametrize("name, value, message", [(name, value, message) for name, (_, _, wrong) in FIELDS.items() for value, message in wrong])
def test_what_is_wrong_is_refused_with_name_value_and_rule(name, value, message):
    with pytest.raises(ConfigError, match=message) as caught:
        TrainConfig(**{name: value})
    said = str(caught.value)
    assert said.startswith(f"{name}=")
    assert "\n" not in said, "one line for one wrong value"
    assert "Value error" not in said
    assert "pydantic" not in said


@pytest.mark.parametrize("name, value", [(name, value) for name, values in LATER.items() for value in values])
def test_what_comes_later_is_refused_never_ignored(name, value):
    with pytest.raises(ConfigError, match=rf"^{name}=.+ is not available yet: leave {name} out$"):
        TrainConfig(**{name: value})


CONFLICTS = [
    ({"batch_size": 8, "per_rank_batch_size": 4}, "batch_size is the global batch and per_rank_batch_size a rank's share of it: give one of the two"),
    ({"fused": True, "optimizer": "rmsprop"}, "fused=True: rmsprop has no fused kernels; adam, adamw, adagrad, sgd have"),
    ({"fused": True, "optimizer": "lbfgs"}, "fused=True: lbfgs has no fused kernels; adam, adamw, adagrad, sgd have"),
    ({"momentum": 0.9}, "momentum=0.9: adamw has none; sgd and rmsprop have"),
    ({"momentum": 0.9, "optimizer": "adagrad"}, "momentum=0.9: adagrad has none; sgd and rmsprop have"),
    ({"weight_decay": 0.01, "optimizer": "lbfgs"}, "weight_decay=0.01: lbfgs has none; the others have"),
    ({"on_nan": "skip", "optimizer": "lbfgs"}, "on_nan=skip can't undo a step of lbfgs, which evaluates the model itself: --on-nan warn"),
    ({"on_nan": "stop", "optimizer": "lbfgs"}, "on_nan=stop can't undo a step of lbfgs, which evaluates the model itself: --on-nan warn"),
    ({"lr_scale": "linear"}, "lr_scale=linear needs base_batch_size, the batch that lr was tuned for: --base-batch-size 256"),
    ({"lr_scale": "sqrt", "lr": 0.1}, "lr_scale=sqrt needs base_batch_size, the batch that lr was tuned for: --base-batch-size 256"),
    ({"base_batch_size": 256}, "base_batch_size=256 without lr_scale: --lr-scale linear or sqrt says how lr grows with the batch"),
    (
        {"compile": True, "drop_last": False},
        "compile=True with drop_last=False: the last batch of an epoch has another shape and would be compiled again: leave one of the two out",
    ),
    ({"compile": False, "compile_mode": "max-autotune"}, "compile_mode=max-autotune with compile=False: there is nothing to compile"),
    ({"compile": False, "compile_cache_dir": "/x"}, "compile_cache_dir=/x with compile=False: there is nothing to compile"),
    ({"compile": False, "compile_timeout_s": 60}, "compile_timeout_s=60.0 with compile=False: there is nothing to compile"),
    ({"resume": "last", "init": "initial"}, "resume=last brings the weights itself, and init=initial names others: give one of the two"),
    (
        {"static_graph": True, "find_unused_parameters": True},
        "static_graph says that every step uses the same parameters, find_unused_parameters searches them in each: give one of the two",
    ),
    ({"batch_size": 8, "global_batch_size": 16}, "batch_size and global_batch_size are the same option: give one of the two"),
    ({"num_gpus": 2, "world_size": 2}, "num_gpus and world_size are the same option: give one of the two"),
]


SAID_OF_CONFLICTS = (
    *("give one of the two", "leave one of the two out", "has no fused kernels", "has none; ", "can't undo a step of lbfgs"),
    *("needs base_batch_size", "without lr_scale", "there is nothing to compile", "lbfgs compares them"),
)


@pytest.mark.parametrize("values, message", CONFLICTS)
def test_options_that_exclude_each_other(values, message):
    with pytest.raises(ConfigError) as caught:
        TrainConfig(**values)
    assert str(caught.value) == message
    assert any(words in message for words in SAID_OF_CONFLICTS)


@pytest.mark.parametrize(
    "values",
    [
        {"compile_mode": "max-autotune"},  # a stage may compile
        {"resume": "last"},
        {"init": "initial"},
        {"optimizer": "lbfgs", "lr": 0.1, "on_nan": "warn"},
        {"static_graph": True, "find_unused_parameters": False},
        {"compile": True, "drop_last": True},
        {"compile": False, "drop_last": False},
        {"lr_scale": None, "base_batch_size": None},
        {"batch_size": 8, "per_rank_batch_size": None},
    ],
)
def test_what_looks_like_a_conflict_and_is_none(values):
    assert TrainConfig(**values).given == set(values)


def test_two_wrong_values_are_two_lines():
    with pytest.raises(ConfigError) as caught:
        TrainConfig(epochs=0, lr=-1, batch_size=8)
    assert [line.split("=")[0] for line in str(caught.value).splitlines()] == ["epochs", "lr"]


@pytest.mark.parametrize("optimizer", ["sgd", "rmsprop"])
def test_momentum_is_for_those_that_have_it(optimizer):
    assert TrainConfig(optimizer=optimizer, momentum=0.9).momentum == 0.9


@pytest.mark.parametrize(
    "name, message", [("epoch", "epoch is not an option. Did you mean epochs"), ("zzz", "zzz is not an option.$"), ("batchsize", "Did you mean batch_size")]
)
def test_an_unknown_name_is_refused_with_the_nearest(name, message):
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**{name: 1})


def test_names_of_other_tools_are_understood():
    assert set(SYNONYMS.values()) <= set(TrainConfig.model_fields)
    assert not set(SYNONYMS) & set(TrainConfig.model_fields)
    config = TrainConfig(num_gpus=2, gradient_accumulation_steps=4, max_grad_norm=1.0, save_total_limit=3, learning_rate="1e-3")
    assert (config.nproc, config.accumulate, config.clip_norm, config.keep_last, config.lr) == (2, 4, 1.0, 3, 1e-3)
    assert config.given == {"nproc", "accumulate", "clip_norm", "keep_last", "lr"}


def test_a_configuration_is_frozen_and_replaced_by_a_checked_copy():
    config = TrainConfig(epochs=3, batch_size=8)
    with pytest.raises(Exception, match="frozen"):
        config.epochs = 4
    other = config.replace(epochs=5, lr=0.1)
    assert (config.epochs, other.epochs, other.batch_size, other.lr) == (3, 5, 8, 0.1)
    assert other.given == {"epochs", "batch_size", "lr"}
    with pytest.raises(ConfigError, match="give one of the two"):
        config.replace(per_rank_batch_size=4)


def test_a_value_that_is_the_default_counts_as_given():
    config = TrainConfig(epochs=1)
    assert config.given == {"epochs"}
    assert config.changes() == {}


@given(st.fixed_dictionaries({}, optional={name: st.sampled_from([value for value, _ in right]) for name, (_, right, _) in FIELDS.items() if right}))
def test_any_options_together_survive_being_written_down(values):
    try:
        config = TrainConfig(**values)
    except ConfigError as error:
        assert any(words in str(error) for words in SAID_OF_CONFLICTS)  # noqa: PT017 - those that exclude each other
        return
    assert TrainConfig(**json.loads(json.dumps(config.to_json()))) == config
    assert config.given == set(values)


@pytest.mark.parametrize(
    "values, read",
    [
        ({}, {}),
        ({"learning_rate": "1e-3", "epochs": "3"}, {"epochs": 3, "lr": 1e-3}),
        ({"per_rank_batch_size": 4, "batch_size": 8}, {"batch_size": 8, "per_rank_batch_size": 4}),
        ({"momentum": 0.9, "lr_scale": "linear", "norm": "layer"}, {"momentum": 0.9, "lr_scale": "linear", "norm": "layer"}),
        ({"clip_norm": None}, {"clip_norm": None}),
    ],
)
def test_some_options_are_read_each_by_itself(values, read):
    assert TrainConfig.read(values) == read


@pytest.mark.parametrize("values, message", [({"epochs": 0}, "^epochs=0 must be "), ({"epoch": 1}, "epoch is not an option. Did you mean epochs")])
def test_options_read_by_themselves_are_refused_as_ever(values, message):
    with pytest.raises(ConfigError, match=message):
        TrainConfig.read(values)
    with pytest.raises(ConfigError, match=r"momentum=0\.9: adamw has none"):  # the rules hold again
        TrainConfig(momentum=0.9)


def test_the_words_of_a_field_are_those_of_its_type():
    hints = typing.get_type_hints(TrainConfig)
    assert typing.get_args(hints["on_nan"]) == ("warn", "skip", "stop")


@pytest.mark.parametrize("value, precision", [(True, "high"), ("false", "highest"), ("medium", "medium")])
def test_tf32_is_a_precision_of_matmul(value, precision):
    assert TrainConfig(tf32=value).matmul_precision == precision
