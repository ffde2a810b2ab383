"""BatchNorm on several ranks as a notebook meets it: what is said once, what net becomes, and what is refused before anything starts."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.kernel

NETS = """
def make():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)).double()

def kinds(net):
    return [type(module).__name__ for module in net if "Norm" in type(module).__name__ or isinstance(module, nn.Identity)]

double = TensorDataset(X.double(), Y.double())
held_out = TensorDataset(X[:13].double() * 2, Y[:13].double())

def evaluated(net):
    with torch.no_grad():
        return float(F.mse_loss(copy.deepcopy(net).eval()(held_out.tensors[0]), held_out.tensors[1]))

net = make()
"""
OPTIONS = "--val held_out --batch-size 24 --no-drop-last --epochs 2 --lr 0.02 --load last"
LOSS = "loss = nn.MSELoss()"


@pytest.fixture(scope="module", autouse=True)
def setup(shared_kernel):
    shared_kernel.run(NETS, check=True)


def train(nb, line, name="net"):
    return nb.run(f"%%ddp_train {name} double {OPTIONS} {line}\n{LOSS}", check=True)


def refused(nb, line, name="net", body=LOSS):
    """Run a cell that must be refused before anything starts; return what it says."""
    before = nb.eval(f"(run_files(), standby_pid(), repr({name}), nbddp.last_run and nbddp.last_run.id)")
    cell = nb.run(f"%%ddp_train {name} double --val held_out {line}\n{body}")
    assert cell.error is not None, cell.text
    assert nb.eval(f"(run_files(), standby_pid(), repr({name}), nbddp.last_run and nbddp.last_run.id)") == before
    return cell.error.traceback


def notes(cell):
    return [line for line in cell.text.splitlines() if "BatchNorm" in line or line.startswith("norm")]


def test_auto_synchronises_says_so_once_and_net_gets_the_same(nb):
    nb.run("net = make()\nbefore = net[1]\noptimizer = torch.optim.SGD(net.parameters(), lr=1)", check=True)
    cell = train(nb, "-n 2")
    warning, became = notes(cell)
    assert warning.startswith("note: BatchNorm (1, 4) is synchronised over the 2 ranks")
    assert "an exchange per layer" in warning
    assert "--norm layer" in warning
    assert became.endswith("; 2 BatchNorm layers became SyncBatchNorm, as in the run")
    assert nb.eval("kinds(net)") == ["SyncBatchNorm", "SyncBatchNorm"]
    assert nb.eval("net[1] is before and optimizer.param_groups[0]['params'][2] is net[1].weight")
    assert nb.eval("apart(net, run.model())") == 0
    assert nb.eval("float(abs(evaluated(net) - run.epochs['val_loss'][-1]))") < 1e-12
    curve = nb.eval("run.history['loss'].tolist()")
    assert not any(word in nb.eval(f"run.log({rank})") for rank in range(2) for word in ("BatchNorm", "Warning"))
    nb.run("net = make()", check=True)
    alone = train(nb, "-n 1")
    assert notes(alone) == []
    assert nb.eval("kinds(net)") == ["BatchNorm1d", "BatchNorm1d"]
    assert nb.eval("run.history['loss'].tolist()") == pytest.approx(curve, rel=1e-9)
    again = train(nb, "-n 2")  # from what net holds, at another number of ranks
    assert len(notes(again)) == 2
    assert notes(train(nb, "-n 2")) == []  # net is synchronised by now


@pytest.mark.parametrize("batch, small", [(16, True), (32, False)])
def test_keep_warns_once_with_the_batch_of_a_rank(nb, batch, small):
    nb.run("net = make()", check=True)
    cell = nb.run(f"%%ddp_train net double -n 2 --batch-size {batch} --norm keep\n{LOSS}", check=True)
    (warning,) = notes(cell)
    assert warning.startswith(f"note: BatchNorm (1, 4) uses the statistics of each rank's {batch // 2} samples")
    assert ("which is small" in warning) == small
    assert nb.eval("kinds(net)") == ["BatchNorm1d", "BatchNorm1d"]
    assert notes(nb.run(f"%%ddp_train net double -n 1 --norm keep\n{LOSS}", check=True)) == []


@pytest.mark.parametrize(
    "option, kinds",
    [
        ("layer", ["LayerNorm", "LayerNorm"]),
        ("group", ["GroupNorm", "GroupNorm"]),
        ("none", ["Identity", "Identity"]),
        ("1=layer,4=keep", ["LayerNorm", "BatchNorm1d"]),
        ("{'1': 'none', '*': 'auto'}", ["Identity", "SyncBatchNorm"]),
    ],
)
def test_the_swap_of_the_run_is_that_of_net_and_the_cell_can_be_run_again(nb, option, kinds):
    nb.run("net = make()", check=True)
    cell = train(nb, f'-n 2 --norm "{option}"')
    assert nb.eval("kinds(net)") == kinds
    assert nb.eval("kinds(run.model())") == kinds
    assert nb.eval("apart(net, run.model())") == 0
    assert nb.eval("float(abs(evaluated(net) - run.epochs['val_loss'][-1]))") < 1e-12
    assert any("as in the run" in line for line in notes(cell))
    assert not any("as in the run" in line for line in notes(train(nb, f'-n 2 --norm "{option}"')))
    assert nb.eval("kinds(net)") == kinds
    nb.run("other = make()\nrun.load(other)", check=True)  # one that was not swapped yet
    assert nb.eval("(kinds(other), apart(net, other))") == (kinds, 0)
    nb.run("run.load('initial')", check=True)
    train(nb, f'-n 2 --norm "{option}" --init initial')
    assert nb.eval("kinds(net)") == kinds


def test_a_run_of_swapped_layers_starts_from_the_weights_before_them(nb):
    nb.run("net = make()", check=True)
    train(nb, "-n 2 --norm keep")
    first = nb.eval("run.id")
    train(nb, "-n 2 --norm 1=layer,4=none --init initial")
    curve = nb.eval("run.history['loss'].tolist()")
    cell = train(nb, "-n 1 --norm 1=layer,4=none --init initial")  # net is swapped by now, and its initial weights are not
    assert "net starts from" in cell.text
    assert nb.eval("run.history['loss'].tolist()") == pytest.approx(curve, rel=1e-9)
    nb.run(f"nbddp.attach({first!r}).load('initial', net)", check=True)
    assert nb.eval("kinds(net)") == ["LayerNorm", "Identity"]


def test_a_new_model_goes_on_from_the_checkpoint_of_a_swapped_one(nb):
    nb.run("net = make()", check=True)
    train(nb, "-n 2 --norm 1=layer,4=sync")
    nb.run("whole = make()", check=True)
    train(nb, "-n 2 --norm 1=layer,4=sync --epochs 4".replace("--epochs 4", ""), name="whole")
    nb.run("net = make()", check=True)
    cell = nb.run(f"%%ddp_train net double --val held_out --resume {nb.eval('run.id')} --epochs 3 -n 2\n{LOSS}", check=True)
    assert "1 BatchNorm layer became LayerNorm, 1 SyncBatchNorm, as in the run" in cell.text
    nb.run("net = make()", check=True)
    said = refused(nb, "--resume last --epochs 5 --norm none -n 2")
    assert "norm=none: the layers of the checkpoint are layer and sync: leave --norm out to go on with them" in said


def test_a_failed_run_leaves_net_as_it_was(nb):
    nb.run("net = make()\nbefore = copy.deepcopy(net.state_dict())", check=True)
    cell = nb.run("%%ddp_train net double -n 2 --norm layer\ndef training_step(model, batch):\n    raise ValueError('no')")
    assert cell.error.ename == "WorkerError"
    assert nb.eval("kinds(net)") == ["BatchNorm1d", "BatchNorm1d"]
    assert nb.eval("all(torch.equal(before[name], value) for name, value in net.state_dict().items())")


def test_where_net_changed_meanwhile_it_stays_and_the_message_says_how_to_get_there(nb):
    nb.run("net = make()", check=True)
    nb.run(f"%%ddp_train net double -n 2 --norm layer --background\n{LOSS}", check=True)
    assert nb.eval("kinds(net)") == ["BatchNorm1d", "BatchNorm1d"]
    nb.run("net[1] = nn.Dropout(0.1)\nbefore = copy.deepcopy(net.state_dict())", check=True)
    cell = nb.run("run.wait()", check=True)
    assert "net is unchanged: run " in cell.text
    assert "1 is to become layer: it must be a BatchNorm layer of Sequential, and is a Dropout; run.model() rebuilds the one that was trained" in cell.text
    assert nb.eval("all(torch.equal(before[name], value) for name, value in net.state_dict().items())")
    assert nb.eval("kinds(net)") == ["BatchNorm1d"]
    assert nb.eval("kinds(run.model())") == ["LayerNorm", "LayerNorm"]


def test_torchs_own_synchronised_layers_train_on_the_cpu_too(nb):
    nb.run("net = nn.SyncBatchNorm.convert_sync_batchnorm(make())", check=True)
    assert "norm=keep: 1, 4 is torch's SyncBatchNorm, which trains on GPUs only: --norm auto has one for ranks on the CPU" in refused(nb, "-n 2 --norm keep")
    curve = [train(nb, "-n 2") and nb.eval("run.history['loss'].tolist()")]
    nb.run("net = nn.SyncBatchNorm.convert_sync_batchnorm(make())", check=True)
    train(nb, "-n 1")
    assert nb.eval("run.history['loss'].tolist()") == pytest.approx(curve[0], rel=1e-9)
    assert nb.eval("kinds(net)") == ["SyncBatchNorm", "SyncBatchNorm"]


def test_what_is_refused_before_anything_starts(nb):
    nb.run(
        """
