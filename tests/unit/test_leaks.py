"""The fixture that watches every test fails one that leaves something behind, and clears it away."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest_plugins = "pytester"
CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"

LEAKS = {  # what is reported: what the test does
    "processes:\n  pid .*sleep 301": "import subprocess\n    subprocess.Popen(['sleep', '301'])",
    "processes:\n  pid .*sleep 302": "import os\n    os.system('setsid sleep 302 >/dev/null 2>&1 &')",
    "threads: stuck": "import threading\n    threading.Thread(target=lambda: __import__('time').sleep(2), name='stuck').start()",
    "changed environment variables: NBDDP_LEAK": "import os\n    os.environ['NBDDP_LEAK'] = '1'",
    "another working directory: /": "import os\n    os.chdir('/')",
    "a changed sys.path: .*'/nowhere'": "import sys\n    sys.path.append('/nowhere')",
    "files: .*nbddp_runs": "from conftest import ROOT\n    (ROOT / 'nbddp_runs').mkdir()",
}


@pytest.mark.parametrize("reported, leak", LEAKS.items(), ids=lambda text: text.split("\n")[0])
def test_a_leak_fails_its_test_and_not_the_next(pytester, reported, leak):
    # The very fixtures, with a short patience, watching a folder of their own.
    source = CONFTEST.read_text().replace("LEAVING_S = 5.0", "LEAVING_S = 0.3").replace("parent.parent\n", "parent\n", 1)
    pytester.makeconftest(source)
    pytester.makepyfile(f"def test_leaks():\n    {leak}\n\ndef test_next():\n    pass\n")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-o", f"pythonpath={CONFTEST.parent} .")
    result.assert_outcomes(passed=2, errors=1)
    assert re.search(f"the test left behind\n{reported}", result.stdout.str()), result.stdout.str()
