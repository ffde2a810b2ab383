"""Steps through torch.compile on real ranks."""

from __future__ import annotations

import linecache
import signal
import subprocess
import sys
import time
from datetime import timedelta

import numpy as np
import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import nbddp
from nbddp.evaluation.errors import StepError
from support import processes

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]  # compilers take their time on a busy machine

N, FEATURES = 48, 5


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """One folder for all tests: what one has compiled, the next finds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        yield


def make():
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 2))
    x, y = torch.randn(N, FEATURES), torch.randn(N, 2)
    return net, TensorDataset(x, y), TensorDataset(x[:13], y[:13])


def mse(model, batch):
    x, y = batch
    output = model(x)
    return {"loss": nn.functional.mse_loss(output, y), "output": output, "target": y, "largest": (output - y).abs().max()}


def run(training, nproc, step=mse, model=make, hooks=None, **options):
    options = {"epochs": 2, "batch_size": 12, "lr": 0.05, **options}
    return training(nproc, model, {"training_step": step, **(hooks or {})}, timeout=110, **options)


def assert_alike(one, other, rtol=1e-4):
    np.testing.assert_allclose(other.history["loss"], one.history["loss"], rtol=rtol)
    assert list(one.weights[0]) == list(other.weights[0])
    for weights in other.weights:
        for name, value in weights.items():
            np.testing.assert_array_equal(value, other.weights[0][name], err_msg=name)
            np.testing.assert_allclose(value, one.weights[0][name], rtol=rtol * 10, atol=1e-4, err_msg=name)


def messages(result, word=""):
    return [event.data["text"] for event in result.of_kind("message") if word in event.data["text"]]


@pytest.mark.parametrize("nproc", [1, 2])
def test_the_curve_is_the_eager_one(training, nproc):
    eager = run(training, nproc)
    compiled = run(training, nproc, compile=True)
    assert_alike(eager, compiled)
    np.testing.assert_allclose(compiled.history["largest"], eager.history["largest"], rtol=1e-4)
    np.testing.assert_allclose(compiled.epochs["val_loss"], eager.epochs["val_loss"], rtol=1e-4)
    phases = [event.data["phase"] for event in compiled.of_kind("phase")]
    assert phases[:2] == ["compiling", "training"]
    assert "compiling" not in phases[1:]
    assert "compiling" not in [event.data["phase"] for event in eager.of_kind("phase")]
    assert len(messages(compiled, "compiled in")) == 1
    assert list(torch.load(compiled.run.checkpoints / "last.pt", weights_only=True)["model"]) == list(make()[0].state_dict())


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate": 2},
        {"find_unused_parameters": True},
        {"static_graph": True, "accumulate": 2},
        {"bucket_cap_mb": 0.0001},
        {"gradient_as_bucket_view": False, "clip_norm": 0.1, "on_nan": "skip"},
        {"grad_compression": "bf16"},
        {"num_workers": 2},
    ],
    ids=str,
)
def test_with_other_options_too(training, options):
    assert_alike(run(training, 2, **options), run(training, 2, compile=True, **options))


@pytest.mark.parametrize("precision, rtol", [("bf16", 0.03), ("fp16", 0.01)])
def test_with_autocast_too(training, precision, rtol):
    def seen(model, batch):
        x, y = batch
        output = model(x)
        return {"loss": nn.functional.mse_loss(output, y) / 16, "width": float(output.dtype.itemsize)}

    compiled = run(training, 2, seen, precision=precision, compile=True)
    np.testing.assert_allclose(compiled.history["loss"], run(training, 2, seen, precision=precision).history["loss"], rtol=rtol)
    assert set(compiled.history["width"]) == {2.0}


def test_own_weights_and_plain_numbers_in_the_dict(training):
    def weighted(model, batch):
        x, y = batch
        kept = y[:, 0] > -0.5
        errors = ((model(x) - y) ** 2).mean(dim=1) * kept
        return {"loss": errors.sum() / kept.sum(), "weight": kept.sum(), "kept": kept.float().mean(), "samples_here": len(x), "flag": True}

    eager, compiled = run(training, 2, weighted, accumulate=2), run(training, 2, weighted, accumulate=2, compile=True)
    assert_alike(eager, compiled)
    for name in ("kept", "samples_here", "flag"):
        np.testing.assert_allclose(compiled.history[name], eager.history[name], rtol=1e-6)


class Several(nn.Module):
    """What is called is not forward; one part may stay unused; a buffer and a number change with every call."""

    def __init__(self, spare=False):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.spare = nn.Linear(3, 3) if spare else None
        self.calls = 0

    def log_prob(self, x, y):
        return -((self.head(torch.tanh(self.norm(self.body(x)))) - y) ** 2).mean()


def several(spare=False):
    def build():
        torch.manual_seed(5)
        net = Several(spare)
        return net, make()[1], None

    return build


def nll(model, batch):
    return -model.log_prob(*batch)


def test_methods_other_than_forward_are_compiled_and_synchronised(training):
    def seen(model, batch):
        return {"loss": nll(model, batch), "compiling": float(torch.compiler.is_compiling())}

    options = {"optimizer": "sgd"}  # AdamW moves a bias before a norm, whose gradient is rounding alone, by as much as any other
    eager, compiled = run(training, 2, nll, several(), **options), run(training, 2, seen, several(), compile=True, **options)
    np.testing.assert_allclose(compiled.history["loss"], eager.history["loss"], rtol=1e-4)
    assert set(compiled.history["compiling"]) == {1.0}
    assert compiled.weights[0]["norm.num_batches_tracked"] == eager.weights[0]["norm.num_batches_tracked"] == 8
    np.testing.assert_allclose(compiled.weights[0]["norm.running_mean"], eager.weights[0]["norm.running_mean"], rtol=1e-3, atol=1e-5)


def test_unused_parameters_with_the_option(training):
    options = {"find_unused_parameters": True, "optimizer": "sgd"}
    assert_alike(run(training, 2, nll, several(spare=True), **options), run(training, 2, nll, several(spare=True), compile=True, **options))


def test_validation_is_eager(training):
    def seen(model, batch):
        x, y = batch
        return {"loss": nn.functional.mse_loss(model(x), y), "compiling": float(torch.compiler.is_compiling())}

    result = run(training, 1, seen, compile=True)
    assert set(result.history["compiling"]) == {1.0}
    assert set(result.epochs["val_compiling"]) == {0.0}


def wide():
    """Gradients of 2.5 MB: three buckets of 1 MB."""
    torch.manual_seed(5)
    layers = [nn.Linear(FEATURES, 400), nn.Tanh(), *(layer for _ in range(4) for layer in (nn.Linear(400, 400), nn.Tanh())), nn.Linear(400, 2)]
    return nn.Sequential(*layers), make()[1], None


def test_the_backward_pass_is_cut_where_the_buckets_of_ddp_end(ranks, tmp_path):
    """Else the first all-reduce would begin when the last gradient is there."""
    from nbddp.rundir import RunDir

    def graphs(rank, path, options):
        from torch._dynamo.utils import counters

        from support.training import train_rank

        train_rank(rank, path, wide, {"training_step": nll_of}, options, {})
        return counters["aot_autograd"]["total"]

    def nll_of(model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    for nproc, cap, expected in ((1, 1.0, 1), (2, 1.0, 3), (2, 25.0, 2), (2, 0.5, 1)):  # the first bucket is of 1 MB always
        path = str(RunDir.create(tmp_path / f"{nproc}-{cap}", "test").path)
        options = {"max_steps": 2, "batch_size": 12, "compile": True, "bucket_cap_mb": cap}
        assert ranks(nproc, graphs, path, options, timeout=110) == [expected] * nproc


def test_a_cut_step_follows_the_curve(training):
    options = {"optimizer": "sgd", "bucket_cap_mb": 1.0, "model": wide}
    assert_alike(run(training, 2, **options), run(training, 2, compile=True, **options))


def test_activation_checkpointing_inside(training):
    from torch.utils.checkpoint import checkpoint

    def step(model, batch):
        x, y = batch
        hidden = checkpoint(lambda z: model[:6](z), x, use_reentrant=False)
        return nn.functional.mse_loss(model[6:](hidden), y)

    options = {"optimizer": "sgd", "bucket_cap_mb": 1.0, "model": wide}
    assert_alike(run(training, 2, **options), run(training, 2, step, compile=True, **options))


# -- the phase leaves nothing behind


class Noisy(torch.utils.data.Dataset):
    """Samples with noise of the rank's streams: whoever draws from these elsewhere changes the curve."""

    def __len__(self):
        return N

    def __getitem__(self, index):
        x = torch.full((FEATURES,), index / N) + 0.1 * torch.randn(FEATURES) + 0.1 * float(np.random.rand())
        return x, x[:2] * 2


