"""Folders of other trainers, and checkpoints in several files: what they are called, and that the remedy in the message works as it stands."""

from __future__ import annotations

import json
import pathlib  # noqa: F401 - the remedies name it
import re

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint.format_utils
from torch import nn

import nbddp
from nbddp.errors import CheckpointError
from support.loading import refused, same


def said_of(path):
    with pytest.raises(CheckpointError) as caught:
        nbddp.load_checkpoint(path)
    return str(caught.value)


@pytest.fixture
def sharded(tmp_path):
    """A model in two files with an index, as transformers saves large ones; the model."""
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    entries = list(net.state_dict().items())
    for number, part in enumerate((entries[:1], entries[1:]), 1):
        safetensors.torch.save_file(dict(part), tmp_path / f"model-0000{number}-of-00002.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))
    return net


@pytest.mark.parametrize("name", ["", "model.safetensors.index.json", "model-00002-of-00002.safetensors"])
def test_a_checkpoint_in_several_files_says_how_they_are_read_together(tmp_path, sharded, name):
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    message = refused(tmp_path / name, model)
    remedy = re.search(r"model\.load_state_dict\(.*\)$", message)[0]
    eval(remedy)
    assert same(model, sharded)


def test_a_part_is_a_state_dict_like_any_other(tmp_path, sharded, capsys):
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    nbddp.load_checkpoint(tmp_path / "model-00001-of-00002.safetensors", model, strict=False)
    assert torch.equal(model[0].weight, sharded[0].weight)
    assert "1 entry loaded, left out" in capsys.readouterr().out


def test_whole_files_beside_parts_are_named(tmp_path, sharded):
    (tmp_path / "adapter.safetensors").touch()
    assert said_of(tmp_path).endswith("; whole files are adapter.safetensors")


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
def test_a_distributed_checkpoint_names_the_function_that_makes_a_file_of_it(tmp_path):
    net, folder = nn.Linear(2, 2), tmp_path / "dcp"
    torch.distributed.checkpoint.save({"model": net.state_dict()}, checkpoint_id=folder, no_dist=True)
    call = re.search(r"torch\.\S+\([^)]*, FILE\)", said_of(folder))[0]
    eval(call, {"torch": torch, "FILE": tmp_path / "x.pt"})
    assert same(nbddp.load_checkpoint(tmp_path / "x.pt"), net)


def test_a_checkpoint_of_deepspeed_names_its_script(tmp_path):
    (tmp_path / "zero_to_fp32.py").touch()
    assert said_of(tmp_path).endswith(f"it is a checkpoint of DeepSpeed, of which python {tmp_path}/zero_to_fp32.py {tmp_path} OUTPUT makes files")


def test_checkpoints_in_the_folders_below_are_named(tmp_path):
    (tmp_path / "step-10").mkdir()
    (tmp_path / "step-10" / "model.pt").touch()
    assert said_of(tmp_path).endswith("name one of its files: step-10/model.pt")
