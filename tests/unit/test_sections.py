from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import TYPE_CHECKING

from nbddp.advice import Advice
from nbddp.kernel import markup, sections
from nbddp.kernel.follow import fold_all
from nbddp.state import RunState
from nbddp.window import BLOCKS, PHASES
from support.fake_run import PLAN_LINE, FakeRun

if TYPE_CHECKING:
    from pathlib import Path


class Text(HTMLParser):
    """What is shown, with a space between elements; insists that every element is closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.parts: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.parts.append(data)


def text(html: str) -> str:
    return re.sub(r"\s+", " ", " ".join(Text(html).parts)).strip()


def state_of(tmp_path: Path, steps: int, **options: int) -> RunState:
    run = FakeRun(tmp_path, **options)
    run.start()
    run.train(steps)
    state = fold_all(run.run_dir)
    run.end("stopped")
    return state


def head(state: RunState) -> str:
    return sections.head(state, title="mine", run="20260101-000000-mine-k3f9", plan_line=PLAN_LINE, elapsed_s=65)


def test_the_head_says_what_the_run_is_and_how_far(tmp_path: Path) -> None:
    shown = text(head(state_of(tmp_path, 1234)))
    for part in ("running", "mine", "k3f9", "1:05", PLAN_LINE, "31 %", "epoch 4 of 10", "step 1,234 of 3,900", "to go"):
        assert part in shown
    assert "starting the ranks" in text(head(RunState()))


def test_progress_is_told_to_screen_readers(tmp_path: Path) -> None:
    assert 'role="progressbar" aria-label="steps done" aria-valuemin="0" aria-valuemax="100" aria-valuenow="32"' in head(state_of(tmp_path, 1234))
    assert "aria-valuenow" not in head(RunState())


def test_what_ranks_tell_and_what_they_are_called_is_no_markup() -> None:
    state = RunState(stop_text="<b>stop", stop_reason="stop")
    state.messages.append({"level": "warning", "text": "<script>"})
    shown = sections.head(state, title="<i>", run="<u>", plan_line="<p>", elapsed_s=0)
    assert "stopping: <b>stop" in text(shown)
    assert all(part in text(shown) for part in ("<i>", "<u>", "<p>", "<script>"))


def test_figures_and_what_else_was_recorded(tmp_path: Path) -> None:
    state = state_of(tmp_path, 800)
    state.validated["val_<accuracy>"] = 0.875
    state.epochs[-1].values["grad_norm"] = 1.5
    shown = text(sections.figures(state))
    for part in ("loss", "epoch mean", "val_loss", "lowest", "val_<accuracy> 0.875", "grad_norm 1.5", "samples/s", "steps/s", "lr 0.001"):
        assert part in shown
    assert shown.index("val_loss") < shown.index("val_<accuracy>")
    assert sections.figures(RunState()) == ""


def test_figures_stand_in_columns(tmp_path: Path) -> None:
    assert "display:grid;grid-template-columns:repeat(auto-fill,minmax(" in sections.figures(state_of(tmp_path, 800))


def test_head_ranks_and_progress_are_of_the_newest_step_that_is_known(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    run.start()
    run.train(780)
    run.ranks[1].emit("heartbeat", step=819, phase="forward", position=[3, 819, 0], memory=0)
    state = fold_all(run.run_dir)
    assert "21 % · epoch 3 of 10 · step 819 of 3,900" in text(head(state))
    assert 'aria-valuenow="21"' in head(state)
    assert re.findall(r"78\d|819", text(sections.timings(state)).partition("Ranks")[2]) == ["780", "819"]
    run.train(10)  # a report that is older than the heartbeat does not take the rank back
    assert fold_all(run.run_dir).ranks[1].step == 819
    run.train(100)
    state = fold_all(run.run_dir)
    run.end("stopped")
    assert state.newest_step == state.step == state.ranks[1].step == 890
    assert (state.newest_epoch, state.epoch) == (3, 3)


def test_heading_bars_table_and_ranks_are_of_the_same_steps_without_the_warm_up(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, report_steps=20)
    run.start()
    columns = run._columns(20, None)
    slow = {name: [value * 50 for value in values] for name, values in columns.items() if name.endswith("_s")}
    run.ranks[0].emit("steps", **{**columns, **slow, "warmup": [1] * 20})
    run.step += 20
    run.train(360)
    state = fold_all(run.run_dir)
    run.end("stopped")
    assert not state.window.blocks or state.window.recent.steps < 360
    recent = state.window.recent
    html = sections.timings(state)
    shown = text(html)
    assert 3.5e-3 < recent.step_s < 4.5e-3
    assert f"Where a step's {1e3 * recent.step_s:.1f} ms go" in shown
    assert f"a step {1e3 * recent.step_s:.1f} ms" in shown
    assert f"last {recent.steps} steps" in shown
    bars = [float(took) for took in re.findall(r"(\d\.\d) ms rank 1 slowest", shown)]
    assert bars
    assert min(bars) - 0.05 <= 1e3 * recent.step_s <= max(bars) + 0.05
    share = 100 * recent.slowest[1] / recent.steps
    assert f"rank 1 is the slowest in {share:.0f} % of the steps" in shown


def test_the_phases_of_the_table_add_up_to_a_step(tmp_path: Path) -> None:
    table = text(markup.phase_table({"last 10 steps": {"data": 1e-3, "forward": 3e-3}, "all 90": {"data": 2e-3, "sync": 2e-3}}))
    assert table.startswith("phase last 10 steps share all 90 data 1.0 ms 25 % 2.0 ms forward 3.0 ms 75 % ")
    assert table.endswith("a step 4.0 ms 4.0 ms")
    assert [table.index(phase) for phase in PHASES] == sorted(table.index(phase) for phase in PHASES)


def test_each_recent_stretch_of_steps_has_a_bar_and_its_slowest_rank(tmp_path: Path) -> None:
    state = state_of(tmp_path, 3000)
    blocks = state.window.blocks
    html = markup.window_bars(state.window)
    assert len(blocks) > markup.MOST_BARS
    assert 3 <= html.count('role="img"') <= markup.MOST_BARS
    shown = text(html)
    assert shown.count("rank 1 slowest, 9") == html.count('role="img"')
    counts = [int(count.replace(",", "")) for count in re.findall(r"([\d,]+) steps", shown)]
    assert sum(counts) == sum(block.steps for block in blocks)
    assert re.findall(r"(last )?[\d,]+ steps", shown) == [""] * (len(counts) - 1) + ["last "]


def test_bars_have_one_scale(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    run.start()
    while not fold_all(run.run_dir).window.blocks:
        run.train(50)
    columns = run._columns(50, None)
    run.ranks[0].emit("steps", **{**columns, **{name: [20 * value for value in values] for name, values in columns.items() if name.endswith("_s")}})
    state = fold_all(run.run_dir)
    run.end("stopped")
    widths = [sum(map(float, re.findall(r"flex:0 0 ([\d.]+)%", bar))) for bar in markup.window_bars(state.window).split('role="img"')[1:]]
    assert len(widths) == 2
    assert round(widths[1]) == 100
    assert 3 < widths[0] < 7


def test_with_one_rank_none_is_the_slowest(tmp_path: Path) -> None:
    html = sections.timings(state_of(tmp_path, 1000, nproc=1, slow_rank=0))
    assert "slowest" not in text(html)
    assert "rank 0 " not in text(html)


def test_the_slowest_rank_is_marked_in_the_table(tmp_path: Path) -> None:
    html = sections.timings(state_of(tmp_path, 1000, nproc=3, slow_rank=2))
    rows = [text(f"<table>{row}</table>") for row in re.findall(r"<tr.*?</tr>", html.partition("Ranks")[2])]
    assert [("slowest" in row) for row in rows] == [False, False, False, True]
    assert rows[3].startswith("2 slowest cpu training")
    assert "rank 2 is the slowest in" in text(html)


def test_advice_comes_with_what_to_write() -> None:
    said = [Advice("loader-bound", "71 % of a step <waits> for data", "--num-workers 4"), Advice("straggler", "rank 1 is late", None)]
    html = sections.advice(said)
    assert text(html) == "Advice 71 % of a step <waits> for data --num-workers 4 rank 1 is late"
    assert html.count("<code") == 1
    assert sections.advice([]) == sections.timings(RunState()) == ""


def test_a_long_run_of_many_ranks_is_small(tmp_path: Path) -> None:
    state = state_of(tmp_path, 20_000, nproc=8, steps_per_epoch=5000)
    assert len(state.window.blocks) == BLOCKS
    assert len(sections.timings(state)) < 28_000
    assert len(head(state)) < 3_000
    assert len(sections.figures(state)) < 6_000


def test_of_very_many_ranks_those_are_listed_that_work_longest(tmp_path: Path) -> None:
    state = state_of(tmp_path, 500, nproc=40, slow_rank=37)
    html = sections.timings(state)
    assert "the 16 of 40 that work longest for a step" in text(html)
    assert html.partition("Ranks")[2].count("<tr") == 1 + sections.MOST_ROWS
    assert "37 slowest" in text(html)
    assert len(html) < 45_000
