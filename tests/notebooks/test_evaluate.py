"""`run.evaluate` and `run.predict`: the numbers of the run's own validation, in the kernel that trained and in one that never saw the notebook."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.kernel

DEFINE = """
import random, torchmetrics
labels = (X[:, 0] > 0).long() + (X[:, 1] > 0).long()
train_part, val_part = TensorDataset(X[:48], labels[:48]), TensorDataset(X[47:64], labels[47:64])

class Within(nbddp.Metric):
    def __init__(self, bound):
        self.bound = bound
        self.add_state("hits", 0)
        self.add_state("p", [], "cat")

    def update(self, output, target):
        p = output.softmax(1).gather(1, target[:, None])[:, 0]
        self.hits += (p > self.bound).sum()
        self.p.append(p)

    def compute(self):
        return {"hits": self.hits, "median": self.p.median()}

def correct(output, target):
    return output.argmax(1) == target

def make(dtype=torch.float32):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3)).to(dtype)

def differs(found, recorded, epoch=-1):
    "The largest relative difference from what the run recorded, of the same names."
    names = [name for name in recorded if name.startswith("val_")]
    assert sorted(names) == sorted(found), (names, found)
    return float(max(abs(found[name] - recorded[name][epoch]) / max(1e-3, abs(recorded[name][epoch])) for name in names))

def streams():
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist(), np.random.get_state()[2]

def unchanged(call, model):
    "What `call` returns; an error where it changed the model, a random stream, or one of torch's defaults."
    def now():
        modes = [module.training for module in model.modules()]
        return streams(), modes, torch.get_default_dtype(), torch.get_float32_matmul_precision(), torch.is_grad_enabled()
    weights, before = copy.deepcopy(model.state_dict()), now()
    value = call()
    assert now() == before
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    return value
"""

METRICS = """
metrics = {
    "correct": correct,
    "within": Within(0.4),
    "f1": torchmetrics.F1Score(task="multiclass", num_classes=3, average="macro"),
    "auroc": torchmetrics.AUROC(task="multiclass", num_classes=3),
}
"""

LOSS = "loss = nn.CrossEntropyLoss()"

WEIGHTED = """
weights = torch.tensor([1.0, 2.0, 0.5])
def training_step(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])
def validation_step(model, batch):
    x, y = batch
    output, counted = model(x), weights.to(x)[y].sum()
    return {
        "loss": F.cross_entropy(output, y, weight=weights.to(x)), "weight": counted, "entropy": torch.distributions.Categorical(logits=output).entropy().mean(),
        "output": output, "target": y,
    }
