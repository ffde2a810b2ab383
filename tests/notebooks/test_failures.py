"""Runs that fail: within seconds, with the right rank, cell and line, and with nothing left that runs."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from html import escape

import pytest

from support.example import ENDLESS, EXAMPLE, run_folders, start

pytestmark = pytest.mark.kernel

AT_ONCE_S = 5.0
KERNEL_S = 10.0


@pytest.fixture(scope="module", autouse=True)
def example(shared_kernel):
    shared_kernel.run(EXAMPLE, check=True)


@pytest.fixture(autouse=True)
def before(nb):
    """Fresh weights in `net`, kept in `before`; no run fails without saying so, and none touches `net`."""
    nb.run("net = make_net()\nbefore = weights(net)\nglobals().pop('run', None)", check=True)
    (nb.folder / "when").unlink(missing_ok=True)
    yield
    assert nb.eval("run.state == 'failed' and run.error.run is run and same(net.state_dict(), before)") is True


def since(nb):
    """Seconds since the ranks wrote down that they are about to fail."""
    return time.time() - float((nb.folder / "when").read_text())


def error_of(nb):
    """What `run.error` says: class, rank, cell, line."""
    return nb.eval("(type(run.error).__name__, run.error.rank, getattr(run.error, 'cell', None), getattr(run.error, 'line', None))")


def result_of(folder):
    return json.loads((folder / "result.json").read_text())


# -- ends of one rank, while the other waits for it

ON_RANK_1 = """
calls = []
def training_step(model, batch):
    calls.append(1)
    if rank() == 1 and len(calls) == 3:
        Path("when").write_text(str(time.time()))
        {code}
    return step(model, batch)
"""


@pytest.mark.parametrize(
    "code, ename, said",
    [
        ("raise KeyError('sample')", "WorkerError", "rank 1 raised KeyError: 'sample' (Cell In[{cell}], line 7)"),
        ("sys.exit(0)", "WorkerError", "rank 1 left by sys.exit with exit code 0 (Cell In[{cell}], line 7)"),
        ("sys.exit(3)", "WorkerError", "rank 1 left by sys.exit with exit code 3 (Cell In[{cell}], line 7)"),
        ("raise KeyboardInterrupt", "WorkerError", "rank 1 raised KeyboardInterrupt (Cell In[{cell}], line 7)"),
        ("os._exit(0)", "WorkerLost", "rank 1 left with exit code 0 and without a word"),
        ("os.kill(os.getpid(), 9)", "WorkerLost", "rank 1 was killed by signal 9 (SIGKILL)"),
        ("os.abort()", "WorkerLost", "rank 1 was killed by signal 6 (SIGABRT)"),
    ],
)
def test_the_rank_that_ended_first_is_named_and_where(nb, code, ename, said):
    cell = nb.run(f"%%ddp_train net samples {ENDLESS}{ON_RANK_1.format(code=code)}")
    assert since(nb) < AT_ONCE_S
    assert cell.error.ename == ename
    assert said.format(cell=cell.execution_count) in cell.error.traceback
    in_cell = ename == "WorkerError"
    assert error_of(nb) == (ename, 1, cell.execution_count if in_cell else None, 7 if in_cell else None)
    if in_cell:
        assert f"---->   7         {code}" in cell.error.traceback
        assert "nbddp/" not in cell.error.traceback
    assert cell.text.splitlines()[-1] == "net is unchanged"
    assert said.format(cell=cell.execution_count) in cell.shown()[-1]
    assert escape(said.format(cell=cell.execution_count)) in (run_folders(nb)[-1] / "card.html").read_text()


CRASH_OF_THE_DUMP = """
import ctypes
from ctypes import c_uint64, c_void_p

def dangling_thread():
    '''Adds a thread whose frames can't be read: faulthandler crashes over it. Its state points into itself where the frames are (Python 3.11).'''
    interpreter, new = ctypes.pythonapi.PyInterpreterState_Get, ctypes.pythonapi.PyThreadState_New
    interpreter.restype, new.restype, new.argtypes = c_void_p, c_void_p, [c_void_p]
    state = new(interpreter())
    words = (c_uint64 * 16).from_address(state)
    frames = [index for index, word in enumerate(words) if state < word < state + 1024]
    assert frames
    for index in frames:
        words[index] = 8

calls = []
def training_step(model, batch):
    calls.append(1)
    if rank() == 1 and len(calls) == 3:
        Path("when").write_text(str(time.time()))
        dangling_thread()
        os.abort()
    return step(model, batch)