def test_random_streams_buffers_and_counters_are_as_without_it(training):
    def counted(model, batch):
        model.calls += 1
        return {"loss": nll(model, batch), "calls": model.calls}

    def build():
        torch.manual_seed(5)
        return Several(), Noisy(), None

    eager, compiled = run(training, 2, counted, build), run(training, 2, counted, build, compile=True)
    np.testing.assert_allclose(compiled.history["loss"], eager.history["loss"], rtol=1e-4)
    assert compiled.history["calls"].tolist() == eager.history["calls"].tolist() == list(range(1, 9))
    assert compiled.weights[0]["norm.num_batches_tracked"] == 8


def test_a_run_that_goes_on_has_the_bits_of_one_that_was_not_interrupted(training):
    options = {"compile": True, "precision": "bf16", "accumulate": 2}
    whole, half = run(training, 2, **options), run(training, 2, **options, max_steps=3)
    rest = run(training, 2, **options, resume=half.run.checkpoints / "last.pt")
    for name, value in whole.weights[0].items():
        np.testing.assert_array_equal(rest.weights[0][name], value)


# -- time


class Sleeps:
    """A step whose first call takes long on one rank."""

    def __init__(self, seconds, *, deaf=False):
        self.seconds, self.deaf, self.called = seconds, deaf, False

    def __call__(self, model, batch):
        if not self.called and torch.distributed.get_rank() == 1:
            self.called = True
            if self.deaf:
                signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
            time.sleep(self.seconds)
        return nn.functional.mse_loss(model(batch[0]), batch[1])


