"""`nbddp.autocast`: what it computes in, what it understands, and what it leaves alone."""

from __future__ import annotations

import pytest
import torch

import nbddp
from nbddp import ConfigError
from nbddp.precision import autocast_context, read_device

CPU = torch.device("cpu")


def product(dtype=torch.float32):
    x = torch.full((4, 4), 1.001, dtype=dtype)
    return x @ x


@pytest.mark.parametrize(
    "precision, dtype",
    [
        *[(word, torch.bfloat16) for word in ("bf16", "bf16-mixed", "BF16", torch.bfloat16)],
        *[(word, torch.float16) for word in ("fp16", "16-mixed", 16, torch.float16)],
        *[(word, torch.float32) for word in ("fp32", "32-true", 32, "no", torch.float32, "auto")],
    ],
)
def test_products_are_in_the_precision_as_in_a_run(precision, dtype):
    with nbddp.autocast(precision, "cpu") as context:
        inside = product()
    assert inside.dtype is dtype
    with autocast_context(context.precision, CPU):
        assert torch.equal(inside, product())
    assert product().dtype is torch.float32


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_float64_and_complex_are_left_alone(precision, dtype):
    with nbddp.autocast(precision, "cpu"):
        assert torch.equal(product(dtype), inside := product(dtype))
        assert inside.dtype is dtype


def test_fp32_holds_within_an_autocast_of_torch_and_what_was_there_comes_back():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with nbddp.autocast("fp32", "cpu"):
            assert product().dtype is torch.float32
        assert product().dtype is torch.bfloat16


def test_one_object_is_entered_again_within_itself_and_after_an_error():
    context = nbddp.autocast("bf16", "cpu")
    with context, context:
        assert product().dtype is torch.bfloat16
    with pytest.raises(ZeroDivisionError), context:
        1 / 0  # noqa: B018 - the error is what is tested
    assert product().dtype is torch.float32
    assert repr(context) == "nbddp.autocast('bf16', 'cpu')"


def test_as_a_decorator_each_call_has_its_context():
    @nbddp.autocast("bf16", "cpu")
    def called(depth, *, dtype=torch.float32):
        "Its own words."
        return called(depth - 1) if depth else product(dtype)

    assert called(2).dtype is torch.bfloat16
    assert called(0, dtype=torch.float64).dtype is torch.float64
    assert (called.__name__, called.__doc__) == ("called", "Its own words.")
    assert product().dtype is torch.float32


def test_gradients_and_modes_are_not_its_business():
    with nbddp.autocast("bf16", "cpu"):
        assert torch.nn.Linear(2, 2)(torch.ones(1, 2)).requires_grad


@pytest.mark.parametrize(
    "precision, message",
    [
        ("fp8", "precision=fp8 must be one of auto, bf16, fp16, fp32"),
        ("bf61", "precision=bf61 must be one of .* Did you mean bf16"),
        (torch.float64, "precision=float64 is the model's own matter: net.double"),
        (torch.int64, "precision=int64 must be one of"),
        (None, "precision=None must be one of"),
    ],
)
def test_other_precisions_are_refused_before_anything_runs(precision, message):
    with pytest.raises(ConfigError, match=message):
        nbddp.autocast(precision, "cpu")


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "meta", True, 1.0, -1, [0]])
def test_other_devices_are_refused(device):
    with pytest.raises(ConfigError, match=r"device=.* must be cpu, cuda, cuda:0, a torch.device of one of them, or the index of a GPU"):
        nbddp.autocast("bf16", device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without GPUs")
@pytest.mark.parametrize("device", ["cuda", 0, "cuda:3", torch.device("cuda", 1)])
def test_a_gpu_that_is_not_there_is_an_error_and_no_warning(device):
    with pytest.raises(ConfigError, match=r"device=.*: this machine has no visible GPU; use device='cpu'"):
        nbddp.autocast("bf16", device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without GPUs")
def test_by_default_it_is_for_the_cpu_where_there_is_no_gpu():
    assert read_device(None) == CPU
    assert nbddp.autocast("auto").precision == "fp32"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_by_default_it_is_for_the_gpu_and_auto_is_what_it_computes_in_natively():
    context = nbddp.autocast()
    assert context.device == torch.device("cuda", torch.cuda.current_device())
    assert context.precision == ("bf16" if torch.cuda.get_device_capability()[0] >= 8 else "fp32")
    x = torch.ones(4, 4, device="cuda")
    with nbddp.autocast("fp16", 0):
        assert (x @ x).dtype is torch.float16
    with pytest.raises(ConfigError, match=rf"device={torch.cuda.device_count()}: the visible GPUs are 0"):
        nbddp.autocast("bf16", torch.cuda.device_count())


def test_functions_that_go_on_after_they_have_returned_are_refused():
    async def later(x):
        return x @ x

    def one_by_one(x):
        yield x @ x

    async def both(x):
        yield x @ x

    for function in (later, one_by_one, both):
        with pytest.raises(ConfigError, match=f"{function.__name__} runs on after it has returned, outside of the context: write `with nbddp.autocast"):
            nbddp.autocast("bf16")(function)


def test_what_can_not_be_called_is_not_decorated():
    with pytest.raises(ConfigError, match=r"nbddp\.autocast\('bf16'\) decorates a function, not a int"):
        nbddp.autocast("bf16")(3)
    with pytest.raises(ConfigError, match=r'takes a precision first, as in @nbddp\.autocast\("bf16"\), not a function'):
        nbddp.autocast(lambda x: x)
