"""What can be asked of a run: by the kernel that started it, by another one, and by one that comes later."""

from __future__ import annotations

import os
import shutil
import signal
import time

import pytest

from support.example import ALONE, BRIEF, ENDLESS, EXAMPLE, STEP, run_folders, start

pytestmark = pytest.mark.kernel


@pytest.fixture(scope="module", autouse=True)
def example(shared_kernel):
    shared_kernel.run(EXAMPLE, check=True)


@pytest.fixture(autouse=True)
def before(nb):
    nb.run("net = make_net()\nbefore = weights(net)\nglobals().pop('run', None)", check=True)
    (nb.folder / "stepped").unlink(missing_ok=True)
    yield
    nb.run("for known in list(__import__('nbddp.kernel.runs', fromlist=['_known'])._known.values()):\n    known.kill()", check=True)


@pytest.fixture
def other(notebook, nb):
    """A second kernel on the same folder, which has neither model nor data of the first."""
    other = notebook(folder=nb.folder, env={"NBDDP_WARM": "0"})
    other.run("%load_ext nbddp\nimport nbddp, torch, time\nfrom torch import nn", check=True)
    return other


def stepped(nb):
    nb.until(lambda: (nb.folder / "stepped").exists())


# -- another kernel


def test_another_kernel_watches_and_stops_a_run_and_has_its_model(nb, other):
    cell = start(nb, f"net samples --val held_out {ENDLESS} --note 'the long one'")
    run_id = run_folders(nb)[-1].name
    other.run(f"%ddp_attach {run_id[-4:]} --as there", check=True)
    attached = other.cells[-1]
    other.until(lambda: "running" in "".join(str(state.get("value")) for state in other.widgets.values()))
    assert other.eval("(there.id, there.state, there.error)") == (run_id, "running", None)
    assert "the long one" in other.run("%ddp_runs", check=True).shown()[0]
    assert "running" in other.cells[-1].shown()[0]
    stacks = other.run("%ddp_stacks there", check=True).text
    assert "rank 0" in stacks
    assert "rank 1" in stacks
    assert "nbddp/worker/loop.py" in stacks
    error = other.run("there.load()").error
    assert error.traceback.startswith("ConfigError: run ")
    assert "was started by another kernel: name the model, run.load(net), or rebuild it with run.model()" in error.traceback
    assert f"{run_id} was asked to stop" in other.run("%ddp_stop there", check=True).text
    nb.wait()
    assert (cell.error, nb.eval("run.state")) == (None, "stopped")
    other.run("there.wait(10)", check=True)
    other.until(lambda: any("stopped" in text for text in attached.shown()))
    assert other.widgets == {}
    assert "has ended already: stopped" in other.run("%ddp_stop there", check=True).text

    # What the second kernel has: the weights, in a module that it rebuilds, and everything that was recorded.
    kept = nb.eval("{name: tensor.tolist() for name, tensor in net.state_dict().items()}")
    other.run("model, blank = there.model(), there.model('initial')\nloaded = nbddp.load_checkpoint(there, blank)", check=True)
    values = "{{name: tensor.tolist() for name, tensor in {}.items()}}"
    assert other.eval(values.format("model.state_dict()")) == kept
    assert other.eval(values.format("blank.state_dict()")) == kept
    assert other.eval(values.format("nbddp.load_checkpoint(there)")) == kept
    assert other.eval("(loaded is blank, type(model).__name__, 'Net' in globals(), tuple(model(torch.zeros(2, 8)).shape))") == (True, "Net", False, (2, 4))
    for expression in ("history['loss'].tolist()", "epochs['val_loss'].tolist()", "timeline", "duration_s", "log(1)"):
        assert other.eval(f"repr(there.{expression})") == nb.eval(f"repr(run.{expression})")  # repr, for the nan of epochs without a validation
    card = other.run(f"%ddp_attach {run_id}", check=True).shown()[0]
    assert card.splitlines()[:8] == nb.eval("run.card().text").splitlines()[:8]
    assert other.eval("nbddp.last_run is run and run.id") == run_id


