"""The one standby supervisor of this kernel: warmed when the extension is loaded, taken by each run, warmed again after its first step.

Runs in the kernel; imports neither torch nor Jupyter.
"""

from __future__ import annotations

from nbddp.launch.standby import Standby

standby = Standby()
