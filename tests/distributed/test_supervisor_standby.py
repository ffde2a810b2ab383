"""The warm standby, what a supervisor's processes are like, and what becomes of them when the kernel goes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import nbddp
from nbddp.errors import LaunchError
from nbddp.launch.local import Supervised, launch, settle
from nbddp.launch.order import Order
from nbddp.launch.scratch import make_scratch, remove_scratch, scratch
from nbddp.launch.standby import Standby, Template
from nbddp.process import ProcessId
from nbddp.rundir import RunDir
from support import processes
from support.supervised import ENTRY, make_order, make_run
from support.supervision import result_of, stepping, supervisor_of, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.distributed


def events(run: RunDir, rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.rank_events(rank, 0).read_text().splitlines()]


def waiting(standby: Standby) -> Template:
    template = standby.template
    assert template is not None
    return template


def warmed(template: Template) -> Template:
    """Wait until it has imported everything and waits for orders: then it looks after its children."""

    def ready() -> bool:
        status = Path(f"/proc/{template.process.pid}/status").read_text()
        caught = int(next(line for line in status.splitlines() if line.startswith("SigCgt:")).split()[1], 16)
        return bool(caught >> (signal.SIGCHLD - 1) & 1)

    until(ready)
    return template


def threads_of(pid: int) -> list[int]:
    return [int(path.name) for path in Path(f"/proc/{pid}/task").iterdir()]


def described(run: RunDir, rank: int) -> dict[str, Any]:
    path = run.path / f"described-{rank}.json"
    until(lambda: path.exists() and path.read_text().endswith("}"))
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def test_warming_returns_at_once_and_starts_one(standby: Standby) -> None:
    first = waiting(standby)
    began = time.monotonic()
    standby.warm()
    standby.warm(niced=True)
    assert time.monotonic() - began < 0.1
    assert waiting(standby) is first


def test_closing_ends_it_at_once(standby: Standby) -> None:
    template = waiting(standby)
    began = time.monotonic()
    standby.close()
    left = processes.gone(lambda: processes.of_session(template.process.pid), 1.0)
    assert not left, processes.describe(left)
    assert time.monotonic() - began < 1.5
    assert standby.template is None


def test_warming_can_be_turned_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NBDDP_WARM", "0")
    standby = Standby(entry=ENTRY)
    standby.warm()
    assert standby.template is None
    run = make_run(tmp_path)
    assert result_of(launch(run, make_order(run, "finish"), standby), 20)["state"] == "finished"
    standby.close()


def test_a_standby_that_no_longer_fits_is_replaced(standby: Standby, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stale = waiting(standby)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    run = make_run(tmp_path)
    supervised = launch(run, make_order(run, "describe"), standby)
    assert waiting(standby) is not stale
    assert not stale.alive()
    assert described(run, 0)["env"]["OMP_NUM_THREADS"] == "4"  # the user's goes before the plan's
    run.ask("stop")
    assert result_of(supervised)["state"] == "stopped"
    standby.warm()
    fitting = waiting(standby)
    monkeypatch.setenv("SOMETHING_ELSE", "4")
    standby.warm()
    assert waiting(standby) is fitting


def test_a_dead_standby_is_replaced(standby: Standby, tmp_path: Path) -> None:
    waiting(standby).process.kill()
    waiting(standby).process.wait()
    run = make_run(tmp_path)
    assert result_of(launch(run, make_order(run, "finish"), standby), 20)["state"] == "finished"


def test_a_standby_that_dies_as_it_gets_the_order(standby: Standby, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The look at it was too early: the pipe is broken."""
    template = waiting(standby)
    template.process.kill()
    template.process.wait()
    monkeypatch.setattr(template, "alive", lambda: True)
    run = make_run(tmp_path)
    supervised = launch(run, make_order(run, "finish"), standby)
    assert waiting(standby) is not template
    assert result_of(supervised, 20)["state"] == "finished"


