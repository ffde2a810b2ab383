"""Settings files of two other systems: what is mapped, what is listed, what is refused."""

from __future__ import annotations

import pytest
import yaml

from nbddp.errors import ConfigError
from nbddp.kernel.settings import read

LOCAL = """
data:
  train_fraction: 0.95
  window: {type: tukey}
model:
  kind: flow
training:
  stage_0:
    epochs: 300
    batch_size: 4096
    freeze_rb_layer: true
    optimizer: {type: Adam, lr: 5.0e-5, betas: [0.9, 0.99], fused: true}
    scheduler: {type: cosine, T_max: 300}
    automatic_mixed_precision: true
    noise_path: noise.hdf5
  stage_1:
    epochs: 150
    batch_size: 4096
    freeze_rb_layer: false
    optimizer: {type: SGD, lr: 1.0e-2, momentum: 0.9}
    scheduler: {type: reduce_on_plateau, factor: 0.5}
local:
  device: cuda
  num_workers: 32
  num_gpus: 8
  ddp_port: 12355
  torch_compile: true
  torch_compile_cache_dir: /scratch/tmp
  float32_matmul_precision: high
  wandb: {project: flows, group: O4, id: abc}
  runtime_limits: {max_time_per_run: 3600}
  condor: {memory_gpus: 8000, extra_submit_lines: "+WantFull = true"}
"""

TRAINER = """
device: cuda
gpus: [0, 1]
net: {module: nets, type: Net, config: {width: 8}}
dataloaders:
  train:
    module: torch.utils.data
    type: DataLoader
    config: {batch_size: 40, shuffle: true, num_workers: 6, drop_last: true, prefetch_factor: 4, timeout: 3}
  test:
    module: torch.utils.data
    type: DataLoader
    config: {batch_size: 20, shuffle: false, num_workers: 6}
optimizer: {module: torch.optim, type: AdamW, config: {lr: 0.002, weight_decay: 0.01, amsgrad: true}}
scheduler: {module: torch.optim.lr_scheduler, type: CosineAnnealingLR, config: {T_max: 6}}
trainer:
  module: trainers.baseline
  type: Trainer
  config:
    epochs: 6
    precision: bf16
    tf32: false
    cudnn_benchmark: false
    compile: true
    compile_mode: max-autotune
    ddp_find_unused_parameters: false
    times_to_validate_per_epoch: 1
    keep_best_on: accuracy
target: {path: ./out, checkpoints_to_keep: 2}
"""


@pytest.fixture
def read_text(tmp_path):
    def of(text, **arguments):
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return read(path, **arguments)

    return of


def one_stage(**stage):
    return yaml.safe_dump({"local": {"num_gpus": 2}, "training": {"stage_0": stage}})


def trainer(**config):
    return yaml.safe_dump({"trainer": {"config": config}})


def loader(**config):
    return yaml.safe_dump({"dataloaders": {"train": {"config": config}}})


# -- local and training


def test_local_and_training_become_options_and_stages(read_text):
    found = read_text(LOCAL, freeze_rb_layer="*layers_rb*,head.*")
    assert found.config.to_json() == {
        "nproc": 8,
        "num_workers": 32,
        "compile": True,
        "compile_cache_dir": "/scratch/tmp",
        "matmul_precision": "high",
        "precision": "fp32",
        "val_split": 0.05,
        "wandb": {"project": "flows", "group": "O4"},
    }
    first, second = found.stages
    assert (first.name, first.freeze, second.name, second.freeze) == ("stage_0", ("*layers_rb*", "head.*"), "stage_1", ())
    common = {"batch_size": 4096}
    assert first.options == {**common, "epochs": 300, "optimizer": "adam", "lr": 5e-5, "fused": True, "schedule": "cosine", "precision": "fp16"}
    assert second.options == {**common, "epochs": 150, "optimizer": "sgd", "lr": 1e-2, "momentum": 0.9, "schedule": "plateau"}


def test_what_has_no_counterpart_is_listed_by_its_path(read_text):
    notes = read_text(LOCAL).notes
    for line in (
        "data.window",
        "model",
        "training.stage_0.noise_path",
        "training.stage_0.optimizer.betas: an optimizer hook sets it",
        "training.stage_0.freeze_rb_layer: say which parameters are meant: --freeze-rb-layer PATTERN, such as '*layers_rb*'",
        "training.stage_1.scheduler.factor: plateau has 0.1 here; a scheduler hook sets it",
        "local.ddp_port: not needed, a free port is taken",
        "local.runtime_limits: limits of a job; --max-time and --max-steps limit a run",
        "local.wandb.id",
        "local.condor.memory_gpus: --launcher brings its own",
        "local.condor.extra_submit_lines, which is not available yet",
    ):
        assert f"run.yaml: not mapped: {line}" in notes
    assert "run.yaml: not given there, so as by default there: precision fp32" in notes
    assert len(notes) == 12


