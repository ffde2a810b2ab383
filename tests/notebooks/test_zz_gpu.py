"""Precision and compile on GPUs, through a cell; skipped where there is none. With two GPUs and more the ranks reduce by NCCL."""

from __future__ import annotations

import pytest

from support.example import EXAMPLE

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(300)]

LINE = "%%ddp_train net samples --val held_out --batch-size 64 --lr 1e-2 --epochs 4 -n 2 --devices cpu"
SAVED = "torch.load(Path(run.dir) / 'checkpoints/last.pt', weights_only=True)"
LOSS = "loss = nn.CrossEntropyLoss()"
SEEN = """
def training_step(model, batch):
    x, y = batch
    output = model(x)
    return {"loss": F.cross_entropy(output, y), "bytes_each": output.element_size(), "on_gpu": x.is_cuda}"""


@pytest.fixture(scope="module", autouse=True)
def example(shared_kernel):
    shared_kernel.run(EXAMPLE, check=True)


@pytest.fixture(autouse=True)
def before(nb):
    nb.run("torch.manual_seed(3)\nnet = make_net()\nbefore = weights(net)\nglobals().pop('run', None)", check=True)


def phases_add_up(nb):
    """Times come from events on the stream: none is negative, and together they are no more than the wall clock allows."""
    names = [f"{phase}_s" for phase in ("data", "forward", "backward", "sync", "optimizer")]
    assert nb.eval(f"all((run.history[name] >= 0).all() for name in {names})") is True
    assert nb.eval(f"float(sum(run.history[name].sum() for name in {names})) < run.duration_s") is True
    assert nb.eval("float(run.history['forward_s'].sum()) > 0") is True


@pytest.mark.parametrize("precision, size", [("fp32", 4), ("bf16", 2), ("fp16", 2)])
def test_every_precision_trains_on_the_gpu(nb, precision, size):
    nb.run(f"{LINE} --precision {precision} --clip-norm 1 --on-nan skip{SEEN}", timeout=120, check=True)
    assert nb.eval(f"set(run.history['bytes_each'].tolist()) == {{{float(size)}}} and set(run.history['on_gpu'].tolist()) == {{0.0}}") is True
    assert nb.eval("float(run.history['loss'][-4:].mean()) < 0.7 * float(run.history['loss'][0])") is True
    assert nb.eval("next(net.parameters()).dtype == torch.float32 and not same(weights(net), before)") is True
    assert nb.eval(f"{SAVED}['precision']") == precision
    phases_add_up(nb)


def test_auto_is_bf16_where_the_gpu_has_it(nb):
    expected = "fp32"
    nb.run(f"{LINE}\n{LOSS}", timeout=120, check=True)
    assert nb.eval(f"{SAVED}['precision']") == expected


@pytest.mark.parametrize("fused", ["", "--fused"])
def test_an_overflow_on_the_gpu_backs_off(nb, fused):
    nb.run(
        f"""{LINE} --precision fp16 {fused}
calls = []
def training_step(model, batch):
    calls.append(1)
    loss = F.cross_entropy(model(batch[0]), batch[1])
    if len(calls) == 3:
        loss.register_hook(lambda gradient: gradient * float("inf"))
    return loss""",
        timeout=120,
        check=True,
    )
    assert nb.eval(f"{SAVED}['scaler']['scale']") <= 2.0**15
    assert nb.eval("all(bool(value.isfinite().all()) for value in net.state_dict().values())") is True


@pytest.mark.parametrize("options", ["", "--compile-mode reduce-overhead", "--precision bf16 --accumulate 2", "--compile-mode reduce-overhead --accumulate 2"])
def test_a_compiled_step_follows_the_curve_of_the_eager_one(nb, options):
    eager = " ".join(part for part in options.replace("--compile-mode reduce-overhead", "").split())
    nb.run(f"{LINE} --optimizer sgd {eager}\n{LOSS}\n", timeout=120, check=True)
    nb.run("expected = run.history['loss']\nnet = make_net()\nnet.load_state_dict(before)", check=True)
    nb.run(f"{LINE} --optimizer sgd --compile {options}\n{LOSS}", timeout=280, check=True)
    tolerance = 3e-2 if "bf16" in options else 1e-3
    assert nb.eval(f"bool(np.allclose(run.history['loss'], expected, rtol={tolerance}))") is True
    assert nb.eval("list(net.state_dict()) == list(before)") is True


def test_the_ranks_of_several_gpus_reduce_by_nccl(nb):
    if nb.eval("torch.cuda.device_count()") < 2:
        pytest.skip("one GPU")
    nb.run(f"{LINE} -n 2 --precision fp16 --compile --grad-compression bf16\n{LOSS}", timeout=280, check=True)
    assert "backend=nccl" in nb.eval("run.log(rank=1)")
    assert nb.eval("float(run.history['loss'][-4:].mean()) < 0.7 * float(run.history['loss'][0])") is True