import zuko
def activation():
    return nn.Sequential(nn.BatchNorm1d(16), nn.ReLU())
flow = zuko.flows.NSF(4, 0, transforms=1, hidden_features=(16, 16), activation=activation).double()
lazy = nn.Sequential(nn.Linear(4, 8), nn.LazyBatchNorm1d(), nn.Linear(8, 2))
net = make()
""",
        check=True,
    )
    said = refused(nb, "-n 2 --norm layer", name="flow")
    assert "norm=layer is refused for transform.transforms.0.hyper.1.0 (and 1 more)" in said
    assert "would let output" in said
    assert "--norm sync and --norm none work there" in said
    assert "lazy[1]: LazyBatchNorm1d has no shapes yet" in refused(nb, "-n 2 --norm layer", name="lazy")
    assert "the pattern 3 matches no BatchNorm layer. The names are 1, 4" in refused(nb, "-n 2 --norm 3=layer")
    assert "norm=laier must be one of auto, keep, sync" in refused(nb, "-n 2 --norm laier")
    said = refused(nb, "-n 2 --norm none", body=f"{LOSS}\nstages = [nbddp.Stage('a', epochs=1), nbddp.Stage('b', epochs=1, freeze='1.*')]")
    assert "stage b: the pattern 1.* matches no parameter" in said
    assert "norm=none leaves no parameters in 1, 4" in said


def test_stages_freeze_what_a_swap_leaves(nb):
    nb.run("net = make()", check=True)
    body = f"{LOSS}\nstages = [nbddp.Stage('a', epochs=1, freeze='[14].*'), nbddp.Stage('b', epochs=1)]"
    nb.run(f"%%ddp_train net double --batch-size 24 -n 2 --norm 1=none,4=layer\n{body}", check=True)
    assert nb.eval("kinds(net)") == ["Identity", "LayerNorm"]


def test_a_gradient_penalty_is_that_of_one_process(nb):
    nb.run(
        """