"""


@pytest.fixture(scope="module", autouse=True)
def setup(shared_kernel):
    shared_kernel.run(DEFINE, check=True)


def train(nb, options, body, *, data="train_part", val="val_part"):
    return nb.run(f"%%ddp_train net {data} --val {val} --epochs 2 --batch-size 12 --val-batch-size 6 --lr 0.05 {options}\n{body}", check=True)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(
    "body, dtype, options, apart",
    [
        (LOSS + METRICS, "torch.float32", "", 1e-6),
        (WEIGHTED + METRICS, "torch.float32", "", 1e-6),
        (WEIGHTED + "metrics = {'correct': correct}", "torch.float64", "", 1e-12),
        (LOSS + METRICS, "torch.float32", "--precision bf16", 1e-6),
    ],
    ids=["loss", "weighted step", "float64", "bf16"],
)
def test_the_numbers_are_those_of_the_validation(nb, ranks, body, dtype, options, apart):
    """17 samples in batches of 6: at 2 and 3 ranks they do not come out even."""
    data = "train_part, val_part = (TensorDataset(X[a:b].to(DTYPE), labels[a:b]) for a, b in ((0, 48), (47, 64)))\n".replace("DTYPE", dtype)
    nb.run(f"{data}net = make({dtype})", check=True)
    train(nb, f"-n {ranks} {options}", body)
    assert nb.eval("differs(unchanged(lambda: run.evaluate(val_part), net), run.epochs)") <= apart


def test_which_weights(nb):
    nb.run("net = make()", check=True)
    train(nb, "-n 2 --keep-last 3 --patience 5 --monitor val_correct --mode max", LOSS + "\nmetrics = {'correct': correct}")
    best = nb.eval("int(np.argmax(run.epochs['val_correct']))")
    assert nb.eval(f"differs(run.evaluate(val_part), run.epochs, {best})") <= 1e-6  # by default what the run loads
    assert nb.eval(f"differs(run.evaluate(val_part, 'best'), run.epochs, {best})") <= 1e-6
    assert nb.eval("differs(run.evaluate(val_part, 1), run.epochs, 0)") <= 1e-6
    assert nb.eval("differs(run.evaluate(val_part, which='last'), run.epochs)") <= 1e-6
    nb.run("first = run.evaluate(val_part, 'initial')\nbefore = run.evaluate(val_part, model=make())", check=True)
    assert nb.eval("first == before") is True
    assert nb.eval("first['val_loss'] != run.evaluate(val_part)['val_loss']") is True


def test_a_module_of_the_kernel_is_evaluated_as_it_is(nb):
    nb.run("net = make()", check=True)
    train(nb, "-n 2", LOSS + METRICS)
    nb.run("net.train()\nwrapped = nn.DataParallel(net)", check=True)
    assert nb.eval("differs(unchanged(lambda: run.evaluate(val_part, model=wrapped), net), run.epochs)") <= 1e-6
    nb.run("for p in net.parameters():\n    p.data.zero_()", check=True)
    assert nb.eval("run.evaluate(val_part, model=net)['val_loss']") == pytest.approx(nb.eval("float(np.log(3))"))


def test_it_is_computed_as_in_the_run_whatever_the_kernel_has_set(nb):
    nb.run("net = make()", check=True)
    train(nb, "-n 1", LOSS + METRICS)
    nb.run(
        """
torch.set_default_dtype(torch.float64)
torch.set_float32_matmul_precision("medium")
try:
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.enable_grad():
        found = unchanged(lambda: run.evaluate(val_part), net)
finally:
    torch.set_default_dtype(torch.float32)
    torch.set_float32_matmul_precision("highest")
""",
        check=True,
    )
    assert nb.eval("differs(found, run.epochs)") <= 1e-9


@pytest.mark.parametrize("within", ["torch.inference_mode()", "torch.no_grad()", "torch.device('meta')"])
def test_it_does_not_matter_within_what_it_is_called(nb, within):
    nb.run("net = make()", check=True)
    train(nb, "-n 2", LOSS + METRICS)
    source = f"""
streams_before = streams()
with {within}:
    found, outputs, rebuilt = run.evaluate(val_part), run.predict(X), run.model()
same_streams = streams() == streams_before
rebuilt(X).sum().backward()
outputs.add_(1)"""
    nb.run(source, check=True)
    assert nb.eval("differs(found, run.epochs)") <= 1e-6
    assert nb.eval("same_streams") is True


def test_numbers_of_numpy_are_numbers_of_epochs_and_samples(nb):
    nb.run("net = make()", check=True)
    train(nb, "-n 1 --keep-last 2", LOSS)
    nb.run("first = np.int64(1)\nfound = run.evaluate(val_part, first), run.evaluate(val_part, 1, batch_size=np.int32(6))", check=True)
    assert nb.eval("max(differs(each, run.epochs, 0) for each in found)") <= 1e-6
    nb.run("run.load(first, net); state = copy.deepcopy(net.state_dict()); run.load(net, first)", check=True)
    assert nb.eval("run.diff(state, first).equal and run.diff(run.model(first), 1).equal and len(run.predict(X, first, batch_size=first)) == len(X)") is True


def test_a_stage_has_its_own_precision(nb):
    nb.run("net = make()", check=True)
    stages = "\nstages = [nbddp.Stage('low', epochs=1, precision='bf16'), nbddp.Stage('whole', epochs=1, precision='fp32')]"
    step = """
