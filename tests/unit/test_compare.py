"""Runs side by side: what is drawn, what is said to differ, and what can't be compared."""

from __future__ import annotations

import base64
import io
import json
import math
import re
import shutil
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

import nbddp
from nbddp.errors import ConfigError
from nbddp.kernel.compare import PNG_BYTES, Comparison
from nbddp.kernel.compare_figure import COLOURS, LONGEST, Look
from nbddp.kernel.run import Run
from support.fake_run import FakeRun, finished

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

    from nbddp.rundir import RunDir


def small(root: Path, **options: Any) -> RunDir:
    return finished(root, epochs=2, steps_per_epoch=40, **options)


def tail(run: RunDir) -> str:
    return f"digits-{run.id[-4:]}"


def html(comparison: Comparison) -> str:
    text: str = comparison._repr_mimebundle_()["text/html"]
    return text


def legend(comparison: Comparison) -> list[str]:
    return [text.get_text() for text in comparison.figure.legends[0].get_texts()]


def lines(axes: Axes) -> list[np.ndarray]:
    """The drawn lines as arrays of shape (points, 2), without the rings around the best values."""
    return [np.asarray(line.get_xydata()) for line in axes.get_lines() if len(line.get_xdata()) > 1]  # type: ignore[arg-type] # data are arrays here


def test_two_runs_by_what_differs(tmp_path: Path) -> None:
    one = small(tmp_path, config={"lr": 0.001, "batch_size": 64})
    other = small(tmp_path, config={"lr": 0.01, "batch_size": 64}, note="faster")
    made = nbddp.compare(one.id, other.path, root=tmp_path)
    assert [row.id for row in made.runs] == [one.id, other.id]
    assert made.options == {"lr": (0.001, 0.01)}
    assert legend(made) == ["lr=0.001", "lr=0.01"]
    train, val = made.figure.axes
    assert (train.get_title("left"), val.get_title("left"), train.get_xlabel()) == ("loss", "val_loss", "step")
    assert [curve[:, 0].tolist() for curve in lines(val)] == [[40.0, 80.0]] * 2
    header, *rows = repr(made).splitlines()[:3]
    assert header.split("  ")[0] == "run"
    assert re.search(r"state +lr +best +lowest val_loss +loss at the end +steps +duration", header)
    assert [row.split()[:3] for row in rows] == [[tail(one), "finished", "0.001"], [tail(other), "finished", "0.01"]]
    assert rows[0].split()[-2:] == ["80", "0:00"]


def test_the_display_is_a_picture_and_a_table(tmp_path: Path) -> None:
    small(tmp_path, config={"lr": 0.1})
    higher = FakeRun(tmp_path, epochs=2, steps_per_epoch=40, config={"lr": 0.2})
    higher.start()
    higher.train(80, losses=[3 / (1 + step / 100) for step in range(80)])
    higher.end()
    made = nbddp.compare(nbddp.runs(tmp_path))
    bundle = made._repr_mimebundle_()
    assert set(bundle) == {"text/html", "image/png", "text/plain"}
    assert bundle["text/plain"] == repr(made)
    image = np.asarray(Image.open(io.BytesIO(base64.b64decode(bundle["image/png"]))).convert("RGBA")).astype(int)
    assert (image[..., 3] == 0).mean() > 0.7
    for colour in COLOURS[:2]:
        near = np.abs(image[..., :3] - [int(colour[at : at + 2], 16) for at in (1, 3, 5)]).max(axis=-1) < 12
        assert (near & (image[..., 3] > 200)).sum() > 300
    assert len(bundle["image/png"]) * 3 / 4 <= PNG_BYTES
    page = bundle["text/html"]
    assert re.search(
        r'<img alt="Training and validation loss of 2 runs over step; training loss of lr=0.2: 3 to 1.676; lr=0.1: \d\.\d+ to 0\.\d+" src="data:image/png', page
    )
    assert page.count('<th scope="col"') == 8
    assert page.count("data:image/svg+xml") == 2
    assert "script" not in page


