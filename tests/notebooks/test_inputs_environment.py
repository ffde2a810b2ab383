"""Where the notebook stands: its folder and modules, its environment, its children, and the cluster it may run in."""

from __future__ import annotations

import os
import signal
import sys

import nbformat
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from support import processes

pytestmark = pytest.mark.kernel

KERNEL_ENDS_S = 10.0

# Records what the ranks see; `seen()` reads it, a line per rank.
SEEN = """
def seen():
    return [json.loads(next(line for line in run.log(rank).splitlines() if line.startswith("{"))) for rank in (0, 1)]

net = nn.Linear(4, 2)
"""
LOOK = """
told = []
def training_step(model, batch):
    if not told:
        told.append(print(json.dumps({LOOKED_AT})))
    return mse(model, batch)
"""


def look(nb, what):
    """Train, and return what an expression gives on each rank."""
    nb.run(f"%%ddp_train net train_set {{BY_HAND}}\n{LOOK.replace('LOOKED_AT', repr('value') + ': ' + what)}", check=True)
    return [record["value"] for record in nb.eval("seen()")]


@pytest.fixture(scope="module")
def sight(shared_kernel):
    shared_kernel.run(SEEN, check=True)
    return shared_kernel


def test_a_helper_module_beside_the_notebook(sight, nb):
    (nb.folder / "helpers").mkdir()
    (nb.folder / "helpers" / "__init__.py").write_text("")
    (nb.folder / "helpers" / "losses.py").write_text("def mean_square(a, b):\n    return ((a - b) ** 2).mean()\n")
    (nb.folder / "layers.py").write_text("from torch import nn\n\nclass Head(nn.Linear):\n    pass\n")
    nb.run("import helpers.losses\nfrom layers import Head\nhead = Head(4, 2)\nexpected = fit(head, mse, in_order(X, Y))", check=True)
    nb.run("%%ddp_train head train_set {BY_HAND}\nloss = helpers.losses.mean_square", check=True)
    assert nb.eval("apart(head, expected)") < 1e-6
    nb.run("expected = fit(head, mse, in_order(X, Y))", check=True)
    nb.run(
        """%%ddp_train head train_set {BY_HAND}
def training_step(model, batch):
    from helpers.losses import mean_square
    return mean_square(model(batch[0]), batch[1])
""",
        check=True,
    )
    assert nb.eval("apart(head, expected)") < 1e-6


def test_cd_moves_the_ranks_and_not_the_runs(sight, nb):
    (nb.folder / "elsewhere").mkdir()
    (nb.folder / "elsewhere" / "here.txt").write_text("found")
    nb.run("%cd -q elsewhere", check=True)
    try:
        assert look(nb, "[os.getcwd(), Path('here.txt').read_text()]") == [[str(nb.folder / "elsewhere"), "found"]] * 2
        assert nb.eval("str(run.dir.parent)") == str(nb.folder / "nbddp_runs")
    finally:
        nb.run("%cd -q ..", check=True)
    assert sorted(path.name for path in (nb.folder / "elsewhere").iterdir()) == ["here.txt"]


def test_changes_of_the_environment_reach_the_ranks_and_not_the_disk(sight, nb):
    nb.run("os.environ['SET_NOW'] = 'sesame-4711'\nos.environ.pop('HOME_OF_NOBODY', None)\nos.environ['TZ'] = 'Asia/Tokyo'\ntime.tzset()", check=True)
    try:
        assert look(nb, "[os.environ['SET_NOW'][::-1] == '1174-emases', time.tzname[0]]") == [[True, "JST"]] * 2
        nb.run("del os.environ['SET_NOW']", check=True)
        assert look(nb, "os.environ.get('SET_NOW')") == [None] * 2
    finally:
        nb.run("os.environ.pop('SET_NOW', None); del os.environ['TZ']; time.tzset()", check=True)
    runs = [path for path in (nb.folder / "nbddp_runs").rglob("*") if path.is_file()]
    assert runs
    secret = b"sesame-4711"
    # The cell that set it is the user's own text, which travels where its code is needed: here it is not.
    assert [path for path in runs if secret in path.read_bytes()] == []


def test_sys_path_is_the_notebooks(sight, nb):
    (nb.folder / "library").mkdir()
    (nb.folder / "library" / "far_away.py").write_text("VALUE = 7\n")
    nb.run("sys.path.insert(0, str(Path('library').resolve()))", check=True)
    try:
        assert look(nb, "__import__('far_away').VALUE") == [7, 7]
    finally:
        nb.run("del sys.path[0]", check=True)


def test_a_standby_that_env_made_stale_is_replaced(sight, nb):
    nb.run("from nbddp.launch.local import standby\nstandby.warm()", check=True)
    stale = nb.eval("standby_pid()")
    nb.run("%env OMP_NUM_THREADS=4", check=True)
    try:
        assert look(nb, "[os.environ['OMP_NUM_THREADS'], torch.get_num_threads()]") == [["4", 4]] * 2
        assert not psutil.pid_exists(stale)
    finally:
        nb.run("del os.environ['OMP_NUM_THREADS']", check=True)
    assert look(nb, "[os.environ['OMP_NUM_THREADS'], torch.get_num_threads()]") == [[str(_share()), _share()]] * 2