"""


def test_a_crash_while_the_stacks_of_an_abort_are_written_is_an_abort(nb):
    cell = nb.run(f"%%ddp_train net samples {ENDLESS}{CRASH_OF_THE_DUMP}")
    log = (run_folders(nb)[-1] / "logs" / "rank-00001.log").read_text()
    assert re.findall("Fatal Python error: (.*)", log) == ["Aborted", "Segmentation fault"]
    assert "rank 1 was killed by signal 6 (SIGABRT): a crash in native code; its log may say where" in cell.error.traceback
    assert nb.eval("(run.error.rank, run.error.signal)") == (1, 6)


def test_a_run_that_had_a_checkpoint_says_how_to_load_it(nb):
    body = f"{ON_RANK_1}".replace("len(calls) == 3", "list(Path('nbddp_runs').glob('*-kept-*/checkpoints/last.pt'))").format(code="raise KeyError('sample')")
    cell = nb.run(f"%%ddp_train net samples {ENDLESS} --name kept --checkpoint-every '2 steps'{body}")
    assert cell.error.ename == "WorkerError"
    assert cell.text.splitlines()[-1] == 'net is unchanged; the last checkpoint: run.load("last")'
    assert nb.eval("same(net.state_dict(), before)") is True
    nb.run('run.load("last")\nafter = weights(net)\nnet.load_state_dict(before)', check=True)
    assert nb.eval("same(after, nbddp.load_checkpoint(run)) and not same(after, before)") is True


def test_waiting_for_it_again_raises_again_and_so_does_a_background_run(nb):
    cell = nb.run(f"%%ddp_train net samples {ENDLESS} --background{ON_RANK_1.format(code='raise KeyError(7)')}", check=True)
    error = nb.run("run.wait(30)").error
    assert (error.ename, error_of(nb)) == ("WorkerError", ("WorkerError", 1, cell.execution_count, 7))
    assert "KeyError: 7" in error.traceback
    assert nb.run("try:\n    run.wait()\nexcept nbddp.RunFailed as error:\n    print(error.rank, error.run is run)").text == "1 True\n"


# -- ends from outside


def recorded(folder, who):
    if who == "supervisor":
        return json.loads((folder / "supervisor.json").read_text())["process"][0]
    if who == "fork server":
        return json.loads((folder / "events/supervisor.jsonl").read_text().splitlines()[0])["data"]["fork_server"][0]
    return json.loads((folder / "events/rank-00001.0.jsonl").read_text().splitlines()[0])["data"]["process"][0]


@pytest.mark.parametrize(
    "who, rank, number, said",
    [
        ("rank", 1, 9, "rank 1 was killed by signal 9 (SIGKILL)"),
        ("supervisor", None, 9, "the supervisor of the run was killed by signal 9 (SIGKILL)"),
        ("fork server", None, None, "the process that starts the ranks was killed"),
    ],
)
def test_a_process_of_the_run_is_killed(nb, who, rank, number, said):
    cell = start(nb, f"net samples {ENDLESS}")
    began = time.monotonic()
    os.kill(recorded(run_folders(nb)[-1], who), signal.SIGKILL)
    nb.wait()
    assert time.monotonic() - began < AT_ONCE_S
    assert cell.error.ename == "WorkerLost"
    assert said in cell.error.traceback
    assert nb.eval("(run.error.rank, run.error.signal)") == (rank, number)


def test_a_rank_that_hangs_is_named(nb):
    body = ON_RANK_1.format(code="time.sleep(1000)")
    cell = nb.run(f"%%ddp_train net samples {ENDLESS} --hang-after-s 1{body}")
    assert since(nb) < 30  # a run on a busy machine has its pauses, ten times the longest of which are none
    assert cell.error.ename == "HangDetected"
    assert "rank 1 is in the phase " in cell.error.traceback
    assert nb.eval("run.error.rank") == 1


# -- a full disk, or a quota: here the size that a file may have


def test_the_disk_of_the_ranks_is_full(nb):
    full = """