def test_every_key_of_a_file_is_an_option_or_listed(read_text):
    """Whatever key is added, at whatever level, it is named in a note."""
    values = yaml.safe_load(LOCAL)
    places = [(), ("local",), ("local", "condor"), ("local", "wandb"), ("data",), ("training",), ("training", "stage_0"), ("training", "stage_1", "optimizer")]
    for place in places:
        changed = yaml.safe_load(LOCAL)
        section = changed
        for key in place:
            section = section[key]
        section["surprise"] = {"deep": 1}
        path = ".".join((*place, "surprise"))
        assert any(note.startswith(f"run.yaml: not mapped: {path}") for note in read_text(yaml.safe_dump(changed)).notes), path
    assert not any("surprise" in note for note in read_text(yaml.safe_dump(values)).notes)


def test_what_a_file_leaves_out_means_what_it_means_there(read_text):
    found = read_text("local: {device: cuda}\ntraining: {stage_0: {epochs: 2}}\n")
    assert found.config.to_json() == {"nproc": 1, "epochs": 2, "drop_last": False, "precision": "fp32", "matmul_precision": "highest"}
    assert found.notes == ("run.yaml: not given there, so as by default there: nproc 1, drop_last false, precision fp32, matmul_precision highest",)


def test_the_options_of_an_only_stage_are_those_of_the_run(read_text):
    found = read_text(one_stage(epochs=3, batch_size=64, optimizer={"type": "lbfgs", "lr": 1}, freeze_rb_layer=True), freeze_rb_layer="rb.*")
    assert (found.config.epochs, found.config.batch_size, found.config.optimizer, found.config.lr) == (3, 64, "lbfgs", 1)
    (stage,) = found.stages
    assert (stage.name, stage.freeze, stage.options) == ("stage_0", ("rb.*",), {})


def test_the_batch_of_a_backward_pass_becomes_that_of_a_step(read_text):
    config = read_text(one_stage(batch_size=64, gradient_updates_per_optimizer_step=4)).config
    assert (config.batch_size, config.accumulate) == (256, 4)


def test_early_stopping_is_patience(read_text):
    config = read_text(one_stage(early_stopping={"patience": 5, "delta": 0.1, "metric": "training"})).config
    assert (config.patience, config.min_delta, config.monitor) == (5, 0.1, "loss")
    assert read_text(one_stage(early_stopping={"patience": 5, "metric": "validation"})).config.monitor == "val_loss"


@pytest.mark.parametrize(
    "device, options",
    [("cpu", {"devices": "cpu", "nproc": 1}), ("cuda", {"nproc": 1}), ("cuda:3", {"devices": [3], "nproc": 1})],
)
def test_a_device_without_a_number(read_text, device, options):
    config = read_text(f"local: {{device: {device}}}\n").config.to_json()
    assert {name: config.get(name) for name in ("devices", "nproc")} == {"devices": None, **options}


def test_the_number_of_gpus_may_stand_in_the_older_place(read_text):
    assert read_text("local: {condor: {num_gpus: 4}}\n").config.nproc == 4
    assert read_text("local: {num_gpus: 4, condor: {num_gpus: 4}}\n").config.nproc == 4


@pytest.mark.parametrize("wandb, note", [("true", "local.wandb: it needs a project"), ("false", None), ("null", None)])
def test_wandb_without_a_mapping(read_text, wandb, note):
    found = read_text(f"local: {{wandb: {wandb}}}\n")
    assert found.config.wandb is None
    assert any(note in line for line in found.notes) if note else not any("wandb" in line for line in found.notes)


