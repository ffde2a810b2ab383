"""What a rank writes down about the exception that ended it: place, traceback, kind."""

from __future__ import annotations

import os
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from nbddp.bundle import CellSource
from nbddp.contents import EVENTS, MESSAGE_LETTERS, TRACEBACK_LETTERS
from nbddp.evaluation.errors import StepError
from nbddp.evaluation.step import step_from_loss
from nbddp.worker.errors import ReplicasDiffer
from nbddp.worker.failure import failure_record, is_collective, shortened
from nbddp.worker.trace import render

CELL = "/tmp/ipykernel_1/2345.py"
SOURCE = """%%ddp_train net data
def training_step(model, batch):
    x = batch[0]
    y = [x, x * 2]
    name = "x"
    return helper(x)
def helper(values):
    scale = 2
    return values @ values  # line 9
"""


def cells(source=SOURCE, number=7):
    return {CELL: CellSource(number, source)}


def raised(function, *args):
    try:
        function(*args)
    except BaseException as error:  # noqa: BLE001 - whatever the test raises
        return error.with_traceback(error.__traceback__.tb_next)  # without this function
    pytest.fail("nothing was raised")


def cell_error(source, call, *args):
    """The exception of a function of a cell; the magic's own line is a comment to Python."""
    space = {"torch": torch, "sys": sys}
    exec(compile(source.replace("%%", "# "), CELL, "exec"), space)
    return raised(space[call], *args)


def test_the_failing_line_of_a_cell_is_found_marked_and_its_tensors_listed():
    error = cell_error(SOURCE, "training_step", None, [torch.ones(2, 3)])
    record = failure_record(error, cells(), "forward")
    assert (record["type"], record["cell"], record["line"], record["file"], record["phase"]) == ("RuntimeError", 7, 9, CELL, "forward")
    assert "mat1 and mat2 shapes cannot be multiplied" in record["message"]
    assert not any(record[kind] for kind in ("collective", "oom", "replicas"))
    assert record["exit_code"] is None
    lines = record["traceback"].splitlines()
    assert lines[:6] == [
        "Cell In[7], line 6, in training_step",
        "        4     y = [x, x * 2]",
        '        5     name = "x"',
        "---->   6     return helper(x)",
        "        7 def helper(values):",
        "        8     scale = 2",
    ]
    assert "Cell In[7], line 9, in helper" in lines
    assert "---->   9     return values @ values  # line 9" in lines
    assert lines[-2:] == ["tensors in helper:", "    values: (2, 3) float32 cpu"]
    assert not any("test_worker_failure" in line and "File" in line and "nbddp/" in line for line in lines)


def test_a_loss_that_meets_wrong_shapes_shows_the_tensors_of_the_step():
    step = step_from_loss(nn.CrossEntropyLoss())
    text = render(raised(step, nn.Linear(4, 3), [torch.zeros(5, 4), torch.zeros(6, dtype=torch.int64)]), {})
    assert "    output: (5, 3) float32 cpu" in text
    assert "    target: (6,) int64 cpu" in text


def test_lists_of_tensors_are_listed_too_and_a_cell_may_have_no_number():
    source = (
        "def training_step(model, batch):\n    many = [torch.ones(1)] * 5\n    pair = (torch.ones(2), torch.ones(3, dtype=torch.int64))\n    raise KeyError\n"
    )
    record = failure_record(cell_error(source, "training_step", None, None), cells(source, None), "forward")
    assert (record["cell"], record["line"], record["message"]) == (None, 4, "")
    assert "Cell, line 4, in training_step" in record["traceback"]
    assert "    many: [(1,) float32 cpu, (1,) float32 cpu, (1,) float32 cpu, (1,) float32 cpu, ...]" in record["traceback"]
    assert "    pair: [(2,) float32 cpu, (3,) int64 cpu]" in record["traceback"]