def training_step(model, batch):
    output = model(batch[0])
    return {"loss": F.cross_entropy(output, batch[1]), "wide": float(output.dtype is torch.float32)}"""
    nb.run(f"%%ddp_train net train_part --val val_part -n 1 --batch-size 12 --keep-last 3 --load last{step}{stages}", check=True)
    assert nb.eval("[run.evaluate(val_part, which)['val_wide'] for which in ('initial', 1, 2)]") == [0.0, 0.0, 1.0]
    assert nb.eval("run.evaluate(val_part, model=net)['val_wide']") == 1.0
    assert nb.eval("differs(run.evaluate(val_part, 1), run.epochs, 0)") <= 1e-6
    nb.run("with nbddp.autocast(run, 'cpu') as cast:\n    assert cast.precision == 'fp32'", check=True)


def test_collate_and_batch_size_are_those_of_the_run_or_of_the_loader(nb):
    nb.run(
        """
net = make()
def collate(samples):
    x, y = zip(*samples)
    return torch.stack(x), torch.stack(y), len(samples)
def doubled(samples):
    x, y, n = collate(samples)
    return 2 * x, y, n
""",
        check=True,
    )
    step = """
collate_fn = collate
def training_step(model, batch):
    x, y, n = batch
    return {"loss": F.cross_entropy(model(x), y), "n": float(n)}"""
    train(nb, "-n 2", step)
    assert nb.eval("differs(run.evaluate(val_part), run.epochs)") <= 1e-6
    # The mean over samples of the number of samples in their step: 6, 6 and 5 on two ranks are five steps of 3 and one of 2.
    assert nb.eval("run.evaluate(val_part)['val_n']") == pytest.approx((5 * 3**2 + 2**2) / 17)
    assert nb.eval("run.evaluate(DataLoader(val_part, batch_size=4))['val_n']") == pytest.approx((8 * 2**2 + 1) / 17)
    assert nb.eval("run.evaluate(val_part, batch_size=17)['val_n']") == 17
    assert nb.eval("run.evaluate(val_part, batch_size=1)['val_n']") == 1
    nb.run("loader = DataLoader(val_part, batch_size=6, collate_fn=doubled)\nby_hand = TensorDataset(2 * X[47:64], labels[47:64])", check=True)
    assert nb.eval("run.evaluate(loader) == run.evaluate(by_hand)") is True


def test_steps_that_draw_draw_the_same_in_each_call(nb):
    nb.run("net = make()", check=True)
    step = """
def training_step(model, batch):
    noise = torch.rand(()) + random.random() + np.random.rand()
    return F.cross_entropy(model(batch[0]), batch[1]) * noise"""
    train(nb, "-n 1", step)
    nb.run("one = unchanged(lambda: run.evaluate(val_part), net)\ntorch.rand(3)", check=True)
    assert nb.eval("run.evaluate(val_part) == one") is True


@pytest.mark.parametrize("norm", ["layer", "group", "none", "sync"])
def test_where_the_run_swapped_norms_the_rebuilt_model_has_them_too(nb, norm):
    nb.run("net = make()", check=True)
    train(nb, f"-n 2 --norm {norm}", LOSS + METRICS)
    assert nb.eval("differs(unchanged(lambda: run.evaluate(val_part), net), run.epochs)") <= 1e-6
    nb.run("net.eval()\nwith torch.no_grad():\n    expected = net(X)", check=True)
    assert nb.eval("float((run.predict(X) - expected).abs().max())") <= 1e-6


@pytest.mark.gpu
def test_on_a_gpu_the_numbers_are_the_same_and_its_streams_go_on(nb):
    nb.run("net = make().cuda()", check=True)
    nb.run(
        f"%%ddp_train net train_part --val val_part -n 1 --epochs 2 --batch-size 12 --val-batch-size 6 --precision fp32\n{WEIGHTED}{METRICS}",
        timeout=120,
        check=True,
    )
    nb.run("on_gpu = tuple(t.cuda() for t in val_part.tensors)\nbefore = torch.cuda.get_rng_state()", check=True)
    for call in ("val_part", "on_gpu", "on_gpu, model=net", "val_part, device=0", "on_gpu, device='cpu'"):
        assert nb.eval(f"differs(unchanged(lambda: run.evaluate({call}), net), run.epochs)") <= 1e-5, call
    assert nb.eval("torch.equal(before, torch.cuda.get_rng_state())") is True
    assert nb.eval("run.predict(on_gpu).device.type") == "cpu"
    assert "model is on cuda:0: move it there" in nb.run("run.evaluate(val_part, model=net, device='cpu')").error.evalue


# -- predictions


def test_predictions_are_of_all_samples_in_order(nb):
    nb.run("net = make()", check=True)
    train(nb, "-n 3", LOSS)
    nb.run("net.eval()\nwith torch.no_grad():\n    expected = net(X)\nnet.train()", check=True)
    for data in ("(X, labels)", "TensorDataset(X)", "(X,)", "X", "X.numpy()", "DataLoader(TensorDataset(X, labels), batch_size=5, shuffle=True)"):
        assert nb.eval(f"float((unchanged(lambda: run.predict({data}), net) - expected).abs().max())") <= 1e-6, data
    assert nb.eval("torch.equal(run.predict(X, batch_size=64), expected)") is True
    assert nb.eval("torch.equal(run.predict(X[:5], model=net), run.predict(X[:5]))") is True
    assert nb.eval("(run.predict(X).requires_grad, tuple(run.predict(X[:1]).shape))") == (False, (1, 3))


def test_the_output_of_a_step_keeps_its_structure_and_is_widened(nb):
    nb.run(
        """