@pytest.mark.parametrize(
    "scheduler, schedule, note",
    [
        (None, "constant", None),
        ({"type": "cosine", "T_max": 3}, "cosine", None),
        ({"type": "cosine"}, "cosine", None),
        ({"type": "cosine", "T_max": 3, "eta_min": 0}, "cosine", None),
        ({"type": "cosine", "T_max": 5}, "constant", "training.stage_0.scheduler: cosine over 5 epochs"),
        ({"type": "cosine", "T_max": 3, "eta_min": 1e-6}, "constant", "training.stage_0.scheduler: cosine over 3 epochs down to 1e-06"),
        ({"type": "reduce_on_plateau"}, "plateau", None),
        ({"type": "reduce_on_plateau", "factor": 0.1, "patience": 10}, "plateau", None),
        ({"type": "reduce_on_plateau", "patience": 3}, "plateau", "training.stage_0.scheduler.patience: plateau has 10 here"),
        ({"type": "step", "step_size": 3}, "constant", "training.stage_0.scheduler: step; the learning rate stays constant"),
        ({"type": "none"}, "constant", None),
    ],
)
def test_schedulers_that_are_the_same_and_those_that_are_not(read_text, scheduler, schedule, note):
    found = read_text(one_stage(epochs=3, scheduler=scheduler))
    assert found.config.schedule == schedule
    listed = [line for line in found.notes if "scheduler" in line]
    assert any(note in line for line in listed) if note else not listed


@pytest.mark.parametrize("name", ["adam", "AdamW", "SGD", "Adagrad", "RMSprop", "LBFGS"])
def test_optimizers_by_the_names_of_their_classes(read_text, name):
    assert read_text(one_stage(optimizer={"type": name})).config.optimizer == name.lower()


def test_an_optimizer_without_a_type_is_ours(read_text):
    found = read_text(one_stage(optimizer={"lr": 0.1}))
    assert (found.config.lr, "optimizer" in found.config.given) == (0.1, False)
    assert "run.yaml: training.stage_0.optimizer.type is not given: adamw" in found.notes


@pytest.mark.parametrize(
    "text, said",
    [
        ("local: 5\n", "local=5 must be a mapping"),
        ("local: null\n", "local=None must be a mapping"),
        ("local: {1: 2}\n", "local={1: 2} must be a mapping"),
        ("local: {device: 3}\n", "local.device=3 must be a word"),
        ("local: {device: gpu}\n", "local.device=gpu must be cpu or cuda"),
        ("local: {device: cpu, num_gpus: 2}\n", "local.num_gpus=2 with local.device=cpu: leave num_gpus out"),
        ("local: {device: 'cuda:1', num_gpus: 2}\n", "local.num_gpus=2 with local.device=cuda:1"),
        ("local: {num_gpus: two}\n", "local.num_gpus='two' must be a whole number"),
        ("local: {num_gpus: true}\n", "local.num_gpus=True must be a whole number"),
        ("local: {num_gpus: 2, condor: {num_gpus: 4}}\n", "local.num_gpus=2 and local.condor.num_gpus=4"),
        ("local: {condor: []}\n", "local.condor=[] must be a mapping"),
        ("local: {num_workers: many}\n", "local.num_workers: num_workers='many' must be a valid integer"),
        ("local: {torch_compile: 3}\n", "local.torch_compile: compile=3 must be"),
        ("local: {float32_matmul_precision: low}\n", "local.float32_matmul_precision: matmul_precision='low' must be"),
        ("local: {wandb: {group: a}}\n", "local.wandb: wandb={'group': 'a'} needs a project"),
        ("local: {wandb: yes please}\n", "local.wandb='yes please' must be a mapping"),
        ("training: 5\n", "training=5 must be a mapping"),
        ("training: {}\n", "training has no stages: the first is stage_0"),
        ("training: {stage_0: [1]}\n", "training.stage_0=[1] must be a mapping"),
        ("training: {stage_0: null}\n", "training.stage_0=None must be a mapping"),
        ("training: {stage_1: {epochs: 1}}\n", "training.stage_0 is missing: the stages are stage_1"),
        ("training: {stage_0: {}, stage_2: {}}\n", "training.stage_1 is missing: the stages are stage_0, stage_2"),
        ("training: {stage_0: {}, stage_01: {}}\n", "training.stage_01 is not the name of a stage"),
        ("training: {stage_0: {epochs: many}}\n", "training.stage_0.epochs: epochs='many' must be a valid integer"),
        ("training: {stage_0: {epochs: 0}}\n", "training.stage_0.epochs: epochs=0 must be greater"),
        ("training: {stage_0: {batch_size: [1]}}\n", "training.stage_0.batch_size: batch_size=[1] must be"),
        ("training: {stage_0: {optimizer: adam}}\n", "training.stage_0.optimizer='adam' must be a mapping"),
        ("training: {stage_0: {optimizer: {type: 3}}}\n", "training.stage_0.optimizer.type=3 must be a word"),
        ("training: {stage_0: {optimizer: {type: adamm}}}\n", "training.stage_0.optimizer.type=adamm must be one of adam, adamw, sgd"),
        ("training: {stage_0: {optimizer: {type: adam, lr: fast}}}\n", "training.stage_0.optimizer.lr: lr='fast' must be a valid number"),
        ("training: {stage_0: {optimizer: {type: lbfgs, fused: true}}}\n", "fused=True: lbfgs has no fused kernels"),
        ("training: {stage_0: {scheduler: cosine}}\n", "training.stage_0.scheduler='cosine' must be a mapping"),
        ("training: {stage_0: {scheduler: {type: cosine, T_max: ten}}}\n", "training.stage_0.scheduler.T_max='ten' must be a whole number"),
        ("training: {stage_0: {freeze_rb_layer: 3}}\n", "training.stage_0.freeze_rb_layer=3 must be true or false"),
        ("training: {stage_0: {automatic_mixed_precision: fp16}}\n", "training.stage_0.automatic_mixed_precision='fp16' must be true or false"),
        ("training: {stage_0: {gradient_updates_per_optimizer_step: 0}}\n", "gradient_updates_per_optimizer_step=0 must be a whole number, at least 1"),
        ("training: {stage_0: {early_stopping: {metric: test}}}\n", "training.stage_0.early_stopping.metric=test must be training or validation"),
        ("local: {}\ndata: {train_fraction: 1.5}\n", "data.train_fraction=1.5 must be above 0 and at most 1"),
        ("local: {}\ndata: {train_fraction: most}\n", "data.train_fraction='most' must be above 0 and at most 1"),
        ("local: {}\ndata: 3\n", "data=3 must be a mapping"),
        ("local: {}\nbatch_size: 64\n", "batch_size beside local, a mixture of layouts"),
        ("training: {stage_0: {}}\nstages: [{epochs: 1}]\n", "stages beside training, a mixture of layouts"),
        ("local: {}\ntrainer: {config: {epochs: 1}}\n", "local beside trainer: a mixture of layouts"),
    ],
)
def test_refusals_of_local_and_training_name_file_and_key(read_text, tmp_path, text, said):
    with pytest.raises(ConfigError) as caught:
        read_text(text)
    assert str(caught.value).startswith(f"--config {tmp_path / 'run.yaml'}: ")
    assert said in str(caught.value)


