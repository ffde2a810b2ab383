"""Style, types and import contracts: ``python tools/lint.py [CHECK...]``, all of them without arguments.

The one definition of these checks: `make lint`, the pre-commit hooks and the tests run this file. Ends with the number of checks that failed.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent  # of the virtual environment, whether or not it is activated

CHECKS = {
    "ruff-check": [str(BIN / "ruff"), "check", "."],
    "ruff-format": [str(BIN / "ruff"), "format", "--check", "--diff", "."],
    "mypy": [str(BIN / "mypy"), "nbddp", "tests/support", "tests/conftest.py", "tools"],
    "imports": [str(BIN / "lint-imports")],
}


def main(names: list[str]) -> int:
    """Run the named checks, or all; return how many failed."""
    unknown = [name for name in names if name not in CHECKS]
    if unknown:
        print(f"no check is called {', '.join(unknown)}; there are {', '.join(CHECKS)}", file=sys.stderr)
        return len(unknown)
    failed = 0
    for name in names or CHECKS:
        print(f"== {name}", flush=True)
        failed += subprocess.run(CHECKS[name], cwd=ROOT, stdin=subprocess.DEVNULL, check=False).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