net = make()
@dataclasses.dataclass
class Answer:
    logits: object
    parts: object
def step(model, batch):
    output = model(batch[0])
    return {"loss": F.cross_entropy(output, batch[1]), "output": Answer(output, {"top": output.argmax(1), "both": (output, batch[0])})}
""",
        check=True,
    )
    train(nb, "-n 2 --precision bf16", "training_step = step")
    nb.run("whole = run.predict((X, labels))\nnet.eval()\nwith torch.no_grad(), nbddp.autocast(run, 'cpu'):\n    expected = net(X).float()", check=True)
    assert nb.eval("(type(whole).__name__, whole.logits.dtype is torch.float32, sorted(whole.parts))") == ("Answer", True, ["both", "top"])
    assert nb.eval("torch.equal(whole.parts['top'], whole.logits.argmax(1)) and torch.equal(whole.parts['both'][1], X)") is True
    assert nb.eval("float((whole.logits - expected).abs().max())") <= 1e-2


def test_a_model_of_several_inputs_is_predicted_with_and_without_targets(nb):
    nb.run(
        """
class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
    def forward(self, x, scale):
        return self.layer(x) * scale
scale = torch.rand(64, 1)
net = Two()
""",
        check=True,
    )
    nb.run("%%ddp_train net (X, scale, Y) -n 2 --batch-size 16\nloss = nn.MSELoss()", check=True)
    nb.run("with torch.no_grad():\n    expected = net(X, scale)", check=True)
    assert nb.eval("[float((run.predict(data) - expected).abs().max()) < 1e-6 for data in ((X, scale), (X, scale, Y))]") == [True, True]


# -- in a kernel that never saw the notebook


def test_in_a_fresh_kernel_of_another_folder_hooks_and_model_come_from_the_bundle(notebook, tmp_path_factory):
    first = notebook()
    (first.folder / "shapes.py").write_text("def flat(x):\n    return x.flatten(1)\n")
    (first.folder / "later.py").write_text("FOUR = 4\n")
    first.run(
        """