def test_a_background_run_outlives_its_kernel_and_is_found_again(notebook, tmp_path, other):
    first = notebook(folder=tmp_path)
    first.run(ALONE, check=True)
    first.run(f"%%ddp_train net samples {ENDLESS} --background --checkpoint-every '2 steps'\n{STEP}", check=True)
    assert first.eval("run.state in ('starting', 'running')") is True
    stepped(first)
    first.until(lambda: list(tmp_path.glob("nbddp_runs/*/checkpoints/last.pt")))
    (folder,) = run_folders(first)
    os.kill(first.kernel_pid, signal.SIGKILL)
    other.run(f"gone = nbddp.attach({str(folder)!r})\nseen = gone.follower.state.step", check=True)
    other.run("deadline = time.monotonic() + 20\nwhile gone.follower.state.step <= seen and time.monotonic() < deadline: time.sleep(0.05)", check=True)
    assert other.eval("(gone.state, gone.follower.state.step > seen)") == ("running", True)
    other.run("gone.stop()\ngone.wait(10)", check=True)
    assert other.eval("(gone.state, gone.error)") == ("stopped", None)
    assert other.eval("sum(p.numel() for p in gone.model().parameters())") == 8 * 32 + 32 + 32 * 4 + 4


# -- in the background


def test_several_runs_in_the_background(nb):
    nb.run("other = make_net()", check=True)
    nb.run(f"%%ddp_train net samples {ENDLESS} --background --as one\n{STEP}", check=True)
    nb.run(f"%%ddp_train other samples {ENDLESS} --background --as two\n{STEP}", check=True)
    assert nb.eval("nbddp.last_run is two and one.id != two.id") is True
    nb.run("while not (one.state == two.state == 'running'): time.sleep(0.02)", timeout=30, check=True)
    error = nb.run("two.wait(0.2)").error
    assert (error.ename, error.evalue) == ("TimeoutError", f"run {nb.eval('two.id')} goes on after 0.2 s")
    nb.run("one.stop()\none.wait(10)", check=True)
    assert nb.eval("(one.state, two.state)") == ("stopped", "running")
    assert nb.eval("same(net.state_dict(), nbddp.load_checkpoint(one)) and not same(net.state_dict(), before)") is True
    nb.run("two.stop()", check=True)
    cell = nb.run("two.wait()", check=True)
    assert cell.text.splitlines()[-1].startswith("other: epoch ")
    assert nb.eval("two.wait() is two") is True
    assert nb.cells[-1].text.count("other: ") == 1


def test_the_object_that_was_bundled_is_written_to_whatever_its_name_means_by_then(nb):
    nb.run("bundled = net", check=True)
    nb.run(f"%%ddp_train net samples {BRIEF} --background\n{STEP}", check=True)
    nb.run("net = 'something else'", check=True)
    assert nb.run("run.wait(30)", check=True).text.startswith("net (the object that was bundled; ")
    assert nb.eval("(net, same(bundled.state_dict(), nbddp.load_checkpoint(run)), same(bundled.state_dict(), before))") == ("something else", True, False)
    nb.run("del bundled, net", check=True)
    nb.run("net = make_net()\n%ddp_train net samples -n 2 --batch-size 64 --max-steps 3 --background --loss F.cross_entropy\ndel net", check=True)
    nb.run("run.wait(30)", check=True)
    assert nb.eval("run.state") == "finished"


def test_a_look_at_weights_in_the_making_does_not_replace_those_of_the_end(nb):
    nb.run(f"%%ddp_train net samples {ENDLESS} --background --checkpoint-every '1 steps'\n{STEP}", check=True)
    nb.until(lambda: (run_folders(nb)[-1] / "checkpoints/last.pt").exists())
    nb.run("run.load()\nmiddle = weights(net)\nrun.stop()\nrun.wait(10)", check=True)
    assert nb.eval("same(net.state_dict(), nbddp.load_checkpoint(run)) and not same(net.state_dict(), middle)") is True


def test_a_thread_trains_too(nb):
    nb.run(
        """
import threading
done = []
thread = threading.Thread(target=lambda: done.append(nbddp.train(net, samples, loss=F.cross_entropy, nproc=2, batch_size=64, max_steps=3)))
thread.start()
thread.join(30)
""",
        check=True,
    )
    assert nb.eval("(done[0].state, same(net.state_dict(), before))") == ("finished", False)