@pytest.mark.parametrize("x, end, label", [("step", 80.0, "step"), ("epoch", 2.0, "epoch"), ("time", 42.0, "time in s")])
def test_over_steps_epochs_and_time(tmp_path: Path, x: Any, end: float, label: str) -> None:
    runs = [small(tmp_path) for _ in range(2)]
    for run in runs:
        spec = run.read_spec() or {}
        spec["times"]["requested"] = json.loads(run.rank_events(0, 0).read_text().splitlines()[-1])["time"] - 42
        run.write_spec(spec)
    made = nbddp.compare([run.path for run in runs], x=x)
    train, val = made.figure.axes
    assert (train.get_xlabel(), made.axis) == (label, x)
    for axes in (train, val):
        assert lines(axes)[0][-1, 0] == pytest.approx(end, abs=0.1)


def test_long_runs_are_timed_in_hours(tmp_path: Path) -> None:
    runs = [small(tmp_path) for _ in range(2)]
    spec = runs[0].read_spec() or {}
    spec["times"]["requested"] -= 3 * 3600
    runs[0].write_spec(spec)
    train, _ = nbddp.compare(*(run.path for run in runs), x="time").figure.axes
    assert train.get_xlabel() == "time in h"
    assert lines(train)[0][-1, 0] == pytest.approx(3, abs=0.01)


def test_names_where_the_options_do_not_tell_runs_apart(tmp_path: Path) -> None:
    one, again, other = (small(tmp_path, config={"lr": lr}) for lr in (0.1, 0.1, 0.2))
    assert legend(nbddp.compare(one.path, again.path)) == [tail(one), tail(again)]
    said = repr(nbddp.compare(one.path, again.path)).splitlines()[3:]
    alike = f"{tail(one)} and {tail(again)} have the same training losses: one line covers the other"
    assert said == ["the options of these runs are the same", alike]
    assert legend(nbddp.compare(one.path, again.path, other.path)) == [f"{tail(one)}: lr=0.1", f"{tail(again)}: lr=0.1", "lr=0.2"]


def test_options_at_their_default_unknown_ones_and_long_ones(tmp_path: Path) -> None:
    norm = {f"blocks.{index}.*": "sync" for index in range(20)}
    one = small(tmp_path, config={"clip_norm": 1.0, "sharding": "full", "run_root": "/elsewhere", "name": "one"})
    other = small(tmp_path, config={"norm": norm, "run_root": "/here"})
    made = nbddp.compare(one.path, other.path)
    assert made.options == {"clip_norm": (1.0, None), "norm": ("auto", norm), "sharding": ("full", None)}
    first, second = legend(made)
    assert first == "clip_norm=1, sharding=full", "what is the default has no room"
    assert len(second) == LONGEST
    assert second.startswith("norm={'blocks.0.*': 'sync', ")
    assert "blocks.19.*" in html(made)


def test_what_differs_most_comes_first_in_a_label_and_what_is_left_out_there_is_in_the_table(tmp_path: Path) -> None:
    same = {"batch_size": 96, "optimizer": "sgd", "momentum": 0.9, "schedule": "cosine", "warmup_steps": 100, "lr_scale": "linear", "base_batch_size": 48}
    runs = [small(tmp_path, config={**same, "lr": lr}) for lr in (0.1, 0.2)] + [small(tmp_path, config={"lr": 0.3}), small(tmp_path, nproc=2, config={})]
    made = nbddp.compare(*(run.path for run in runs))
    labels = legend(made)
    assert [label.split(", ")[0] for label in labels] == ["lr=0.1", "lr=0.2", "lr=0.3", "all at their default"]
    assert labels[2] == "lr=0.3"
    page = html(made)
    assert page.count('<th scope="col"') == 8, "seven and one for all of the options"
    assert page.count("base_batch_size=</span>48") == 2
    assert "base_batch_size=</span>default" not in page
    assert page.count("all at their default</span>") == 1


