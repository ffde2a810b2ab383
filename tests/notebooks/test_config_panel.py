"""The configuration panel in a real kernel, its widgets set and pressed as a front end does."""

from __future__ import annotations

import html
import re
from typing import TYPE_CHECKING, Any

import pytest

from support.example import ALONE, run_folders
from support.kernel import Cell

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.kernel import Notebook

pytestmark = pytest.mark.kernel

SETUP = (
    ALONE
    + """
from torch.utils.data import DataLoader
criterion = nn.CrossEntropyLoss()
normed = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
loader = DataLoader(samples, batch_size=32, num_workers=2)
"""
)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """One kernel for the tests of this module; each opens a panel of its own."""
    from support.kernel import Notebook

    with Notebook(tmp_path_factory.mktemp("notebook"), tmp_path_factory.mktemp("kernel")) as nb:
        nb.run(SETUP, check=True)
        yield nb


class Panel:
    """The panel that a line opens, as a front end sees it."""

    def __init__(self, nb: Notebook, line: str) -> None:
        before = set(nb.widgets)
        self.nb = nb
        self.cell: Cell = nb.run(f"%ddp_config {line}", check=True)
        self.ids = [key for key in nb.widgets if key not in before]

    def id(self, description: str) -> str:
        (found,) = [key for key in self.ids if self.nb.widgets[key].get("description") == description]
        return found

    def state(self, description: str) -> dict[str, Any]:
        return self.nb.widgets[self.id(description)]

    def set(self, description: str, value: object) -> None:
        self.nb.set_widget(self.id(description), value=value)

    def choose(self, description: str, word: str) -> None:
        labels = self.state(description)["_options_labels"]
        self.nb.set_widget(self.id(description), index=labels.index(word))

    @property
    def shown(self) -> str:
        """The text of all that is no control."""
        values = [str(self.nb.widgets[key].get("value")) for key in self.ids if self.nb.widgets[key].get("_model_name") == "HTMLModel"]
        return re.sub(r"\s+", " ", html.unescape(re.sub(r"<style>.*?</style>|<[^>]+>", " ", "\n".join(values), flags=re.DOTALL)))

    @property
    def alerts(self) -> list[str]:
        """What is wrong, as shown beside the controls."""
        values = [str(self.nb.widgets[key].get("value")) for key in self.ids]
        return [html.unescape(text) for value in values for text in re.findall(r'<div role="alert"[^>]*>([^<]+)', value)]

    def until(self, *parts: str, alerts: int | None = None) -> None:
        """Wait until all of these are shown, and so many alerts."""
        self.nb.until(lambda: all(part in self.shown for part in parts) and (alerts is None or len(self.alerts) == alerts), 20)

    def written(self, *, until: str = "%ddp_train") -> str:
        """Press Write cell and return what it shows."""
        self.nb.click(self.id("Write cell"))
        self.nb.until(lambda: until in str(self.state("cell")["value"]), 20)
        return str(self.state("cell")["value"])


def test_wrong_options_are_told_as_one_types_in_the_words_of_the_magic(kernel: Notebook) -> None:
    panel = Panel(kernel, "net samples -n 2")
    assert panel.alerts == []
    assert "2 x CPU ranks · 64 = 2 x 32 (default) · 8 steps/epoch" in panel.shown
    for value, said in (("1", "must divide by 2 ranks: use 2"), ("10x", "batch_size='10x' must be a valid integer"), ("101", "use 100 or 102")):
        panel.set("batch_size", value)
        panel.until(said, alerts=1)
    (reference,) = panel.alerts
    error = kernel.run("%ddp_plan net samples -n 2 --batch-size 101").error
    assert error is not None
    assert error.evalue == reference
    tabs = next(kernel.widgets[key] for key in panel.ids if kernel.widgets[key].get("_model_name") == "TabModel")
    assert tabs["titles"][0] == "ranks and batch \u27171"
    panel.set("batch_size", "")
    panel.until("64 = 2 x 32 (default)", alerts=0)
    assert tabs["titles"][0] == "ranks and batch"


