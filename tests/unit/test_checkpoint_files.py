"""Files that are not what they should be: what is wrong with each is said, and nothing that they carry is run."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from pathlib import Path

import h5py
import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from nbddp import checkpoint
from nbddp.checkpoint import load_checkpoint, newest_complete, read, read_resumable, state_of, write
from nbddp.errors import CheckpointError

# -- what a file is, from outside


def zipped(**files):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return buffer.getvalue()


def hdf5():
    buffer = io.BytesIO()
    with h5py.File(buffer, "w") as file:
        file["x"] = [1.0]
    return buffer.getvalue()


def array():
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(3))
    return buffer.getvalue()


FOREIGN = {
    "png": (b"\x89PNG\r\n\x1a\n" + bytes(100), "it is a PNG image, not a checkpoint"),
    "text": ("größer als ein Kopf\n" * 20, "it is a text that begins 'größer"),
    "short text": ("404\n", r"it is a text that begins '404\\n', not a checkpoint"),
    "git lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n", "a pointer of Git LFS, whose file was not fetched: git lfs pull$"),
    "zip": (zipped(a="1", b="2"), r"it is a zip archive that torch did not write \(a, b\), not a checkpoint"),
    "empty zip": (zipped(), "not a checkpoint"),
    "script": (zipped(**{"m/data.pkl": "", "m/code/m.py": ""}), "it is a program of TorchScript, not a checkpoint"),
    "hdf5": (hdf5(), "it is an HDF5 file"),
    "array": (array(), "it is a numpy array"),
    "pickle": (pickle.dumps({"model": [1.0]}), "it is a pickle that torch did not write"),
    "header alone": ((2).to_bytes(8, "little") + b"[]", "it is something else, beginning with the bytes 02 00 00 00 00 00 00 00"),
    "zeros": (bytes(5000), "it is zeros, as a machine that went down may leave"),
    "noise": (b"\xfe\xed\xfa\xce\x07\x00\x00\x01" * 50, "it is something else, beginning with the bytes fe ed fa ce 07 00 00 01"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_file_of_another_kind_is_called_by_its_kind(tmp_path, name):
    data, says = FOREIGN[name]
    path = tmp_path / "x.pt"
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    with pytest.raises(CheckpointError, match=rf"^{path} can't be read: .*{says}"):
        read(path)


def test_an_empty_file_is_empty(tmp_path):
    (tmp_path / "x.pt").touch()
    with pytest.raises(CheckpointError, match=r"x\.pt is not a complete checkpoint: the file is empty"):
        read(tmp_path / "x.pt")


@pytest.mark.parametrize("keep", [4, 10, 500, -1, -30, -200])
def test_a_truncated_file_is_cut_off(tmp_path, keep):
    path = tmp_path / "x.pt"
    write(path, {"model": nn.Linear(20, 20).state_dict()})
    data = path.read_bytes()[:keep]
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"x\.pt is not a complete checkpoint: it is cut off after {len(data)} bytes"):
        read(path)


@pytest.mark.parametrize("keep", [30, -100, -1])
def test_a_truncated_file_of_an_old_torch_is_not_complete(tmp_path, keep):
    path = tmp_path / "x.pt"
    torch.save(nn.Linear(20, 20).state_dict(), path, _use_new_zipfile_serialization=False)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"x\.pt is not a complete checkpoint"):
        read(path)


def test_a_file_of_an_old_torch_is_read(tmp_path):
    net = nn.Linear(2, 2)
    torch.save(net.state_dict(), tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    torch.testing.assert_close(load_checkpoint(tmp_path / "x.pt", nn.Linear(2, 2)).weight, net.weight)


def test_a_folder_and_a_pipe_are_not_files(tmp_path):
    os.mkfifo(tmp_path / "pipe.pt")
    for path in (tmp_path, tmp_path / "pipe.pt"):
        with pytest.raises(CheckpointError, match="can't be read: it is not a file"):
            read(path)


def test_why_the_system_does_not_open_a_file_is_said(tmp_path):
    (tmp_path / "x.pt").symlink_to("x.pt")
    with pytest.raises(CheckpointError, match=r"x\.pt can't be read: Too many levels of symbolic links"):
        read(tmp_path / "x.pt")


def test_a_missing_file_lists_what_is_there(tmp_path):
    with pytest.raises(CheckpointError, match=r"no checkpoint .*/x\.pt$"):
        read(tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"no checkpoint .*/nowhere/x\.pt$"):
        read(tmp_path / "nowhere" / "x.pt")
    for name in ("b", "a"):
        write(tmp_path / f"{name}.pt", {"model": {}})
    with pytest.raises(CheckpointError, match=rf"no checkpoint .*/x\.pt; {tmp_path} has a\.pt, b\.pt"):
        read(tmp_path / "x.pt")


# -- files of torch that are not ours


class Code:
    """Runs a command when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("reader", [read, read_resumable, load_checkpoint, lambda path: newest_complete(path.parent)])