def test_runs_that_go_on_stop_and_fail_are_compared_as_they_are(tmp_path: Path) -> None:
    live, failed = FakeRun(tmp_path, epochs=2, steps_per_epoch=40), FakeRun(tmp_path, epochs=2, steps_per_epoch=40)
    live.start()
    failed.start()
    live.train(10)
    failed.train(70)
    failed.fail()
    failed.end("failed")
    made = nbddp.compare(live.run_dir.path, failed.run_dir.path)
    assert [row.state for row in made.runs] == ["running", "failed"]
    assert [len(curve) for curve in lines(made.figure.axes[1])] == [], "one validation each at most"
    live.train(70)
    assert lines(made.figure.axes[0])[0][-1, 0] == 10, "a comparison stays what it was"
    assert lines(nbddp.compare(live.run_dir.path, failed.run_dir.path).figure.axes[0])[0][-1, 0] == 80
    live.end()


def test_a_run_that_goes_on_from_another_is_drawn_from_the_beginning(tmp_path: Path) -> None:
    first = small(tmp_path)
    second = FakeRun(tmp_path, epochs=3, steps_per_epoch=40)
    spec = second.run_dir.read_spec() or {}
    second.run_dir.write_spec({**spec, "parent": first.id, "resume": str(first.checkpoints / "last.pt"), "resume_step": 80})
    second.step, second.epoch = 80, 3
    second.start()
    second.train(40)
    second.end()
    other = small(tmp_path)
    made = nbddp.compare(second.run_dir.path, other.path)
    assert [line[-1, 0] for line in lines(made.figure.axes[1])] == [120, 80]
    assert f"{second.run_dir.id} goes on from {tail(first)}, whose steps come first" in repr(made)
    shutil.rmtree(first.path)
    made = nbddp.compare(second.run_dir.path, other.path)
    assert lines(made.figure.axes[0])[0][0, 0] == 81
    assert f"{second.run_dir.id} begins later: the directory of {first.id}, from which it goes on, is gone" in html(made)


def test_without_a_validation_there_is_one_panel(tmp_path: Path) -> None:
    runs = [FakeRun(tmp_path, epochs=1, steps_per_epoch=100) for _ in range(2)]
    for run in runs:
        run.start()
        run.train(50)
        run.end("stopped")
    made = nbddp.compare(*(run.run_dir.path for run in runs))
    assert [axes.get_title("left") for axes in made.figure.axes] == ["loss"]
    assert 'alt="Training loss of 2 runs' in html(made)


def test_losses_that_are_many_times_apart_or_not_finite(tmp_path: Path) -> None:
    runs = [FakeRun(tmp_path, epochs=1, steps_per_epoch=200) for _ in range(2)]
    for run, losses in zip(runs, ([1e6 * 0.9**step for step in range(100)], [math.nan] * 50 + [5.0] * 50), strict=True):
        run.start()
        run.train(100, losses=losses)
        run.end("stopped")
    made = nbddp.compare(*(run.run_dir.path for run in runs))
    assert made.figure.axes[0].get_yscale() == "log"
    assert html(made).count("<img") == 3
    flat = nbddp.compare(*(small(tmp_path).path for _ in range(2)))
    assert flat.figure.axes[0].get_yscale() == "linear"


