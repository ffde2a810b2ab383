"""Stop in the middle of everything: what the cell says, what is kept, and that nothing goes on."""

from __future__ import annotations

import random
import time

import pytest

from support.example import BRIEF, ENDLESS, EXAMPLE, run_folders, start

pytestmark = pytest.mark.kernel


@pytest.fixture(scope="module", autouse=True)
def example(shared_kernel):
    shared_kernel.run(EXAMPLE, check=True)


@pytest.fixture
def before(nb):
    """Fresh weights in `net`, kept in `before`, and no run."""
    nb.run("net = make_net()\nbefore = weights(net)\nglobals().pop('run', None)", check=True)


def assert_the_next_cell_trains(nb):
    nb.run(f"%%ddp_train net samples {BRIEF}\nloss = nn.CrossEntropyLoss()", check=True)
    assert nb.eval("(run.state, len(run.history['step']))") == ("finished", 3)


@pytest.mark.usefixtures("before")
def test_the_first_stops_in_order_and_keeps_the_weights_so_far(nb):
    cell = start(nb, f"net samples {ENDLESS}")
    nb.interrupt()
    began = time.monotonic()
    nb.wait()
    assert time.monotonic() - began < 5
    assert cell.error is None
    assert cell.stderr == ""
    assert "stopping in order, with a checkpoint; interrupt again to terminate" in cell.text
    assert nb.eval("(run.state, run.error, run.config.max_time)") == ("stopped", None, 100.0)
    step = nb.eval("int(run.history['step'][-1])")
    assert nb.eval("[(c.name, c.step) for c in run.checkpoints if c.name == 'last']") == [("last", step)]
    assert nb.eval("same(net.state_dict(), nbddp.load_checkpoint(run))") is True
    assert nb.eval("same(net.state_dict(), before)") is False
    assert cell.text.splitlines()[-1].startswith("net: epoch ")
    assert "stopped as asked" in cell.shown()[-1]
    assert_the_next_cell_trains(nb)
    assert "net starts from run" in nb.cells[-1].text or "net starts from run" in nb.cells[-2].text


@pytest.mark.usefixtures("before")
def test_the_second_a_moment_later_terminates_ranks_that_do_not_come_to_a_stop(nb):
    sleeps = "def training_step(model, batch):\n    if rank() == 1:\n        Path('asleep').touch()\n        time.sleep(1000)\n    return step(model, batch)"
    cell = start(nb, f"net samples {ENDLESS}", sleeps, until="asleep")
    nb.interrupt()
    time.sleep(0.08)  # between two presses of a key, not for anything to happen
    nb.interrupt()
    began = time.monotonic()
    nb.wait()
    assert time.monotonic() - began < 5
    assert cell.error is None
    assert "terminating; interrupt again to kill" in cell.text
    assert "in training_step" in cell.text  # where the ranks were
    assert nb.eval("(run.state, run.error, same(net.state_dict(), before))") == ("stopped", None, True)
    assert cell.text.splitlines()[-1].startswith("net is unchanged: the run was terminated ")
    assert_the_next_cell_trains(nb)


@pytest.mark.usefixtures("before")
def test_a_run_that_is_cut_off_leaves_its_newest_weights_whichever_file_holds_them(nb):
    """last.pt is of an early epoch, at most every 20 s; best.pt is written more often."""
    sleeps = """
def training_step(model, batch):
    files = [path for folder in Path("nbddp_runs").glob("*-cut_off-*") for path in (folder / "checkpoints/best.pt", folder / "checkpoints/last.pt")]
    if rank() == 1 and all(path.exists() for path in files) and files[0].stat().st_mtime_ns > files[1].stat().st_mtime_ns:
        Path("asleep").touch()
        time.sleep(1000)
    time.sleep(0.02)
    return step(model, batch)
"""
    cell = start(nb, f"net samples {ENDLESS} --name cut_off", sleeps, until="asleep")
    nb.interrupt()
    time.sleep(0.08)  # as above
    nb.interrupt()
    nb.wait()
    assert cell.error is None
    held = 'torch.load(run.dir / "checkpoints/best.pt", weights_only=True)'
    nb.run(f"held, last = {held}, {held.replace('best', 'last')}", check=True)
    assert nb.eval("(run.state, held['step'] > last['step'], same(net.state_dict(), held['model']))") == ("stopped", True, True)
    epoch, step = nb.eval("(held['epoch'], __import__('json').loads((run.dir / 'result.json').read_text())['step'])")
    line = cell.text.splitlines()[-1]
    assert line.startswith(f"net: epoch {epoch} (loss ")
    assert line.endswith(f", the best; the run was terminated after step {step}")
    card = cell.shown()[-1]
    assert "· terminated" in card
    assert f"{step} · epoch " in card
    assert f"net: epoch {epoch} (loss " in card
    assert repr(step) in nb.eval("repr(run)")
    assert nb.eval("same(run.model().state_dict(), held['model']) and same(nbddp.load_checkpoint(run), held['model'])") is True
    assert f"epoch {epoch}, step {nb.eval('held[' + repr('step') + ']')}, best.pt" in nb.run("%ddp_plan net samples --resume last", check=True).text


