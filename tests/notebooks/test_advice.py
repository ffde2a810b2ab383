"""Advice that real ranks provoke, and what becomes of it when it is followed."""

from __future__ import annotations

import os
import re

import pytest

from nbddp.kernel.line import parse

pytestmark = pytest.mark.kernel

SETUP_OF_ADVICE = """
from nbddp.advice import advise

class Slow(Dataset):
    "Whose samples take 2 ms each."
    def __len__(self):
        return 4096
    def __getitem__(self, index):
        time.sleep(2e-3)
        return X[index % 64], Y[index % 64]

class Quick(Slow):
    def __getitem__(self, index):
        return X[index % 64], Y[index % 64]

class Late(Slow):
    "Whose samples take 2 ms each on rank 1."
    def __getitem__(self, index):
        if os.environ.get("RANK") == "1":
            time.sleep(2e-3)
        return X[index % 64], Y[index % 64]

slow_set, quick_set, late_set = Slow(), Quick(), Late()
net = nn.Linear(4, 2)

def advised():
    return {part.rule: (part.text, part.option) for part in advise(run.follower.state, run.config)}
"""

# A step that takes a while on the one rank or on both; the cores are free meanwhile, so that it does on a busy machine as well.
STEP = """
def training_step(model, batch):
    time.sleep({seconds})
    return F.mse_loss(model(batch[0]), batch[1])
"""


@pytest.fixture(scope="module", autouse=True)
def setup_of_advice(shared_kernel):
    shared_kernel.run(SETUP_OF_ADVICE, check=True)


def train(nb, line, body):
    nb.run(f"%%ddp_train net {line} --devices cpu\n{body}", timeout=120, check=True)
    return nb.eval("advised()")


def test_a_slow_dataset_is_loader_bound_and_not_with_the_workers_that_are_advised(nb):
    line, body = "slow_set -n 2 --batch-size 128 --max-time 8", STEP.format(seconds=0.2)  # 64 samples of 2 ms: a worker has a third of its time left
    advised = train(nb, line, body)
    text, option = advised["loader-bound"]
    assert set(advised) == {"loader-bound"}
    assert "is waiting for data, which the ranks make themselves" in text
    workers = parse(f"net data {option}").options["num_workers"]
    assert int(workers) % 2 == 0
    assert 2 <= int(workers) <= max(2, len(os.sched_getaffinity(0)))
    assert train(nb, f"{line} {option}", body) == {}
    assert nb.eval("run.config.num_workers") == int(workers)


def test_a_rank_that_is_late_is_named(nb):
    line = "quick_set -n 2 --batch-size 128 --max-time 7"
    advised = train(nb, line, STEP.format(seconds="0.3 if os.environ['RANK'] == '1' else 0.1"))
    assert set(advised) == {"straggler"}
    text, option = advised["straggler"]
    assert re.match(r"rank 1 \(cpu\) is the slowest in (100|9\d) % of the steps, and the others wait (19|2\d)\d ms of ", text)
    assert "its forward pass takes 3" in text
    assert option is None  # the run is over
    assert train(nb, line, STEP.format(seconds=0.1)) == {}


def test_a_rank_whose_data_is_late_is_named_though_all_meet_in_the_forward_pass(nb):
    """Where BatchNorm is synchronised, the forward pass of the others lasts until its data is there."""
    nb.run("net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))", check=True)
    line = "late_set -n 2 --batch-size 128 --max-time 7"
    advised = train(nb, line, STEP.format(seconds=0.1))
    assert set(advised) == {"straggler"}
    text, option = advised["straggler"]
    assert re.match(r"rank 1 \(cpu\) is late, and the others wait (1[2-9]|2\d)\d ms of .* in their first synchronised BatchNorm: its data takes ", text)
    workers = parse(f"net data {option}").options["num_workers"]
    assert int(workers) % 2 == 0
    assert nb.eval("float(np.median(run.history['wait_s'][3:]))") < 0.05, "the sums of the phases do not tell it"


def test_a_batch_that_was_not_scaled_with_the_ranks(nb):
    body = "loss = nn.MSELoss()"
    nb.run("net = nn.Sequential(nn.Linear(4, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2))", check=True)
    advised = train(nb, "DataLoader(train_set, batch_size=8) -n 2 --max-time 5", body)  # the batch that one process had
    assert "unscaled-batch" in advised
    text, option = advised["unscaled-batch"]
    assert text.startswith("4 samples per rank (8 = 2 x 4): as many steps as on one rank, and ")
    assert option == "-n 1"  # of 64 samples
    advised = train(nb, "TensorDataset(X.repeat(100, 1), Y.repeat(100, 1)) -n 2 --batch-size 8 --max-time 5", body)
    assert advised["unscaled-batch"][1] == "--batch-size 64 --lr-scale sqrt --base-batch-size 8"
    assert "sync-bound" not in advised


def test_what_a_rank_finds_out_of_itself_is_in_the_state(nb):
    nb.run("net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))", check=True)
    train(nb, "train_set -n 2 --batch-size 16 --norm keep", "loss = nn.MSELoss()")
    facts = nb.eval("run.follower.state.stage_facts")
    assert (facts["batch_norm"], facts["trainable"], facts["float32"], facts["capability"]) == (1, 74, True, None)
    assert facts["cores"] == nb.eval("len(os.sched_getaffinity(0))")
    assert facts["matmul_precision"] == nb.eval("torch.get_float32_matmul_precision()")
    assert facts["options"] is None
    body = "stages = [nbddp.Stage('head', epochs=1, batch_size=32), nbddp.Stage('all', epochs=1)]\nloss = nn.MSELoss()"
    train(nb, "train_set -n 2 --batch-size 16", body)  # where BatchNorm is synchronised
    assert nb.eval("run.follower.state.stage_facts['batch_norm']") == 0
    assert nb.eval("run.follower.state.stage_facts['options']['batch_size']") == 16


@pytest.mark.gpu
def test_a_gpu_that_waits_for_its_kernels_is_told_from_one_that_computes(nb):
    body = "loss = nn.MSELoss()"
    nb.run("many = TensorDataset(X.repeat(256, 1), Y.repeat(256, 1))", check=True)
    nb.run("net = nn.Sequential(nn.Linear(4, 16), *(nn.Linear(16, 16) for _ in range(64)), nn.Linear(16, 2))", check=True)
    nb.run(f"%%ddp_train net many -n 1 --batch-size 256 --max-steps 2000\n{body}", timeout=120, check=True)
    assert nb.eval("run.follower.state.window.total.starved / run.follower.state.window.total.steps") > 0.8
    assert set(nb.eval("advised()")) == {"launch-bound"}
    nb.run("net = nn.Sequential(nn.Linear(4, 8192), *(nn.Linear(8192, 8192) for _ in range(6)), nn.Linear(8192, 2))", check=True)
    nb.run(f"%%ddp_train net many -n 1 --batch-size 4096 --precision fp32 --max-steps 60\n{body}", timeout=300, check=True)
    assert nb.eval("run.follower.state.window.total.starved / run.follower.state.window.total.steps") < 0.2
    assert {rule: option for rule, (_, option) in nb.eval("advised()").items()} == {"precision": "--matmul-precision high"}