def test_runs_without_a_loss_are_left_out_and_named(tmp_path: Path) -> None:
    one, other = small(tmp_path), small(tmp_path)
    early, bad, waiting = (FakeRun(tmp_path, epochs=1, steps_per_epoch=10) for _ in range(3))
    early.end("failed")
    bad.start()
    bad.train(5, losses=[math.nan] * 5)
    bad.end("failed")
    waiting.start()
    made = nbddp.compare(nbddp.runs(tmp_path))
    assert {row.id for row in made.runs} == {one.id, other.id}
    assert made.left_out == {
        early.run_dir.id: "failed before its first step",
        bad.run_dir.id: "with no loss that is finite",
        waiting.run_dir.id: "which has no step yet",
    }
    assert f"left out: {early.run_dir.id}, failed before its first step" in repr(made)
    with pytest.raises(ConfigError, match=f"^of 2 runs 1 has a loss to compare: {early.run_dir.id}, failed before its first step$"):
        nbddp.compare(one.path, early.run_dir.path)
    with pytest.raises(ConfigError, match=r"^of 2 runs none has a loss to compare: .*; "):
        nbddp.compare(bad.run_dir.path, early.run_dir.path)
    waiting.end("stopped")


def test_every_way_to_name_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBDDP_RUN_ROOT", str(tmp_path))
    one, other = small(tmp_path), small(tmp_path)
    table = nbddp.runs()
    for given in ((Run(one), Run(other)), (one.id[-4:], other.id), (str(one.path), other.path), (table,), tuple(table), ([one.path, table[0]], [])):
        made = nbddp.compare(*given)
        assert {row.id for row in made.runs} == {one.id, other.id}
    assert len(nbddp.compare(one.path, other.id, table, one.id)) == 2, "a run that is named twice is one run"


def test_what_can_not_be_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBDDP_RUN_ROOT", str(tmp_path))
    one, other = small(tmp_path), small(tmp_path)
    takes = "^nbddp.compare takes two different runs or more, and was given"
    for given, said in (
        ((), f"{takes} no run: name runs, ids or directories"),
        ((nbddp.runs(tmp_path / "none"),), f"{takes} no run"),
        ((one.path,), f"{takes} only {one.id}"),
        ((one.path, one.id), f"{takes} only {one.id}"),
        ((one.id, "zzzz"), f"^no run zzzz in {tmp_path}; %ddp_runs lists them"),
        ((one.id, "digits"), "^2 runs match digits: "),
        ((one.id, 3), "^nbddp.compare takes runs, ids and directories of runs, and tables of runs, not a int$"),
        ((one.id, None), "not a NoneType$"),
    ):
        with pytest.raises(ConfigError, match=said):
            nbddp.compare(*given)
    with pytest.raises(ConfigError, match=r"^x='steps': must be step, epoch or time\. Did you mean step\?$"):
        nbddp.compare(one.id, other.id, x="steps")  # type: ignore[arg-type] # the wrong word is what is tested
    run = Run(other)
    run.follower.join()
    shutil.rmtree(other.path)
    with pytest.raises(ConfigError, match=f"^the directory of run {other.id} is gone: {other.path}$"):
        nbddp.compare(one.id, run)


def test_fifty_runs_at_once(tmp_path: Path) -> None:
    model = finished(tmp_path, epochs=10)
    text = json.dumps(model.read_spec())
    for index in range(49):
        path = tmp_path / f"20261129-1305{index:02d}-copy{index}-abcd"
        (path / "events").mkdir(parents=True)
        shutil.copy(model.path / "result.json", path)
        (path / "events" / "rank-00000.0.jsonl").hardlink_to(model.rank_events(0, 0))
        spec = json.loads(text)
        spec["config"]["lr"] = index / 1000
        (path / "spec.json").write_text(json.dumps(spec))
    table = nbddp.runs(tmp_path)
    began = time.process_time()
    made = nbddp.compare(table)
    bundle = made._repr_mimebundle_()
    assert time.process_time() - began < 6
    assert (len(made), len(legend(made))) == (50, 50)
    assert len({(look.colour, look.dashes) for look in map(Look.of, range(50))}) == 50
    assert len(bundle["image/png"]) * 3 / 4 <= PNG_BYTES
    assert len(bundle["text/html"]) < 200_000
    figure = made.figure
    box = figure.legends[0].get_window_extent()
    assert box.y0 >= 0
    assert box.x1 <= figure.bbox.x1
    assert box.y1 < figure.axes[0].get_window_extent().y0, "the legend stands below the panels"