%load_ext nbddp
import torch, nbddp, shapes
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
X = torch.randn(40, 2, 2); Y = (X[:, 0, 0] > 0).long()
temperature = torch.tensor(2.0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
    def forward(self, x):
        return self.layer(shapes.flat(x))
net = Net()

def correct(output, target):
    return (output / temperature).argmax(1) == target
""",
        check=True,
    )
    cell = """%%ddp_train net data --val held -n 2 --batch-size 10 --epochs 2 --lr 0.1
def training_step(model, batch):
    import later
    x, y = batch
    if len(x) == later.FOUR:
        raise LookupError("four")
    output = model(x)
    return {"loss": F.cross_entropy(output / temperature, y), "output": output, "target": y, "t": temperature}
metrics = {"correct": correct}
"""
    first.run("data, held = (X[:30], Y[:30]), (X[30:], Y[30:])", check=True)
    ran = first.run(cell, check=True)
    recorded = first.eval("{name: float(column[-1]) for name, column in run.epochs.items() if name.startswith('val_')}")
    folder, expected = first.eval("str(run.dir)"), first.eval("run.predict(held).tolist()")
    first.close()

    later = notebook(tmp_path_factory.mktemp("elsewhere"), {"NBDDP_WARM": "0"})
    later.run(
        f"""
import sys, torch, nbddp
names = set(globals())
run = nbddp.attach({folder!r})
path = list(sys.path)
torch.manual_seed(0)
X = torch.randn(40, 2, 2); Y = (X[:, 0, 0] > 0).long()
held = X[30:], Y[30:]
found = run.evaluate(held)
made = set(globals()) - names
""",
        check=True,
    )
    assert sorted(later.eval("made")) == ["X", "Y", "found", "held", "names", "path", "run"]
    assert later.eval("sys.path == path") is True
    assert later.eval("found") == pytest.approx(recorded, rel=1e-6)
    assert later.eval("run.predict(held).tolist()") == expected

    failed = later.run("run.evaluate(held, batch_size=4)").error
    assert (failed.ename, failed.evalue.splitlines()[0]) == ("LookupError", "four")
    assert f"in run.evaluate with the hooks of run {Path(folder).name}: Cell In[{ran.execution_count}], line 6" in failed.traceback
    assert 'raise LookupError("four")' in failed.traceback


def test_a_run_that_goes_on_is_evaluated_at_its_last_checkpoint(nb):
    nb.run("net = make()\nbefore = copy.deepcopy(net.state_dict())", check=True)
    nb.run(
        "%%ddp_train net train_part --val val_part -n 1 --batch-size 12 --epochs 100000 --checkpoint-every '1 steps' --background --as going\n"
        "loss = nn.CrossEntropyLoss()",
        check=True,
    )
    try:
        nb.run("while not (going.dir / 'checkpoints/last.pt').is_file(): time.sleep(0.05)", timeout=60, check=True)
        nb.run("values = [going.evaluate(val_part)['val_loss'] for _ in range(5)]\ngoing_on = going.state", check=True)
        assert nb.eval("going_on") == "running"
        assert nb.eval("all(0 < value < 10 for value in values)") is True
        assert nb.eval("all(torch.equal(before[name], value) for name, value in net.state_dict().items())") is True
    finally:
        nb.run("going.stop(); going.follower.done.wait(60)", check=True)


def test_an_interrupt_leaves_everything_as_it_was(nb):
    nb.run("net = make()", check=True)
    steps = """
def training_step(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])
def validation_step(model, batch):
    Path("evaluating").touch()
    time.sleep(30 * Path("slow").exists())
    return training_step(model, batch)"""
    train(nb, "-n 1", steps)
    nb.run("Path('slow').touch(); Path('evaluating').unlink()\nnet.train()", check=True)
    cell = nb.start(
        "torch.set_default_dtype(torch.float64)\ntry:\n    unchanged(lambda: run.evaluate(val_part, model=net), net)\n"
        "except KeyboardInterrupt:\n    after = net.training, torch.get_default_dtype() is torch.float64, torch.is_grad_enabled()\n"
        "finally:\n    torch.set_default_dtype(torch.float32)"
    )
    nb.until(lambda: (nb.folder / "evaluating").exists() or cell.done)
    nb.interrupt()
    nb.wait(20)
    nb.run("Path('slow').unlink()", check=True)
    assert nb.eval("after") == (True, True, True)


# -- what is refused


@pytest.fixture(scope="module")
def trained(shared_kernel):
    shared_kernel.run("net = make()", check=True)
    cell = """%%ddp_train net train_part --val val_part -n 1 --batch-size 12 --as trained
def training_step(model, batch):
    output = model(batch[0])
    return {"loss": F.cross_entropy(output, batch[1]), "output": output, "target": batch[1]}
def validation_step(model, batch):
    result = training_step(model, batch)
    if len(batch) > 2:
        del result["output"]
    return result
