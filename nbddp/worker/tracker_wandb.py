"""Values to Weights & Biases. Runs in the process of the tracker, see `nbddp.worker.tracker`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from nbddp.worker.tracker import End, Start


class Wandb:
    """One wandb run, under the id of ours; its files are kept in the run directory unless ``WANDB_DIR`` says otherwise."""

    def __init__(self, start: Start) -> None:
        import wandb

        self._wandb = wandb
        options = start.config.wandb
        assert options is not None, "started for a run with the option"
        tags, mode = options.get("tags"), options.get("mode")
        self._run = wandb.init(
            project=options["project"],
            entity=options.get("entity"),
            group=options.get("group"),
            job_type=options.get("job_type"),
            name=options.get("name", start.run.id),
            notes=start.spec.get("note"),
            tags=tags.split("+") if tags else None,
            mode=cast("Any", mode),
            id=start.run.id,
            resume="allow" if start.attempt else None,
            config=start.facts(),
            dir=os.environ.get("WANDB_DIR") or start.run.path,
            settings=wandb.Settings(console="off", silent=True),
        )
        if self._run.url:
            start.say(f"wandb: {self._run.url}")
        elif self._run.offline:
            start.say(f"wandb: offline; `wandb sync {os.path.dirname(self._run.dir)}` sends the run")  # noqa: PTH120 - wandb's own path, as a text

    def log(self, step: int, time_s: float, values: dict[str, float]) -> None:
        self._run.log({**values, "_timestamp": time_s}, step=step)

    def flush(self) -> None:
        """Nothing to do: what is logged goes to a process of wandb's at once."""

    def finish(self, end: End) -> None:
        self._run.summary["state"] = end.state
        if end.reason:
            self._run.summary["reason"] = end.reason
        self._run.finish(exit_code=end.exit_code)
        self._wandb.teardown()  # its service process ends before this one does