def test_without_a_cell_the_line_is_that_of_the_users_file(tmp_path):
    path = tmp_path / "helper.py"
    path.write_text("def step():\n    return 1 / 0\n")
    space = {}
    exec(compile(path.read_text(), str(path), "exec"), space)
    record = failure_record(raised(space["step"]), cells(), "forward")
    assert (record["cell"], record["file"], record["line"]) == (None, str(path), 2)
    assert f"File {path}:2, in step" in record["traceback"]
    assert "return 1 / 0" in record["traceback"]


def test_the_cell_counts_although_a_library_raised_further_in():
    source = "def training_step(model, batch):\n    return torch.nn.functional.linear(batch, torch.ones(2, 'x'))\n"
    record = failure_record(cell_error(source, "training_step", None, torch.ones(1)), cells(source), "forward")
    assert (record["cell"], record["line"]) == (7, 2)


def test_causes_come_first_and_each_with_its_lines():
    source = "def inner():\n    return {}['k']\ndef step():\n    try:\n        inner()\n    except KeyError as e:\n        raise ValueError('no k') from e\n"
    text = render(cell_error(source, "step"), cells(source))
    assert text.index("KeyError: 'k'") < text.index("The above exception led to:") < text.index("ValueError: no k")
    assert "line 2, in inner" in text
    suppressed = render(cell_error(source.replace("from e", "from None"), "step"), cells(source))
    assert "KeyError: 'k'" not in suppressed


@pytest.mark.parametrize("code, exit_code, shown", [(0, 0, "0"), (3, 3, "3"), (None, 0, ""), ("bye", 1, "'bye'")])
def test_exits_are_told_by_their_code_and_line(code, exit_code, shown):
    source = f"def training_step(model, batch):\n    sys.exit({code!r})\n"
    record = failure_record(cell_error(source, "training_step", None, None), cells(source), "forward")
    assert (record["exit_code"], record["message"], record["line"]) == (exit_code, f"the step called sys.exit({shown})", 2)
    assert record["type"] == "SystemExit"


def test_an_exception_that_cannot_be_printed_is_written_down_all_the_same():
    source = "class Odd(Exception):\n    def __str__(self):\n        raise ZeroDivisionError\ndef training_step(model, batch):\n    raise Odd\n"
    record = failure_record(cell_error(source, "training_step", None, None), cells(source), "forward")
    assert (record["type"], record["line"]) == ("Odd", 5)
    assert "__str__ of Odd fails" in record["message"]


def test_endless_recursion_is_cut_to_its_end():
    source = "def training_step(model, batch):\n    return training_step(model, batch)\n"
    text = render(cell_error(source, "training_step", None, None), cells(source))
    assert text.count("Cell In[7], line 2") <= 12
    assert "RecursionError" in text


def test_a_syntax_error_of_evaluated_code_has_its_place():
    error = raised(compile, "x = (\n", CELL, "exec")
    record = failure_record(error, cells(), "loading")
    assert (record["type"], record["cell"], record["line"]) == ("SyntaxError", 7, 1)


def test_errors_of_our_own_rules_come_without_what_led_to_them():
    def step():
        try:
            raise RuntimeError("torch's long story")
        except RuntimeError:
            message = "the step does not use a.weight"
            raise StepError(message)  # noqa: B904 - what is tested

    assert "long story" not in render(raised(step), {})


def test_replicas_that_differ_are_about_a_rank():
    record = failure_record(ReplicasDiffer(3, "a", 1), {}, "checkpoint")
    assert (record["replicas"], record["about_rank"], record["collective"]) == (True, 3, False)