def test_figures_move_with_the_options(kernel: Notebook) -> None:
    panel = Panel(kernel, "normed samples -n 2 --batch-size 64")
    panel.until("2 x CPU ranks", "8 steps in all", "no loader workers", "1 becomes SyncBatchNorm")
    panel.set("nproc", "1")
    panel.set("epochs", "3")
    panel.set("num_workers", "2")
    panel.set("lr", "0.1")
    panel.choose("lr_scale", "linear")
    panel.set("base_batch_size", "32")
    # A sample is 8 floats and an index.
    panel.until("1 x CPU rank ·", "24 steps in all", "1 rank x 2 workers x 2 batches x 2.5 KiB", "1 stays", "0.1 x 64/32", alerts=0)
    panel.until("1 64 8 0.2 these options", "2 32 8 0.2 valid")


def test_a_loader_is_the_default_and_a_switch_says_what_differs(kernel: Notebook) -> None:
    panel = Panel(kernel, "net loader")
    assert panel.state("num_workers")["placeholder"] == "2"
    assert panel.state("batch_size")["placeholder"] == "32"
    assert panel.state("shuffle")["value"] is False
    assert panel.written() == "%%ddp_train net loader\nloss = criterion"
    panel.set("shuffle", True)
    panel.set("num_workers", "0")
    kernel.until(lambda: "--shuffle" in str(panel.state("cell")["value"]), 20)
    assert panel.state("cell")["value"] == "%%ddp_train net loader --shuffle --num-workers 0\nloss = criterion"


def test_every_control_has_a_name_and_what_is_not_available_is_disabled(kernel: Notebook) -> None:
    panel = Panel(kernel, "net samples")
    states = [kernel.widgets[key] for key in panel.ids]
    controls = [state for state in states if {"value", "index", "button_style"} & set(state) and state["_model_name"] != "HTMLModel"]
    names = [state["description"] for state in controls]
    beside = ("val", "loss", "as", "note", "background", "body of the cell", "Run", "Write cell", "cell")
    assert [name for name in names if name not in beside] == kernel.eval("list(nbddp.TrainConfig.model_fields)")
    assert all(names)
    assert len(names) == len(set(names))
    disabled = {state["description"] for state in controls if state.get("disabled")}
    assert {"launcher", "slurm", "nnodes"} <= disabled
    assert "lr" not in disabled
    assert "options for sbatch; not available yet" in panel.shown


def test_the_written_cell_asks_for_what_the_panel_shows(kernel: Notebook) -> None:
    panel = Panel(kernel, "net samples -n 2 --epochs 3 --optimizer adamw --precision fp32 --val held_out")
    panel.choose("optimizer", "sgd")
    panel.choose("pin_memory", "false")
    panel.set("max_time", "90 min")
    panel.set("norm", "a*=sync, b=keep")
    panel.set("compile", True)
    panel.set("body of the cell", "def training_step(model, batch):\n    return model(batch[0]).sum()\n")
    kernel.until(lambda: "training_step" in panel.written(), 20)
    cell = panel.written(until="--compile")
    line = "net samples --val held_out -n 2 --epochs 3 --max-time 90 min --no-pin-memory --optimizer sgd --precision fp32 --compile --norm a*=sync,b=keep"
    assert cell == f"%%ddp_train {line}\ndef training_step(model, batch):\n    return model(batch[0]).sum()"
    put = kernel.run("%ddp_config --cell", check=True)
    assert put.payload == [{"source": "set_next_input", "text": cell, "replace": False}]
    assert put.outputs == []
    panel.set("lr", "fast")
    panel.until("lr='fast' must be a valid number")
    panel.nb.click(panel.id("Write cell"))
    panel.nb.until(lambda: panel.state("cell")["value"] == "", 20)
    error = kernel.run("%ddp_config --cell").error
    assert error is not None
    assert error.evalue.startswith("lr='fast' must be a valid number")


def test_run_trains_in_the_background_below_the_panel(kernel: Notebook) -> None:
    panel = Panel(kernel, "net samples -n 2 --epochs 2 --as first")
    other = kernel.run("print('another cell')", check=True)
    before = kernel.eval("accuracy(net)")
    kernel.click(panel.id("Run"))
    kernel.until(lambda: "finished" in str(panel.cell.outputs[-1].get("data", {}).get("text/plain")), 60)
    assert [output["output_type"] for output in other.outputs] == ["stream"]
    assert "2 x CPU ranks" in panel.cell.text
    panel.until("has finished: its card is below", "first.load() brings its weights")
    assert kernel.eval("(first.state, first.config.nproc, first.config.epochs)") == ("finished", 2, 2)
    assert kernel.eval("accuracy(net)") == before  # a run in the background writes nothing by itself
    kernel.run("first.wait()", check=True)
    spec = kernel.eval("first.files.read_spec()['cell']['source']")
    assert spec == "%%ddp_train net samples -n 2 --epochs 2 --as first --background\nloss = criterion"
    assert panel.state("Run")["disabled"] is False