# -- checkpoints and where a run starts


def test_checkpoints_are_loaded_by_name_and_by_epoch(nb):
    nb.run("kept = {}", check=True)
    nb.run(f"%%ddp_train net samples --val held_out -n 2 --batch-size 256 --max-steps 4 --checkpoint-every '2 steps' --keep-last 3\n{STEP}", check=True)
    names = nb.eval("[c.name for c in run.checkpoints]")
    assert names[0] == "initial"
    assert set(names) == {"initial", "last", "best", "epoch-0001", "epoch-0002"}
    assert nb.eval("[(c.name, c.path.name, c.path.is_file(), c.bytes == c.path.stat().st_size) for c in run.checkpoints if c.name == 'last']") == [
        ("last", "last.pt", True, True)
    ]
    for which, text in (("'initial'", "its initial weights"), ("1", "epoch 1"), ("2", "epoch 2"), ("'last'", "epoch 2"), ("'best'", "epoch ")):
        assert nb.run(f"assert run.load(which={which}) is net\nkept[{which}] = weights(net)", check=True).text.startswith(f"net: {text}")
    assert nb.eval("same(kept['initial'], before) and same(kept['last'], kept[2]) and not same(kept[1], kept[2])") is True
    nb.run("for checkpoint in run.checkpoints:\n    torch.load(checkpoint.path, weights_only=True)", check=True)
    nb.run("another = make_net()\nrun.load(another, 1)", check=True)
    assert nb.eval("same(another.state_dict(), kept[1]) and same(run.model(1).state_dict(), kept[1])") is True
    nb.run("run.load('best')", check=True)
    assert nb.run("%ddp_load another --which initial", check=True).text.startswith("another: its initial weights")
    assert nb.eval("same(another.state_dict(), before)") is True
    nb.run("path = run.checkpoints[-1].path", check=True)
    nb.run("%ddp_load another {path}", check=True)
    error = nb.run("run.load(which=7)").error
    assert error.traceback.startswith("CheckpointError: run ")
    assert "has no checkpoint 7: it has best, epoch-0001, epoch-0002, initial, last" in error.traceback
    nb.run("wide = nn.Linear(3, 3)\nheld = weights(wide)", check=True)
    error = nb.run("%ddp_load wide").error
    assert error.ename == "CheckpointError"
    assert nb.eval("same(wide.state_dict(), held)") is True


def test_what_a_model_starts_from_is_said_only_while_it_is_true(nb):
    nb.run(f"%%ddp_train net samples {BRIEF}\n{STEP}", check=True)
    assert "net starts from run" in nb.run("%ddp_plan net samples", check=True).text
    nb.run("with torch.no_grad():\n    next(net.parameters()).zero_()", check=True)
    assert "starts from" not in nb.run("%ddp_plan net samples", check=True).text


def test_a_run_that_has_ended_stays_what_it_was_without_its_directory(nb):
    nb.run(f"%%ddp_train net samples {BRIEF}\n{STEP}", check=True)
    nb.run("import shutil\nshutil.rmtree(run.dir)", check=True)
    assert nb.eval("(run.state, run.error)") == ("finished", None)
    assert "is gone, and its checkpoints with it" in nb.run("run.load()").error.traceback


