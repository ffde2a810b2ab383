"""The figures of a panel, of real models and data."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from nbddp import Stage
from nbddp.kernel.panel_figures import loader_text, norm_text, sample_bytes, table, tiles, what_if
from nbddp.kernel.prepare import complete, outline
from nbddp.kernel.request import Named, Request
from nbddp.norm import batch_norm_layers
from nbddp.planning import Machine

CPU = Machine((), cores=4)
GPUS = Machine(("H100",) * 3, cores=8, bf16=True)


def outlined(stages=None, **options):
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4), nn.BatchNorm1d(4))
    data = TensorDataset(torch.zeros(512, 8), torch.zeros(512, dtype=torch.long))
    hooks = {"loss": nn.CrossEntropyLoss(), **({} if stages is None else {"stages": stages})}
    return outline(Request(Named("net", model), Named("train_set", data), None, options, hooks, requested=0.0))


def rows(machine, **options):
    return [(row.nproc, row.plan and row.plan.stages[0].per_rank_batch_size, row.why_not) for row in what_if(outlined(**options), machine)]


def test_the_same_options_on_every_number_of_ranks():
    not_three = "batch_size=100 is the global batch and must divide by 3 ranks: use 99 or 102"
    assert rows(CPU, batch_size=100) == [(1, 100, ""), (2, 50, ""), (3, None, not_three), (4, 25, "")]
    assert rows(GPUS, batch_size=100) == [(1, 100, ""), (2, 50, ""), (3, None, not_three)]
    assert [row[0] for row in rows(GPUS, devices="cpu", nproc=9)] == list(range(1, 10))
    assert rows(GPUS, nproc=5)[-1] == (5, None, "nproc=5 is more than the 3 visible GPUs: -n 3, or --devices cpu for ranks on the CPU")
    assert [row[0] for row in rows(Machine((), cores=200))] == list(range(1, 9))
    assert [row[:2] for row in rows(GPUS, devices=[0, 2], per_rank_batch_size=16)] == [(1, 16), (2, 16), (3, 16)]


def test_steps_and_rates_of_the_other_numbers():
    found = what_if(outlined(lr=0.1, lr_scale="linear", base_batch_size=32), CPU)
    assert [(row.plan.stages[0].steps_per_epoch, row.plan.stages[0].lr) for row in found] == [(16, 0.1), (8, 0.2), (5, pytest.approx(0.3)), (4, 0.4)]


def test_the_size_of_a_sample():
    sample = (torch.zeros(3, 4), {"a": np.zeros(5, dtype=np.float32), "b": [1, 2.0]}, "four", b"six123")
    assert sample_bytes([sample]) == 48 + 20 + 16 + 4 + 6
    assert sample_bytes([]) is None
    assert sample_bytes(TensorDataset(torch.zeros(2, 8))) == 32


@pytest.mark.parametrize(
    "options, text",
    [
        ({"nproc": 2, "batch_size": 128}, ("0 B", "no loader workers")),
        ({"batch_size": 64, "num_workers": 1, "prefetch_factor": 1}, ("2.5 KiB", "1 rank x 1 worker x 1 batch x 2.5 KiB")),
        ({"nproc": 2, "batch_size": 128, "num_workers": 4, "prefetch_factor": 3}, ("30 KiB", "2 ranks x 2 workers x 3 batches x 2.5 KiB")),
        ({"nproc": 2, "batch_size": 128, "num_workers": 4, "accumulate": 2}, ("10 KiB", "2 ranks x 2 workers x 2 batches x 1.2 KiB")),
    ],
)
def test_loader_memory(options, text):
    prepared = complete(outlined(**options), CPU)
    assert loader_text(prepared.plan, prepared.config, 40) == text
    if options.get("num_workers"):
        assert loader_text(prepared.plan, prepared.config, None) == ("–", text[1].rsplit(" x ", 1)[0] + " of unknown size")


@pytest.mark.parametrize(
    "options, text",
    [
        ({}, "2 stay"),
        ({"nproc": 2}, "2 become SyncBatchNorm"),
        ({"nproc": 2, "norm": "keep"}, "2 stay"),
        ({"norm": {"1": "group"}}, "1 becomes GroupNorm, 1 stays"),
    ],
)
def test_norm_layers(options, text):
    prepared = complete(outlined(**options), CPU)
    assert norm_text(dict.fromkeys(batch_norm_layers(prepared.model), False), prepared.swaps) == ("2", text)
    assert norm_text({}, {}) == ("0", "nothing to swap")
    assert norm_text({"a": True, "b": False}, {"a": "sync"}) == ("2", "1 stays synchronised, 1 stays")


def test_html_says_it_all_and_escapes():
    found = outlined(batch_size=100, nproc=2, epochs=3)
    shown = tiles(complete(found, CPU), {"1": False, "3": False}, 40)
    for part in ("per-rank batch", ">50<", "of 100 global", ">5<", "15 steps in all, 12 samples dropped", "2 become SyncBatchNorm", ">0.001<"):
        assert part in shown
    shown = table(what_if(outlined(optimizer="sgd", batch_size=7), CPU), 1)
    assert "class=nb-these><th scope=row>1<" in shown
    assert "must divide by 4 ranks: use 4 or 8" in shown


def texts(html):
    return [part for part in re.split(r"<[^>]+>", html) if part]


def figures(html):
    return {name: (value, aside) for name, value, aside in re.findall(r"<div><span>(.*?)</span><b>(.*?)</b><span>(.*?)</span></div>", html)}


def test_a_figure_that_depends_on_a_wrong_option_says_so_and_the_others_stay():
    prepared = complete(outlined(nproc=2, epochs=1, batch_size=512), CPU)
    shown, wrong = figures(tiles(prepared, {"1": False}, 40, {"batch_size"})), ("–", "batch_size is wrong")
    assert shown["per-rank batch"] == shown["steps per epoch"] == shown["loader memory"] == wrong
    assert shown["ranks"] == ("2", "CPU")
    assert shown["effective lr"] == ("0.001", "")
    assert shown["BatchNorm layers"] == ("1", "1 becomes SyncBatchNorm")
    assert figures(tiles(prepared, {}, 40))["steps per epoch"] == ("1", "1 step in all")
    shown = figures(tiles(prepared, {"1": False}, 40, {"epochs", "norm"}))
    assert shown["steps per epoch"] == ("1", "epochs is wrong")
    assert shown["BatchNorm layers"] == ("1", "norm is wrong")
    scaled = complete(outlined(lr_scale="linear", base_batch_size=32), CPU)
    assert figures(tiles(scaled, {}, 40, {"batch_size"}))["effective lr"] == wrong
    shown = texts(table(what_if(outlined(), CPU), 1, {"lr"}))
    assert shown[shown.index("1") :][:5] == ["1", "32", "16", "–", "lr is wrong"]


def test_each_stage_has_its_figures():
    shown = texts(tiles(complete(outlined(stages=[Stage("head", epochs=2), Stage("all", batch_size=64)]), CPU), {}, None))
    assert [shown[index + 1] for index, text in enumerate(shown) if text == "per-rank batch"] == ["32", "64"]
    assert {"Stage head", "Stage all", "The run"} <= set(shown)


def test_looking_at_a_sample_draws_nothing():
    class Random(list):
        def __getitem__(self, index):
            return torch.rand(3), np.random.rand(2), random.random()

    before = torch.get_rng_state().clone(), np.random.get_state()[1].copy(), random.getstate()
    assert sample_bytes(Random([0])) == 12 + 16 + 8
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()
    assert random.getstate() == before[2]
