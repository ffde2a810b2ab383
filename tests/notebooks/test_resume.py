"""Going on from a run or a checkpoint, in cells: which one, with which options, and what the new run knows of the old one."""

from __future__ import annotations

import shutil

import pytest

from support.example import ENDLESS, EXAMPLE, STEP, run_folders

pytestmark = pytest.mark.kernel

# With dropout and a validation; 512 samples in steps of 64 are 8 steps an epoch.
NETS = (
    EXAMPLE
    + """
class Drop(Net):
    def forward(self, x):
        return self.layers(F.dropout(x, 0.2, self.training))

def fresh(seed=0):
    torch.manual_seed(seed)
    return Drop()
"""
)
LINE = "net samples --val held_out -n 2 --batch-size 64 --lr 0.01"
LOSS = "loss = F.cross_entropy"


@pytest.fixture(scope="module", autouse=True)
def nets(shared_kernel):
    shared_kernel.run(NETS, check=True)


@pytest.fixture(autouse=True)
def before(nb):
    shutil.rmtree(nb.folder / "nbddp_runs", ignore_errors=True)
    nb.run("net = fresh()", check=True)


def train(nb, options, body=LOSS, line=LINE):
    return nb.run(f"%%ddp_train {line} {options}\n{body}", check=True)


def refused(nb, options, ename="ConfigError", line=LINE):
    cell = nb.run(f"%%ddp_train {line} {options}\n{LOSS}")
    assert cell.error is not None, cell.text
    assert cell.error.ename == ename
    assert cell.error.traceback == f"{ename}: {cell.error.evalue}", "one line, no frames of ours"
    return cell.error.evalue


def tail(nb, name="run"):
    return nb.eval(f"{name}.id[-4:]")


def test_a_run_that_goes_on_is_the_one_that_never_stopped(nb, notebook):
    train(nb, "--epochs 3 --as whole")
    nb.run("expected, net = weights(net), fresh()", check=True)
    train(nb, "--epochs 3 --max-steps 13 --as begun")
    nb.run("net = fresh(9)", check=True)
    cell = train(nb, "--max-steps 24 --resume last --as rest")
    begun = nb.eval("begun.id")
    head = cell.text.splitlines()[0]
    assert f"resumes run {begun[-4:]} (Drop), epoch 2, step 13, last.pt" in head
    assert "unlike the checkpoint: max_steps 13 -> 24" in cell.text.splitlines()
    assert nb.eval("same(net.state_dict(), expected)"), "bit for bit"
    assert nb.eval("(rest.parent, begun.parent, rest.config.epochs, rest.config.lr)") == (begun, None, 3, 0.01)
    for names in ("history['loss']", "history['step']", "history['lr']", "epochs['val_loss']", "epochs['step']", "epochs['epoch']"):
        assert nb.eval(f"rest.{names}.tolist()") == nb.eval(f"whole.{names}.tolist()"), names
    assert nb.eval("rest.history['step'].tolist() == list(range(1, 25))")
    assert nb.eval("[c.path.parent.parent.name for c in rest.checkpoints]") == [nb.eval("rest.id")] * nb.eval("len(rest.checkpoints)")

    # Everywhere else it is the same, also in a kernel that knows nothing.
    assert f"goes on from  drop-{begun[-4:]}, step 13" in nb.eval("rest.card().text")
    table = nb.run("%ddp_runs", check=True).shown()[0]
    assert table.count(f"drop-{begun[-4:]}") == 2, "its own row and its child's"
    other = notebook(folder=nb.folder, env={"NBDDP_WARM": "0"})
    other.run(f"import nbddp\nthere = nbddp.attach({tail(nb, 'rest')!r})", check=True)
    for expression in ("parent", "history['loss'].tolist()", "epochs['val_loss'].tolist()"):
        assert other.eval(f"there.{expression}") == nb.eval(f"rest.{expression}")

    # A child of the child; then the first one is pruned.
    train(nb, "--epochs 4 --max-steps 32 --resume last --as third")
    assert nb.eval("third.parent == rest.id and third.history['step'].tolist() == list(range(1, 33))")
    assert nb.eval("third.epochs['epoch'].tolist()") == [1, 2, 3, 4]
    nb.run("import shutil\nshutil.rmtree(begun.dir)", check=True)
    other.run(f"third = nbddp.attach({tail(nb, 'third')!r})\nsteps = third.history['step'].tolist()", check=True)
    assert other.eval("steps") == list(range(14, 33))
    assert f"the directory of run {begun} is gone" in other.cells[-2].stderr + other.cells[-1].stderr