def _share():
    return max(1, len(os.sched_getaffinity(0)) // 2)


def test_a_forked_child_of_the_kernel_is_alive(sight, nb):
    """It holds copies of every pipe of the kernel's, and is none of our business."""
    nb.run("child = os.fork()\nif child == 0:\n    time.sleep(300)\n    os._exit(0)", check=True)
    child = nb.eval("child")
    try:
        nb.run("net = nn.Linear(4, 2)\nexpected = fit(net, mse, in_order(X, Y))", check=True)
        for _ in range(2):
            nb.run("%%ddp_train net train_set {BY_HAND}\nloss = nn.MSELoss()", check=True)
            assert nb.eval("apart(net, expected)") < 1e-6
            nb.run("expected = fit(net, mse, in_order(X, Y))", check=True)
        assert psutil.pid_exists(child)
    finally:
        os.kill(child, signal.SIGKILL)
        nb.run("os.waitpid(child, 0)", check=True)


TRAINING = """
%load_ext nbddp
import multiprocessing, os, time, torch
from torch import nn
net, data = nn.Linear(1, 1), torch.utils.data.TensorDataset(torch.zeros(64, 1), torch.ones(64, 1))
"""


def test_a_kernel_that_is_killed_ends_its_run_although_a_forked_child_holds_its_pipes(notebook):
    nb = notebook()
    nb.run(TRAINING, check=True)
    nb.run("child = multiprocessing.get_context('fork').Process(target=time.sleep, args=(300,))", check=True)
    cell = nb.start("%%ddp_train net data -n 2 --epochs 1000000\nchild.start()\nprint('child', child.pid, flush=True)\nloss = nn.MSELoss()")
    nb.until(lambda: "child " in cell.text)
    child = psutil.Process(int(cell.text.split("child ")[1].split()[0]))
    folder = nb.folder / "nbddp_runs"
    nb.until(lambda: any('"first_step":true' in path.read_text().replace(" ", "") for path in folder.glob("*/events/rank-00000.0.jsonl")))
    try:
        os.kill(nb.kernel_pid, signal.SIGKILL)
        left = processes.gone(lambda: nb.processes() - {child}, KERNEL_ENDS_S)
        assert not left, processes.describe(left)
        assert child.is_running()
        (result,) = folder.glob("*/result.json")
        assert '"stopped"' in result.read_text()
        assert list(folder.glob("*/checkpoints/last.pt"))
    finally:
        processes.end([child])


def test_a_kernel_that_is_shut_down_takes_its_standby_along_although_a_forked_child_holds_its_pipes(notebook):
    nb = notebook()
    nb.run(TRAINING, check=True)
    nb.run("child = os.fork()\nif child == 0:\n    time.sleep(300)\n    os._exit(0)", check=True)
    child = psutil.Process(nb.eval("child"))
    nb.run("%%ddp_train net data -n 2\nloss = nn.MSELoss()", check=True)
    os.kill(nb.kernel_pid, signal.SIGKILL)
    try:
        left = processes.gone(lambda: nb.processes() - {child}, KERNEL_ENDS_S)
        assert not left, processes.describe(left)
    finally:
        processes.end([child])


@pytest.mark.parametrize(
    "env",
    [
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "17"},
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "10.255.255.1", "MASTER_PORT": "1"},
    ],
    ids=["srun", "torchrun"],
)
def test_a_kernel_with_the_variables_of_a_rank_trains_as_usual(notebook, env):
    nb = notebook(env=env)
    nb.run(TRAINING, check=True)
    nb.run("%%ddp_train net data -n 2 --epochs 2\nloss = nn.MSELoss()", check=True)
    assert nb.eval("(run.state, len(run.history['loss']))") == ("finished", 2)
    assert "backend=gloo, rank=1, world_size=2" in nb.eval("run.log(1)")


# Rank 0 of two tasks executes the notebook, as in `srun -n 2 jupyter ...`; the other one has nothing to do.
UNDER_SRUN = """
import os, sys
if os.environ["SLURM_PROCID"] == "0":
    import nbformat
    from nbclient import NotebookClient
    book = nbformat.read("book.ipynb", 4)
    NotebookClient(book, timeout=90, kernel_name="python3").execute()
    nbformat.write(book, "done.ipynb")
"""


@pytest.mark.slurm
def test_a_kernel_inside_srun_trains_as_usual(slurm, tmp_path, monkeypatch):
    book = new_notebook()
    book.cells = [
        new_code_cell(TRAINING),
        new_code_cell("%%ddp_train net data -n 2 --epochs 2\nloss = nn.MSELoss()"),
        new_code_cell("print(run.state, len(run.history['loss']), *(os.environ[f'SLURM_{name}'] for name in ('PROCID', 'NTASKS', 'STEP_ID')))"),
    ]
    nbformat.write(book, tmp_path / "book.ipynb")
    (tmp_path / "execute.py").write_text(UNDER_SRUN)
    slurm.run(["srun", "-n", "2", "--overcommit", sys.executable, "execute.py"], cwd=tmp_path, timeout=100)
    done = nbformat.read(tmp_path / "done.ipynb", 4)
    assert done.cells[2].outputs[0]["text"] == "finished 2 0 2 0\n"
