"""The line magics about runs that exist: list, prune, attach, stop, stacks, load; and those that are not available yet.

Runs in the kernel or in terminal IPython. Loading the extension imports this module, so that whatever is large is imported where a magic is called.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.core.magic import Magics, line_magic, magics_class, needs_local_scope, no_var_expand
from IPython.display import display

from nbddp.errors import ConfigError, suggest
from nbddp.kernel.binding import binder, names_of, say

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from IPython.core.interactiveshell import InteractiveShell

    from nbddp.kernel.line import Arguments, Word
    from nbddp.kernel.options import Option
    from nbddp.kernel.run import Run


@magics_class
class RunMagics(Magics):
    """%ddp_runs, %ddp_attach, %ddp_stop, %ddp_stacks, %ddp_load."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self._shell = shell

    @line_magic
    @no_var_expand
    @needs_local_scope
    def ddp_runs(self, line: str, local_ns: Mapping[str, Any] | None = None) -> None:
        """%ddp_runs [--root DIR] [--sort COLUMN] [--reverse]: the runs beside this notebook, with state, best value, loss, what they differ by, size, note.

        COLUMN is best, duration, loss, note, run, size, started, state, steps, or an option such as lr.
        %ddp_runs --prune [--keep 20] [--older-than-days 30]: name the runs that could be deleted; with --no-dry-run, delete them.
        %ddp_runs --prune RUN ...: the same of the runs that are named; RUN is an id, a part of it, a directory, or a variable that holds runs.
        """
        __tracebackhide__ = True
        from nbddp.kernel.line import flag_value
        from nbddp.kernel.options import RUNS_OPTIONS

        usage = "%ddp_runs [--root DIR] [--sort COLUMN] [--reverse] [--prune [RUN ...] [--keep N] [--older-than-days DAYS] [--no-dry-run]]"
        found = self._split(line, RUNS_OPTIONS, local_ns, usage, at_most=None)
        if found is None:
            return
        root = None if found.values.get("root") is None else Path(str(found.values["root"])).expanduser()
        if flag_value("prune", found.values.get("prune", False)):
            if arranging := [name for name in ("sort", "reverse") if name in found.values]:
                message = f"{RUNS_OPTIONS[arranging[0]].spelling} arranges the list of runs: leave it out with --prune"
                raise ConfigError(message)
            self._prune(root, found, local_ns)
            return
        _at_most(found, 0, usage)
        if stray := next((name for name in ("keep", "older_than_days", "dry_run") if name in found.values), None):
            message = f"{RUNS_OPTIONS[stray].spelling} goes with --prune"
            raise ConfigError(message)
        from nbddp.kernel.runs import runs

        by, reverse = str(found.values.get("sort", "started")).replace("-", "_"), flag_value("reverse", found.values.get("reverse", False))
        display(runs(root).sorted(by, reverse=reverse))

    def _prune(self, root: Path | None, found: Arguments, local_ns: Mapping[str, Any] | None) -> None:
        from nbddp.kernel.line import flag_value, number_value
        from nbddp.kernel.options import RUNS_OPTIONS
        from nbddp.kernel.pruning import prune_named, prune_old
        from nbddp.runroot import run_root

        values, where = found.values, run_root(root)
        dry_run = flag_value("dry_run", values.get("dry_run", True))
        if found.words:
            if by_age := next((name for name in ("keep", "older_than_days") if name in values), None):
                message = f"{RUNS_OPTIONS[by_age].spelling} chooses among all runs, and {found.words[0].text} names one: leave one of the two out"
                raise ConfigError(message)
            names = names_of(self._shell, local_ns)
            say(str(prune_named([_runs_of(names.get(word.text), word.text) for word in found.words], where, dry_run=dry_run)))
            return
        keep = int(number_value("keep", values.get("keep", "20"), int))
        days = number_value("older_than_days", values.get("older_than_days", "30"), float)
        pruned = prune_old(where, keep=keep, older_than_days=days, dry_run=dry_run)
        say(str(pruned) if pruned.runs else f"nothing to prune in {where}")

    @line_magic
    @no_var_expand
    @needs_local_scope
    def ddp_attach(self, line: str, local_ns: Mapping[str, Any] | None = None) -> None:
        """%ddp_attach RUN [--as NAME]: the view of a run, also of another kernel's, and `run` bound to it; RUN is an id, a part of it, or a directory."""
        __tracebackhide__ = True
        from nbddp.kernel.line import identifier
        from nbddp.kernel.options import ATTACH_OPTIONS
        from nbddp.kernel.runs import register

        found = self._split(line, ATTACH_OPTIONS, local_ns, "%ddp_attach RUN [--as NAME]", at_least=1, at_most=1)
        if found is None:
            return
        run = self._run(found.words, local_ns)
        register(run)
        binder(self._shell, identifier(str(found.values["as"]), "--as") if "as" in found.values else None)(run)
        view = run.view()
        if view is not None:
            display(view)

    @line_magic
    @no_var_expand
    @needs_local_scope
    def ddp_stop(self, line: str, local_ns: Mapping[str, Any] | None = None) -> None:
        """%ddp_stop [RUN]: ask a run (the last one) to stop in order, with a checkpoint."""
        __tracebackhide__ = True
        found = self._split(line, {}, local_ns, "%ddp_stop [RUN]", at_most=1)
        if found is None:
            return
        run = self._run(found.words, local_ns)
        if run.state in ("finished", "stopped", "failed"):
            say(f"{run.id} has ended already: {run.state}")
            return
        run.stop()
        say(f"{run.id} was asked to stop")

    @line_magic
    @no_var_expand
    @needs_local_scope
    def ddp_stacks(self, line: str, local_ns: Mapping[str, Any] | None = None) -> None:
        """%ddp_stacks [RUN]: where each rank of a run (the last one) is right now."""
        __tracebackhide__ = True
        found = self._split(line, {}, local_ns, "%ddp_stacks [RUN]", at_most=1)
        if found is None:
            return
        stacks = self._run(found.words, local_ns).stacks()
        if stacks is not None:
            say(str(stacks))

    @line_magic
    @no_var_expand
    @needs_local_scope
    def ddp_load(self, line: str, local_ns: Mapping[str, Any] | None = None) -> None:
        """%ddp_load MODEL [RUN|PATH] [--which last|best|initial|EPOCH]: weights of a run (the last one) or of a checkpoint file into a model.

        --no-strict leaves out what does not fit, and says what that was; --no-weights-only runs the code that a file may carry.
        """
        __tracebackhide__ = True
        from nbddp.kernel.line import flag_value
        from nbddp.kernel.names import evaluate
        from nbddp.kernel.options import LOAD_OPTIONS

        usage = "%ddp_load MODEL [RUN|PATH] [--which last|best|initial|EPOCH] [--no-strict] [--no-weights-only]"
        found = self._split(line, LOAD_OPTIONS, local_ns, usage, at_least=1, at_most=2)
        if found is None:
            return
        words = found.words
        model = evaluate(words[0].text, names_of(self._shell, local_ns), what="MODEL")
        from torch import nn

        if not isinstance(model.value, nn.Module):
            message = f"MODEL {model.name} is a {type(model.value).__name__}: it must be a torch.nn.Module; the order is MODEL, then RUN or PATH"
            raise ConfigError(message)
        which = _which(found.values.get("which"))
        how = {name: flag_value(name, found.values.get(name, True)) for name in ("strict", "weights_only")}
        path = self._file(words[1], local_ns) if len(words) == 2 else None
        if path is not None and which is not None:
            message = f"--which {which}: {path} is one checkpoint file; leave --which out, or name its run"
            raise ConfigError(message)
        if path is None:
            run = self._run(words[1:], local_ns)
            which = "last" if which is None else which
            if all(how.values()):
                run.load_named(model.value, which, model.name)
                return
            from nbddp.kernel.weights import file_of

            path = file_of(run.files, which)
        from nbddp.checkpoint import load_file

        facts = load_file(path, model.value, **how).facts()
        say(f"{model.name}: {'; '.join([str(path), *facts])}")

    def _file(self, word: Word, local_ns: Mapping[str, Any] | None) -> Path | None:
        """The checkpoint file that a word names, there or not; None where it names a run."""
        value = names_of(self._shell, local_ns).get(word.text)
        from nbddp.checkpoint import SUFFIXES, Place, located
        from nbddp.kernel.table import CheckpointEntry

        value = value.path if isinstance(value, CheckpointEntry) else value
        place = Place.of(value if isinstance(value, Path) and not word.quoted else word.text)
        path = place.path
        if place.is_folder:
            return None if (path / "spec.json").is_file() else located(path)
        return path if place.is_there or path.suffix in SUFFIXES else None

    def _split(
        self, line: str, options: Mapping[str, Option], local_ns: Mapping[str, Any] | None, usage: str, *, at_least: int = 0, at_most: int | None
    ) -> Arguments | None:
        """Words and options of a line; None where it asked for help and got it."""
        from nbddp.kernel.line import split, uncommented
        from nbddp.kernel.names import expand

        found = split(expand(uncommented(line), names_of(self._shell, local_ns)), options, usage.split()[0])
        if found.help:
            say(usage)
            return None
        if len(found.words) < at_least:
            message = f"something is missing: write {usage}"
            raise ConfigError(message)
        if at_most is not None:
            _at_most(found, at_most, usage)
        return found

    def _run(self, words: Sequence[Word], local_ns: Mapping[str, Any] | None) -> Run:
        """The run that a word names: a variable that holds one, an id or a directory; without a word the last one."""
        from nbddp.kernel.run import Run
        from nbddp.kernel.runs import attach, last_run

        if not words:
            run = last_run()
            if run is None:
                message = "no run was started in this kernel: name one; %ddp_runs lists them"
                raise ConfigError(message)
            return run
        text = words[0].text
        value = names_of(self._shell, local_ns).get(text)
        if isinstance(value, Run):
            return value
        try:
            return attach(text)
        except ConfigError as error:
            message = f"{error}{_nearest_runs(text)}"
            raise ConfigError(message) from None

    # -- not yet

    @line_magic
    def ddp_check(self, line: str) -> None:
        """%ddp_check: not available yet."""
        _refuse("ddp_check")

    @line_magic
    def ddp_export(self, line: str) -> None:
        """%ddp_export: not available yet."""
        _refuse("ddp_export")


def _runs_of(value: object, text: str) -> object:
    """What a variable of that name holds, where that is runs; else the text, which is an id or a directory."""
    from nbddp.kernel.entry import RunEntry
    from nbddp.kernel.run import Run
    from nbddp.kernel.table import RunTable

    held = value if isinstance(value, list | tuple) else [value]
    return value if held and all(isinstance(one, Run | RunEntry | RunTable) for one in held) else text


def _at_most(found: Arguments, count: int, usage: str) -> None:
    if len(found.words) > count:
        message = f"{found.words[count].text}: too many words; write {usage}"
        raise ConfigError(message)


def _refuse(magic: str) -> None:
    message = f"%{magic} is not available yet"
    raise ConfigError(message)


def _nearest_runs(text: str) -> str:
    """A question about the runs that may have been meant; empty where some do match."""
    from nbddp.kernel.text import short_id
    from nbddp.rundir import run_dirs
    from nbddp.runroot import run_root

    ids = [run.id for run in run_dirs(run_root())]
    if any(text in run for run in ids):
        return ""
    spellings = [spelling for run in ids for spelling in (run, short_id(run), short_id(run).rpartition("-")[0], run.rpartition("-")[2])]
    near = suggest(text, dict.fromkeys(spellings))
    return f".{near}" if near else ""


def _which(value: str | bool | None) -> str | int | None:
    if value is None:
        return None
    text = str(value)
    if text.isdigit():
        return int(text)
    if text not in ("last", "best", "initial") and not re.fullmatch(r"(epoch|stage)-\d+", text):
        message = f"--which {text}: must be last, best, initial or the number of an epoch"
        raise ConfigError(message)
    return text
