"""What each entrance to the package loads, in a fresh interpreter: start-up times and the separation of the processes rest on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import nbddp

JUPYTER = {"IPython", "ipykernel", "ipywidgets", "traitlets", "zmq"}
CONTRACT = [
    "config",
    "rules",
    "curve",
    "plans",
    "stage",
    "values",
    "planning",
    "remarks",
    "advice",
    "evidence",
    "remedies",
    "events",
    "rundir",
    "staged",
    "runroot",
    "state",
    "window",
    "failure",
    "process",
    "deathguard",
    "contents",
    "shapes",
    "numerals",
    "runname",
    "runpruning",
    "errors",
    "visible",
]

# Imports every module of a package as well, without those that run as programs.
LOAD = """
import importlib, json, pkgutil, sys
before = set(sys.modules)
module = importlib.import_module(sys.argv[1])
if sys.argv[2] == "whole":
    for info in pkgutil.walk_packages(getattr(module, "__path__", []), module.__name__ + "."):
        if not info.name.endswith(".__main__"):
            importlib.import_module(info.name)
print(json.dumps(sorted({name.partition(".")[0] for name in set(sys.modules) - before} - {"nbddp"} - sys.stdlib_module_names)))
"""

LOAD_EXTENSION = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
before = set(sys.modules)
shell.run_line_magic("load_ext", "nbddp")
loaded = sorted({name.partition(".")[0] for name in set(sys.modules) - before})
magics = shell.magics_manager.magics
print(json.dumps([loaded, "ddp_train" in magics["cell"], "ddp_train" in magics["line"]]))
"""


def python(program, *args):
    # No standby is warmed up: it would outlive the interpreter for a moment.
    environment = {**os.environ, "NBDDP_WARM": "0"}
    return subprocess.run([sys.executable, "-c", program, *args], env=environment, capture_output=True, text=True, timeout=60, check=False)


def loaded_by(module, extent="alone"):
    done = python(LOAD, module, extent)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def test_the_package_alone_loads_the_standard_library_only():
    assert loaded_by("nbddp") == set()


@pytest.mark.parametrize("name", CONTRACT)
def test_the_contract_loads_neither_torch_nor_jupyter(name):
    assert loaded_by(f"nbddp.{name}") & ({"torch", "numpy", "matplotlib", "h5py"} | JUPYTER) == set()


def test_the_whole_worker_loads_no_jupyter():
    loaded = loaded_by("nbddp.worker", "whole")
    assert "torch" in loaded
    assert loaded & (JUPYTER | {"matplotlib"}) == set()


def test_the_supervisor_loads_no_jupyter():
    assert loaded_by("nbddp.supervisor", "whole") & (JUPYTER | {"matplotlib"}) == set()


def test_the_extension_loads_neither_torch_nor_matplotlib_and_prints_nothing():
    done = python(LOAD_EXTENSION)
    assert done.returncode == 0, done.stderr
    loaded, cell_magic, line_magic = json.loads(done.stdout)  # the only thing on stdout
    assert done.stderr == ""
    assert set(loaded) & {"torch", "matplotlib", "h5py"} == set()
    assert (cell_magic, line_magic) == (True, True)


def test_all_names_exist_and_are_found_by_dir_and_star():
    namespace = {}
    exec("from nbddp import *", namespace)
    namespace.pop("__builtins__")
    assert sorted(namespace) == sorted(nbddp.__all__)
    assert set(nbddp.__all__) <= set(dir(nbddp))
    assert len(set(nbddp.__all__)) == len(nbddp.__all__)


def test_the_public_names_are_these():
    errors = "BundleError CheckpointError ConfigError HangDetected LaunchError NbddpError OutOfMemory ReplicaMismatch RunFailed WorkerError WorkerLost"
    names = "Metric Run Stage TrainConfig __version__ attach autocast compare last_run load_checkpoint plan prune runs swap_norm train"
    assert sorted(nbddp.__all__) == sorted([*errors.split(), *names.split()])


@pytest.mark.parametrize("name", ["H5Dataset"])
def test_names_of_later_versions_say_so(name):
    with pytest.raises(AttributeError, match=f"nbddp.{name} is not available yet"):
        getattr(nbddp, name)


def test_nothing_else_is_public():
    program = """
import json, types, nbddp
public = {name for name, value in vars(nbddp).items() if not name.startswith("_") and not isinstance(value, types.ModuleType)}
print(json.dumps(sorted(public - set(nbddp.__all__) - {"annotations", "Any", "TYPE_CHECKING", "load_ipython_extension", "unload_ipython_extension"})))
"""
    done = python(program)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="trian"):
        nbddp.trian  # noqa: B018 - the access is what is tested
