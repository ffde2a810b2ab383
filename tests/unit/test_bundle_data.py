"""Staged datasets: addressed by content, written once, and only where they fit."""

from __future__ import annotations

import os
import resource
import signal
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from nbddp.bundle import Bundler
from nbddp.errors import BundleError
from support.bundled import CellNotebook


def tensors(n=5000):
    return TensorDataset(torch.arange(n).float(), torch.arange(n))


def digest(folder, dataset, main=None):
    return Bundler(data_dir=folder, main=main, cells={}).stage("train", "train_set", dataset).hash


DATASETS = {
    "tensors": tensors,
    "arrays": lambda: {"x": np.arange(4000.0), "y": np.arange(4000).astype(">i2"), "names": np.array(["a", "b"])},
    "strided": lambda: np.arange(40_000.0).reshape(200, 200)[::3, 5:150].T,
    "list": lambda: [{"text": str(i), "label": i % 3} for i in range(100)],
    "samples": lambda: [(torch.full((3,), float(i)), i) for i in range(100)],
}


@pytest.mark.parametrize("name", DATASETS)
def test_equal_content_has_an_equal_hash(tmp_path, name):
    assert digest(tmp_path, DATASETS[name]()) == digest(tmp_path, DATASETS[name]())
    data = DATASETS[name]()
    bundler = Bundler(data_dir=tmp_path, main=None, cells={})
    assert bundler.stage("train", "a", data).hash == bundler.stage("train", "b", data).hash