@pytest.mark.parametrize("how", ["pickle", "zip", "before zip"])
def test_code_in_a_file_is_not_run(tmp_path, how, reader):
    mark, path = tmp_path / "ran", tmp_path / "best.pt"
    content = {"format": checkpoint.FORMAT, "version": 1, "model": {"w": torch.ones(1)}, "optimizer": Code(mark)}
    if how == "pickle":
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=how == "zip")
    try:
        assert reader(path) is None
    except CheckpointError as error:
        assert "can't be read: it " in str(error)  # noqa: PT017 - the fallback passes it over instead
    assert not mark.exists()


def test_pickled_objects_are_named(tmp_path):
    torch.save({"model": nn.Linear(1, 1).state_dict(), "path": Path("x")}, tmp_path / "x.pt")
    with pytest.raises(
        CheckpointError,
        match=r"it holds pickled objects beside tensors \(pathlib.PosixPath\); nbddp.load_checkpoint\(FILE, weights_only=False\) runs what they say",
    ):
        read(tmp_path / "x.pt")
    assert read(tmp_path / "x.pt", weights_only=False)["path"] == Path("x")


@pytest.mark.parametrize(
    "content, what", [([1, 2], "holds a list"), ({"a": 1, "b": 2}, "holds no state dict of a model: keys a, b$"), ({3: torch.ones(1)}, "keys 3$")]
)
def test_a_file_without_a_state_dict_says_what_it_holds(tmp_path, content, what):
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=what):
        load_checkpoint(tmp_path / "x.pt")


def test_weights_of_another_trainer_are_nothing_to_go_on_from(tmp_path):
    path = tmp_path / "epoch=1.ckpt"
    torch.save({"epoch": 1, "pytorch-lightning_version": "2.5.0", "state_dict": nn.Linear(2, 2).state_dict()}, path)
    safetensors.torch.save_file(nn.Linear(2, 2).state_dict(), tmp_path / "x.safetensors")
    for file in (path, tmp_path / "x.safetensors"):
        with pytest.raises(CheckpointError, match=rf"{file} is not a checkpoint of nbddp, so there is nothing to go on from but weights"):
            read_resumable(file)


@pytest.mark.parametrize("version, remedy", [(99, ": update nbddp$"), (0, "1$"), (None, "1$"), ("2", "1$")])
def test_another_version_of_the_schema_is_refused(tmp_path, version, remedy):
    torch.save({"format": checkpoint.FORMAT, "version": version, "model": {}}, tmp_path / "x.pt")
    for reader in (read, read_resumable):
        with pytest.raises(CheckpointError, match=rf"has version {version!r} of the schema; this nbddp reads version 1{remedy[:-1].removeprefix('1')}$"):
            reader(tmp_path / "x.pt")


def test_a_checkpoint_of_ours_without_a_model_is_refused(tmp_path):
    write(tmp_path / "x.pt", {"step": 3})
    with pytest.raises(CheckpointError, match="holds no state dict"):
        state_of(read(tmp_path / "x.pt"), tmp_path / "x.pt")


# -- what training can go on from


def complete(**changes):
    """A content with all that is needed to go on; None takes a key out."""
    stream = {"torch": torch.get_rng_state()}
    content = {
        **{"model": {"w": torch.ones(3)}, "optimizer": {"state": {}, "param_groups": []}, "scheduler": None, "scaler": None, "comm_hook": [None, None]},
        **{"rng": [stream, stream], "precision": "fp32", "matmul_precision": "highest", "stage": 0, "stage_name": "0", "stage_step": 30},
        **{"stage_epochs_done": 3, "epoch": 3, "step": 30, "epochs_done": 3, "epoch_sums": {}, "values": {}, "metrics": {}, "early_stop": {}, "best": {}},
        **{"sampler": {"seed": 0, "stage": 0, "epoch": 3, "step": 10, "samples": 100, "n": 100}, "elapsed_s": 1.0, "config": {}, "world_size": 2},
        **{"versions": {}, "run": "x", "value": None, "finite": True},
        "epoch_sums": {"loss": 1.0, "weight": 2.0, "scalars": {}, "samples": 2, "steps": 1, "times": [0.0] * 3},
        "early_stop": {"without_gain": 0, "validated_at": -1},
        "best": {"name": "loss", "mode": "min", "value": None, "epoch": 0, "step": 0},
    }
    return {name: value for name, value in {**content, **changes}.items() if name not in changes or value is not ...}


def test_a_complete_one_is_read(tmp_path):
    write(tmp_path / "x.pt", complete())
    assert read_resumable(tmp_path / "x.pt", verify=True)["step"] == 30


@pytest.mark.parametrize("name", sorted(complete()))
def test_every_key_is_needed(tmp_path, name):
    write(tmp_path / "x.pt", complete(**{name: ...}))
    with pytest.raises(CheckpointError, match=rf"^training can't go on from {tmp_path}/x\.pt: it has no {name}$"):
        read_resumable(tmp_path / "x.pt")