def test_a_panel_is_filled_from_a_run_and_runs_again(kernel: Notebook) -> None:
    kernel.run("%%ddp_train net samples -n 2 --max-steps 3 --val held_out --as second\nloss = nn.CrossEntropyLoss(label_smoothing=0.1)", check=True)
    panel = Panel(kernel, "--from second")
    assert panel.written() == "%%ddp_train net samples --val held_out -n 2 --max-steps 3 --as second\nloss = nn.CrossEntropyLoss(label_smoothing=0.1)"
    again = Panel(kernel, "")  # the last panel as it is
    assert again.written() == panel.written()
    short = kernel.eval("second.id")[-4:]
    other = Panel(kernel, f"normed samples --from {short} --epochs 2")
    assert other.written().splitlines()[0] == "%%ddp_train normed samples --val held_out -n 2 --epochs 2 --max-steps 3 --as second"


def test_what_run_refuses_is_told_and_starts_nothing(kernel: Notebook) -> None:
    runs = len(run_folders(kernel))
    panel = Panel(kernel, "net samples -n 2")
    panel.set("body of the cell", "")
    panel.until("neither loss nor training_step is given", alerts=1)
    kernel.click(panel.id("Run"))
    panel.until("neither loss nor training_step is given", alerts=2)
    panel.set("body of the cell", "loss = nowhere + 1")
    panel.until(alerts=1)  # the button's own, until the next press
    kernel.click(panel.id("Run"))
    panel.until("the body of the cell raised NameError: name 'nowhere' is not defined")
    assert panel.cell.error is not None
    assert "line 2" in panel.cell.error.traceback
    panel.set("body of the cell", "loss = criterion")
    panel.set("loss", "criterion")
    panel.until("--loss and the cell's loss: keep one of the two")
    panel.set("loss", "")
    panel.set("batch_size", "7")
    panel.until("batch_size=7", alerts=2)
    kernel.click(panel.id("Run"))
    panel.until(alerts=2)
    kernel.until(lambda: panel.state("Run")["disabled"] is False, 20)
    assert len(run_folders(kernel)) == runs
    assert panel.state("Run")["disabled"] is False


def test_a_panel_of_what_can_not_be_trained_is_refused_at_once(kernel: Notebook) -> None:
    for line, said in (("samples net", "the model must be a torch.nn.Module"), ("net net", "the order is MODEL DATA"), ("nett samples", "Did you mean net?")):
        error = kernel.run(f"%ddp_config {line}").error
        assert error is not None
        assert said in error.evalue
        assert "\n" not in error.traceback


def test_what_stays_in_the_notebook_says_what_it_was(kernel: Notebook) -> None:
    panel = Panel(kernel, "net samples")
    assert [output["output_type"] for output in panel.cell.outputs] == ["display_data"] * 2
    rest, widgets = (output["data"] for output in panel.cell.outputs)
    assert rest["text/plain"] == "configuration panel of net and samples\n%%ddp_train net samples\nloss = criterion"
    assert "run this cell to open it again" in rest["text/html"]
    assert (widgets["text/html"], widgets["text/plain"]) == ("", "")
    panel.set("epochs", "3")
    kernel.until(lambda: "--epochs 3" in panel.cell.outputs[0]["data"]["text/plain"], 20)
    panel.set("epochs", "x")
    panel.until("epochs='x'")
    assert "--epochs 3" in panel.cell.outputs[0]["data"]["text/html"], "the last cell that could be run"


def run_as(nb: Notebook, cell_id: str, source: str) -> Cell:
    """Run a cell that says which it is, as JupyterLab does."""
    content = {"code": source, "silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": False, "stop_on_error": True}
    message = nb._client.session.msg("execute_request", content, metadata={"cellId": cell_id})
    nb._client.shell_channel.send(message)
    nb.cells.append(Cell(source, message["header"]["msg_id"]))
    return nb.wait()


