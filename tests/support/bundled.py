"""A notebook without a kernel, whose cells are bundled here and opened in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from nbddp.bundle import Bundler, CellSource, DataRef, Interpreter, load

TIMEOUT_S = 60


class CellNotebook:
    """Runs cells in a ``__main__`` of its own, under the file names that ipykernel gives them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.main = ModuleType("__main__")
        self.main.__dict__["__builtins__"] = __builtins__
        self.cells: dict[str, CellSource] = {}

    def __getitem__(self, name: str) -> Any:
        return self.main.__dict__[name]

    def cell(self, source: str) -> str:
        """Run a cell; return the file name of its code."""
        number = len(self.cells) + 1
        filename = f"/tmp/ipykernel_1/{100 + number}.py"
        self.cells[filename] = CellSource(number, source)
        exec(compile(source, filename, "exec"), self.main.__dict__)
        return filename

    def bundler(self) -> Bundler:
        return Bundler(data_dir=self.folder / "data", main=self.main, cells=self.cells)

    def ship(self, *, model: object = None, hooks: dict[str, object] | None = None, always: tuple[str, ...] = (), **datasets: object) -> Shipped:
        """Bundle it all; datasets by role."""
        bundler = self.bundler()
        refs = [bundler.stage(role, f"{role}_set", dataset) for role, dataset in datasets.items()]
        bundler.write(self.folder / "run" / "bundle.pt", model=model, hooks=hooks or {}, model_name="net", always=always)
        return Shipped(self.folder, refs, Interpreter.capture())


class Shipped:
    """A bundle on the disk."""

    def __init__(self, folder: Path, refs: list[DataRef], interpreter: Interpreter) -> None:
        self.path, self.data_dir, self.refs, self.interpreter = folder / "run" / "bundle.pt", folder / "data", refs, interpreter

    def opened(self, program: str, *args: str) -> Any:
        """Open the bundle in a fresh process and run a program there, which finds it as ``loaded``; return what it binds to ``result``."""
        spec = {
            "path": str(self.path),
            "data_dir": str(self.data_dir),
            "refs": [vars(ref) for ref in self.refs],
            "interpreter": self.interpreter.to_json(),
            "program": program,
            "args": args,
        }
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", "from support.bundled import open_in_child; open_in_child()"],
            input=json.dumps(spec),
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            message = f"the process that opened the bundle failed:\n{done.stderr}"
            raise AssertionError(message)
        return json.loads(done.stdout.splitlines()[-1])


def open_in_child() -> None:
    """Open the bundle that standard input describes, as a rank does, and run the program given there."""
    import multiprocessing

    multiprocessing.set_start_method("fork")
    spec = json.loads(sys.stdin.read())
    Interpreter.from_json(spec["interpreter"]).apply()
    loaded = load(Path(spec["path"]), Path(spec["data_dir"]), [DataRef(**ref) for ref in spec["refs"]])
    names = {"loaded": loaded, "args": spec["args"]}
    exec(compile(spec["program"], "<program>", "exec"), names)
    sys.stdout.write(f"\n{json.dumps(names.get('result'))}\n")
