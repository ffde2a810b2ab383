"""A real SLURM on this machine, without systemd, cgroups or an accounting database: two nodes, of which both are this host.

Every part has its files in one folder and ports of its own, so that several clusters, and one that the machine itself belongs to, do not meet.
"""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import socket
import subprocess
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

NODES = ("node1", "node2")
START_S = 30.0
PROGRAMS = ("slurmctld", "slurmd", "munged", "munge", "srun", "sbatch", "sinfo", "scontrol")

CONF = """\
ClusterName=nbddp
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
# Nothing that needs privileges, a hardware probe or a database.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
# A test waits for jobs to start and end: look often, kill soon, remember what ended.
SchedulerParameters=sched_interval=1,bf_interval=1
KillWait=3
MinJobAge=600
ReturnToService=2
{nodes}
PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} Sockets=1 CoresPerSocket={cores} ThreadsPerCore=1 RealMemory=2000 State=UNKNOWN"


@dataclass(frozen=True)
class Cluster:
    """A running cluster; ``env`` is what a process needs in order to use it."""

    folder: Path
    env: dict[str, str]

    def run(self, command: Sequence[str], *, timeout: float = 60, cwd: Path | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run one of SLURM's commands, or a program that uses them, and return its output."""
        done = subprocess.run(
            command, env={**os.environ, **self.env}, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, check=False
        )
        assert not check or done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}{done.stderr}"
        return done


def missing() -> list[str]:
    """Return the programs that a cluster needs and this machine lacks."""
    return [name for name in PROGRAMS if _find(name) is None]


@contextmanager
def running(folder: Path) -> Iterator[Cluster]:
    """Start a cluster whose files are in ``folder``, wait until both nodes are idle, and end it afterwards, jobs first."""
    (folder / "state").mkdir(parents=True)
    conf, key = folder / "slurm.conf", folder / "munge.key"
    conf.write_text(_conf(folder))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nConstrainCores=no\nConstrainRAMSpace=no\n")
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    cluster = Cluster(folder, {"SLURM_CONF": str(conf)})
    with ExitStack() as stack:
        munge_files = [f"--{kind}-file={folder}/munge.{kind}" for kind in ("key", "log", "pid", "seed")]
        _start(stack, cluster, "munged", "--force", "--foreground", f"--socket={folder}/munge.sock", *munge_files)
        _wait(cluster, ["munge", "-S", f"{folder}/munge.sock", "-n"], "")
        _start(stack, cluster, "slurmctld", "-D", "-c")
        for node in NODES:
            (folder / f"spool-{node}").mkdir()
            _start(stack, cluster, "slurmd", "-D", "-N", node)
        _wait(cluster, ["sinfo", "-h", "-t", "idle", "-o", "%D"], str(len(NODES)))
        yield cluster
        cluster.run(["scancel", "--user", getpass.getuser()], check=False)
        _wait(cluster, ["sinfo", "-h", "-t", "idle", "-o", "%D"], str(len(NODES)))


def _conf(folder: Path) -> str:
    host = socket.gethostname().split(".")[0]
    with ExitStack() as stack:  # all bound at once, so that they differ
        ports = [stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(1 + len(NODES))]
    nodes = "\n".join(NODE.format(name=name, host=host, port=port, cores=os.cpu_count()) for name, port in zip(NODES, ports[1:], strict=True))
    return CONF.format(host=host, folder=folder, user=getpass.getuser(), ctld_port=ports[0], nodes=nodes, names=",".join(NODES))


def _find(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")  # daemons are not on every user's path


def _start(stack: ExitStack, cluster: Cluster, name: str, *args: str) -> None:
    program = _find(name)
    assert program is not None, f"{name} is not installed"
    log = stack.enter_context((cluster.folder / f"{name}.out").open("ab"))
    process = subprocess.Popen([program, *args], env={**os.environ, **cluster.env}, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    stack.callback(_end, process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(5)
    process.kill()
    process.wait()


def _wait(cluster: Cluster, command: list[str], answer: str) -> None:
    """Ask until the command succeeds and its output contains ``answer``."""
    deadline = time.monotonic() + START_S
    while True:
        done = cluster.run(command, check=False)
        if done.returncode == 0 and answer in done.stdout:
            return
        if time.monotonic() > deadline:
            logs = "\n".join(f"-- {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in sorted(cluster.folder.glob("*.log")))
            message = f"{' '.join(command)} still answers {done.stdout + done.stderr!r}\n{logs}"
            raise RuntimeError(message)
        time.sleep(0.1)
