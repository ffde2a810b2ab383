"""What Tab offers in the lines of the magics."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nbddp.kernel.completion import complete

DATA = TensorDataset(torch.zeros(2))
NAMES = {
    "net": nn.Linear(1, 1),
    "criterion": nn.MSELoss(),
    "my_loss": len,
    "train_set": DATA,
    "loader": DataLoader(DATA),
    "lr0": 0.1,
    "flag": True,
    "text": "a",
    "_net": nn.Linear(1, 1),
}


def offers(text, magic="ddp_train"):
    return [offer for offer, _ in complete(magic, text, NAMES)[1]]


@pytest.mark.parametrize(
    "text, fragment, expected",
    [
        ("", "", ["net"]),
        ("ne", "ne", ["net"]),
        ("net ", "", ["train_set", "loader"]),
        ("net tr", "tr", ["train_set"]),
        ("--lr 1 net tr", "tr", ["train_set"]),
        ("net train_set --ba", "--ba", ["--background", "--backend", "--batch-size", "--base-batch-size"]),
        ("net train_set --batch_s", "--batch_s", ["--batch-size"]),
        ("net train_set --no-sh", "--no-sh", ["--no-shuffle"]),
        ("net train_set --epochs 3 --epo", "--epo", []),
        ("net train_set --max-epochs 3 --epo", "--epo", []),
        ("net train_set --optimizer ", "", ["adam", "adamw", "sgd", "adagrad", "rmsprop", "lbfgs"]),
        ("net train_set --optimizer=ada", "ada", ["adam", "adamw", "adagrad"]),
        ("net train_set --learning-rate ", "", ["{lr0}"]),
        ("net train_set --fused=", "", ["true", "false"]),
        ("net train_set --fused f", "f", ["false"]),
        ("net train_set --devices c", "c", ["cpu"]),
        ("net train_set --val l", "l", ["loader"]),
        ("net train_set --loss ", "", ["criterion", "my_loss"]),
        ("net train_set --epochs ", "", ["1", "{lr0}"]),
        ("net train_set --val-every ", "", ['"1 epoch"']),
        ("net train_set --norm s", "s", ["sync"]),
        ("net train_set --as ", "", ["run"]),
        ("net train_set --unknown=", "", []),
    ],
)
def test_offers(text, fragment, expected):
    found, offered, ours = complete("ddp_train", text, NAMES)
    assert found == fragment
    assert [offer for offer, _ in offered] == expected
    assert ours


def test_options_follow_where_nothing_is_missing():
    assert {"--val", "--nproc", "--lr"} <= set(offers("net train_set "))
    assert set(offers("net train_set -")) == set(offers("net train_set "))
    assert offers("--wh", "ddp_load") == ["--which"]
    assert offers("net --which ", "ddp_load") == ["last", "best", "initial"]
    assert {"--prune", "--no-dry-run"} <= set(offers("--", "ddp_runs")) | set(offers("--no", "ddp_runs"))


@pytest.mark.parametrize("text", ["net train_set.ten", "net train_set --val data['tr", "net train_set --val 'a", "f(ne", "net train_set # --l", "'a'b"])
def test_expressions_strings_and_comments_are_left_to_ipython(text):
    assert complete("ddp_train", text, NAMES)[1:] == ([], False)


def test_other_magics_are_left_alone():
    assert complete("ddp_check", "n", NAMES) == ("", [], False)


def test_the_panel_takes_what_a_cell_takes_and_more():
    assert offers("ne", "ddp_config") == offers("ne")
    assert {"--cell", "--from", "--batch-size", "--val"} <= set(offers("net train_set --", "ddp_config"))
    assert offers("--fr", "ddp_config") == ["--from", "--freeze-rb-layer"]


def test_files_are_offered_for_config(tmp_path, monkeypatch):
    for name in ("a.yaml", "b.json", "c.txt", ".hidden.yaml"):
        (tmp_path / name).touch()
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "d.yml").touch()
    monkeypatch.chdir(tmp_path)
    assert offers("net d --config ") == ["a.yaml", "b.json", "conf/"]
    assert offers("net d --config conf/") == ["conf/d.yml"]
    assert offers(f"net d --config {tmp_path}/a") == [f"{tmp_path}/a.yaml"]
    assert offers("net d --config nowhere/") == []
    assert offers("net d --run-root ") == ["conf/"]


def test_torch_is_not_imported_for_it():
    program = """
import sys
from nbddp.kernel.completion import complete
offers = [offer for text in ("", "net ", "net d --loss ", "net d --val ") for offer in complete("ddp_train", text, {"x": 1})[1]]
print({kind for _, kind in offers}, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "{'option'} False\n"