def test_where_a_run_starts(nb, tmp_path):
    one = "-n 2 --batch-size 512 --max-steps 1 --optimizer sgd --lr 0.1 --as {}\n" + STEP
    nb.run("%%ddp_train net samples " + one.format("first"), check=True)
    nb.run("once = weights(net)", check=True)
    cell = nb.run("%%ddp_train net samples --init initial " + one.format("again"), check=True)
    assert f"net starts from run {nb.eval('first.id')[-4:]}, initial.pt" in cell.text
    assert nb.eval("same(net.state_dict(), once)") is True
    nb.run("%%ddp_train net samples " + one.format("second"), check=True)
    nb.run("twice = weights(net)\nnet = make_net()", check=True)
    cell = nb.run("%%ddp_train net samples --init {first.id} " + one.format("third"), check=True)
    assert f"net starts from run {nb.eval('first.id')[-4:]}, last.pt" in cell.text
    assert nb.eval("same(net.state_dict(), twice)") is True
    torch_file = tmp_path / "bare.pt"
    nb.run(f"torch.save(once, {str(torch_file)!r})\nnet = make_net()", check=True)
    nb.run(f"%%ddp_train net samples --init {torch_file} " + one.format("fourth"), check=True)
    assert nb.eval("same(net.state_dict(), twice)") is True
    there = run_folders(nb)
    error = nb.run("%%ddp_train net samples --init nowhere.pt " + one.format("none")).error
    assert error.traceback.startswith("ConfigError: init=nowhere.pt: no such checkpoint file")
    assert nb.run("%%ddp_train net samples --init nosuchrun " + one.format("none")).error.ename == "ConfigError"
    nb.run("torch.save({'weight': torch.zeros(1)}, 'foreign.pt')", check=True)
    assert nb.run("%%ddp_train net samples --init foreign.pt " + one.format("none")).error.ename == "CheckpointError"
    assert run_folders(nb) == there


@pytest.mark.parametrize("state", ["finished", "failed"])
def test_who_attaches_to_a_run_that_is_over_is_shown_the_card_of_its_cell(nb, other, state):
    body = STEP if state == "finished" else "def training_step(model, batch):\n    raise ValueError('bad')"
    cell = nb.run(f"%%ddp_train net samples --val held_out -n 2 --batch-size 64 --epochs 2\n{body}")
    assert (cell.error is None) is (state == "finished")
    (card,) = cell.shown("text/html")
    run = run_folders(nb)[-1]
    assert card in (run / "card.html").read_text()
    assert nb.run(f"%ddp_attach {run.name}", check=True).shown("text/html") == [card]
    without, holds = card.rsplit('<div style="margin-top:8px;font-weight:600">', 1)
    assert holds.startswith("net")
    assert other.run(f"%ddp_attach {run.name}", check=True).shown("text/html") == [f"{without}</div>"], "there is no net there that could hold anything"


# -- lists and comparisons


def test_runs_are_listed_in_any_order_and_compared(nb):
    nb.run("runs = {}", check=True)
    for lr, steps in ((0.1, 8), (0.001, 24), (0.01, 16)):
        nb.run("net = make_net()", check=True)
        nb.run(f"%%ddp_train net samples --val held_out -n 2 --batch-size 64 --max-steps {steps} --epochs 3 --lr {lr} --optimizer sgd\n{STEP}", check=True)
        nb.run(f"runs[{lr}] = run", check=True)
    assert nb.eval("[row.differs['lr'] for row in nbddp.runs()[:3]]") == [0.01, 0.001, 0.1]
    by_loss = nb.eval("sorted(runs, key=lambda lr: runs[lr].epochs['loss'][-1])")
    for line, order in (("--sort lr --reverse", [0.1, 0.01, 0.001]), ("--sort steps", [0.001, 0.01, 0.1]), ("--sort loss", by_loss)):
        shown = nb.run(f"%ddp_runs {line}", check=True).shown()[0]
        ids = nb.eval(f"[runs[lr].id for lr in {order}]")
        assert sorted(ids, key=shown.index) == ids, line
        assert shown.splitlines()[0].split()[0] == "run"
    row = nb.eval("(lambda row: (row.best, row.loss, row.step, row.curve.step[-1], len(row.curve.step)))(nbddp.runs()[0])")
    assert row == (("val_loss", nb.eval("float(min(run.epochs['val_loss']))"), 2), nb.eval("float(run.epochs['loss'][-1])"), 16, 16, 16)

    cell = nb.run("made = nbddp.compare(*runs.values())\nmade", check=True)
    lines = cell.shown()[0].splitlines()
    assert [line.split()[1:4] for line in lines[1:4]] == [["finished", "8", "0.1"], ["finished", "24", "0.001"], ["finished", "16", "0.01"]]
    assert set(cell.outputs[0]["data"]) == {"text/html", "image/png", "text/plain"}
    assert nb.eval("made.options") == {"max_steps": (8, 24, 16), "lr": (0.1, 0.001, 0.01)}
    drawn = "[[line.get_ydata().tolist() for line in axes.lines if len(line.get_ydata()) > 1] for axes in made.figure.axes]"
    train, val = nb.eval(drawn)
    assert train == nb.eval("[run.history['loss'].tolist() for run in runs.values()]")
    assert val == nb.eval("[run.epochs['val_loss'].tolist() for run in list(runs.values())[1:]]"), "the first has one validation"
    assert nb.eval("'matplotlib.pyplot' in sys.modules") is False