@pytest.fixture
def warm(training):
    """What the ranks compile below is there already: what takes long is the sleep."""
    run(training, 2, Sleeps(0), compile=True, max_steps=1)


@pytest.mark.usefixtures("warm")
def test_a_rank_that_is_not_done_in_time_says_so(training):
    with pytest.raises(StepError, match=r"compiling took longer than compile_timeout_s=25 s on rank 1: raise --compile-timeout-s, or leave --compile out"):
        run(training, 2, Sleeps(100), compile=True, compile_timeout_s=25)


@pytest.mark.usefixtures("warm")
def test_of_a_rank_that_can_not_say_so_the_others_do(training):
    with pytest.raises(StepError, match="compile_timeout_s=25 s on rank 1"):
        run(training, 2, Sleeps(100, deaf=True), compile=True, compile_timeout_s=25)


def test_a_rank_that_is_done_does_not_wait_in_a_collective(training):
    def impatient():
        torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=10))
        return make()

    result = run(training, 2, Sleeps(20), impatient, compile=True)
    assert len(result.history["loss"]) == 8


# -- what is compiled again


def ragged(samples):
    """Batches of lengths that change from step to step."""
    x, y = (torch.stack(part) for part in zip(*samples, strict=True))
    return x.repeat(1 + int(x[0, 0] > 0), 1), y.repeat(1 + int(x[0, 0] > 0), 1)


def test_what_is_compiled_again_is_counted_and_said_once(training):
    result = run(training, 2, hooks={"collate_fn": ragged}, compile=True, epochs=4)
    (said,) = messages(result, "compiled again")
    assert "Batches of one shape" in said
    eager = run(training, 2, hooks={"collate_fn": ragged}, epochs=4)
    np.testing.assert_allclose(result.history["loss"], eager.history["loss"], rtol=1e-3)