def test_a_run_is_named_in_every_way(nb):
    train(nb, "--epochs 1 --as one --name digits")
    run_id, folder = nb.eval("(one.id, str(one.dir))")
    for number, given in enumerate((run_id, run_id[-4:], folder, f"{folder}/checkpoints/last.pt", f"nbddp_runs/{run_id}/checkpoints/last.pt"), start=2):
        cell = train(nb, f"--epochs {number} --resume {given}")
        assert f"resumes run {run_id[-4:]} (digits), epoch 1, step 8, last.pt" in cell.text.splitlines()[0]
        assert nb.eval("(run.parent, int(run.history['step'][-1]), run.config.name)") == (run_id, 8 * number, "digits")
    nb.run("run = nbddp.train(net, samples, val_data=held_out, loss=F.cross_entropy, resume=one, epochs=2)", check=True)
    assert nb.eval("(run.parent, run.config.nproc, run.config.batch_size, run.config.lr, len(run.history['step']))") == (run_id, 2, 64, 0.01, 16)
    train(nb, "--epochs 1 --as other")
    cell = train(nb, "--epochs 9 --resume last --name digits")
    assert "(digits), epoch 2, step 16" in cell.text.splitlines()[0], "the latest of that name"


def test_nothing_is_started_where_nothing_can_go_on(nb):
    assert refused(nb, "--resume last").startswith("resume=last: no run of a model of class Drop in ")
    train(nb, "--epochs 1 --as one")
    before = nb.eval("run_files()")
    name = tail(nb, "one")
    assert refused(nb, "--resume last") == f"run {name} has nothing left to do: 1 of 1 epochs done: --epochs 2"
    assert refused(nb, "--resume last --max-steps 8") == f"run {name} has nothing left to do: 8 of 8 steps done: --max-steps 16"
    assert refused(nb, "--resume lost").startswith("resume=lost: no such run in ")
    assert "Did you mean last" in refused(nb, "--resume lasts")
    assert "has no lost.pt." in refused(nb, f"--resume nbddp_runs/{nb.eval('one.id')}/checkpoints/lost.pt")
    assert refused(nb, "--resume last --epochs 2 --init current").startswith("resume=last brings the weights itself")
    nb.run("wide = nn.Linear(8, 4)\ntorch.save(net.state_dict(), 'weights.pt')", check=True)
    wrong = refused(nb, f"--resume {name}", "CheckpointError", LINE.replace("net", "wide"))
    assert wrong.splitlines()[0].endswith("last.pt does not fit Linear, so that nothing can go on from it:")
    assert "missing     weight" in wrong
    assert "--init" in refused(nb, "--resume weights.pt", "CheckpointError")
    initial = f"nbddp_runs/{nb.eval('one.id')}/checkpoints/initial.pt"
    assert "--init" in refused(nb, f"--resume {initial}", "CheckpointError")
    assert nb.eval("run_files()") == before


def test_an_epoch_under_way_keeps_its_order_and_any_number_of_ranks_goes_on_with_it(nb):
    train(nb, "--epochs 2 --max-steps 11 --as begun")
    assert refused(nb, "--resume last --max-steps 16 --seed 3").startswith("seed 0 -> 3 in the middle of epoch 2 (192 of 512 samples are done): ")
    nb.run("torch.manual_seed(3)\nfewer = TensorDataset(features[:500], labels[:500])", check=True)
    assert refused(nb, "--resume last --max-steps 16", line=LINE.replace("samples", "fewer")).startswith("number of training samples 512 -> 500 in the ")
    cell = train(nb, "--resume last --max-steps 99 -n 1 --batch-size 32 --as rest", line="net samples --val held_out")
    assert "unlike the checkpoint: nproc 2 -> 1" in cell.text
    assert nb.eval("(len(rest.history['step']), int(rest.history['samples'].sum()), rest.epochs['step'].tolist())") == (11 + 10, 1024, [8, 21])