def test_a_supervisor_that_cannot_start(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    standby = Standby(entry="support.no_such_module:entry")
    result = result_of(launch(run, make_order(run, "finish"), standby), 20)
    standby.close()
    assert (result["state"], result["error"]["kind"]) == ("failed", "LaunchError")
    assert "No module named 'support.no_such_module'" in result["error"]["message"]
    assert not run.bundle.exists()


def test_no_interpreter_to_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    run = make_run(tmp_path)
    with pytest.raises(LaunchError, match="no standby could be started\nFileNotFoundError"):
        launch(run, make_order(run, "finish"), Standby(entry=ENTRY))
    assert settle(run) == run.read_result()


def test_a_standby_ends_over_an_unreadable_order(standby: Standby, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    template = standby.order(run, b'{"run_dir": 1, "kernel": null}\n')
    assert template is not None
    assert "not an order" in result_of(Supervised(run, template), 20)["error"]["message"]


def test_a_run_without_a_spec(standby: Standby, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (run.path / "spec.json").unlink()
    error = result_of(launch(run, make_order(run, "finish"), standby), 20)["error"]
    assert (error["kind"], "spec.json can't be read" in error["message"]) == ("LaunchError", True)


def test_one_run_right_after_the_other_and_two_at_once(standby: Standby, tmp_path: Path) -> None:
    """From one standby, which has imported torch once."""
    template = warmed(waiting(standby))
    for _ in range(2):
        run = make_run(tmp_path)
        supervised = launch(run, make_order(run, "finish"), standby)
        assert result_of(supervised)["state"] == "finished"
    runs = [make_run(tmp_path) for _ in range(2)]
    both = [launch(run, make_order(run, "go_on"), standby) for run in runs]
    for run in runs:
        stepping(run)
    assert supervisor_of(both[0]) != supervisor_of(both[1])
    for run in runs:
        run.ask("stop")
    assert [result_of(supervised)["state"] for supervised in both] == ["stopped", "stopped"]
    assert waiting(standby) is template
    assert template.alive()


def test_a_run_goes_on_without_its_standby(standby: Standby, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    supervised = launch(run, make_order(run, "go_on"), standby)
    stepping(run)
    waiting(standby).process.kill()
    waiting(standby).process.wait()
    seen = len(events(run, 0))
    until(lambda: len(events(run, 0)) > seen + 5)
    run.ask("stop")
    assert result_of(supervised)["state"] == "stopped"


def test_an_order_is_carried_out_although_the_standby_is_closed_while_it_imports(tmp_path: Path) -> None:
    standby = Standby(entry=ENTRY)
    run = make_run(tmp_path)
    supervised = launch(run, make_order(run, "finish"), standby)
    standby.close()
    assert result_of(supervised, 20)["state"] == "finished"


def test_a_supervisor_that_cannot_take_the_run_over(standby: Standby, tmp_path: Path) -> None:
    """The standby says so: the kernel sees neither its start nor its end."""
    run = make_run(tmp_path)
    for path in (run.log(None), run.path / "supervisor.json"):
        path.mkdir()
    result = result_of(launch(run, make_order(run, "finish"), standby), 20)
    assert (result["error"]["kind"], "before it took the run over" in result["error"]["message"]) == ("LaunchError", True)


def test_names_and_values_that_are_not_utf8() -> None:
    order = Order("/tmp/\udcff", {"A": "\udcfe\n", "B": "ä"}, "/", ProcessId(1, 2), "continue")
    line = order.to_line()
    assert line.count(b"\n") == 1
    assert Order.from_line(line) == order


def test_niced_imports_leave_ranks_at_normal_priority(tmp_path: Path) -> None:
    standby = Standby(entry=ENTRY)
    standby.warm(niced=True)
    template = waiting(standby)
    until(lambda: 10 in {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads_of(template.process.pid)})
    run = make_run(tmp_path)
    supervised = launch(run, make_order(run, "describe"), standby)
    assert [described(run, rank)["nice"] for rank in (0, 1)] == [0, 0]
    for process in stepping(run):
        assert {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads_of(process.pid)} == {0}
    run.ask("stop")
    assert result_of(supervised)["state"] == "stopped"
    standby.close()


@pytest.fixture
def folder_with_traps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a notebook whose helper modules have unlucky names."""
    for name in ("random", "types", "nbddp", "signal"):
        (tmp_path / f"{name}.py").write_text("raise AssertionError('shadowed')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_modules_beside_the_notebook_shadow_nothing(folder_with_traps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the kernel has the folder on its path, first and as the working directory."""
    monkeypatch.syspath_prepend(str(folder_with_traps))
    monkeypatch.syspath_prepend("")
    standby = Standby(entry=ENTRY)
    run = make_run(folder_with_traps)
    supervised = launch(run, make_order(run, "describe"), standby)
    record = described(run, 1)
    assert record["random"].startswith(str(Path(os.__file__).parent))
    assert not {"NBDDP_SYS_PATH", "NBDDP_SUPERVISOR", "PYTHONPATH"} & set(record["env"]) - set(os.environ)
    run.ask("stop")
    assert result_of(supervised, 20)["state"] == "stopped"
    standby.close()


def test_nbddp_is_the_kernels_own(tmp_path: Path) -> None:
    """Found through a kernel's sys.path, from a folder that no clean interpreter looks into."""
    copy = tmp_path / "elsewhere"
    copy.mkdir()
    (copy / "nbddp").symlink_to(Path(nbddp.__file__).parent)
    program = f"""
import os, sys
sys.path[:0] = [{str(copy)!r}, {str(Path(__file__).parents[1])!r}]
from pathlib import Path
from nbddp.launch.local import launch
from nbddp.launch.standby import Standby
from support.supervised import ENTRY, make_order, make_run
run = make_run(Path({str(tmp_path)!r}))
supervised = launch(run, make_order(run, "finish"), Standby(entry=ENTRY))
supervised.wait(30)
print(supervised.settle()["state"])
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd="/", env=environment, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("finished\n", "")


def test_the_environment_reaches_ranks_and_no_file(standby: Standby, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "s3cr3t-" + "7f" * 8
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))  # not the supervisor's: it was started before
    run = make_run(tmp_path)
    supervised = launch(run, make_order(run, "describe", TOKEN=secret, RANK="9", WORLD_SIZE="11"), standby)
    for rank in (0, 1):
        environment = described(run, rank)["env"]
        (run.path / f"described-{rank}.json").unlink()
        assert environment["TOKEN"] == secret
        assert (environment["RANK"], environment["WORLD_SIZE"], environment["OMP_NUM_THREADS"]) == (str(rank), "2", "1")
        assert environment["GLOO_SOCKET_IFNAME"] == environment["NCCL_SOCKET_IFNAME"] == "lo"
    stepping(run)
    folders = [tmp_path, scratch(supervisor_of(supervised))]
    assert folders[1].is_dir()
    run.ask("stop")
    assert result_of(supervised)["state"] == "stopped"
    for path in (path for folder in folders for path in folder.rglob("*") if path.is_file()):
        assert secret.encode() not in path.read_bytes(), path


def test_nothing_listens_beyond_loopback(standby: Standby, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    supervised = launch(run, make_order(run, "go_on"), standby)
    stepping(run)
    pids = {process.pid for process in processes.of_session(supervisor_of(supervised).pid)}
    assert len(pids) >= 4  # supervisor, fork server, two ranks
    lines = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True).stdout.splitlines()
    ours = [line for line in lines if pids & {int(pid) for pid in re.findall(r"pid=(\d+)", line)}]
    assert ours  # the store
    assert all(line.split()[3].rpartition(":")[0] in ("127.0.0.1", "[::1]") for line in ours), ours
    run.ask("stop")
    result_of(supervised)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder with a path as short as they usually are."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="t") as name:
        monkeypatch.setattr("tempfile.tempdir", name)
        monkeypatch.setenv("TMPDIR", name)
        yield Path(name)


def test_it_leaves_nothing_in_the_temporary_folder(tmp_path: Path, folder: Path) -> None:
    """Neither torch's nor multiprocessing's files, whether the run ends well, badly or by SIGKILL."""
    standby = Standby(entry=ENTRY)
    for do in ("finish", "raise", "leave_0"):
        run = make_run(tmp_path)
        result_of(launch(run, make_order(run, do), standby), 20)
        assert list(folder.iterdir()) == []
    run = make_run(tmp_path)
    supervised = launch(run, make_order(run, "go_on"), standby)
    stepping(run)
    assert list(folder.iterdir()) != []
    supervised.kill()
    result_of(supervised)
    assert list(folder.iterdir()) == []
    standby.close()


def test_a_temporary_folder_whose_path_is_too_long_for_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ("long" * 20)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    run, standby = make_run(tmp_path), Standby(entry=ENTRY)
    assert result_of(launch(run, make_order(run, "finish"), standby), 20)["state"] == "finished"
    standby.close()


def test_folders_of_supervisors_that_are_gone_are_removed(dead: ProcessId) -> None:
    left = scratch(dead)
    left.mkdir()
    own = make_scratch(ProcessId.current())
    assert own.stat().st_mode & 0o777 == 0o700
    assert not left.exists()
    with pytest.raises(FileExistsError):
        make_scratch(ProcessId.current())
    remove_scratch(ProcessId.current())
    assert not own.exists()


# -- when the kernel goes


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[str], RunDir, int, int]]]:
    """Start a stand-in for a kernel that launches a run and keeps a standby; return it, the run, and the two supervisors' pids."""
    started: list[subprocess.Popen[str]] = []

    def start(do: str, on_kernel_exit: str, *options: str) -> tuple[subprocess.Popen[str], RunDir, int, int]:
        path = os.pathsep.join([str(Path(nbddp.__file__).parents[1]), str(Path(__file__).parents[1])])
        command = [sys.executable, "-m", "support.supervised", str(tmp_path), do, on_kernel_exit, *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path})
        started.append(process)
        assert process.stdout is not None
        record = json.loads(process.stdout.readline())
        run = RunDir(Path(record["run"]))
        stepping(run)
        return process, run, record["supervisor"], record["standby"]

    yield start
    for process in started:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def gone(session: int, within_s: float) -> None:
    left = processes.gone(lambda: processes.of_session(session), within_s)
    assert not left, processes.describe(left)


@pytest.mark.parametrize("options", [(), ("fork",)], ids=["alone", "with a forked child that holds the pipe"])
def test_kernel_killed_and_the_run_stops_in_order(kernel: Callable[..., Any], options: tuple[str, ...]) -> None:
    process, run, supervisor, standby = kernel("go_on", "stop", *options)
    children = [ProcessId.of(child.pid) for child in psutil.Process(process.pid).children() if child.pid not in (supervisor, standby)]
    process.kill()
    gone(standby, 2)
    gone(supervisor, 5)
    for child in filter(None, children):
        child.send(signal.SIGKILL)
    result = run.read_result()
    assert result is not None
    assert (result["state"], result["error"], result["stop_reason"]) == ("stopped", None, "asked")


def test_kernel_killed_and_the_run_does_not_stop_by_itself(kernel: Callable[..., Any]) -> None:
    process, run, supervisor, _ = kernel("ignore", "stop")
    process.kill()
    gone(supervisor, 10)
    result = run.read_result()
    assert result is not None
    assert (result["state"], result["stop_reason"]) == ("stopped", "the kernel ended")


def test_kernel_killed_and_the_run_goes_on(kernel: Callable[..., Any]) -> None:
    process, run, supervisor, standby = kernel("go_on", "continue")
    process.kill()
    process.wait()
    gone(standby, 2)
    seen = len(events(run, 0))
    until(lambda: len(events(run, 0)) > seen + 5)
    assert settle(run) is None  # from another kernel, which this is
    run.ask("stop")
    gone(supervisor, 5)
    assert settle(run) == run.read_result()
    assert run.read_result() is not None


def test_kernel_and_supervisor_killed(kernel: Callable[..., Any]) -> None:
    process, run, supervisor, _ = kernel("go_on_deaf", "continue")
    process.kill()
    process.wait()
    os.kill(supervisor, signal.SIGKILL)
    gone(supervisor, 1)
    result = settle(run)
    assert result is not None
    assert (result["state"], result["error"]["kind"], result["error"]["rank"], result["error"]["signal"]) == ("failed", "WorkerLost", None, None)


def test_an_orderly_exit_of_the_kernel_ends_its_standby(tmp_path: Path) -> None:
    program = "from nbddp.launch.standby import Standby; s = Standby(); s.warm(); print(s.template.process.pid)"
    path = str(Path(nbddp.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True, env={**os.environ, "PYTHONPATH": path})
    assert done.stderr == ""
    gone(int(done.stdout), 0.5)


def test_a_forked_child_leaves_the_standby_alone(standby: Standby) -> None:
    template = waiting(standby)
    # In a thread-free process this is safe; the child does what its atexit would do.
    assert threading.active_count() == 1
    child = os.fork()
    if child == 0:
        code = 1
        try:
            before = standby.template
            standby.close()
            code = 0 if before is None else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert template.alive()
    assert waiting(standby) is template


def test_what_a_supervisor_makes_of_a_lost_run_directory(standby: Standby, tmp_path: Path) -> None:
    """Nothing can be written down; its processes end all the same."""
    run = make_run(tmp_path)
    order = make_order(run, "finish")
    for path in sorted(run.path.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    run.path.rmdir()
    launch(run, order, standby)
    # The next order is carried out as if nothing had been, which tells that this one was taken.
    other = make_run(tmp_path)
    assert result_of(launch(other, make_order(other, "finish"), standby), 20)["state"] == "finished"
    until(lambda: not psutil.Process(waiting(standby).process.pid).children())