import resource
def training_step(model, batch):
    Path("when").write_text(str(time.time()))
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    return step(model, batch)
"""
    cell = nb.run(f"%%ddp_train net samples {ENDLESS}{full}")
    assert since(nb) < AT_ONCE_S
    assert cell.error.ename == "WorkerLost"
    assert "could not write to the run directory: its disk is full, or over quota, or gone" in cell.error.traceback


# -- exceptions of the user's code, wherever it is called


def bad_dataset(nb):
    """Define a dataset whose samples can't be had, in a cell of its own; return that cell's number. The line is 5."""
    source = "class Bad(Dataset):\n    def __len__(self):\n        return 512\n    def __getitem__(self, i):\n        return [][i]\nbad = Bad()"
    return nb.run(source, check=True).execution_count


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_in_the_rank_or_in_a_loader_worker(nb, workers):
    number = bad_dataset(nb)
    cell = nb.run(f"%%ddp_train net bad -n 2 --batch-size 64 --num-workers {workers}\ntraining_step = step")
    assert cell.error.ename == "WorkerError"
    kind, rank, *place = error_of(nb)
    assert (kind, place) == ("WorkerError", [number, 5])
    assert rank in (0, 1)
    assert "IndexError: list index out of range" in cell.error.traceback
    assert nb.eval("run.error.type_name") == "IndexError"


@pytest.mark.parametrize(
    "line, body, at",
    [
        ("--epochs 1", "def collate_fn(items):\n    return 1 / 0\ntraining_step = step", 3),
        ("--epochs 1", "training_step = step\ndef optimizer(model):\n    return 1 / 0", 4),
        ("--epochs 1", "training_step = step\ndef scheduler(optimizer):\n    return 1 / 0", 4),
        ("--epochs 1 --val held_out", "training_step = step\ndef validation_step(model, batch):\n    return 1 / 0", 4),
        ("--epochs 1", "def helper():\n    return 1 / 0\n\ndef loss(output, target):\n    return helper()", 3),
        ("--epochs 1", "loss = lambda output, target: 1 / 0", 2),
    ],
    ids=["collate_fn", "optimizer", "scheduler", "validation_step", "helper of the body", "lambda"],
)
def test_a_hook(nb, line, body, at):
    cell = nb.run(f"%%ddp_train net samples -n 2 --batch-size 64 {line}\n{body}")
    kind, rank, *place = error_of(nb)
    assert (kind, place) == ("WorkerError", [cell.execution_count, at])
    assert rank in (0, 1)
    assert cell.error.traceback.rstrip().endswith(f"(Cell In[{cell.execution_count}], line {at})")
    assert "ZeroDivisionError: division by zero" in cell.error.traceback


def test_a_module_beside_the_notebook_is_named_with_its_line(nb):
    (nb.folder / "my_losses.py").write_text("def half(x):\n    y = x / 2\n    return y.nonsense\n")
    cell = nb.run(f"%%ddp_train net samples {ENDLESS}\nimport my_losses\ndef loss(output, target):\n    return my_losses.half(output)")
    assert error_of(nb)[2:] == (cell.execution_count, 4)
    assert re.search(r"^File \S*my_losses\.py:3, in half$", cell.error.traceback, re.MULTILINE)
    assert "return y.nonsense" in cell.error.traceback
    nb.run("import my_losses", check=True)
    cell = nb.run(f"%ddp_train net samples {ENDLESS} --loss 'lambda output, target: my_losses.half(output)'")
    assert "my_losses.py:3, in half" in cell.error.traceback


def test_what_can_not_be_rebuilt_on_the_rank(nb):
    number = nb.run(
        """class Fragile(TensorDataset):
    def __setstate__(self, state):
        raise ValueError("made on another machine")
fragile = Fragile(features, labels)""",
        check=True,
    ).execution_count
    cell = nb.run(f"%%ddp_train net fragile {ENDLESS}\ntraining_step = step")
    assert error_of(nb)[0] == "WorkerError"
    assert error_of(nb)[2:] == (number, 3)
    assert "ValueError: made on another machine" in cell.error.traceback
    assert "while fragile was rebuilt on the rank" in cell.error.traceback


def test_an_exception_that_can_not_be_described(nb):
    """Whatever its __str__ does, the run ends with rank and line."""
    body = """
class Odd(Exception):
    def __str__(self):
        raise RuntimeError("no words")
def training_step(model, batch):
    raise Odd
"""
    cell = nb.run(f"%%ddp_train net samples {ENDLESS}{body}")
    assert error_of(nb)[0] == "WorkerError"
    assert error_of(nb)[2:] == (cell.execution_count, 6)
    assert "Odd" in cell.error.traceback


def test_the_next_cell_trains_right_after_a_failure(nb):
    nb.run(f"%%ddp_train net samples {ENDLESS}\ndef loss(output, target):\n    return 1 / 0")
    assert nb.eval("run.state") == "failed"
    failed = nb.eval("run.id")
    nb.run("%%ddp_train net samples -n 2 --batch-size 64 --max-steps 3 --as good\ntraining_step = step", check=True)
    assert nb.eval("(good.state, run.id)") == ("finished", failed)
    nb.run("net.load_state_dict(before)", check=True)
