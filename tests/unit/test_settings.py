"""The settings file of --config."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from nbddp.config import TrainConfig
from nbddp.errors import ConfigError
from nbddp.kernel.settings import read


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "settings.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_keys_are_options_and_synonyms(file):
    found = read(file("batch_size: 64\nlearning_rate: 1e-3\nshuffle: off\nval_every: 500 steps\n"))
    config = found.config
    assert config.given == {"batch_size", "lr", "shuffle", "val_every"}
    assert (config.batch_size, config.lr, config.shuffle, config.val_every) == (64, 0.001, False, "500 steps")
    assert (found.stages, found.notes) == ((), ())


def test_gpus_alone_are_devices(file):
    assert read(file("gpus: [0, 1]\nlr: 0.1\n")).config.devices == (0, 1)


def test_a_mapping_is_read_like_a_file():
    assert read({"num_epochs": 3, "stages": [{"lr": 0.1}]}).config.epochs == 3
    assert read({"trainer": {"config": {"epochs": 3}}}).notes[0].startswith("config: not given there")
    with pytest.raises(ConfigError, match=r"^local=3 must be a mapping"):
        read({"local": 3})


def test_stages(file):
    text = """
lr: 0.1
stages:
  - {name: head, freeze: "backbone.*", epochs: 3, optimizer: sgd, learning_rate: 0.2}
  - {train_only: [a.*, b.*], freeze_batch_norm: true, per_rank_batch_size: 8}
