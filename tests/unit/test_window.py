from __future__ import annotations

import pickle
from typing import Any

import pytest

from nbddp.window import BLOCK_S, BLOCK_STEPS, BLOCKS, PHASES, RECENT_BLOCKS, Block, Window


def report(count: int, *, step_s: float = 0.1, stage: int = 0, warmup: int = 0, ranks: int = 1, slowest: int = 0, **more: Any) -> dict[str, Any]:
    row = {f"{phase}_s": step_s / 5 for phase in PHASES}
    return {
        "step": list(range(count)),
        "stage": [stage] * count,
        "warmup": [warmup] * count,
        "wait_s": [0.01] * count,
        "slowest_rank": [slowest] * count,
        **{f"{phase}_s": [step_s / 5] * count for phase in PHASES},
        "ranks": [{"rank": rank, **row} for rank in range(ranks)],
        **more,
    }


def test_blocks_have_enough_steps_and_seconds() -> None:
    window = Window()
    for _ in range(100):
        window = window.add(report(3, step_s=0.05))
    assert len(window.blocks) == 14
    assert all(block.steps == 21 for block in window.blocks)  # 1.05 s
    assert all(block.steps >= BLOCK_STEPS and block.seconds >= BLOCK_S for block in window.blocks)
    assert window.total.steps == 300
    assert window.total.step_s == pytest.approx(0.05)
    slow = Window()
    for _ in range(12):
        slow = slow.add(report(1, step_s=30.0))
    assert [block.steps for block in slow.blocks] == [BLOCK_STEPS] * 2


def test_sums_and_means_of_a_block() -> None:
    window = Window().add(report(4, ranks=2, slowest=1, starved=0.5)).add(report(6, step_s=0.2, ranks=2, starved=1.0))
    (block,) = window.blocks
    assert block.seconds == pytest.approx(1.6)
    assert block.phase_s("forward") == pytest.approx(1.6 / 5 / 10)
    assert block.share("forward", "backward") == pytest.approx(0.4)
    assert block.rank_s(1, "data", "sync") == pytest.approx(2 * 1.6 / 5 / 10)
    assert block.rank_s(7, "data") == 0
    assert block.slowest == {1: 4, 0: 6}
    assert block.wait_s == pytest.approx(0.1)
    assert block.starved == pytest.approx(8)


def test_nothing_is_divided_by_zero() -> None:
    block = Block()
    assert (block.step_s, block.share("data"), block.phase_s("data"), block.rank_s(0, "data")) == (0, 0, 0, 0)
    assert Window().recent == block


def test_the_warm_up_counts_for_what_was_compiled_only() -> None:
    window = Window().add(report(1, step_s=100.0, warmup=1, recompiles=1)).add(report(10, step_s=0.11, recompiles=3))
    assert (window.total.steps, window.total.recompiles) == (10, 3)
    assert window.recent.recompiles == 2
    mixed = report(10, step_s=100.0)
    mixed["warmup"][0] = 1
    assert window.add(mixed).total.steps == 10


def test_another_stage_begins_anew_and_counts_recompiles_from_there() -> None:
    window = Window().add(report(50, recompiles=5)).add(report(2, stage=1, recompiles=6))
    assert (window.stage, window.blocks, window.total.steps, window.total.recompiles) == (1, (), 2, 1)


def test_reports_without_rows_of_ranks_and_figures_of_later_versions() -> None:
    columns = report(20)
    del columns["ranks"]
    (block,) = Window().add(columns).blocks
    assert (block.ranks_s, block.starved, block.recompiles) == ({}, 0, 0)


def test_a_window_is_a_value() -> None:
    before = Window().add(report(10, step_s=0.11, ranks=2))
    shown = repr(before)
    before.add(report(10, ranks=2, slowest=1)).add(report(10, stage=1))
    assert repr(before) == shown


def test_a_long_run_takes_bounded_memory() -> None:
    window = Window()
    for index in range(20_000):
        window = window.add(report(10, step_s=0.11, ranks=8, slowest=index % 8))
    assert len(window.blocks) == BLOCKS
    assert window.total.steps == 200_000
    assert window.recent.steps == RECENT_BLOCKS * 10
    assert len(pickle.dumps(window)) < 200_000