def test_a_whole_fraction_leaves_nothing_to_validate_on(read_text):
    assert read_text("local: {}\ndata: {train_fraction: 1.0}\n").config.val_split is None


@pytest.mark.parametrize("text", ["lr: 0.1\n", TRAINER, "local: {}\n", "training: {stage_0: {epochs: 1}}\n", "training: {stage_0: {freeze_rb_layer: false}}\n"])
def test_a_pattern_for_a_key_that_is_not_there(read_text, text):
    with pytest.raises(ConfigError, match=r"freeze_rb_layer is given in the call, and .*: leave it out"):
        read_text(text, freeze_rb_layer="rb.*")


# -- gpus, dataloaders and trainer


def test_gpus_dataloaders_and_trainer_become_options(read_text):
    found = read_text(TRAINER)
    assert found.stages == ()
    assert found.config.to_json() == {
        "devices": [0, 1],
        "nproc": 2,
        "batch_size": 40,
        "val_batch_size": 20,
        "epochs": 6,
        "shuffle": True,
        "drop_last": True,
        "num_workers": 12,
        "prefetch_factor": 4,
        "persistent_workers": False,
        "optimizer": "adamw",
        "lr": 0.002,
        "weight_decay": 0.01,
        "schedule": "cosine",
        "precision": "bf16",
        "matmul_precision": "highest",
        "cudnn_benchmark": False,
        "compile": True,
        "compile_mode": "max-autotune",
        "find_unused_parameters": False,
        "keep_last": 2,
    }
    assert found.notes == (
        "run.yaml: not mapped: dataloaders.train.config.timeout",
        "run.yaml: not mapped: trainer.config.keep_best_on: --monitor val_NAME --mode max keeps the best by a metric of the cell",
        "run.yaml: not mapped: optimizer.config.amsgrad: an optimizer hook sets it",
        "run.yaml: not mapped: target.path",
        "run.yaml: not mapped: net",
        "run.yaml: num_workers 6 per rank, 12 over 2 ranks",
        "run.yaml: not given there, so as by default there: persistent_workers false",
    )


