"""%ddp_config where there are no widgets: the written cell, and what fills it. The panel itself needs a kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from nbddp.config import TrainConfig
from nbddp.errors import ConfigError, NbddpError
from nbddp.kernel.cell_writer import MEANT, Call, told, write_line
from nbddp.kernel.line import parse, uncommented
from nbddp.kernel.names import expand
from nbddp.kernel.options import INVOCATION, UNITS, train_options
from nbddp.kernel.panel_call import CallControls
from nbddp.kernel.panel_check import Checker
from nbddp.kernel.panel_controls import Options, Shared
from nbddp.kernel.panel_fill import Draft, Source, cell_of, draft, given_texts
from nbddp.kernel.prepare import prepare
from nbddp.kernel.settings import read
from nbddp.rundir import RunDir
from support import shell as shells
from support.configs import AVAILABLE, configs
from support.fake_run import finished

NO_PANEL = "the panel needs a notebook"


@pytest.fixture
def shell(tmp_path, monkeypatch):
    monkeypatch.setenv("NBDDP_RUN_ROOT", str(tmp_path / "runs"))
    monkeypatch.setattr("nbddp.kernel.runs._last", [])
    data = TensorDataset(torch.zeros(64, 2), torch.zeros(64, 1))
    with shells.running(tmp_path) as shell:
        names = {"net": nn.Linear(2, 1), "train_set": data, "loader": DataLoader(data, batch_size=16, num_workers=2), "val_set": data, "n": 4}
        shell.ip.user_ns.update(names, criterion=nn.MSELoss())
        yield shell


def written(shell, line):
    shell.ip.rl_next_input = None
    shell.run(f"%ddp_config {line}")
    return shell.ip.rl_next_input


def refused(shell, source):
    shell.run(source, check=False)
    assert type(shell.error).__name__ == "ConfigError", shell.output
    return shell.output.strip().removeprefix("ConfigError: ")


def test_a_terminal_is_told_what_to_use_instead(shell):
    assert written(shell, "net train_set -n 2") is None
    assert shell.output.startswith(NO_PANEL)
    assert "%ddp_config MODEL DATA [options] --cell" in shell.output
    shell.run("%ddp_config -h")
    assert "--from RUN" in shell.output


@pytest.mark.parametrize(
    "line, cell",
    [
        ("net train_set --cell -n 2 --epochs 3 --batch-size {n * 8}", "%%ddp_train net train_set -n 2 --batch-size 32 --epochs 3\nloss = criterion"),
        ("--cell net train_set --optimizer adamw --lr 0.001 --val val_set", "%%ddp_train net train_set --val val_set --lr 0.001\nloss = criterion"),
        ("net train_set --cell --loss nn.MSELoss()", "%ddp_train net train_set --loss nn.MSELoss()"),
        ('net train_set --cell --background --as first --note "a note"', '%%ddp_train net train_set --as first --note "a note" --background\nloss = criterion'),
        ("net train_set --cell --no-load --max-time 90 min", "%%ddp_train net train_set --max-time 90 min --load none\nloss = criterion"),
        ("net train_set --cell # a comment", "%%ddp_train net train_set\nloss = criterion"),
    ],
)
def test_the_cell_of_a_line(shell, line, cell):
    assert written(shell, line) == cell
    assert shell.output == ""


def test_a_cell_of_a_run_is_its_cell(shell, tmp_path):
    run = finished(tmp_path / "runs", epochs=1, steps_per_epoch=10, config={"nproc": 2, "per_rank_batch_size": 8, "epochs": 3, "shuffle": True})
    spec = run.read_spec()
    source = "# mine\n%%ddp_train net train_set -n 2 --val val_set --as first --note 'a b'\n\ndef loss(output, target):\n    return output.mean()\n"
    spec.update(model_name="net", data_name="train_set", val_name="val_set", cell={"number": 3, "source": source})
    run.write_spec(spec)
    body = "def loss(output, target):\n    return output.mean()"
    short = run.id[-4:]
    expected = '%%ddp_train net train_set --val val_set -n 2 --per-rank-batch-size 8 --epochs 3 --shuffle --as first --note "a b"\n' + body
    assert written(shell, f"--from {short} --cell") == expected
    assert written(shell, f"--cell --from={run.path}") == expected
    other = written(shell, f"net loader --from {run.id} --cell --batch-size 32 --epochs 5")  # the line wins, and per_rank_batch_size gives way
    assert other == f'%%ddp_train net loader --val val_set -n 2 --batch-size 32 --epochs 5 --shuffle --as first --note "a b"\n{body}'
    assert refused(shell, "%ddp_config --from nowhere --cell").startswith("no run")


def test_a_cell_of_a_settings_file(shell, tmp_path):
    path = tmp_path / "a b.yaml"
    path.write_text("learning_rate: 1e-3\nepochs: 4\nstages:\n  - {name: head, epochs: 2}\n  - {name: all, lr: 0.1}\n", encoding="utf-8")
    body = "import nbddp\nstages = [\n    nbddp.Stage('head', epochs=2),\n    nbddp.Stage('all', lr=0.1),\n]\nloss = criterion"
    cell = written(shell, f'net train_set --from "{path}" --cell --max-steps 9')
    assert cell == f"%%ddp_train net train_set --epochs 4 --max-steps 9 --lr 0.001\n{body}"
    assert written(shell, f'net train_set --config "{path}" --cell --max-steps 9') == cell
    request = shell.run(cell)
    assert [repr(stage) for stage in request.hooks["stages"]] == ["Stage('head', epochs=2)", "Stage('all', lr=0.1)"]


@pytest.mark.parametrize(
    "text, options",
    [
        ("local:\n  device: cpu\n  num_workers: 0\ntraining:\n  stage_0:\n    epochs: 2\n    batch_size: 16\n    optimizer: {type: adam, lr: 0.01}\n", None),
        ("trainer:\n  config:\n    epochs: 3\n", {"epochs": 3}),
    ],
)
def test_settings_files_of_other_systems_fill_it(shell, tmp_path, text, options):
    path = tmp_path / "other.yaml"
    path.write_text(text, encoding="utf-8")
    expected = read(path)
    request = shell.run(written(shell, f"net train_set --from {path} --cell"))
    config = TrainConfig(**request.options)
    assert config == expected.config
    assert options is None or config.epochs == options["epochs"]
    assert len(request.hooks.get("stages", [])) == len(expected.stages)


@pytest.mark.parametrize(
    "line, said",
    [
        ("", "model and training data are missing: %ddp_config MODEL DATA [options]"),
        ("--cell", "model and training data are missing"),
        ("net", "net is the model; the training data is missing"),
        ("net train_set --from", "--from needs a value"),
        ("net train_set --from --cell", "--from needs a value"),
        ("net train_set --from a --from b", "--from is given twice"),
        ("net train_set --dry-run", "--dry-run: a panel shows the plan"),
        ("net train_set --from gone.yaml", "--config gone.yaml: there is no such file"),
        ("net train_set --batchsize 3", "--batchsize is not an option of %ddp_config. Did you mean --batch-size"),
        ("net train_set --batch-size many --cell", "batch_size='many' must be a valid integer"),
        ("net train_set --batch-size 8 --per-rank-batch-size 4", "batch_size is the global batch and per_rank_batch_size"),
    ],
)
def test_wrong_lines(shell, line, said):
    assert refused(shell, f"%ddp_config {line}").startswith(said)


def test_one_source_is_enough(shell, tmp_path):
    (tmp_path / "s.yaml").write_text("lr: 1\n", encoding="utf-8")
    assert "keep one of the two" in refused(shell, f"%ddp_config net train_set --from {tmp_path}/s.yaml --config {tmp_path}/s.yaml")


FREE = {"compile_cache_dir", "run_root", "tensorboard", "name", "monitor", "resume", "init"}
"""Options of which any text is right by itself."""


def wrong_texts(name):
    """Texts that an option refuses by itself."""
    option = train_options()[name]
    if name in UNITS:
        return ["0", "2 fortnights", "1.5.5", "-1 h"]
    return {"N": ["-1", "1.5", "many", "1e3", ""], "X": ["-1", "nan", "inf", "1,5", "fast"]}.get(option.metavar, ["no such word", "a=", "0,0"])


# A switch can't be wrong.
BY_ITSELF = [(name, text) for name in AVAILABLE if name not in FREE and not train_options()[name].flag for text in wrong_texts(name)]
WRONG = [
    {"batch_size": "many"},
    {"batch_size": "0"},
    {"lr": "-1"},
    {"max_time": "soon"},
    {"devices": "0,0"},
    {"norm": "batc"},
    {"norm": "a=sync,b"},
    {"precision": "fp64"},
    {"wandb": "group=a"},
    {"val_every": "10 min"},
    {"fused": True, "optimizer": "rmsprop"},
    {"lr_scale": "linear"},
    {"batch_size": "8", "per_rank_batch_size": "4"},
    {"nproc": "3", "batch_size": "32"},
    {"nproc": "2", "num_workers": "3"},
    {"devices": "7"},
    {"batch_size": "128"},
    {"patience": "3"},
    {"warmup_steps": "1000"},
    {"monitor": "accuracy"},
    {"resume": "last"},
    {"init": "nowhere.pt"},
    {"scheduler_interval": "epoch"},
    {"norm": "nothing.*=sync"},
]


@pytest.mark.parametrize("values", WRONG, ids=str)
def test_a_panel_says_what_the_magic_says(shell, values):
    """The reference is a cell with the same options, run and prepared; the panel shows it at the option that it begins with."""
    line = " ".join(f"--{name.replace('_', '-')}" + ("" if value is True else f" '{value}'") for name, value in values.items())
    request = shell.run(f"%ddp_plan net train_set {line}", check=False)
    if request is None:
        reference = str(shell.error)
    else:
        with pytest.raises(NbddpError, match=r"\w") as caught:
            prepare(replace(request, hooks={**request.hooks, "loss": nn.MSELoss()}))
        reference = str(caught.value)
    checked = Checker(lambda: shell.ip.user_ns).check(Draft(Call("net", "train_set", values), "loss = criterion"))
    assert checked.plan is None
    ((name, said),) = checked.errors.items()
    assert said == reference
    assert name in ("", *values)


@pytest.mark.parametrize("name, text", BY_ITSELF)
def test_every_option_is_refused_in_the_words_of_the_magic(shell, name, text):
    shell.run(f"%ddp_plan net train_set --{name.replace('_', '-')}='{text}'" if text else f"%ddp_plan net train_set --{name.replace('_', '-')} ''", check=False)
    assert isinstance(shell.error, NbddpError), "the magic takes it"
    checker = Checker(lambda: shell.ip.user_ns)
    assert checker.error_of(name, text) in (str(shell.error), *([""] if name == "norm" else []))
    checked = checker.check(Draft(Call("net", "train_set", {name: text}), "loss = criterion"))
    assert dict(checked.errors) == {name: str(shell.error)}
    assert checked.wrong == checked.unread == {name}
    assert checked.plan is None
    assert checked.prepared is not None, "what does not depend on it is still known"


def test_what_is_wrong_with_the_name_of_the_run(shell):
    for text in ("1x", "class", "a b"):
        shell.run(f"%ddp_plan net train_set --as '{text}'", check=False)
        checked = Checker(lambda: shell.ip.user_ns).check(Draft(Call("net", "train_set", bind=text), "loss = criterion"))
        assert checked.errors == {"as": str(shell.error)}


def test_a_variable_in_place_of_its_value(shell):
    error = Checker(lambda: shell.ip.user_ns).error_of("batch_size", "n")
    assert error.endswith("n is a variable of the notebook: write its value, 4")


def test_what_remains_of_options_that_do_not_go_together(shell):
    checker = Checker(lambda: shell.ip.user_ns)

    def check(**values):
        return checker.check(Draft(Call("net", "train_set", values), "loss = criterion"))

    checked = check(nproc="2", batch_size="33", epochs="3")
    assert (set(checked.errors), checked.wrong, checked.unread) == ({"batch_size"}, {"batch_size"}, set())
    assert checked.outlined.config.batch_size == 33, "on other numbers of ranks it may be right"
    assert checked.prepared.plan.stages[0].epochs == 3
    checked = check(batch_size="8", per_rank_batch_size="4", lr="0.1")
    assert checked.unread == checked.wrong == {"batch_size"}
    assert checked.prepared.plan.stages[0].lr == 0.1
    checked = check(batch_size="x", lr="y", epochs="0")
    assert set(checked.errors) == checked.wrong == {"batch_size", "lr", "epochs"}
    assert checked.prepared.plan.n_train == 64
    shell.ip.user_ns["train_set"] = "gone"
    checked = check(lr="0.1")
    assert (checked.outlined, checked.prepared) == (None, None)
    assert "train_set is a str" in checked.errors[""]


def test_stages_and_samplers_of_the_body(shell):
    checker = Checker(lambda: shell.ip.user_ns)
    checked = checker.check(Draft(Call("net", "train_set"), "import nbddp\nstages = [nbddp.Stage('a', epochs=2), nbddp.Stage('b', lr=0.5)]\nloss = criterion"))
    assert [stage.name for stage in checked.plan.plan.stages] == ["a", "b"]
    assert checked.remarks == ()
    checked = checker.check(Draft(Call("net", "train_set"), "stages = make()\nsampler = other\nloss = criterion"))
    assert checked.remarks == ("the figures are without stages and sampler of the body, which is not run here: %%ddp_plan shows them",)
    checked = checker.check(Draft(Call("net", "train_set"), "import nbddp\nstages = [nbddp.Stage(epochs=0)]\nloss = criterion"))
    assert "epochs=0" in checked.errors["body"]
    assert checker.check(Draft(Call("net", "train_set"), "loss = (")).errors == {"body": "SyntaxError: '(' was never closed (line 1 of the body)"}


def test_a_run_by_the_name_of_its_variable(shell, tmp_path):
    done = finished(tmp_path / "runs", epochs=1, steps_per_epoch=10)
    shell.run(f"import nbddp\nmine = nbddp.attach({str(done.path)!r})")
    calls = [Call("net", "train_set", {"init": init}) for init in ("mine", str(done.path))]
    errors = [Checker(lambda: shell.ip.user_ns).check(Draft(call, "loss = criterion")).errors for call in calls]
    assert errors[0] == errors[1]
    assert "mine" not in str(errors[0])


def test_bad_data_is_refused_as_by_the_magic(shell):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([])

    class Endless:
        def __getitem__(self, index):
            return index

    shell.ip.user_ns.update(stream=Stream(), endless=Endless(), bare=nn.Identity(), frozen=nn.Linear(2, 1).requires_grad_(requires_grad=False))
    batches = DataLoader(shell.ip.user_ns["train_set"], batch_size=None)
    shell.ip.user_ns["batches"] = batches
    for line in ("net stream", "net endless", "bare train_set", "frozen train_set", "nett train_set", "net train_sett", "net batches", "net n", "n net"):
        model, data = line.split()
        request = shell.run(f"%ddp_plan {line}", check=False)
        reference = str(shell.error)
        if request is not None:
            with pytest.raises(NbddpError) as caught:
                prepare(replace(request, hooks={"loss": nn.MSELoss()}))
            reference = str(caught.value)
        checked = Checker(lambda: shell.ip.user_ns).check(Draft(Call(model, data), "loss = criterion"))
        assert checked.errors == {"": reference}
        assert checked.plan is None


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(config=configs())
def test_a_line_and_the_cell_of_its_panel_are_the_same_configuration(shell, controls, config):
    """Line -> panel -> written cell -> line, with the panel's own widgets; what a text box can't hold is left out."""
    try:
        line = write_line(Call("net", "train_set", told(config)))
    except ConfigError:  # no line can say it
        assume(False)
    blank = [name for name in config.given if isinstance(text := getattr(config, name), str) and not text.strip()]
    assume(not blank)
    filled = draft(Source(), parse(expand(line, {})), {"criterion": 1})
    controls.fill(filled.call.values)
    typed = replace(filled, call=replace(filled.call, values=controls.values()))
    cell = cell_of(typed)
    back = TrainConfig(**parse(expand(uncommented(cell.removeprefix("%%ddp_train").removeprefix("%ddp_train").split("\n")[0]), {})).options)
    assert back == config
    plain = {name for name in config.given if getattr(config, name) == TrainConfig.model_fields[name].default}
    switches = {name for name, field in controls.fields.items() if field.control.kind == "switch"}  # on and left out look the same, and are
    assert back.given == {name for name in config.given if name not in plain or (name in MEANT and name not in switches)}


@pytest.fixture(scope="module")
def controls():
    return Options({}, lambda name: (), Shared())


def test_what_belongs_to_the_call_goes_through_its_controls():
    call = CallControls(lambda name: ["val_set"], Shared())
    full = Draft(Call("net", "train_set", {"lr": "1"}, val="val_set", loss="f", bind="first", note="a 'note'", background=True), "x = 1\n", ("said",))
    for asked in (full, Draft(Call("net", "train_set"))):
        call.fill(asked)
        assert call.put_into(Draft(Call("net", "train_set", asked.call.values), "", asked.notes)) == asked
    beside = {"config", "freeze_rb_layer", "no_load", "dry_run"}  # see the module's own text
    assert {option.name for option in INVOCATION} - beside == set(call.controls) - {"body"}


def test_none_takes_an_option_back(shell, tmp_path):
    path = tmp_path / "s.yaml"
    path.write_text("lr_scale: linear\nbase_batch_size: 32\nclip_norm: 1\npatience: 3\nmonitor: loss\n", encoding="utf-8")
    assert "--lr-scale linear --base-batch-size 32 --clip-norm 1" in written(shell, f"net train_set --from {path} --cell")
    assert written(shell, f"net train_set --from {path} --cell --lr-scale none --clip-norm none --patience none") == (
        "%%ddp_train net train_set --monitor loss\nloss = criterion"
    )
    assert "--batch-size none" in written(shell, "net loader --batch-size none --cell"), "that of the loader"
    request = shell.run(f"%%ddp_train net train_set --config {path} --lr-scale none\nloss = criterion")
    assert TrainConfig(**request.options).base_batch_size is None


def test_the_latest_run(shell, tmp_path):
    assert refused(shell, "%ddp_config --from latest").startswith("no run latest")
    for epochs in (2, 3):
        run = finished(tmp_path / "runs", epochs=1, steps_per_epoch=10, config={"epochs": epochs})
        run.write_spec({**run.read_spec(), "model_name": "net", "data_name": "train_set"})
    newest = max((tmp_path / "runs").glob("2*"), key=lambda path: (path.name[:15], path.name[-4:]))
    epochs = RunDir(newest).read_spec()["config"]["epochs"]
    for word in ("latest", "last"):
        assert written(shell, f"--from {word} --cell") == f"%%ddp_train net train_set -n 2 --epochs {epochs}\nloss = criterion"
    assert written(shell, f"--from {newest} --cell") == written(shell, f"--from {newest.name} --cell")


def test_what_is_right_has_a_plan_and_hooks_of_the_body_count(shell):
    checker = Checker(lambda: shell.ip.user_ns)
    checked = checker.check(Draft(Call("net", "train_set", {"nproc": "2", "epochs": "3"}), "loss = criterion\ndef optimizer(model): pass"))
    assert checked.errors == {}
    assert "optimizer hook" in checked.prepared.plan_line()
    checked = checker.check(Draft(Call("net", "train_set", {"lr": "1"}), "loss = criterion\ndef optimizer(model): pass"))
    assert checked.errors == {"lr": "lr beside the hook optimizer, which sets all of it: keep one of the two"}
    checked = checker.check(Draft(Call("net", "train_set", {"monitor": "val_accuracy"}, val="val_set"), "loss = criterion\nmetrics = {'accuracy': f}"))
    assert checked.errors == {}


def test_a_missing_loss_is_said_and_the_plan_is_there(shell):
    checked = Checker(lambda: shell.ip.user_ns).check(Draft(Call("net", "train_set"), "criterion2 = 3"))
    assert set(checked.errors) == {"body"}
    assert checked.errors["body"].startswith("neither loss nor training_step is given")
    assert checked.prepared is not None


def test_names_are_looked_up_each_time_and_expressions_once(shell):
    checker = Checker(lambda: shell.ip.user_ns)
    shell.run("calls = []\ndef make():\n    calls.append(1)\n    return val_set")
    for _ in range(3):
        checked = checker.check(Draft(Call("net", "train_set", val="make()"), "loss = criterion"))
    assert checked.prepared.plan.n_val == 64
    assert shell.ip.user_ns["calls"] == [1]
    shell.ip.user_ns["train_set"] = TensorDataset(torch.zeros(128, 2), torch.zeros(128, 1))
    assert checker.check(Draft(Call("net", "train_set"), "loss = criterion")).prepared.plan.n_train == 128
    assert checker.check(Draft(Call("net", "train_set", val="val_sett"), "loss = criterion")).errors == {
        "val": "val_sett is not defined in the notebook. Did you mean val_set?"
    }


def test_an_error_of_the_users_own_code_is_shown_as_it_is(shell):
    class Broken(TensorDataset):
        def __len__(self):
            raise RuntimeError("no length")

    shell.ip.user_ns["broken"] = Broken(torch.zeros(4, 2))
    checked = Checker(lambda: shell.ip.user_ns).check(Draft(Call("net", "broken"), "loss = criterion"))
    assert checked.errors == {"": "RuntimeError: no length"}


def test_texts_of_a_configuration():
    config = TrainConfig(nproc=2, epochs=1, shuffle=True, lr=None, pin_memory=None, batch_size=64)
    assert given_texts(config) == {"nproc": "2", "batch_size": "64", "epochs": "1", "shuffle": True, "pin_memory": "auto"}
