"""Trackers as options: how they are written, and whether they are there."""

from __future__ import annotations

import importlib
import sys

import pytest

from nbddp.config import TrainConfig
from nbddp.errors import ConfigError
from nbddp.kernel.trackers import check_trackers


@pytest.mark.parametrize(
    "given, read",
    [
        ("project=digits", {"project": "digits"}),
        (" project = digits , group = a b ", {"project": "digits", "group": "a b"}),
        ("project=a=b,tags=x+y,mode=offline", {"project": "a=b", "tags": "x+y", "mode": "offline"}),
        ({"project": "a, b", "tags": ["x", "y"], "group": 4, "entity": None}, {"project": "a, b", "tags": "x+y", "group": "4"}),
        (None, None),
    ],
)
def test_wandb_is_pairs_or_a_mapping(given, read):
    config = TrainConfig(wandb=given)
    assert config.wandb == read
    assert TrainConfig(**config.to_json()) == config


@pytest.mark.parametrize(
    "given, said",
    [
        ("digits", "must be key=value pairs such as project=digits,group=lab"),
        ("", "must be key=value pairs"),
        ("project=a,", "must be key=value pairs"),
        (3, "must be key=value pairs"),
        (True, "must be key=value pairs"),
        (["project"], "must be key=value pairs"),
        ("group=a", "needs a project: project=NAME"),
        ({}, "needs a project"),
        ({"project": None}, "needs a project"),
        ("project=", "has project='', which must be a text"),
        ({"project": ["a"]}, "has project=['a'], which must be a text"),
        ({"project": True}, "has project=True, which must be a text"),
        ("project=a,project=b", "gives project twice: keep one"),
        ("project=a,grup=b", "has the unknown key grup; the keys are project, group, name, entity, mode, tags, job_type. Did you mean group?"),
        ("project=a,mode=offlin", "has mode=offlin, which must be one of online, offline, disabled. Did you mean offline"),
        ("project=a,tags=x++y", "has tags='x++y', which must be a text, or several joined by + (a+b)"),
        ({"project": "a", "tags": []}, "has tags=[], which must be a text, or several"),
        ({"project": "a", "tags": ["x+y"]}, "has tags=['x+y'], which must be a text, or several"),
    ],
)
def test_wandb_refusals(given, said):
    with pytest.raises(ConfigError) as caught:
        TrainConfig(wandb=given)
    assert str(caught.value).startswith(f"wandb={given!r} ")
    assert said in str(caught.value)


def test_tensorboard_is_a_folder(tmp_path):
    assert str(TrainConfig(tensorboard="boards").tensorboard) == "boards"
    with pytest.raises(ConfigError, match="tensorboard=3 must be a path"):
        TrainConfig(tensorboard=3)
    check_trackers(TrainConfig(tensorboard=tmp_path / "new" / "boards"))
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "boards"):
        with pytest.raises(ConfigError, match=f"--tensorboard {folder}: {tmp_path / 'file'} is a file; name a folder"):
            check_trackers(TrainConfig(tensorboard=folder))


def test_what_is_installed_passes_and_is_not_imported():
    before = set(sys.modules)
    check_trackers(TrainConfig(wandb="project=a", tensorboard="boards"))
    assert not {name for name in set(sys.modules) - before if name.partition(".")[0] in ("wandb", "tensorboard")}


@pytest.mark.parametrize("name, value", [("wandb", "project=a"), ("tensorboard", "boards")])
def test_what_is_not_installed_is_refused_with_the_remedy(monkeypatch, tmp_path, name, value):
    for module in [module for module in sys.modules if module.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    (tmp_path / name).mkdir()  # as wandb leaves one beside a notebook
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    importlib.invalidate_caches()
    config = TrainConfig(**{name: value})
    with pytest.raises(ConfigError, match=rf"^--{name}: the package {name} is not installed: pip install 'nbddp\[trackers\]'$"):
        check_trackers(config)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match="is not installed"):
        check_trackers(config)


def test_nothing_is_asked_for_what_is_not_wanted(monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    check_trackers(TrainConfig())