def test_a_trainer_that_says_little_has_its_own_defaults(read_text):
    found = read_text(trainer(epochs=2))
    assert found.config.to_json() == {"epochs": 2, "precision": "auto", "matmul_precision": "high", "find_unused_parameters": True}
    assert found.notes == ("run.yaml: not given there, so as by default there: precision auto, matmul_precision high, find_unused_parameters true",)
    assert read_text(loader(batch_size=8)).config.to_json().items() >= {"batch_size": 8, "shuffle": False, "drop_last": False}.items()
    assert read_text(loader(shuffle=True)).config.batch_size == 1


@pytest.mark.parametrize("over, ranks", [({}, 2), ({"n": "3"}, 3), ({"devices": "0,1,2,3"}, 4), ({"devices": "cpu"}, 2), ({"devices": "cpu", "nproc": 5}, 5)])
def test_loader_workers_are_counted_per_rank_there_and_in_total_here(read_text, over, ranks):
    assert read_text("gpus: [0, 1]\n" + loader(num_workers=3), over=over).config.num_workers == 3 * ranks


def test_without_gpus_the_ranks_are_those_of_the_machine(read_text):
    assert read_text("device: cpu\n" + loader(num_workers=3)).config.num_workers == 3
    import torch

    assert read_text(loader(num_workers=3)).config.num_workers == 3 * max(1, torch.cuda.device_count())
    assert read_text(loader(num_workers=3), over={"num_workers": 4}).config.num_workers == 0


def test_a_compiled_step_needs_whole_batches(read_text):
    text = yaml.safe_dump({"dataloaders": {"train": {"config": {"batch_size": 8, "drop_last": False}}}, "trainer": {"config": {"compile": True}}})
    found = read_text(text)
    assert found.config.drop_last
    assert "run.yaml: drop_last true: a compiled step needs whole batches" in found.notes


@pytest.mark.parametrize(
    "text, note",
    [
        ("dataloaders: {train: {type: Balanced, module: loaders}}\n", "dataloaders.train.type: loaders.Balanced"),
        ("dataloaders: {test: {one: {config: {batch_size: 3}}}}\n", "dataloaders.test.one: one validation set is given with --val"),
        ("dataloaders: {test: {config: {shuffle: true}}}\n", "dataloaders.test.config.shuffle: the validation counts every sample once"),
        ("dataloaders: {test: {config: {drop_last: true}}}\n", "dataloaders.test.config.drop_last: the validation counts every sample"),
        ("dataloaders: {test: {config: {num_workers: 2}}}\n", "dataloaders.test.config.num_workers: the validation has as many"),
        ("dataloaders: {train: {config: {prefetch_factor: 2}}}\n", "dataloaders.train.config.prefetch_factor: there are no loader workers"),
        ("dataloaders: {extra: 1}\n", "dataloaders.extra"),
        ("trainer: {type: MultiHead}\n", "trainer.type: MultiHead"),
        ("trainer: {config: {float_labels: true}}\n", "trainer.config.float_labels"),
        ("trainer: {config: {times_to_validate_per_epoch: 4}}\n", "trainer.config.times_to_validate_per_epoch: --val-every"),
        ("trainer: {config: {compile_mode: max-autotune}}\n", "trainer.config.compile_mode: nothing is compiled"),
        ("trainer: {}\nscheduler: {type: StepLR, config: {step_size: 3}}\n", "scheduler: StepLR; the learning rate stays constant"),
        ("trainer: {}\nprecision: fp32\n", "precision: that of its evaluation"),
        ("trainer: {}\ndevice_ids: [0]\n", "device_ids: its system does not use it either"),
        ("trainer: {}\nmetrics: [{accuracy: {}}]\n", "metrics"),
    ],
)
def test_what_a_trainer_has_and_we_have_not_is_listed(read_text, text, note):
    assert any(line.startswith(f"run.yaml: not mapped: {note}") for line in read_text(text).notes)


def test_a_linear_schedule_that_changes_nothing_is_constant(read_text):
    found = read_text("trainer: {}\nscheduler: {module: m, type: LinearLR, config: {start_factor: 1.0, end_factor: 1.0, total_iters: 1}}\n")
    assert found.config.schedule == "constant"
    assert not any("scheduler" in line for line in found.notes)