@pytest.mark.parametrize("name", sorted(complete()))
def test_no_key_may_be_of_another_type(tmp_path, name):
    write(tmp_path / "x.pt", complete(**{name: {1, 2}}))
    with pytest.raises(CheckpointError, match=rf"^training can't go on from {tmp_path}/x\.pt: {name} is a set, not "):
        read_resumable(tmp_path / "x.pt")


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"step": True}, "step is a bool, not int"),
        ({"step": -1}, "step is -1"),
        ({"step": 1.5}, "step is a float, not int"),
        ({"scheduler": [1]}, "scheduler is a list, not dict or None"),
        ({"sampler": {"seed": 0}}, r"it has no sampler\.stage, sampler\.epoch, sampler\.step, sampler\.samples, sampler\.n"),
        ({"sampler": {**complete()["sampler"], "samples": "7"}}, r"sampler\.samples is a str, not int"),
        ({"sampler": {**complete()["sampler"], "n": -7}}, r"sampler\.n is -7"),
        ({"optimizer": {"state": {}}}, r"it has no optimizer\.param_groups"),
        ({"world_size": 3}, "rng is of 2 ranks, and world_size is 3; comm_hook is of 2 ranks, and world_size is 3"),
        ({"early_stop": {"without_gain": 0}}, r"it has no early_stop\.validated_at"),
        ({"epoch_sums": {}}, r"it has no epoch_sums\.loss, epoch_sums\.weight"),
        ({"scheduler": {"steps": 1}}, r"it has no scheduler\.epochs, scheduler\.kind, scheduler\.rates"),
        ({"rng": [1, 2]}, "rng does not hold the random streams of each rank"),
        ({"optimizer": ..., "rng": ..., "epoch": "3", "run": 1, "best": None, "values": None, "metrics": None}, "; and 2 more$"),
    ],
)
def test_what_is_wrong_inside_is_said(tmp_path, changes, says):
    write(tmp_path / "x.pt", complete(**changes))
    with pytest.raises(CheckpointError, match=says):
        read_resumable(tmp_path / "x.pt")


def test_weights_alone_are_for_init(tmp_path):
    torch.save(nn.Linear(1, 1).state_dict(), tmp_path / "bare.pt")
    write(tmp_path / "initial.pt", {"model": {}, "epoch": 0, "step": 0, "stage": 0, "value": None, "finite": True})
    for path, what in ((tmp_path / "bare.pt", "is not a checkpoint of nbddp"), (tmp_path / "initial.pt", "has the weights that a run began with")):
        with pytest.raises(CheckpointError, match=rf"{path} {what}.*: start from (those|them) with --init {path}"):
            read_resumable(path)


def damage(path):
    """Flip a bit in the middle of a tensor, as a disk does."""
    data = bytearray(path.read_bytes())
    data[data.index(torch.ones(4).numpy().tobytes()) + 5] ^= 1
    path.unlink()
    path.write_bytes(data)


def test_damaged_bytes_are_found_where_they_are_looked_for(tmp_path):
    path = tmp_path / "x.pt"
    write(path, complete(model={"w": torch.ones(5000)}))
    damage(path)
    assert read_resumable(path)["step"] == 30
    with pytest.raises(CheckpointError, match=rf"{path} is damaged: the bytes of archive/data/\d+ are not those that were written"):
        read_resumable(path, verify=True)


def test_damage_at_any_place_is_a_checkpoint_error_or_changes_nothing(tmp_path):
    """Headers included, whose damage makes errors of many kinds in the reader."""
    path = tmp_path / "x.pt"
    write(path, complete())
    whole = path.read_bytes()
    refused = 0
    for place in [*range(64), *range(64, len(whole), 97), *range(len(whole) - 300, len(whole), 3)]:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x88]) + whole[place + 1 :])
        try:
            content = read_resumable(path, verify=True)
        except CheckpointError:
            refused += 1
        else:
            assert torch.equal(content["model"]["w"], torch.ones(3))
    assert refused > 100


def test_the_newest_complete_file_is_the_one_of_the_latest_step(tmp_path):
    assert newest_complete(tmp_path / "nowhere") is None
    for name, step, done in (("best", 10, 1), ("stage-0", 20, 2), ("epoch-0003", 30, 2), ("step-00000030", 30, 3), ("last", 50, 5), ("initial", 60, 6)):
        write(tmp_path / f"{name}.pt", complete(step=step, epochs_done=done, model={"w": torch.ones(100)}))
    order = []
    while (found := newest_complete(tmp_path, exclude=order)) is not None:
        assert found[1]["step"] == read(found[0])["step"]
        order.append(found[0])
    assert [path.stem for path in order] == ["step-00000030", "epoch-0003", "stage-0", "best"]
    damage(tmp_path / "step-00000030.pt")
    (tmp_path / "epoch-0003.pt").write_bytes(b"half")
    write(tmp_path / "stage-0.pt", {"model": {}, "step": 40})
    assert newest_complete(tmp_path)[0].stem == "best"