def test_a_cell_that_runs_again_has_one_panel(kernel: Notebook) -> None:
    count = "sum(1 for w in __import__('ipywidgets').widgets.widget._instances.values())"
    kernel.run("again = get_ipython().magics_manager.registry['ConfigMagics']", check=True)
    sizes = []
    for _ in range(3):
        cell = run_as(kernel, "the same", "%ddp_config net samples")
        assert len(cell.outputs) == 2
        sizes.append(kernel.eval(count))
    assert len(set(sizes)) == 1, "a panel whose output is gone is closed"
    run_as(kernel, "the same", "%ddp_config net samples\n%ddp_config normed samples")
    assert kernel.eval("len(again._panels['the same'])") == 2


def test_names_and_objects_are_those_of_now(kernel: Notebook) -> None:
    kernel.run("current, data = normed, samples", check=True)
    panel = Panel(kernel, "current data --as of_now")
    panel.until("16 steps in all", "BatchNorm layers 1 1 stays")
    kernel.run("data = torch.utils.data.Subset(samples, range(96)); current = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4))", check=True)
    panel.until("3 steps in all", "BatchNorm layers 2 2 stay")
    kernel.run("current.append(nn.BatchNorm1d(4))", check=True)
    panel.until("BatchNorm layers 3 3 stay")
    kernel.click(panel.id("Run"))
    panel.until("has finished", "of_now.load()")
    assert kernel.eval("len(of_now.history['loss'])") == 3
    assert kernel.eval("of_now.wait().model().__len__()") == 4
    kernel.run("current = 'gone'", check=True)
    panel.until("current is a str: the model must be a torch.nn.Module", "no figures: what is wrong stands above")


def test_what_is_computed_is_computed_once_and_says_so(kernel: Notebook) -> None:
    kernel.run("made = []\ndef make():\n    made.append(1)\n    return samples", check=True)
    panel = Panel(kernel, 'net "make()"')
    for epochs in ("2", "3"):
        panel.set("epochs", epochs)
        panel.until(f"{16 * int(epochs)} steps in all", "make(): computed once for the figures, and again by Run and by the cell")
    assert kernel.eval("len(made)") == 1


def test_a_net_that_is_being_trained(kernel: Notebook) -> None:
    panel = Panel(kernel, "net samples -n 1 --epochs 1000 --as busy")
    kernel.click(panel.id("Run"))
    panel.until("goes on in the background (", "its view is below", "net is being trained by run")
    kernel.run("busy.stop(); busy.wait()", check=True)
    panel.until("has been stopped")
    kernel.until(lambda: "net is being trained by run" not in panel.shown, 20)


def test_a_key_press_is_answered_soon_and_blocks_nothing(kernel: Notebook) -> None:
    """50 ms is what one check may take of the main thread, for a network with 400 normalization layers and a dataset that must not be touched."""
    kernel.run(
        """
class Huge(torch.utils.data.Dataset):
    touched = 0
    def __len__(self): return 10**9
    def __getitem__(self, index):
        Huge.touched += 1
        return torch.zeros(8), 0
huge = Huge()
deep = nn.Sequential(*(part for _ in range(400) for part in (nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())))
""",
        check=True,
    )
    panel = Panel(kernel, "deep huge -n 2 --num-workers 2")
    kernel.run("panel = get_ipython().magics_manager.registry['ConfigMagics']._panel", check=True)
    took = []
    for size in range(2, 42, 2):
        panel.set("batch_size", str(size * 8))
        panel.until(f"of {size * 8} global")
        took.append(kernel.eval("panel._took_s") if size > 2 else 0.0)
    assert sorted(took)[len(took) // 2] < 0.05, took
    assert kernel.eval("Huge.touched") == 1


def test_changes_are_gathered(kernel: Notebook) -> None:
    panel = Panel(kernel, "normed samples -n 2")
    kernel.run(
        """
checks = []
panel = get_ipython().magics_manager.registry["ConfigMagics"]._panel
check = panel._checker.check
panel._checker.check = lambda draft: (checks.append(draft), check(draft))[1]
""",
        check=True,
    )
    for epochs in range(100):
        panel.set("epochs", str(epochs + 1))
    panel.until("800 steps in all")
    assert 1 <= kernel.eval("len(checks)") <= 10