@pytest.mark.parametrize(
    "text, said",
    [
        ("trainer: 3\n", "trainer=3 must be a mapping"),
        ("trainer: {config: 3}\n", "trainer.config=3 must be a mapping"),
        ("trainer: {config: {epochs: many}}\n", "trainer.config.epochs: epochs='many' must be a valid integer"),
        ("trainer: {config: {precision: fp8}}\n", "trainer.config.precision: precision='fp8' must be one of"),
        ("trainer: {config: {tf32: maybe}}\n", "trainer.config.tf32: matmul_precision='maybe' must be"),
        ("trainer: {config: {compile: true, compile_mode: fast}}\n", "trainer.config.compile_mode: compile_mode='fast' must be"),
        ("trainer: {config: {ddp_find_unused_parameters: 3}}\n", "trainer.config.ddp_find_unused_parameters: find_unused_parameters=3 must be"),
        ("dataloaders: []\n", "dataloaders=[] must be a mapping"),
        ("dataloaders: {train: {config: {batch_size: many}}}\n", "dataloaders.train.config.batch_size: batch_size='many'"),
        ("dataloaders: {train: {config: {num_workers: -1}}}\n", "dataloaders.train.config.num_workers=-1 must be a whole number, at least 0"),
        ("dataloaders: {test: {config: {batch_size: many}}}\n", "dataloaders.test.config.batch_size: val_batch_size='many'"),
        ("dataloaders: {test: {config: {shuffle: 3}}}\n", "dataloaders.test.config.shuffle=3 must be true or false"),
        ("trainer: {}\ngpus: 2\n", "gpus=2 must be a list of GPU indices"),
        ("trainer: {}\ngpus: []\n", "gpus=[] must be a list of GPU indices"),
        ("trainer: {}\ngpus: [a]\n", "gpus: devices=['a'] must be auto, cpu or distinct GPU indices"),
        ("trainer: {}\ngpus: [0]\ndevice: cpu\n", "gpus=[0] with device=cpu: leave one of the two out"),
        ("trainer: {}\ndevice: tpu\n", "device=tpu must be cpu or cuda"),
        ("trainer: {}\noptimizer: {type: RAdam}\n", "optimizer.type=RAdam must be one of adam"),
        ("trainer: {}\noptimizer: adam\n", "optimizer='adam' must be a mapping"),
        ("trainer: {}\nlr: 0.1\n", "lr beside trainer, a mixture of layouts"),
        ("dataloaders: {}\ntraining: {stage_0: {}}\n", "training beside dataloaders: a mixture of layouts"),
    ],
)
def test_refusals_of_a_trainer_name_file_and_key(read_text, tmp_path, text, said):
    with pytest.raises(ConfigError) as caught:
        read_text(text)
    assert str(caught.value).startswith(f"--config {tmp_path / 'run.yaml'}: ")
    assert said in str(caught.value)


# -- what wins


def test_the_line_wins_in_every_stage(read_text):
    found = read_text(LOCAL, over={"epochs": "3", "per_rank_batch_size": "16", "optimizer": "lbfgs", "name": "mine"})
    for stage in found.stages:
        assert not {"epochs", "batch_size", "per_rank_batch_size", "optimizer", "fused", "momentum"} & set(stage.options)
    assert [stage.name for stage in found.stages] == ["stage_0", "stage_1"]
    assert any("in every stage epochs, optimizer of the line" in note for note in found.notes)


def test_hooks_win(read_text):
    found = read_text(LOCAL, hooks=["optimizer", "scheduler"])
    for stage in found.stages:
        assert set(stage.options) <= {"epochs", "batch_size", "precision"}
    assert "run.yaml: training.stage_1.scheduler is left out: the hook makes it" in found.notes
    assert read_text(one_stage(optimizer={"type": "lamb"}), hooks=["optimizer"]).config.optimizer == "adamw"


def test_validation_data_wins_over_a_split(read_text):
    found = read_text(LOCAL, has_val=True)
    assert found.config.val_split is None
    assert "run.yaml: its split of the training data is left out: validation data is given" in found.notes


def test_a_number_of_ranks_wins_over_devices(read_text):
    config = read_text(TRAINER, over={"nproc": 3}).config
    assert "devices" not in config.given
    assert "nproc" not in read_text(TRAINER, over={"devices": [0, 1, 2]}).config.given


def test_defaults_of_the_other_system_give_way_as_well(read_text):
    assert "drop_last" not in read_text("local: {}\n", over={"compile": True}).config.given
    found = read_text(trainer(epochs=1), over={"static_graph": True, "precision": "fp16"})
    assert "find_unused_parameters" not in found.config.given
    assert found.notes == ("run.yaml: not given there, so as by default there: matmul_precision high",)
