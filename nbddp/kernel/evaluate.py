"""Evaluating a run in the kernel: the steps, metrics and precision of its validation, in this process, on any data.

Runs in the kernel's main thread. What it computes with comes from the run's own bundle, so that it works in a kernel that never saw the notebook.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import TensorDataset

from nbddp import rng
from nbddp.data import ValShares, make_fetch, to_device
from nbddp.errors import ConfigError
from nbddp.evaluation.errors import StepError
from nbddp.evaluation.evaluator import Evaluator
from nbddp.evaluation.hooks import Hooks
from nbddp.evaluation.predictor import predict as predict_outputs
from nbddp.evaluation.ranks import Ranks
from nbddp.kernel import weights
from nbddp.kernel.inputs import take_data
from nbddp.kernel.rebuild import importable, rebuilt
from nbddp.kernel.request import Named
from nbddp.kernel.torch_defaults import torch_defaults
from nbddp.plans import Plan
from nbddp.precision import read_device
from nbddp.wrappers import unwrapped

if TYPE_CHECKING:
    from nbddp.bundle import CellSource
    from nbddp.data import Fetch, Micro
    from nbddp.kernel.trained import Trained


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be evaluated and how, as the user gave it; `name` is the method's."""

    name: str
    data: object
    which: object = None
    model: object = None
    batch_size: Any = None
    device: object = None


def evaluate(run: Trained, asked: Asked) -> dict[str, float]:
    """The values that the run's validation records, for other data; see `Run.evaluate`."""
    __tracebackhide__ = True
    with _opened(run, asked) as work:
        evaluator = Evaluator(work.model, work.hooks, Ranks.single(work.device), lambda text: warnings.warn(text, stacklevel=2))
        # As many shares per batch as the run had ranks: steps meet the samples that they met there, and no more of them at a time.
        values = evaluator.run(work.batches(shares=1 if asked.batch_size else work.nproc), work.precision)
    assert values is not None, "it was not left early"
    return values


