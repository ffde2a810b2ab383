"""Stages as the user writes them: what they take, how they combine with the options of the run, and which parameters train."""

from __future__ import annotations

import fnmatch
import pickle

import cloudpickle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbddp.config import TrainConfig
from nbddp.errors import ConfigError
from nbddp.stage import STAGE_FIELDS, Stage, check_stages, matching, read_stages, stage_name, trainable

NAMES = dict.fromkeys(("backbone.0.weight", "backbone.0.bias", "backbone.1.weight", "backbone.1.bias", "head.weight", "head.bias"), True)
PATTERN = "must be a pattern over parameter names, or a list of them"


def refusal(call, *args, **kwargs):
    with pytest.raises(ConfigError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


# -- as written


def adam(model): ...


@pytest.mark.parametrize(
    "written, shown",
    [
        ({}, "Stage()"),
        ({"name": "all", "epochs": 3}, "Stage('all', epochs=3)"),
        ({"train_only": ["a", "b"], "lr": "1e-3"}, "Stage(train_only=('a', 'b'), lr=0.001)"),
        ({"optimizer": "sgd", "scheduler": len}, "Stage(scheduler=len, optimizer='sgd')"),
        ({"freeze": "x.*", "freeze_batch_norm": True, "optimizer": adam}, "Stage(freeze=('x.*',), freeze_batch_norm=True, optimizer=adam)"),
    ],
)
def test_what_a_stage_shows_of_itself(written, shown):
    stage = Stage(**written)
    assert repr(stage) == shown
    assert str(stage) == (f"stage {written['name']}" if "name" in written else "Stage")


@pytest.mark.parametrize("field", STAGE_FIELDS)
def test_fields_of_a_stage_are_fields_of_the_configuration(field):
    assert field in TrainConfig.model_fields


def test_options_are_read_and_checked_each_by_itself():
    stage = Stage(epochs="3", learning_rate="1e-3", momentum=0.9, per_rank_batch_size=4, val_every=2, precision="16-mixed")
    assert stage.options == {"epochs": 3, "lr": 1e-3, "momentum": 0.9, "per_rank_batch_size": 4, "val_every": "2 epochs", "precision": "fp16"}
    assert Stage(optimizer="sgd").options == {"optimizer": "sgd"}
    assert Stage(optimizer="sgd").optimizer is None


@pytest.mark.parametrize("given_, kept", [("a.*", ("a.*",)), (["a.*", "b"], ("a.*", "b")), ((), ()), ({"a"}, ("a",)), ((p for p in "ab"), ("a", "b"))])
def test_patterns_are_one_or_several(given_, kept):
    assert Stage(freeze=given_).freeze == kept


@pytest.mark.parametrize(
    "written, message",
    [
        ({"name": 3}, "Stage: name=3 must be a text; options are given by name, such as Stage(epochs=3)"),
        ({"name": "  "}, "Stage: name='  ' must be a text; options are given by name, such as Stage(epochs=3)"),
        ({"freeze": 3}, f"Stage: freeze=3 {PATTERN}"),
        ({"freeze": [3]}, f"Stage: freeze=[3] {PATTERN}"),
        ({"freeze": ""}, f"Stage: freeze='' {PATTERN}"),
        ({"train_only": {"a": 1}}, f"Stage: train_only={{'a': 1}} {PATTERN}"),
        (
            {"name": "a", "freeze": "x", "train_only": "y"},
            "stage a: freeze and train_only are both given: what one names, the other leaves out; keep one of the two",
        ),
        ({"name": "a", "freeze_batch_norm": 1}, "stage a: freeze_batch_norm=1 must be True or False"),
        ({"freeze_batch_norm": None}, "Stage: freeze_batch_norm=None must be True or False"),
        ({"optimizer": 3}, "Stage: optimizer is a int: it must be a function"),
        ({"name": "a", "scheduler": "cosine"}, "stage a: scheduler is a str: it must be a function"),
        ({"optimizer": "adan"}, "Stage: optimizer='adan' must be 'adam', 'adamw', 'sgd', 'adagrad', 'rmsprop' or 'lbfgs'"),
        ({"name": "a", "epochs": 0}, "stage a: epochs=0 must be greater than or equal to 1"),
        ({"name": "a", "epoch": 3}, "stage a: epoch is not an option. Did you mean epochs or num_epochs?"),
        ({"name": "a", "lr": 1, "learning_rate": 1}, "stage a: lr and learning_rate are the same option: give one of the two"),
        ({"optimizer": len, "lr": 0.1}, "Stage: lr beside the function optimizer, which sets all of it: keep one of the two"),
        (
            {"optimizer": len, "fused": False, "momentum": 0.9},
            "Stage: momentum, fused beside the function optimizer, which sets all of it: keep one of the two",
        ),
        ({"scheduler": len, "schedule": "cosine"}, "Stage: schedule beside the function scheduler, which makes the schedule: keep one of the two"),
        ({"scheduler": len, "warmup_steps": 3}, "Stage: warmup_steps beside the function scheduler, which makes the schedule: keep one of the two"),
    ],
)
def test_what_a_stage_refuses(written, message):
    assert refusal(Stage, **written) == message


@pytest.mark.parametrize("field", sorted(set(TrainConfig.model_fields) - {*STAGE_FIELDS, "name"}))
def test_options_of_the_whole_run_are_refused(field):
    values = {"devices": "cpu", "max_time": 60, "val_split": 0.1, "val_batch_size": 8, "nproc": 2, "norm": "sync", "wandb": "project=x"}
    value = values.get(field, TrainConfig.model_fields[field].default)
    assert refusal(Stage, "a", **{field: value}) == f"stage a: {field} is an option of the whole run, not of a stage: give it to the run, beside `stages`"


def test_a_stage_travels():
    def adam(model):
        return model

    stage = Stage("a", freeze="x", optimizer=adam, epochs=3)
    for copied in (cloudpickle.loads(cloudpickle.dumps(stage)), pickle.loads(pickle.dumps(Stage("a", freeze="x", epochs=3)))):
        assert (copied.name, copied.freeze, copied.options) == (stage.name, stage.freeze, stage.options)


# -- together with the run


@pytest.mark.parametrize(
    "base, own, expected",
    [
        ({"lr": 0.1, "epochs": 3}, {}, {"lr": 0.1, "epochs": 3}),
        ({"lr": 0.1, "epochs": 3}, {"lr": 0.2, "epochs": 1}, {"lr": 0.2, "epochs": 1}),
        ({"batch_size": 64}, {"per_rank_batch_size": 8}, {"per_rank_batch_size": 8}),
        ({"per_rank_batch_size": 8}, {"batch_size": 64}, {"batch_size": 64}),
        ({"max_steps": 9, "max_time": 60}, {}, {}),
        ({"max_steps": 9, "max_time": 60}, {"max_steps": 4}, {"max_steps": 4}),
        ({"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.2}, {"optimizer": "sgd"}, "the same"),
        ({"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "fused": True}, {"optimizer": "adamw"}, {"lr": 0.1, "fused": True, "optimizer": "adamw"}),
        ({"optimizer": "sgd", "momentum": 0.9, "fused": True}, {"optimizer": "rmsprop"}, {"momentum": 0.9, "optimizer": "rmsprop"}),
        ({"weight_decay": 0.1, "fused": True}, {"optimizer": "lbfgs"}, {"optimizer": "lbfgs"}),
        ({"clip_norm": 1.0}, {"clip_norm": None}, {"clip_norm": None}),
        ({"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "lr_scale": "sqrt", "base_batch_size": 32, "epochs": 2}, {"function": "optimizer"}, {"epochs": 2}),
        ({"schedule": "cosine", "warmup_steps": 3, "lr": 0.1}, {"function": "scheduler"}, {"lr": 0.1}),
        ({"schedule": "cosine", "warmup_steps": 3}, {"schedule": "constant"}, {"schedule": "constant", "warmup_steps": 3}),
    ],
)
def test_what_holds_in_a_stage(base, own, expected):
    options = {(own["function"] if name == "function" else name): (len if name == "function" else value) for name, value in own.items()}
    config = Stage(**options).config(TrainConfig(**base))
    assert config == (TrainConfig(**base) if expected == "the same" else TrainConfig(**expected))
    assert config.given == (set(base) if expected == "the same" else set(expected))


@pytest.mark.parametrize(
    "base, own, message",
    [
        ({"drop_last": False}, {"compile": True}, "stage a: compile=True with drop_last=False: the last batch"),
        ({"compile": True}, {"drop_last": False}, "stage a: compile=True with drop_last=False: the last batch"),
        ({}, {"momentum": 0.9}, "stage a: momentum=0.9: adamw has none; sgd and rmsprop have"),
        ({"momentum": 0.9, "optimizer": "sgd"}, {"optimizer": "adam", "momentum": 0.5}, "stage a: momentum=0.5: adam has none"),
        ({}, {"optimizer": "lbfgs", "fused": True}, "stage a: fused=True: lbfgs has no fused kernels"),
        ({"static_graph": True}, {"find_unused_parameters": True}, "stage a: static_graph says that"),
        ({}, {"batch_size": 8, "per_rank_batch_size": 8}, "stage a: batch_size is the global batch and per_rank_batch_size"),
    ],
)
def test_rules_hold_for_the_run_and_the_stage_together(base, own, message):
    assert refusal(Stage("a", **own).config, TrainConfig(**base)).startswith(message)


def test_the_options_of_the_run_stay_as_they_are():
    base = TrainConfig(batch_size=8, epochs=2)
    Stage(per_rank_batch_size=4).config(base)
    assert base == TrainConfig(batch_size=8, epochs=2)


# -- which parameters train


@pytest.mark.parametrize(
    "patterns, found",
    [
        (["head.*"], {"head.weight", "head.bias"}),
        (["*.bias"], {"backbone.0.bias", "backbone.1.bias", "head.bias"}),
        (["backbone.[0-4].weight", "head.bias"], {"backbone.0.weight", "backbone.1.weight", "head.bias"}),
        (["backbone.?.bias"], {"backbone.0.bias", "backbone.1.bias"}),
        (["*"], set(NAMES)),
        ([], set()),
    ],
)
def test_patterns_match_names_of_parameters(patterns, found):
    assert matching(NAMES, patterns) == found


@pytest.mark.parametrize(
    "pattern, message",
    [
        ("backbone", "the pattern backbone matches no parameter. Did you mean backbone.*?"),
        ("backbone.0", "the pattern backbone.0 matches no parameter. Did you mean backbone.0.*?"),
        ("head.wieght", "the pattern head.wieght matches no parameter. Did you mean head.weight or head.bias?"),
        ("backbon.*", "the pattern backbon.* matches no parameter. Did you mean backbone.* or backbone.1.*?"),
        ("hed.*", "the pattern hed.* matches no parameter. Did you mean head.*?"),
        ("zzz.*", f"the pattern zzz.* matches no parameter. The names are {', '.join(NAMES)}"),
    ],
)
def test_a_pattern_that_matches_nothing_says_what_it_may_have_meant(pattern, message):
    assert refusal(matching, NAMES, ["head.*", pattern]) == message


def test_of_many_names_some_are_shown():
    assert refusal(matching, [f"layer{i}.w" for i in range(40)], ["zzz"]).endswith(
        "The names are layer0.w, layer1.w, layer2.w, layer3.w, layer4.w, layer5.w, ..."
    )


@pytest.mark.parametrize(
    "stage, trains",
    [
        (None, set(NAMES)),
        (Stage(epochs=3), set(NAMES)),
        (Stage(freeze="backbone.*"), {"head.weight", "head.bias"}),
        (Stage(freeze=["backbone.0.*", "*.bias"]), {"backbone.1.weight", "head.weight"}),
        (Stage(train_only="*.bias"), {"backbone.0.bias", "backbone.1.bias", "head.bias"}),
    ],
)
def test_which_parameters_train(stage, trains):
    assert trainable(NAMES, stage) == {name: name in trains for name in NAMES}


def test_what_the_user_had_frozen_stays_frozen_unless_it_is_named():
    names = {**NAMES, "head.bias": False}
    assert trainable(names, None) == names
    assert trainable(names, Stage(freeze="backbone.*")) == {name: name == "head.weight" for name in names}
    assert trainable(names, Stage(train_only="head.*")) == {name: name.startswith("head.") for name in names}


def test_a_parameter_with_two_names_has_one_mind():
    names, tied = {"embed.weight": True, "body.weight": True, "out.weight": True, "out.bias": True}, [("embed.weight", "out.weight")]
    assert trainable(names, Stage(freeze="out.*"), tied=tied) == {"embed.weight": False, "body.weight": True, "out.weight": False, "out.bias": False}
    assert trainable(names, Stage(train_only="embed.*"), tied=tied) == {"embed.weight": True, "body.weight": False, "out.weight": True, "out.bias": False}
    assert "freezes all that would train" in refusal(trainable, names, Stage(freeze=["out.*", "body.*"]), tied=tied)


def test_something_must_train():
    assert refusal(trainable, NAMES, Stage("a", freeze=["*"])) == "stage a: freeze=* freezes all that would train: leave something out of it"
    frozen = dict.fromkeys(NAMES, False) | {"head.bias": True}
    assert "freeze=head.*, backbone.* freezes all" in refusal(trainable, frozen, Stage(freeze=["head.*", "backbone.*"]))


segments = st.lists(st.sampled_from(["a", "b", "layer", "0", "1"]), min_size=1, max_size=4).map(".".join)


@given(st.lists(segments, min_size=1, max_size=12, unique=True), st.lists(st.sampled_from(["*", "a*", "*.0", "layer.?", "*.b.*", "[ab]"]), max_size=3))
def test_freeze_and_train_only_are_each_others_complement(names, patterns):
    known = dict.fromkeys(names, True)
    if not all(fnmatch.filter(names, pattern) for pattern in patterns):
        with pytest.raises(ConfigError, match="matches no parameter"):
            matching(known, patterns)
        return
    found = matching(known, patterns)
    assert found == {name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)}
    if patterns and found != set(names):
        frozen, only = trainable(known, Stage(freeze=patterns)), trainable(known, Stage(train_only=patterns))
        assert all(frozen[name] != only[name] for name in names)


# -- the list


def test_the_list_of_stages_takes_dicts_and_gives_names():
    own = Stage(epochs=2)
    stages = read_stages([{"name": "head", "freeze": "backbone.*"}, own, Stage("all")])
    assert [stage.name for stage in stages] == ["head", "1", "all"]
    assert own.name is None, "the user's own object stays as it is"
    assert stages[1].options == {"epochs": 2}
    assert read_stages(None) == ()
    assert [stage.name for stage in read_stages((own, own))] == ["0", "1"]


def test_a_stage_without_a_name_is_called_by_its_number():
    assert [stage_name(stage, index) for index, stage in enumerate([None, Stage(), Stage("x")])] == ["0", "1", "x"]


@pytest.mark.parametrize(
    "value, message",
    [
        ([], "stages is an empty list: it must be a list of nbddp.Stage"),
        ((), "stages is an empty list: it must be a list of nbddp.Stage"),
        (3, "stages is a int: it must be a list of nbddp.Stage"),
        ({"a": 1}, "stages is a dict: it must be a list of nbddp.Stage"),
        (Stage(), "stages is one Stage: it must be a list, stages = [Stage(...), Stage(...)]"),
        ([Stage(), 3], "stages[1] is a int: it must be an nbddp.Stage, or a dict of its arguments"),
        ([Stage("a"), Stage("a")], "two stages are called a: give them different names"),
        ([Stage("1"), Stage()], "two stages are called 1: give them different names"),
        ([{"name": "a", "epoch": 3}], "stage a: epoch is not an option. Did you mean epochs or num_epochs?"),
    ],
)
def test_what_is_no_list_of_stages(value, message):
    assert refusal(read_stages, value) == message


@pytest.mark.parametrize(
    "stages, optimizer, scheduler, message",
    [
        ([{}, {"freeze": "backbone"}], False, False, "stage 1: the pattern backbone matches no parameter. Did you mean backbone.*?"),
        ([{"name": "a", "train_only": "x"}], False, False, "stage a: the pattern x matches no parameter. The names are"),
        ([{"name": "a", "lr": 0.1}], True, False, "stage a: lr beside the hook optimizer, which sets all of it: give the stage an optimizer of its own"),
        ([{"fused": False, "lr": 1}], True, False, "stage 0: lr, fused beside the hook optimizer, which sets all of it"),
        (
            [{"warmup_steps": 3}],
            False,
            True,
            "stage 0: warmup_steps beside the hook scheduler, which makes the schedule: give the stage a schedule of its own",
        ),
        (
            [{"scheduler_interval": "epoch"}],
            False,
            False,
            "stage 0: scheduler_interval=epoch without a function scheduler: there is nothing to advance",
        ),
        ([{"scheduler_interval": "epoch", "schedule": "cosine"}], False, True, "stage 0: scheduler_interval=epoch without a function scheduler"),
    ],
)
def test_stages_agree_with_the_model_and_the_hooks_of_the_run(stages, optimizer, scheduler, message):
    said = refusal(check_stages, read_stages(stages), NAMES, optimizer=optimizer, scheduler=scheduler)
    assert said.startswith(message)


@pytest.mark.parametrize(
    "stage, optimizer, scheduler",
    [
        ({"optimizer": "sgd", "lr": 0.1}, True, False),
        ({"optimizer": len}, True, False),
        ({"lr": 0.1}, False, False),
        ({"schedule": "cosine", "warmup_steps": 3}, False, True),
        ({"scheduler": len, "scheduler_interval": "epoch"}, False, False),
        ({"scheduler_interval": "epoch"}, False, True),
        ({"freeze": "backbone.*"}, True, True),
    ],
)
def test_stages_that_agree(stage, optimizer, scheduler):
    check_stages(read_stages([stage]), NAMES, optimizer=optimizer, scheduler=scheduler)


def test_a_misspelt_argument_of_a_stage_is_suggested():
    with pytest.raises(ConfigError, match=r"train_onli is not an option\. Did you mean train_only\?"):
        Stage("a", train_onli="x")