@pytest.mark.usefixtures("before")
def test_the_third_kills_what_heeds_nothing(nb):
    """The supervisor is suspended, so that SIGTERM does nothing; a checkpoint that the run wrote before is loaded."""
    deaf = """
def training_step(model, batch):
    if rank() == 1 and list(Path("nbddp_runs").glob("*-deaf-*/checkpoints/last.pt")):
        import signal
        os.kill(os.getppid(), signal.SIGSTOP)
        supervisor = int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(supervisor, signal.SIGSTOP)
        Path("deaf").touch()
        time.sleep(1000)
    return step(model, batch)
"""
    cell = start(nb, f"net samples {ENDLESS} --name deaf --checkpoint-every '2 steps'", deaf, until="deaf")
    for _ in range(3):
        nb.interrupt()
        time.sleep(0.08)  # as above
    began = time.monotonic()
    nb.wait()
    assert time.monotonic() - began < 5
    assert cell.error is None
    assert nb.eval("(run.state, run.error)") == ("stopped", None)
    assert nb.eval("same(net.state_dict(), nbddp.load_checkpoint(run)) and not same(net.state_dict(), before)") is True
    assert_the_next_cell_trains(nb)


@pytest.mark.parametrize("swallowed", [False, True], ids=["", "swallowed by the user's code"])
@pytest.mark.usefixtures("before")
def test_while_the_data_is_packed_nothing_is_started_and_nothing_left(nb, swallowed):
    nb.run(
        f"""
class Slow(TensorDataset):
    def __getstate__(self):
        Path("packing").touch()
        try:
            time.sleep({30 if not swallowed else 5})
        except KeyboardInterrupt:
            if not {swallowed}:
                raise
        return self.__dict__
slow = Slow(features, labels)
""",
        check=True,
    )
    there = run_folders(nb)
    cell = start(nb, f"net slow {ENDLESS}", until="packing")
    nb.interrupt()
    began = time.monotonic()
    nb.wait()
    assert time.monotonic() - began < 2
    assert cell.error.ename == "KeyboardInterrupt"
    assert cell.error.traceback == "KeyboardInterrupt: stopped before the run was started; nothing is left of it"
    assert run_folders(nb) == there
    assert nb.eval("('run' in globals(), same(net.state_dict(), before))") == (False, True)
    assert_the_next_cell_trains(nb)


@pytest.mark.usefixtures("before")
def test_in_the_validation_the_rest_of_it_is_left_out(nb):
    slow = "training_step = step\ndef validation_step(model, batch):\n    Path('validating').touch()\n    time.sleep(0.2)\n    return step(model, batch)"
    cell = start(nb, "net samples --val held_out -n 2 --batch-size 256 --val-batch-size 2 --epochs 1", slow, until="validating")
    nb.interrupt()
    began = time.monotonic()
    nb.wait()
    assert time.monotonic() - began < 5  # the whole validation takes 13 s
    assert cell.error is None
    assert nb.eval("(run.state, run.epochs['epoch'].tolist(), same(net.state_dict(), before))") == ("stopped", [1], False)
    assert_the_next_cell_trains(nb)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.usefixtures("before")
def test_at_any_moment_the_cell_ends_with_a_stopped_run_or_with_none(nb, seed):
    """From the first line of the cell over packing and launch to the first steps."""
    there = run_folders(nb)
    cell = start(nb, f"net samples {ENDLESS}", "Path('begun').touch()\ntraining_step = step", until="begun")
    delay = random.Random(seed).uniform(0, 0.4)
    deadline = time.monotonic() + delay
    nb.until(lambda: time.monotonic() > deadline)
    nb.interrupt()
    nb.wait(timeout=10)
    new = [path for path in run_folders(nb) if path not in there]
    if cell.error is None:
        assert nb.eval("run.state") == "stopped", f"after {delay:.3f} s"
        assert len(new) == 1
    else:
        assert (cell.error.ename, new) == ("KeyboardInterrupt", []), f"after {delay:.3f} s"
    assert_the_next_cell_trains(nb)
