"""A real SLURM, brought up for the session."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slurm


def test_srun_runs_on_both_nodes(slurm):
    script = "echo $SLURM_PROCID $SLURM_NTASKS $SLURMD_NODENAME $SLURM_STEP_ID"
    lines = slurm.run(["srun", "-N2", "-n2", "sh", "-c", script]).stdout.splitlines()
    assert sorted(lines) == ["0 2 node1 0", "1 2 node2 0"]


def test_a_failing_command_shows_its_output(slurm):
    with pytest.raises(AssertionError, match=r"(?s)srun .* ended with 3.*what went wrong"):
        slurm.run(["srun", "-n1", "sh", "-c", "echo what went wrong >&2; exit 3"])