"""
    found = read(file(text))
    assert found.config.given == {"lr"}
    head, rest = found.stages
    assert (head.name, head.freeze, head.options) == ("head", ("backbone.*",), {"epochs": 3, "optimizer": "sgd", "lr": 0.2})
    assert (rest.train_only, rest.freeze_batch_norm, rest.options) == (("a.*", "b.*"), True, {"per_rank_batch_size": 8})


@pytest.mark.parametrize(
    "text, said",
    [
        ("batchsize: 64\n", "batchsize is not an option. Did you mean batch_size"),
        ("batch_size: many\n", "batch_size='many' must be a valid integer"),
        ("lr: 1\nepochs: 2\nlr: 2\n", "line 3: the key lr is given twice"),
        ("stages:\n- lr: 1\n  lr: 2\n", "line 3: the key lr is given twice"),
        ("batch_size: 8\nper_rank_batch_size: 4\n", "batch_size is the global batch"),
        ("lr: 1\nlearning_rate: 2\n", "lr and learning_rate are the same option"),
        ("a: [1\n", "line 2: "),
        ("- lr\n", "must be a mapping"),
        ("1: 2\n", "must be a mapping"),
        ("", "must be a mapping"),
        ("lr: \x00\n", "special characters are not allowed"),
        ("!!python/object/apply:os.getcwd []\n", "could not determine a constructor"),
        ("stages: []\n", "stages=[] must be a list of mappings"),
        ("stages: 3\n", "stages=3 must be a list of mappings"),
        ("stages: {epochs: 3}\n", "must be a list of mappings"),
        ("stages: [3]\n", "stages[0]=3 must be a mapping"),
        ("stages: [{1: 2}]\n", "stages[0]={1: 2} must be a mapping"),
        ("stages: [{epochs: 1}, {epochs: many}]\n", "stages[1]: Stage: epochs='many' must be a valid integer"),
        ("stages: [{name: a, freez: x}]\n", "a: freez is not an option"),
        ("stages: [{nproc: 2}]\n", "stages[0]: Stage: nproc is an option of the whole run"),
        ("stages: [{scheduler: cosine}]\n", "stages[0]: Stage: scheduler"),
        ("stages: [{name: a}, {name: a}]\n", "two stages are called a"),
    ],
)
def test_refusals_name_the_file(file, text, said):
    path = file(text)
    with pytest.raises(ConfigError) as caught:
        read(path)
    assert str(caught.value).startswith(f"--config {path}")
    assert said in str(caught.value)


def test_a_missing_file_is_named_with_its_neighbour(file):
    path = file("lr: 1\n").with_name("setting.yaml")
    with pytest.raises(ConfigError, match=r"there is no such file. Did you mean settings.yaml\?"):
        read(path)


def test_what_is_no_text_is_refused(tmp_path):
    (tmp_path / "net.pt").write_bytes(b"\x80\x81\xff")
    with pytest.raises(ConfigError, match="can't be read"):
        read(tmp_path / "net.pt")
    with pytest.raises(ConfigError, match="can't be read"):
        read(tmp_path)


@pytest.mark.parametrize(
    "text, over, left",
    [
        ("per_rank_batch_size: 8\nlr: 1\n", {"batch_size": 64}, {"lr"}),
        ("batch_size: 8\n", {"per_rank_batch_size": "4"}, set()),
        ("init: initial\n", {"resume": "last"}, set()),
        ("resume: last\n", {"init": "initial"}, set()),
        ("find_unused_parameters: true\n", {"static_graph": True}, set()),
        ("drop_last: false\n", {"torch_compile": "true"}, set()),
        ("compile: true\ncompile_mode: max-autotune\n", {"compile": False}, {"compile"}),
        ("optimizer: sgd\nmomentum: 0.9\nfused: true\nweight_decay: 0.1\n", {"optimizer": "lbfgs"}, {"optimizer"}),
        ("optimizer: sgd\nmomentum: 0.9\nlr: 1\n", {"optimizer": "adam"}, {"optimizer", "lr"}),
    ],
)
def test_a_file_gives_way_to_what_the_line_has_instead(file, text, over, left):
    config = read(file(text), over=over).config
    assert config.given == left
    TrainConfig(**{**{name: getattr(config, name) for name in config.given}, **over})


def test_a_file_gives_way_to_hooks(file):
    text = "optimizer: sgd\nlr: 1\nmomentum: 0.9\nschedule: cosine\nepochs: 2\nstages: [{lr: 3, epochs: 1}, {schedule: linear}]\n"
    found = read(file(text), hooks=["optimizer"])
    assert found.config.given == {"schedule", "epochs"}
    assert [stage.options for stage in found.stages] == [{"epochs": 1}, {"schedule": "linear"}]
    assert [stage.options for stage in read(file(text), hooks=["scheduler"]).stages] == [{"lr": 3, "epochs": 1}, {}]
    with pytest.raises(ConfigError, match="the file has stages, and so has the cell"):
        read(file(text), hooks=["stages"])


def test_a_wrong_option_of_the_line_is_not_the_files(file):
    with pytest.raises(ConfigError, match=r"^epochs='many'"):
        read(file("lr: 1\n"), over={"epochs": "many"})


texts = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), min_size=1, max_size=12)
options = st.fixed_dictionaries(
    {},
    optional={
        "nproc": st.integers(1, 64),
        "devices": st.sampled_from(["auto", "cpu"]) | st.lists(st.integers(0, 15), min_size=1, max_size=4, unique=True),
        "batch_size": st.integers(1, 10**6),
        "epochs": st.integers(1, 10**4),
        "max_time": st.floats(1e-3, 1e6),
        "shuffle": st.booleans(),
        "val_split": st.floats(0.01, 0.99),
        "pin_memory": st.booleans() | st.none(),
        "lr": st.floats(0, 1e3),
        "weight_decay": st.floats(0, 1),
        "clip_norm": st.floats(1e-9, 1e9),
        "precision": st.sampled_from(["auto", "bf16", "fp16", "fp32"]),
        "matmul_precision": st.sampled_from(["highest", "high", "medium"]),
        "val_every": st.sampled_from(["1 epoch", "500 steps"]),
        "checkpoint_every": st.sampled_from(["2 epochs", "10 min"]),
        "monitor": texts,
        "name": texts,
        "run_root": texts.filter(lambda text: "\0" not in text),
        "wandb": st.fixed_dictionaries({"project": st.sampled_from(["a", "1e3", "no"])}, optional={"tags": st.sampled_from(["a+b", "a"])}),
        "tensorboard": st.sampled_from(["tb", "/x/y"]),
    },
)


@given(options)
def test_what_is_written_as_yaml_is_read_back(tmp_path_factory, values):
    config = TrainConfig(**values)
    path = tmp_path_factory.getbasetemp() / "written.yaml"
    path.write_text(yaml.safe_dump(config.to_json(), allow_unicode=True), encoding="utf-8")
    read_back = read(path).config if values else TrainConfig()
    assert (read_back, read_back.given) == (config, config.given)