metrics = {"correct": correct}"""
    shared_kernel.run(cell, check=True)


@pytest.mark.parametrize(
    "call, kind, message",
    [
        ("evaluate(net, val_part)", "ConfigError", "run.evaluate takes data, and was given a Sequential: run.evaluate(data, model=net)"),
        ("evaluate(val_part, net)", "ConfigError", "which names a checkpoint, and is a Sequential: run.evaluate(data, model=net)"),
        ("evaluate(val_part, model='net')", "ConfigError", "model is a str, and must be a torch.nn.Module"),
        ("evaluate(val_part, 'best', model=net)", "ConfigError", "which='best' beside model="),
        ("evaluate(val_part, 1.5)", "ConfigError", "which is a float: it must be last, best, initial or the number of an epoch"),
        ("evaluate(val_part, True)", "ConfigError", "which is a bool"),
        ("evaluate(val_part, 7)", "CheckpointError", "has no checkpoint 7: it has best, initial, last"),
        ("evaluate(TensorDataset(X[:0], labels[:0]))", "ConfigError", "run.evaluate: data has no samples"),
        ("evaluate(iter([1]))", "ConfigError", "without __len__"),
        ("evaluate(val_part, batch_size=0)", "ConfigError", "batch_size=0 must be a number of samples, at least 1"),
        ("evaluate(val_part, batch_size=True)", "ConfigError", "batch_size=True must be"),
        ("evaluate(val_part, device='gpu')", "ConfigError", "device='gpu' must be cpu, cuda"),
        ("predict(val_part, model=copy.deepcopy(net).to('meta'), device='cpu')", "ConfigError", "device=cpu, and the model is on meta: move it there"),
        (
            "evaluate((X, labels, labels))",
            "ConfigError",
            "metrics (correct) are computed from output and target, and validation_step returned no output: return {'loss': loss,",
        ),
        ("predict((X, labels, labels))", "ConfigError", "validation_step returned no output, which is what is predicted: return {'loss': loss, 'output'"),
        ("evaluate(val_part, model=copy.deepcopy(net).to('meta'))", "ConfigError", "run.evaluate: the model is on the meta device, without values: give"),
        ("predict(X, model=nn.Sequential(nn.LazyLinear(2)))", "ConfigError", "run.predict: 0.weight of the model is uninitialised: let the model see"),
        ("evaluate((X.repeat(1, 2), labels))", "RuntimeError", "mat1 and mat2 shapes cannot be multiplied"),
    ],
)
def test_wrong_arguments_are_errors_in_words(nb, trained, call, kind, message):
    error = nb.run(f"trained.{call}").error
    assert error.ename == kind
    assert message in error.evalue


def test_what_is_gone_is_said(nb):
    nb.run("net = make()", check=True)
    nb.run("%%ddp_train net train_part -n 1 --batch-size 12 --as lost\nloss = nn.CrossEntropyLoss()\nmetrics = {}", check=True)
    nb.run("import shutil\n(lost.dir / 'checkpoints/last.pt').unlink()", check=True)
    error = nb.run("lost.evaluate(val_part)").error
    assert (error.ename, "has no checkpoint last" in error.evalue) == ("CheckpointError", True)
    nb.run("(lost.dir / 'bundle.pt').unlink()", check=True)
    error = nb.run("lost.predict(X)").error
    assert (error.ename, "has no bundle" in error.evalue) == ("CheckpointError", True)
    nb.run("shutil.rmtree(lost.dir)", check=True)
    error = nb.run("lost.predict(X)").error
    assert (error.ename, "is gone, and its model and checkpoints with it" in error.evalue) == ("CheckpointError", True)


def test_a_metric_that_fails_says_which_and_where(nb):
    metric = """
def picky(output, target):
    if len(target) == 17:
        raise ArithmeticError("all at once")
    return output.argmax(1) == target"""
    nb.run(f"net = make(){metric}", check=True)
    train(nb, "-n 1", LOSS + "\nmetrics = {'picky': picky}")
    error = nb.run("run.evaluate(val_part, batch_size=17)").error
    assert error.ename == "ArithmeticError"
    assert "in the metric picky" in error.traceback
    assert "in run.evaluate with the hooks of run" in error.traceback