def test_live_failed_and_resumed_runs_are_compared(nb):
    nb.run(f"%%ddp_train net samples --val held_out -n 2 --batch-size 64 --max-steps 12 --epochs 9 --as first\n{STEP}", check=True)
    nb.run(f"%%ddp_train net samples --val held_out -n 2 --batch-size 64 --max-steps 20 --epochs 9 --resume last --as second\n{STEP}", check=True)
    failing = "def training_step(model, batch):\n    loss = step(model, batch)\n    assert float(loss) < 0\n    return loss"
    assert nb.run(f"%%ddp_train net samples -n 2 --batch-size 64 --as third\n{failing}").error is not None
    nb.run("net = make_net()", check=True)
    nb.run(f"%%ddp_train net samples {ENDLESS} --background --as live\n{STEP}", check=True)
    nb.run("while not len(live.history['step']): time.sleep(0.02)", timeout=30, check=True)
    nb.run("made = nbddp.compare(first, second.id, live, third.dir, x='epoch')", check=True)
    assert nb.eval("[row.state for row in made.runs]") == ["finished", "finished", "running"]
    assert nb.eval("[float(line.get_xdata()[-1]) for line in made.figure.axes[0].lines][:2]") == [1.5, 2.5]
    assert nb.eval("made.figure.axes[0].lines[1].get_ydata().tolist() == second.history['loss'].tolist()") is True
    assert nb.eval("list(made.left_out.items()) == [(third.id, 'failed before its first step')]") is True
    error = nb.run("nbddp.compare(first, third)").error
    assert error.traceback == f"ConfigError: of 2 runs 1 has a loss to compare: {nb.eval('third.id')}, failed before its first step"
    nb.run("live.stop()\nlive.wait(10)", check=True)


# -- data and old runs


def test_data_is_staged_once_per_content_and_released(nb):
    staged = nb.folder / "nbddp_runs/data"
    nb.run("one, two = TensorDataset(torch.arange(64.).reshape(64, 1)), TensorDataset(torch.arange(64.).reshape(64, 1))\nline = nn.Linear(1, 1)", check=True)
    body = "def training_step(model, batch):\n    return model(batch[0]).mean()"
    nb.run(f"%%ddp_train line one -n 1 --batch-size 64\n{body}", check=True)
    (first,) = staged.glob("*.pt")  # what the runs before needed is gone
    written = first.stat().st_mtime_ns
    cell = nb.run(f"%%ddp_train line two -n 1 --batch-size 64\n{body}", check=True)
    assert "staged before" in cell.text
    assert [path.stat().st_mtime_ns for path in staged.glob("*.pt")] == [written]
    nb.run("two.tensors[0][0] = 7", check=True)
    cell = nb.run(f"%%ddp_train line two -n 1 --batch-size 64\n{body}", check=True)
    assert "staged before" not in cell.text
    nb.run(f"%%ddp_train line one -n 1 --batch-size 64\n{body}", check=True)
    assert [path.name for path in staged.glob("*.pt")] == [first.name]