class Broken(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return BROKEN["get"](index)


BROKEN = {}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_of_the_notebook_that_raises_in_a_loader_worker_has_cell_and_line(workers):
    source = "# a cell\ndef get(index):\n    table = {0: 1}\n    return table[index]\n"
    space = {}
    exec(compile(source, CELL, "exec"), space)
    BROKEN["get"] = space["get"]
    loader = DataLoader(Broken(), num_workers=workers, multiprocessing_context="fork" if workers else None)
    error = raised(list, loader)
    record = failure_record(error, cells(source), "data")
    assert (record["type"], record["cell"], record["line"]) == ("KeyError", 7, 4)
    assert record["message"] == ("1 (in loader worker 0 of this rank)" if workers else "1")
    assert "Cell In[7], line 4, in get" in record["traceback"]
    assert "---->   4     return table[index]" in record["traceback"]
    assert record["traceback"].splitlines()[-1] == f"KeyError: {record['message']}"
    assert "_worker_loop" not in record["traceback"]
    error.with_traceback(None)  # its frames hold the loader, and that its workers


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234"


def in_torch(text):
    """An error that torch raised within a call of the user's code."""
    space = {"text": text}
    exec(compile("def call():\n    raise RuntimeError(text)\n", os.path.join(os.path.dirname(torch.__file__), "fake.py"), "exec"), space)  # noqa: PTH118, PTH120
    return raised(space["call"])


def in_user_code(text):
    source = f"def training_step():\n    raise RuntimeError({text!r})\n"
    return cell_error(source, "training_step")


@pytest.mark.parametrize(
    "error, collective",
    [
        (in_torch(GLOO), True),
        (in_user_code(GLOO), True),
        (in_torch("Connection reset by peer"), True),
        (in_torch("Timed out waiting 1800000ms for recv operation to complete"), True),
        (in_torch("NCCL error in: ProcessGroupNCCL.cpp:1234"), True),
        (in_user_code("Connection reset by peer"), False),
        (in_user_code("a gloomy day"), False),
        (in_torch("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError(GLOO), False),
        (torch.distributed.DistNetworkError("x"), True),
        (torch.distributed.DistBackendError("x"), True),
        (ReplicasDiffer(1, "gloo/", 1), False),
    ],
    ids=str,
)
def test_errors_of_a_collective_are_told_from_those_of_the_user(error, collective):
    assert is_collective(error) is collective


def test_a_loader_worker_that_was_killed_is_nobodys_line():
    """torch raises in a signal handler, wherever the rank is."""
    code = compile("raise RuntimeError('DataLoader worker (pid 7) is killed by signal: Killed. ')", CELL, "exec")
    record = failure_record(raised(exec, code, {}), cells(), "forward")
    assert (record["cell"], record["line"]) == (None, None)
    assert record["message"].startswith("DataLoader worker (pid 7) is killed by signal: Killed; if memory was short")


def test_a_stop_iteration_in_a_generator_of_ours_has_its_line():
    code = compile("\n\nraise StopIteration", CELL, "exec")

    def ours():
        exec(code, {})
        yield

    error = raised(next, ours())
    error.__traceback__ = None  # as if only our frames were there
    record = failure_record(error, cells(), "data")
    assert (record["type"], record["cell"], record["line"]) == ("RuntimeError", 7, 3)


def test_of_a_long_message_head_and_tail_are_written_down_and_the_log_has_the_whole(tmp_path):
    source = "def training_step(model, batch):\n    raise ValueError('begin ' + 'x' * 200_000 + '\\n' * 3000 + ' end')\n"
    record = failure_record(cell_error(source, "training_step", None, None), cells(source), "forward")
    assert len(record["traceback"]) > 200_000
    short = shortened(record, tmp_path / "logs" / "rank-00003.log")
    for name, letters in (("message", MESSAGE_LETTERS), ("traceback", TRACEBACK_LETTERS)):
        assert len(short[name]) < letters
        assert " characters left out, whole in logs/rank-00003.log ..." in short[name]
        assert short[name].endswith(" end")
    assert short["message"].startswith("begin x")
    assert {**record, "message": short["message"], "traceback": short["traceback"]} == short
    assert EVENTS["failed"].take(short) == short, "nothing more is left out where it is read"