def penalised(model, batch):
    x = batch[0].clone().requires_grad_()
    output = model(x)
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return F.mse_loss(output, batch[1]) + gradient.square().mean()
""",
        check=True,
    )
    curves = []
    for ranks in (1, 2):
        nb.run("net = make()", check=True)
        nb.run(f"%%ddp_train net double -n {ranks} --batch-size 24 --epochs 2\ntraining_step = penalised", check=True)
        curves.append(nb.eval("run.history['loss'].tolist()"))
    assert curves[1] == pytest.approx(curves[0], rel=1e-9)


def test_a_flow_of_masked_layers_trains_synchronised(nb):
    nb.run(
        """
flow = zuko.flows.NSF(4, 0, transforms=1, hidden_features=(16, 16), activation=activation).double()
def nll(model, batch):
    return -model().log_prob(batch[0]).mean()
""",
        check=True,
    )
    curves = []
    for ranks in (1, 2):
        nb.run("torch.manual_seed(1)\ntrained = copy.deepcopy(flow)", check=True)
        cell = nb.run(f"%%ddp_train trained double -n {ranks} --batch-size 24 --epochs 2 --lr 0.01\ntraining_step = nll", check=True)
        curves.append(nb.eval("run.history['loss'].tolist()"))
    assert curves[1] == pytest.approx(curves[0], rel=1e-9)
    assert "--norm layer" not in cell.text  # which would be refused
    assert "is synchronised over the 2 ranks" in cell.text


def test_a_net_that_was_swapped_otherwise_is_refused_and_stays(nb):
    nb.run("net = make()", check=True)
    train(nb, "-n 2 --norm layer --as la")
    nb.run("other = make()\nnbddp.swap_norm(other, 'group')\nbefore = copy.deepcopy(other.state_dict())", check=True)
    for load in ("la.load('last', other)", "%ddp_load other {la.id}", "nbddp.load_checkpoint(la, other)"):
        cell = nb.run(load)
        assert cell.error is not None, (load, cell.text)
        assert cell.error.ename == "CheckpointError"
        assert "became group" in cell.error.traceback
    said = refused(nb, "--resume la --epochs 4 -n 2", name="other")
    assert "became group" in said
    assert nb.eval("all(torch.equal(before[name], value) for name, value in other.state_dict().items())")


def test_a_name_that_stands_for_another_object_by_now_is_not_said_to_hold_the_weights(nb):
    nb.run("net = make()", check=True)
    train(nb, "-n 2 --norm keep")
    nb.run("old = net\nnet = make()\nbefore = copy.deepcopy(net.state_dict())", check=True)
    assert nb.run("_ = run.load('last')", check=True).text.startswith(
        'net (the object that was bundled; run.load("last", net) loads into the one of that name now): epoch 2'
    )
    assert nb.eval("all(torch.equal(before[name], value) for name, value in net.state_dict().items())")
    assert nb.run("%ddp_load net", check=True).text.startswith("net: epoch 2 of run")
    assert nb.eval("apart(net, old)") == 0


def test_a_run_goes_on_from_a_variable_that_holds_one(nb):
    nb.run("net = make()", check=True)
    train(nb, "-n 2 --as first")
    cell = nb.run(f"%%ddp_train net double --val held_out --resume first --epochs 3 -n 2\n{LOSS}", check=True)
    assert f"resumes run {nb.eval('first.id')[-4:]}" in cell.text
    assert "no effect" not in cell.text
    cell = nb.run(f"%%ddp_train net double --val held_out --init first -n 2\n{LOSS}", check=True)
    assert f"net starts from run {nb.eval('first.id')[-4:]}, last.pt" in cell.text


def test_an_option_that_was_carried_over_is_not_said_to_have_no_effect(nb):
    nb.run("net = make()", check=True)
    train(nb, "-n 2 --norm sync")
    nb.run("net = make()\nnbddp.swap_norm(net, 'none')\n", check=True)
    refused(nb, "--resume last --epochs 4 -n 2")
    nb.run("net = nn.Sequential(nn.Linear(4, 2)).double()", check=True)
    train(nb, "-n 2 --norm sync")
    cell = nb.run(f"%%ddp_train net double --val held_out --resume last --epochs 4 -n 2\n{LOSS}", check=True)
    assert "no effect" not in cell.text


def test_the_report_is_no_model(nb):
    nb.run("net = make()", check=True)
    for use in ("net(X.double())", "net.parameters()", "net.train()"):
        nb.run("net = nbddp.swap_norm(make(), 'layer')", check=True)
        assert "write swap_norm(net), and go on with net" in nb.run(use).error.evalue


def test_what_is_said_of_a_run_calls_it_as_the_notebook_does(nb):
    nb.run("net = make()", check=True)
    cell = nb.run(f"%%ddp_train net double --val held_out -n 2 --as mine --no-load\n{LOSS}", check=True)
    assert "net is unchanged, as asked; mine.load() loads the last checkpoint" in cell.text