def test_old_runs_are_pruned_and_the_users_files_are_not(nb, tmp_path):
    root = tmp_path / "mine"
    (root / "data").mkdir(parents=True)
    (root / "data" / "mnist.pt").write_bytes(b"the user's")
    for _ in range(3):
        nb.run(f"%%ddp_train net samples {BRIEF} --run-root {root}\n{STEP}", check=True)
    found = sorted(path.name for path in root.iterdir() if path.name[0] == "2")
    assert len(found) == 3
    assert nb.eval(f"nbddp.prune({str(root)!r}, keep=1, older_than_days=0)") == found[:2]
    assert sorted(path.name for path in root.iterdir() if path.name[0] == "2") == found
    assert nb.eval(f"nbddp.prune({str(root)!r}, keep=1, older_than_days=0, dry_run=False)") == found[:2]
    assert [path.name for path in root.iterdir() if path.name[0] == "2"] == found[2:]
    assert nb.eval(f"nbddp.prune({str(root)!r}, keep=0, older_than_days=30, dry_run=False)") == []
    assert (root / "data" / "mnist.pt").read_bytes() == b"the user's"
    assert not (root / ".gitignore").exists()
    assert "nothing to prune" in nb.run(f"%ddp_runs --root {root} --prune", check=True).text
    assert nb.run("nbddp.prune(keep=-1)").error.traceback == "ConfigError: keep=-1 must be at least 0"


def test_a_live_run_is_never_pruned(nb):
    nb.run(f"%%ddp_train net samples {ENDLESS} --background\n{STEP}", check=True)
    nb.run("nbddp.prune(keep=0, older_than_days=0, dry_run=False)", check=True)
    assert nb.eval("[row.id for row in nbddp.runs()] == [run.id]") is True
    nb.run("run.stop()\nrun.wait(10)", check=True)
    assert nb.eval("run.state") == "stopped"


# -- what happens to a run directory


def test_a_run_whose_directory_is_deleted_ends_and_says_so(nb):
    cell = start(nb, f"net samples {ENDLESS}")
    began = time.monotonic()
    shutil.rmtree(run_folders(nb)[-1], ignore_errors=True)
    while run_folders(nb) and time.monotonic() - began < 5:
        shutil.rmtree(run_folders(nb)[-1], ignore_errors=True)
    nb.wait(10)
    assert time.monotonic() - began < 8
    assert cell.error.ename == "WorkerLost"
    assert "was deleted while the run went on" in cell.error.traceback
    assert nb.eval("(run.state, run.error.run is run)") == ("failed", True)
    assert nb.eval("same(net.state_dict(), before)") is True


@pytest.mark.parametrize("size", [0, 8000], ids=["nothing can be written", "the spec can, the bundle can't"])
def test_a_disk_that_is_full_while_the_data_is_packed(nb, size):
    there = run_folders(nb)
    nb.run("import resource\nlimit = resource.getrlimit(resource.RLIMIT_FSIZE)", check=True)
    small = f"resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, limit[1]))\ntry:\n    nbddp.train(net, samples, loss=F.cross_entropy, nproc=2)\n"
    error = nb.run(small + "finally:\n    resource.setrlimit(resource.RLIMIT_FSIZE, limit)").error
    assert error.ename == "BundleError"
    assert error.traceback.startswith(f"BundleError: writing to {nb.folder}" if size == 0 else f"BundleError: writing {nb.folder}")
    assert "free some space with nbddp.prune(), or choose another place with --run-root" in error.traceback
    assert run_folders(nb) == there


@pytest.mark.parametrize("root", ["file/runs", "file"])
def test_a_folder_that_can_not_be_written_to(nb, root):
    (nb.folder / "file").touch()
    error = nb.run(f"%%ddp_train net samples {BRIEF} --run-root {root}\n{STEP}").error
    said = f"run directories can't be written to {nb.folder}/{root}: Not a directory; choose another folder with --run-root"
    assert (error.ename, error.traceback) == ("ConfigError", f"ConfigError: {said}")


# -- what is planned, and what is not there yet


def test_a_plan_starts_nothing(nb):
    there = run_folders(nb)
    line = "net samples --val held_out -n 2 --batch-size 64"
    python = "nbddp.plan(net, samples, held_out, nproc=2, batch_size=64)"
    for source in (f"%ddp_plan {line}", f"%%ddp_plan {line}\n{STEP}", f"%%ddp_train {line} --dry-run\n{STEP}", python):
        cell = nb.run(source, check=True)
        assert cell.text.startswith("2 x CPU ranks · 64 = 2 x 32 · 8 steps/epoch")
        assert cell.shown() == []
    assert run_folders(nb) == there
    assert nb.eval("'run' in globals()") is False