def predict(run: Trained, asked: Asked) -> Any:
    """The outputs of all samples, on the CPU; see `Run.predict`."""
    __tracebackhide__ = True
    with _opened(run, asked) as work:
        size = work.batch_size if asked.batch_size else -(-work.batch_size // work.nproc)
        return predict_outputs(work.model, work.hooks, work.batches(size), work.n, precision=work.precision, device=work.device)


@dataclass(frozen=True, slots=True)
class _Work:
    """Everything that an evaluation needs. `batch_size` is the global one of a validation by `nproc` ranks."""

    model: nn.Module
    hooks: Hooks
    device: torch.device
    precision: str
    fetch: Fetch
    n: int
    batch_size: int
    nproc: int
    seed: int

    def batches(self, size: int | None = None, *, shares: int = 1) -> Iterator[tuple[Any, Micro]]:
        """The batches in order, each dealt into shares as it is to ranks."""
        deals = [ValShares(self.n, size or self.batch_size, shares, share, self.seed).epoch(0) for share in range(shares)]
        for step in zip(*deals, strict=True):
            for micro in step:
                if micro.weight:
                    yield self._placed(self.fetch(micro.indices)), micro

    def _placed(self, batch: Any) -> Any:
        """The batch where the model is; as the ranks do it, but that in this process data may be on a GPU already."""
        return to_device(batch, self.device) if self.device.type != "cpu" or torch.cuda.is_initialized() else batch


@contextlib.contextmanager
def _opened(run: Trained, asked: Asked) -> Iterator[_Work]:
    """What is asked for, checked and rebuilt. Whatever this process shares with it is as it was afterwards: random streams, torch's defaults, modes.

    Raises:
        ConfigError: for arguments that break a rule, and for hooks that do.
        CheckpointError, BundleError: where a file is gone.
    """
    own = _own_model(asked)
    dataset, options, collate_fn = _data(asked)
    spec = run.spec
    plan = Plan.from_json(spec["plan"])
    device = _device(asked, own, plan)
    batch_size = asked.batch_size or int(str(options.get("val_batch_size", plan.val_batch_size)))
    dtype, matmul = spec["interpreter"]["default_dtype"], str(spec["matmul_precision"])
    with (
        torch_defaults(device, dtype=dtype, matmul_precision=matmul),  # hooks and model are rebuilt under them too
        rng.seeded(device, "evaluation", run.config.seed),
        importable(run.files),  # a step may import what it needs when it is called
    ):
        loaded = rebuilt(run.files)
        model, facts = (loaded.model, _load(loaded.model, run, asked.which)) if own is None else (own, {})
        stage = plan.stages[min(int(facts.get("stage", -1)), len(plan.stages) - 1)]
        hooks = Hooks.of(loaded.hooks)
        matmul = str(facts.get("matmul_precision", matmul))
        with torch_defaults(device, dtype=dtype, matmul_precision=matmul), _told(run, asked, loaded.cells):
            if own is None:
                model.to(device)
            if isinstance(hooks.loss, nn.Module):
                hooks.loss.to(device)
            fetch = make_fetch(dataset, collate_fn or hooks.val_collate_fn)
            precision = str(facts.get("precision", stage.precision))
            yield _Work(model, hooks, device, precision, fetch, len(dataset), batch_size, plan.nproc, run.config.seed)


def _own_model(asked: Asked) -> nn.Module | None:
    if isinstance(asked.which, nn.Module):
        message = f"{asked.name}: which names a checkpoint, and is a {type(asked.which).__name__}: {asked.name}(data, model=net) takes a module"
        raise ConfigError(message)
    if asked.model is None:
        return None
    if not isinstance(asked.model, nn.Module):
        message = f"{asked.name}: model is a {type(asked.model).__name__}, and must be a torch.nn.Module"
        raise ConfigError(message)
    if asked.which is not None:
        message = f"{asked.name}: which={asked.which!r} beside model=, which is evaluated with the weights that it has: leave one of them out"
        raise ConfigError(message)
    model = unwrapped(asked.model)
    if (name := next((name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if is_lazy(tensor)), None)) is not None:
        message = f"{asked.name}: {name} of the model is uninitialised: let the model see one batch first"
        raise ConfigError(message)
    return model


def _data(asked: Asked) -> tuple[Any, dict[str, object], Any]:
    """The dataset, and the options and the collate_fn that a DataLoader brought."""
    data = asked.data
    if isinstance(data, nn.Module):
        message = f"{asked.name} takes data, and was given a {type(data).__name__}: {asked.name}(data, model=net) evaluates a module of this kernel"
        raise ConfigError(message)
    tensors = data if isinstance(data, tuple) else (data,)
    if len(tensors) == 1 and isinstance(tensors[0], torch.Tensor) and tensors[0].ndim:
        data = TensorDataset(tensors[0])
    taken = take_data(Named("data", data), training=False)
    if len(taken.dataset) == 0:
        message = f"{asked.name}: data has no samples"
        raise ConfigError(message)
    size = asked.batch_size
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
        message = f"{asked.name}: batch_size={size!r} must be a number of samples, at least 1"
        raise ConfigError(message)
    return taken.dataset, taken.options, taken.hooks.get("val_collate_fn")


def _device(asked: Asked, own: nn.Module | None, plan: Plan) -> torch.device:
    """As asked for; else where the model of the user is, and for one of the run the kind of device that it trained on."""
    given = None if asked.device is None else read_device(asked.device)
    if own is None:
        return given or read_device("cuda" if plan.device == "cuda" and torch.cuda.is_available() else "cpu")
    places = {tensor.device for tensor in (*own.parameters(), *own.buffers())}
    if given is not None and places - {given}:
        message = f"{asked.name}: device={asked.device}, and the model is on {min(map(str, places - {given}))}: move it there, model.to({str(given)!r})"
        raise ConfigError(message)
    if any(place.type == "meta" for place in places):
        message = f"{asked.name}: the model is on the meta device, without values: give one that has been loaded, such as run.model()"
        raise ConfigError(message)
    first = next(iter(own.parameters()), None)
    return given or (read_device("cpu") if first is None else first.device)


def _load(model: nn.Module, run: Trained, which: object) -> Mapping[str, Any]:
    """Write the weights of a checkpoint into the rebuilt model; return what else the checkpoint says."""
    if which is None:
        chosen = weights.chosen(run.config, patient=run.spec["plan"]["stages"][-1].get("patience") is not None)
        which = "best" if chosen == "best" and (run.files.checkpoints / "best.pt").is_file() else "last"
    if not isinstance(which, str | int) or isinstance(which, bool):
        message = f"which is a {type(which).__name__}: it must be last, best, initial or the number of an epoch"
        raise ConfigError(message)
    return weights.load_into(model, run.files, which).facts


@contextlib.contextmanager
def _told(run: Trained, asked: Asked, cells: Mapping[str, CellSource]) -> Iterator[None]:
    """Rules that a hook breaks are a public error; what the user's own code raises stays as it is, with a note on where that stands."""
    try:
        yield
    except StepError as error:
        raise ConfigError(str(error)) from None
    except Exception as error:
        error.add_note(f"in {asked.name} with the hooks of run {run.id}{_place(error, cells)}")
        raise


def _place(error: BaseException, cells: Mapping[str, CellSource]) -> str:
    """The innermost line of a cell that an exception passed."""
    found, traceback = "", error.__traceback__
    while traceback is not None:
        name = traceback.tb_frame.f_code.co_filename
        if name in cells:
            number = cells[name].cell
            found = f": {'cell' if number is None else f'Cell In[{number}]'}, line {traceback.tb_lineno}"
        traceback = traceback.tb_next
    return found
