"""The training loop on real gloo ranks, without kernel, bundle and supervisor: what the tests of its promises run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbddp.config import TrainConfig
from nbddp.events import EventReader, EventWriter
from nbddp.kernel.history import History
from nbddp.planning import Job, Machine, make_plan
from nbddp.rundir import RunDir

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from nbddp.events import Event


@dataclass(frozen=True)
class Result:
    """A run that ended: per rank the final state dict (numpy arrays), and what was written down."""

    run: RunDir
    weights: list[dict[str, Any]]
    progress: list[Any]
    events: list[Event]
    history: dict[str, Any]
    epochs: dict[str, Any]

    def of_kind(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]


class Training:
    """Calls the loop on N ranks: ``training(3, make, hooks, **options)``; `make` returns (model, train_data, val_data or None) in each rank."""

    def __init__(self, ranks: Callable[..., list[Any]], folder: Path) -> None:
        self._ranks, self._folder = ranks, folder

    def __call__(
        self,
        nproc: int,
        make: Callable[[], tuple[Any, Any, Any]],
        hooks: dict[str, Any],
        *,
        timeout: float = 60,
        ask: str | None = None,
        resume: Path | None = None,
        **options: Any,
    ) -> Result:
        run = RunDir.create(self._folder / "runs", "test")
        if ask is not None:
            run.ask(ask)
        spec = {} if resume is None else {"resume": str(resume)}
        returned = self._ranks(nproc, train_rank, str(run.path), make, hooks, options, spec, timeout=timeout)
        reader, events = EventReader(run.events), []
        while new := reader.poll():
            events += new
        history = History(run.events)
        return Result(run, [weights for weights, _ in returned], [progress for _, progress in returned], events, history.steps, history.epochs)


def train_rank(
    rank: int, path: str, make: Callable[[], tuple[Any, Any, Any]], hooks: dict[str, Any], options: dict[str, Any], spec: dict[str, Any]
) -> tuple[Any, Any]:
    """What `nbddp.worker.main` does after the bundle is open and the group has formed."""
    import multiprocessing
    from pathlib import Path

    import torch
    import torch.distributed as dist

    from nbddp.data import split_size
    from nbddp.evaluation.hooks import Hooks
    from nbddp.evaluation.ranks import Ranks
    from nbddp.sampler import GlobalSampler
    from nbddp.worker.context import Context
    from nbddp.worker.loop import train
    from nbddp.worker.position import Position

    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined] # else loader workers are refused
    run, config = RunDir(Path(path)), TrainConfig(**options)
    world_size = dist.get_world_size()
    model, train_data, val_data = make()
    n_train, n_val = len(train_data), 0 if val_data is None else len(val_data)
    if config.val_split is not None:
        n_val = split_size(n_train, config.val_split)
        n_train -= n_val
    if hooks.get("sampler") is not None:
        n_train = len(GlobalSampler(hooks["sampler"], train_data, seed=config.seed))
    job = Job(has_optimizer="optimizer" in hooks, float64=all(parameter.dtype is torch.float64 for parameter in model.parameters()))
    planned = config.replace(nproc=world_size, devices="cpu")
    plan = make_plan(planned, n_train=n_train, n_val=n_val, machine=Machine((), 2), job=job, stages=hooks.get("stages", ()))
    telemetry = dist.new_group(backend="gloo") if world_size > 1 else None
    context = Context(
        run_dir=run,
        spec=spec,
        config=config,
        plan=plan,
        ranks=Ranks(rank, world_size, rank, torch.device("cpu"), "gloo", telemetry),
        events=EventWriter(run.rank_events(rank, 0), run=run.id, rank=rank),
        position=Position(),
        hooks=Hooks.of(hooks),
        model=model,
        train_data=train_data,
        val_data=val_data,
    )
    progress = train(context)
    weights = {name: value.detach().numpy().copy() for name, value in model.state_dict().items()}
    return weights, (progress.step, progress.epoch, progress.stopped, progress.reason)
