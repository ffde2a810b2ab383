"""Fixtures and rules of all tests: what a test may leave behind (nothing), what is skipped where, and the real parts that tests drive."""

from __future__ import annotations

import os
import secrets
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import psutil
import pytest

from support import processes
from support.kernel import MARK as KERNEL_MARK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from support.kernel import Notebook
    from support.lab import Lab
    from support.slurm import Cluster
    from support.training import Training

ROOT = Path(__file__).resolve().parent.parent
MARK = "NBDDP_TEST_SESSION"
LEAVING_S = 5.0
# What pytest itself changes during a test.
FOREIGN_VARIABLES = {"PYTEST_CURRENT_TEST"}
# What a run or a careless test drops where it stands.
DROPPINGS = ("nbddp_runs", "*.pt", "*.h5", "*.html", "*.png", "*.log", "core", "core.*")


def pytest_configure() -> None:
    """Mark what is started below this session, so that it is found wherever it has gone; a busy machine is no reason to fail a property."""
    os.environ[MARK] = secrets.token_hex(8)
    hypothesis.settings.register_profile("any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
    hypothesis.settings.load_profile("any machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, with the reason and the remedy."""
    for marker, reason_not_to in (("gpu", _no_gpu), ("browser", _no_browser), ("slurm", _no_slurm)):
        marked = [item for item in items if item.get_closest_marker(marker)]
        if marked and (reason := reason_not_to()):
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))


def _no_gpu() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "torch sees no CUDA device"


def _no_browser() -> str | None:
    from support import lab

    return None if lab.chromium() else "no Chromium: apt-get install chromium, or name one in NBDDP_CHROMIUM"


def _no_slurm() -> str | None:
    from support import slurm

    return f"no {', '.join(slurm.missing())}: apt-get install slurm-wlm munge" if slurm.missing() else None


@pytest.fixture(autouse=True)
def leaves_nothing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail a test that leaves a process, a thread, an environment variable, a working directory or a file behind, and clear it away for the next."""
    base = str(tmp_path_factory.getbasetemp())
    ours_before = _our_processes(base)
    threads_before = set(threading.enumerate())
    env_before, cwd_before, path_before = dict(os.environ), Path.cwd(), list(sys.path)
    files_before = _droppings()
    kernels_before = processes.values_of(KERNEL_MARK, ours_before)
    yield
    found = []

    # Fixtures of wider scope were set up before this one: what they started is in `ours_before`. A kernel among it answers for what it starts later, such
    # as the supervisor that waits for its next cell: `Notebook.close` finds what outlives it.
    left = processes.gone(lambda: {p for p in _our_processes(base) - ours_before if not processes.values_of(KERNEL_MARK, [p]) & kernels_before}, LEAVING_S)
    if left:
        found.append(f"processes:\n{processes.describe(left)}")
        processes.end(left)

    if threads := [thread for thread in _lasting_threads(threads_before) if _outlives(thread, LEAVING_S)]:
        found.append(f"threads: {', '.join(thread.name for thread in threads)}")

    env_after = dict(os.environ)
    if changed := sorted(name for name in {*env_before, *env_after} - FOREIGN_VARIABLES if env_before.get(name) != env_after.get(name)):
        found.append(f"changed environment variables: {', '.join(changed)}")
        for name in changed:
            if name in env_before:
                os.environ[name] = env_before[name]
            else:
                del os.environ[name]
    if Path.cwd() != cwd_before:
        found.append(f"another working directory: {Path.cwd()}")
        os.chdir(cwd_before)
    if sys.path != path_before:
        found.append(f"a changed sys.path: {[entry for entry in sys.path if entry not in path_before]}")
        sys.path[:] = path_before

    if files := sorted(_droppings() - files_before):
        found.append(f"files: {', '.join(map(str, files))}")
    if found:
        pytest.fail("the test left behind\n" + "\n".join(found), pytrace=False)


def _our_processes(base: str) -> processes.Processes:
    found = processes.descendants() | processes.marked(MARK, os.environ.get(MARK, "")) | processes.refer_to(base)
    return {process for process in found if not _is_resource_tracker(process)}


def _is_resource_tracker(process: psutil.Process) -> bool:
    """Whether this is multiprocessing's own helper, which Python starts once and ends with this process."""
    try:
        return process.ppid() == os.getpid() and any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    except psutil.NoSuchProcess:
        return True


def _lasting_threads(before: set[threading.Thread]) -> list[threading.Thread]:
    """New threads that keep the interpreter from ending, and nbddp's own, which have no reason to outlive what they follow."""
    return [thread for thread in threading.enumerate() if thread not in before and (not thread.daemon or thread.name.startswith("nbddp"))]


def _outlives(thread: threading.Thread, timeout_s: float) -> bool:
    thread.join(timeout_s)
    return thread.is_alive()


def _droppings() -> set[Path]:
    return {path for pattern in DROPPINGS for path in ROOT.glob(pattern)}


@pytest.fixture
def notebook(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Notebook]]:
    """Return a function that starts a kernel: ``notebook(folder=tmp_path, env={...})``. Kernels are shut down, and checked for survivors, at the end."""
    from support.kernel import Notebook

    opened: list[Notebook] = []

    def open_notebook(folder: Path = tmp_path, env: Mapping[str, str] | None = None) -> Notebook:
        opened.append(Notebook(folder, tmp_path_factory.mktemp("kernel"), env))
        return opened[-1]

    yield open_notebook
    _close_all(opened)


def _close_all(notebooks: list[Notebook]) -> None:
    """Close every one, also where one fails to; raise the first failure."""
    try:
        while notebooks:
            notebooks.pop().close()
    finally:
        if notebooks:
            _close_all(notebooks)


@pytest.fixture(scope="session")
def rank_server() -> None:
    """Start the process that ranks are forked from; it stays for the session."""
    from support import ranks

    ranks.start_server()


@pytest.fixture
def ranks(rank_server: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Any]]:
    """Return a function that calls another on gloo ranks: ``ranks(3, f, *args, timeout=60)`` gives ``[f(0, *args), f(1, *args), f(2, *args)]``."""
    from support.ranks import run_on_ranks

    def run(nproc: int, function: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
        return run_on_ranks(function, nproc, *args, folder=tmp_path_factory.mktemp("ranks"), timeout=timeout)

    return run


@pytest.fixture
def training(ranks: Callable[..., list[Any]], tmp_path: Path) -> Training:
    """The training loop on gloo ranks: ``training(3, make, hooks, epochs=2)`` gives a `support.training.Result`."""
    from support.training import Training

    return Training(ranks, tmp_path)


@pytest.fixture
def lab(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A JupyterLab on ``tmp_path``, in a browser."""
    from support.lab import running

    with running(tmp_path, tmp_path_factory.mktemp("lab")) as lab:
        yield lab


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A SLURM of two nodes, for the session."""
    from support.slurm import running

    with running(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster
