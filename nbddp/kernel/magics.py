"""%%ddp_train and %ddp_plan: from the line and the body of a cell to a `Request`, which is handed on.

Runs in the kernel or in terminal IPython. Loading the extension imports this module, so that whatever is large (torch, widgets, even the table of
options) is imported where a magic is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from IPython.core.magic import Magics, line_cell_magic, magics_class, needs_local_scope, no_var_expand

from nbddp.errors import ConfigError
from nbddp.kernel.binding import binder, names_of, say

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from IPython.core.interactiveshell import InteractiveShell

    from nbddp.kernel.cells import CellSources, Origin, RunningCells
    from nbddp.kernel.line import Invocation
    from nbddp.kernel.request import Bind, Request
    from nbddp.kernel.settings import Settings


def _train(request: Request, bind: Bind) -> object:
    from nbddp.kernel.train import train

    return train(request, bind)


def _dry_run(request: Request) -> None:
    from nbddp.kernel.train import dry_run

    dry_run(request)


def _cell_sources(shell: InteractiveShell) -> CellSources:
    """The notebook's cells, made into the bundle's own kind when it reads them."""
    from nbddp.kernel.cells import CellSources

    def make(number: int | None, source: str) -> object:
        from nbddp.bundle import CellSource

        return CellSource(number, source)

    return CellSources(shell, make)


def _documented(make: str) -> Callable[[Any], Any]:
    """Let ``%%magic?`` show a text that is made when it is asked for: IPython prefers an object's `getdoc` to its docstring."""

    def getdoc() -> str:
        from nbddp.kernel import help as texts

        return str(getattr(texts, make)())

    def decorate(function: Any) -> Any:
        function.getdoc = getdoc
        return function

    return decorate


@magics_class
class TrainMagics(Magics):
    """%%ddp_train and %ddp_plan.

    Args:
        shell: the IPython shell.
        cells: what is known of the running cell.
        train, dry_run: what a `Request` is handed to.
    """

    def __init__(
        self,
        shell: InteractiveShell,
        cells: RunningCells,
        train: Callable[[Request, Bind], object] = _train,
        dry_run: Callable[[Request], None] = _dry_run,
    ) -> None:
        super().__init__(shell)
        self._shell = shell
        self._cells = cells
        self._train = train
        self._dry_run = dry_run
        self._told: set[str] = set()

    @line_cell_magic
    @no_var_expand
    @needs_local_scope
    @_documented("help_text")
    def ddp_train(self, line: str, cell: str | None = None, local_ns: Mapping[str, Any] | None = None) -> None:
        """%%ddp_train MODEL DATA [options], or %ddp_train MODEL DATA [options] without a body: train with DDP; -h lists the options."""
        __tracebackhide__ = True
        self._start("ddp_train", line, cell, local_ns)

    @line_cell_magic
    @no_var_expand
    @needs_local_scope
    @_documented("help_text")
    def ddp_plan(self, line: str, cell: str | None = None, local_ns: Mapping[str, Any] | None = None) -> None:
        """%ddp_plan MODEL DATA [options], or %%ddp_plan as a cell: what %%ddp_train would do with this line; starts nothing."""
        __tracebackhide__ = True
        self._start("ddp_plan", line, cell, local_ns)

    def _start(self, magic: str, line: str, body: str | None, local_ns: Mapping[str, Any] | None) -> None:
        __tracebackhide__ = True
        from nbddp.kernel.line import parse, uncommented
        from nbddp.kernel.names import expand

        names = names_of(self._shell, local_ns)
        invocation = parse(expand(uncommented(line), names), ("%" if body is None else "%%") + magic)
        if invocation is None:
            from nbddp.kernel.help import help_text

            say(help_text())
            return
        self._tell_synonyms(invocation.synonyms)
        origin = self._cells.origin(magic, line, body)
        plan_only = magic == "ddp_plan" or invocation.dry_run
        request = self._request(invocation, origin, body, names, plan_only=plan_only)
        if plan_only:
            self._dry_run(request)
        else:
            self._train(request, binder(self._shell, invocation.bind))

    def _request(self, invocation: Invocation, origin: Origin, body: str | None, names: Mapping[str, Any], *, plan_only: bool) -> Request:
        __tracebackhide__ = True
        from nbddp.kernel.body import hooks_of, near_misses, require_loss, run_body
        from nbddp.kernel.names import evaluate
        from nbddp.kernel.request import Named, Request

        requested = self._cells.requested()
        _checked_options(invocation, names, ("optimizer", "scheduler"))  # before the body runs, which may have these hooks

        def look_up(what: str, text: str) -> Named:
            return evaluate(text, names, what=what, filename=origin.cell.filename or "<magic>", line=max(1, origin.offset))

        model, data = look_up("MODEL", invocation.model), look_up("DATA", invocation.data)
        val = None if invocation.val is None else look_up("--val", invocation.val)
        loss = None if invocation.loss is None else look_up("--loss", invocation.loss)
        bound = {} if body is None else run_body(self._shell, body, origin, names)
        hooks = hooks_of(bound)
        if loss is not None:
            if "loss" in hooks:
                message = "--loss and the cell's loss: keep one of the two"
                raise ConfigError(message)
            hooks["loss"] = loss.value
        val = None if val is None or val.value is None else val
        options, file = _checked_options(invocation, names, hooks, has_val=val is not None)
        if file.stages:
            hooks["stages"] = list(file.stages)
        if not plan_only:
            require_loss(hooks, bound, names, has_body=body is not None)
        for name, hook in near_misses(bound).items():
            say(f"{name} in the cell has no meaning for the run; if the {hook} is meant, call it {hook}")
        return Request(
            model=model,
            data=data,
            val=val,
            options=options,
            hooks=hooks,
            requested=requested,
            note=invocation.note,
            background=invocation.background,
            cell=origin.cell,
            main=self._shell.user_module,
            cells=_cell_sources(self._shell),
            notes=file.notes,
        )

    def _tell_synonyms(self, synonyms: Mapping[str, str]) -> None:
        for given, ours in synonyms.items():
            if given not in self._told:
                self._told.add(given)
                say(f"{given} is {ours} here")


def named_runs(options: Mapping[str, object], names: Mapping[str, Any]) -> dict[str, object]:
    """Those of `--resume` and `--init` that name a variable which holds a run, as its directory."""
    found: dict[str, object] = {}
    for option in ("resume", "init"):
        if (value := names.get(str(options.get(option)))) is not None:
            from nbddp.kernel.run import Run

            if isinstance(value, Run):
                found[option] = str(value.dir)
    return found


def _checked_options(
    invocation: Invocation, names: Mapping[str, Any], hooks: Collection[str] = (), *, has_val: bool = False
) -> tuple[dict[str, object], Settings]:
    """Options of the settings file and of the line, which wins, as TrainConfig understands them; and what the file says besides.

    Raises:
        ConfigError: what TrainConfig says, with a hint where a name stands for a value.
    """
    from nbddp.config import TrainConfig
    from nbddp.kernel.settings import Settings, read

    file = Settings()
    written = {**invocation.options, **named_runs(invocation.options, names)}
    try:
        if invocation.config is not None:
            file = read(invocation.config, over=written, hooks=hooks, has_val=has_val, freeze_rb_layer=invocation.freeze_rb_layer)
        config = TrainConfig(**{**{name: getattr(file.config, name) for name in file.config.given}, **written})
    except ConfigError as error:
        hints = [
            f"{value} is a variable of the notebook: write {{{value}}} for its value"
            for name, value in written.items()
            if isinstance(value, str) and value.isidentifier() and value in names and f"{name}={value!r}" in str(error)
        ]
        message = "; ".join([str(error), *hints])
        raise ConfigError(message) from None
    return {name: getattr(config, name) for name in TrainConfig.model_fields if name in config.given}, file