def test_hash_is_the_same_in_another_process(tmp_path):
    program = (
        "import torch, pathlib; from torch.utils.data import TensorDataset; from nbddp.bundle import Bundler\n"
        "data = TensorDataset(torch.arange(5000).float(), torch.arange(5000))\n"
        "print(Bundler(data_dir=pathlib.Path('.'), main=None, cells={}).stage('train', 'd', data).hash)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment, timeout=60)
    assert done.stdout.strip() == digest(tmp_path, tensors())


def test_one_element_changes_the_hash_also_through_numpy(tmp_path):
    array = np.zeros(2_000_000, dtype="f4")  # two chunks
    data = TensorDataset(torch.from_numpy(array))
    seen = {digest(tmp_path, data)}
    for index in (0, 1, 999_999, 1_048_576, 1_999_999):
        array[index] += 1
        seen.add(digest(tmp_path, data))
    assert len(seen) == 6
    array[:] = 0
    assert digest(tmp_path, data) in seen


@pytest.mark.parametrize(
    "change",
    [
        lambda d: setattr(d, "tensors", d.tensors[::-1]),
        lambda d: setattr(d, "extra", 1),
        lambda d: setattr(d, "tensors", (d.tensors[0].reshape(50, 100), d.tensors[1])),
        lambda d: setattr(d, "tensors", (d.tensors[0].view(torch.int32), d.tensors[1])),
        lambda d: setattr(d, "tensors", (d.tensors[0], d.tensors[1][1:])),
    ],
)
def test_anything_else_changes_the_hash(tmp_path, change):
    data = tensors()
    before = digest(tmp_path, data)
    change(data)
    assert digest(tmp_path, data) != before


def test_class_of_the_notebook_is_hashed_with_its_data(tmp_path):
    notebook = CellNotebook(tmp_path)
    notebook.cell("class Data(list):\n    def __getitem__(self, i):\n        return super().__getitem__(i)\na, b = Data([1, 2]), Data([1, 2])\n")
    before = digest(tmp_path, notebook["a"], notebook.main)
    assert digest(tmp_path, notebook["b"], notebook.main) == before
    notebook.cell("Data.__getitem__ = lambda self, i: 0\n")
    assert digest(tmp_path, notebook["b"], notebook.main) != before


def test_ref_describes_the_dataset(tmp_path):
    ref = Bundler(data_dir=tmp_path, main=None, cells={}).stage("val", "val_set", tensors())
    assert (ref.role, ref.name, ref.type) == ("val", "val_set", "TensorDataset")
    assert 60_000 <= ref.bytes < 62_000
    assert len(ref.hash) == 40


def test_content_is_written_once_and_privately(tmp_path):
    before = os.umask(0o022)
    try:
        folder = tmp_path / "runs" / "data"
        for _ in range(2):
            bundler = Bundler(data_dir=folder, main=None, cells={})
            ref = bundler.stage("train", "train_set", tensors())
            bundler.flush()
            path = folder / f"{ref.hash}.pt"
            assert [path] == list(folder.iterdir())
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            path.write_bytes(b"not rewritten") if path.read_bytes() != b"not rewritten" else None
        assert path.read_bytes() == b"not rewritten"
        size = Bundler(data_dir=folder, main=None, cells={}).write(tmp_path / "run" / "bundle.pt", model=torch.nn.Linear(1, 1), hooks={}, model_name="net")
        assert size == (tmp_path / "run" / "bundle.pt").stat().st_size
        assert stat.S_IMODE((tmp_path / "run" / "bundle.pt").stat().st_mode) == 0o600
        assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700
    finally:
        os.umask(before)


def test_full_disk_is_refused_before_anything_is_written(tmp_path):
    asked = []

    def disk_free(folder):
        asked.append(folder)
        return 3 << 28

    # A gigabyte that takes no memory: pages of zeros that are only read.
    big = np.zeros(1 << 30, dtype="u1")
    bundler = Bundler(data_dir=tmp_path / "runs" / "data", main=None, cells={}, disk_free=disk_free)
    bundler.stage("train", "train_set", big)
    with pytest.raises(BundleError) as caught:
        bundler.write(tmp_path / "runs" / "r" / "bundle.pt", model=torch.nn.Linear(1, 1), hooks={}, model_name="net")
    assert str(caught.value) == (
        f"train_set, net and hooks: needs 1.1 GiB in {tmp_path / 'runs' / 'data'}, 0.8 GiB free; "
        "free some with nbddp.prune(), or choose another place with --run-root"
    )
    assert asked == [tmp_path]
    assert list(tmp_path.iterdir()) == []


def test_disk_that_fills_up_while_writing_leaves_nothing(tmp_path):
    def limited():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    program = (
        "import torch, pathlib; from nbddp.bundle import Bundler; from nbddp.errors import BundleError\n"
        f"bundler = Bundler(data_dir=pathlib.Path({str(tmp_path / 'data')!r}), main=None, cells={{}})\n"
        "bundler.stage('train', 'd', torch.ones(100_000))\n"
        "try:\n    bundler.flush()\nexcept BundleError as error:\n    print(error)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment, timeout=60, preexec_fn=limited)
    assert done.stdout.startswith(f"writing {tmp_path / 'data'}"), done.stderr
    assert "choose another place with --run-root" in done.stdout
    assert list((tmp_path / "data").iterdir()) == []


def test_crc_option_of_the_user_is_left_as_it_was(tmp_path):
    bundler = Bundler(data_dir=tmp_path, main=None, cells={})
    bundler.stage("train", "d", tensors())
    assert torch.serialization.get_crc32_options()
    bundler.flush()
    assert torch.serialization.get_crc32_options()


def test_foreign_and_newer_files_are_refused(tmp_path):
    from nbddp.bundle.archive import FORMAT, VERSION, Archive

    torch.save({"weights": torch.ones(2)}, tmp_path / "a.pt")
    torch.save({"format": FORMAT, "version": 99}, tmp_path / "b.pt")
    torch.save([1, 2], tmp_path / "c.pt")
    torch.save({"format": FORMAT, "version": VERSION, "streams": {}}, tmp_path / "d.pt")
    (tmp_path / "e.pt").write_bytes(b"junk")
    (tmp_path / "f.pt").write_bytes((tmp_path / "a.pt").read_bytes()[:-40])
    (tmp_path / "g.pt").touch()
    for name, said in (
        ("a", "is not a bundle of nbddp"),
        ("b", "is not a bundle that this version of nbddp reads; use the version that wrote it"),
        ("c", "is not a bundle of nbddp"),
        ("d", "is damaged: it lacks what a bundle holds"),
        ("e", "is damaged, and no bundle any more"),
        ("f", "is damaged, and no bundle any more"),
        ("g", "is damaged, and no bundle any more"),
    ):
        with pytest.raises(BundleError, match=f"{name}.pt {said}"):
            Archive.read(tmp_path / f"{name}.pt")


def test_paths_need_not_be_ascii(tmp_path):
    notebook = CellNotebook(tmp_path / "Müller – 数据")
    (tmp_path / "Müller – 数据").mkdir()
    shipped = notebook.ship(train=tensors())
    assert shipped.opened("result = len(loaded.datasets['train'])") == 5000
    assert Path(shipped.path).exists()