def test_a_run_that_goes_on_still_is_left_alone(nb):
    (nb.folder / "stepped").unlink(missing_ok=True)
    train(nb, f"{ENDLESS} --as live --background", STEP, line="net samples")
    nb.until(lambda: (nb.folder / "stepped").exists(), 30)
    said = refused(nb, "--resume last")
    assert said.startswith(f"run {nb.eval('live.id')} goes on still, and two runs can't continue one: %ddp_stop {tail(nb, 'live')} first, or --init ")
    nb.run("live.stop()\nlive.wait(20)", check=True)
    taken = nb.eval("int(live.history['step'][-1])")
    train(nb, f"--resume last --max-steps {taken + 2}", STEP, line="net samples")
    assert nb.eval("(run.parent == live.id, run.history['step'].tolist())") == (True, list(range(1, taken + 3)))


def test_a_checkpoint_that_was_cut_off_gives_way_to_the_newest_whole_one(nb):
    train(nb, "--epochs 3 --keep-last 3 --as one")
    last = nb.eval("str(one.dir)") + "/checkpoints/last.pt"
    nb.run(f"data = Path({last!r}).read_bytes()\nPath({last!r}).unlink()\nPath({last!r}).write_bytes(data[:len(data) // 2])", check=True)
    nb.run("(one.dir / 'checkpoints/epoch-0003.pt').unlink()\n(one.dir / 'checkpoints/best.pt').unlink()", check=True)
    assert "last.pt" in refused(nb, f"--resume {last} --epochs 4", "CheckpointError"), "a file is taken as it is"
    cell = train(nb, "--resume last --epochs 4")
    assert f"resumes run {tail(nb, 'one')} (Drop), epoch 2, step 16, epoch-0002.pt" in cell.text.splitlines()[0]
    assert f"run {tail(nb, 'one')} goes on from epoch-0002.pt, its newest complete checkpoint: " in cell.text
    assert nb.eval("(run.history['step'].tolist(), run.epochs['epoch'].tolist())") == (list(range(1, 33)), [1, 2, 3, 4])
    shutil.rmtree(run_folders(nb)[-1])
    nb.run("for path in (one.dir / 'checkpoints').glob('epoch-*.pt'): path.unlink()", check=True)
    assert "no other file of it is complete" in refused(nb, "--resume last --epochs 4", "CheckpointError")


def test_the_best_of_the_parent_is_the_childs_until_there_is_a_better_one(nb):
    train(nb, "--epochs 1 --as one")
    nb.run("best = nbddp.load_checkpoint(one.dir / 'checkpoints/best.pt')", check=True)
    cell = train(nb, "--resume last --epochs 2 --lr 0 --as child", line="net samples --val held_out")
    assert "unlike the checkpoint: lr 0.01 -> 0" in cell.text
    nb.run("child.load('best')", check=True)
    assert nb.eval("same(net.state_dict(), best)")
    assert nb.eval("[(entry.name, entry.step) for entry in child.checkpoints if entry.name == 'best']") == [("best", 8)]


def test_a_dataset_with_a_state_of_its_own_is_said_by_name(nb):
    methods = "    def state_dict(self):\n        return {}\n    def load_state_dict(self, state):\n        pass\n"
    nb.run(f"class Stateful(TensorDataset):\n{methods}held_state = Stateful(features, labels)", check=True)
    line = "net held_state -n 1 --batch-size 64"
    assert "state_dict" not in train(nb, "--epochs 1", line=line).text
    assert "held_state (Stateful) has a state of its own (state_dict), which checkpoints don't hold" in train(nb, "--epochs 2 --resume last", line=line).text