def test_each_stage_is_compiled_for_what_trains_in_it(training):
    def hooks():
        return {"stages": [nbddp.Stage("head", freeze="0.*"), nbddp.Stage("all", batch_size=16), nbddp.Stage("again", batch_size=16)]}

    options = {"epochs": 1, "optimizer": "sgd"}
    eager, compiled = run(training, 2, hooks=hooks(), **options), run(training, 2, hooks=hooks(), compile=True, **options)
    assert_alike(eager, compiled)
    said = messages(compiled, "compiled in")
    assert [text.rpartition(" ")[2] for text in said] == ["head", "all", "again"]
    assert float(said[2].split()[2]) < 2  # nothing has changed
    assert messages(compiled, "compiled again") == []


# -- errors


def failure_of(ranks, step, **options):
    """What a rank would write down of the exception that a run ends with."""

    def rank_main(rank, path, make, hooks, options):
        from nbddp.worker.failure import failure_record
        from support.training import train_rank

        try:
            train_rank(rank, path, make, hooks, options, {})
        except Exception as error:  # noqa: BLE001 - as the worker does
            return failure_record(error, {}, "")
        return None

    return rank_main


def test_errors_of_the_step_have_its_line(ranks, tmp_path):
    from nbddp.rundir import RunDir

    def wrong_shapes(model, batch):
        x, y = batch
        return nn.functional.mse_loss(model(x[:, 1:]), y)  # here

    def late(model, batch):
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        if float(loss) < 0.9:
            raise KeyError("too good")  # here
        return loss

    options = {"epochs": 20, "batch_size": 12, "lr": 0.05, "compile": True}
    for step, name, text in ((wrong_shapes, "RuntimeError", "mat1 and mat2"), (late, "KeyError", "too good")):
        path = RunDir.create(tmp_path / step.__name__, "test").path
        (record,) = ranks(1, failure_of(ranks, step), str(path), make, {"training_step": step}, options, timeout=110)
        assert (record["type"], record["file"]) == (name, "<dynamic-code>")  # as cloudpickle names what a test sends
        assert text in record["message"]
        assert linecache.getline(__file__, record["line"]).endswith("# here\n")


def test_without_a_compiler_the_remedy_is_named(training, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "/nonexistent/g++")
    with pytest.raises(StepError, match=r"torch.compile found no C\+\+ compiler: install one .* without --compile the step runs as it is"):
        run(training, 1, compile=True)


def test_a_cache_folder_that_can_not_be_made_is_refused(training, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StepError, match=r"compile_cache_dir=.*file: .*; it must be a folder that can be written to"):
        run(training, 1, compile=True, compile_cache_dir=str(tmp_path / "file"))


# -- the cache


def test_each_rank_keeps_what_it_compiled_for_the_next_run(training, tmp_path):
    def compiled():
        run(training, 2, compile=True, compile_cache_dir=str(tmp_path / "kept"))
        return sorted(path for path in (tmp_path / "kept").rglob("*.so"))

    first = compiled()
    assert {path.relative_to(tmp_path / "kept").parts[0] for path in first} == {"rank-0", "rank-1"}
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "kept").iterdir())
    changed = {path: path.stat().st_mtime_ns for path in first}
    assert {path: path.stat().st_mtime_ns for path in compiled()} == changed


# -- processes


HELPERS = """
import os, time
import torch._inductor.config as inductor
inductor.compile_threads = 2
from torch._inductor.async_compile import AsyncCompile
print(AsyncCompile.process_pool().submit(os.getpid).result(), flush=True)
time.sleep(100)
"""


def test_the_compiler_s_helpers_end_with_the_process_that_they_help():
    """Those of GPUs; on the CPU it uses threads. A rank that is killed can't end them."""
    with subprocess.Popen([sys.executable, "-c", HELPERS], stdout=subprocess.PIPE, text=True) as rank:
        try:
            helper = psutil.Process(int(rank.stdout.readline()))
            helpers = set(psutil.Process(rank.pid).children(recursive=True))
            assert helper in helpers
        finally:
            rank.kill()
    assert not processes.gone(lambda: processes.alive(helpers), 10)
