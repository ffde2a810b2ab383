"""What an exception from compiled code means: an error of the step, of the compiler, or of another rank. On a compiler that is quick, since it only traces."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nbddp.evaluation.errors import StepError
from nbddp.worker.compiled import CompiledStep, explained, in_compiled_code

COMPILE = torch.compile


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Trace with dynamo and run what was traced as it is."""
    monkeypatch.setattr(torch, "compile", lambda step, mode: COMPILE(step, backend="eager"))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def raised(call, *args):
    with pytest.raises(Exception) as caught:  # noqa: PT011 - which one is what the tests ask
        call(*args)
    return caught.value


def failing(text):
    """What torch raises where its backend does."""

    def backend(graph, inputs):
        raise RuntimeError(text)

    return raised(COMPILE(lambda x: x + 1, backend=backend), torch.ones(1))


BATCH = (torch.randn(4, 3), torch.randn(4, 2))


def test_metrics_inputs_are_left_out_and_scalars_need_no_gradient():
    def step(model, batch):
        output = model(batch[0])
        return {"loss": output.mean(), "output": output, "target": batch[1], "largest": output.max(), "number": 3}

    returned = CompiledStep(step, None)(nn.Linear(3, 2), BATCH)
    assert list(returned) == ["loss", "largest", "number"]
    assert (returned["loss"].requires_grad, returned["largest"].requires_grad, returned["number"]) == (True, False, 3)
    assert CompiledStep(lambda model, batch: model(batch[0]).sum(), None)(nn.Linear(3, 2), BATCH).requires_grad


def test_an_error_of_the_step_comes_from_its_own_line():
    def step(model, batch):
        return model(batch[1]).sum()  # of the wrong width

    error = raised(CompiledStep(step, None), nn.Linear(3, 2), BATCH)
    assert (type(error), "mat1 and mat2" in str(error)) == (RuntimeError, True)
    frames = []
    tb = error.__traceback__
    while tb is not None:
        frames.append((tb.tb_frame.f_code.co_name, tb.tb_lineno - tb.tb_frame.f_code.co_firstlineno))
        tb = tb.tb_next
    assert ("step", 1) in frames


def test_an_error_that_the_step_raises_stays_itself():
    calls = []

    def step(model, batch):
        calls.append(1)
        raise KeyError("mine")

    assert type(raised(CompiledStep(step, None), nn.Linear(3, 2), BATCH)) is KeyError
    assert len(calls) == 1  # it is not called again for what is known


@pytest.mark.parametrize(
    "text, said",
    [
        ("No working C++ compiler found in torch._inductor.config.cpp.cxx: (None, 'g++')", "found no C++ compiler: install one"),
        ("C++ compile error\nfatal error: Python.h: No such file or directory", "found no headers of Python"),
        ("OSError: [Errno 28] No space left on device: '/tmp/x'", "filled its disk: name a folder with space in --compile-cache-dir"),
        ("something else", "failed: backend='backend' raised:"),
    ],
)
def test_an_error_of_the_compiler_is_said_in_words_and_whole_in_the_log(text, said, capsys):
    error = failing(text)
    assert in_compiled_code(error)
    explanation = explained(error)
    assert isinstance(explanation, StepError)
    assert f"torch.compile {said}" in str(explanation)
    assert "without --compile the step runs as it is" in str(explanation)
    assert text.splitlines()[0] in capsys.readouterr().err


def test_a_compiler_that_fails_where_the_step_does_not(monkeypatch):
    broken = failing("broken")

    def compiled(*_):
        raise broken

    step = CompiledStep(lambda model, batch: model(batch[0]).sum(), None)
    monkeypatch.setattr(step, "_compiled", compiled)
    with pytest.raises(StepError, match=r"torch.compile failed: .*; the whole is in this rank's log; without --compile the step runs as it is"):
        step(nn.Linear(3, 2), BATCH)


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("no memory"), torch.distributed.DistBackendError("NCCL error"), RuntimeError("[../third_party/gloo/gloo/x.cc] Connection closed")],
)
def test_errors_of_memory_and_of_other_ranks_are_not_the_compiler_s(error):
    assert not in_compiled_code(error)
