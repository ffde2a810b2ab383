"""What a run has trained: its checkpoints, and what can be done with their weights.

The part of a `Run` that is about weights; torch is imported where it is needed. Runs in the kernel.
"""

from __future__ import annotations

import numbers
import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from nbddp.config import TrainConfig
from nbddp.errors import CheckpointError, ConfigError
from nbddp.kernel.table import CheckpointTable

if TYPE_CHECKING:
    import torch
    from torch import nn

    from nbddp.kernel.diff import StateDiff
    from nbddp.kernel.follow import Follower
    from nbddp.rundir import RunDir


def _plain(value: Any) -> Any:
    """A number of an epoch as numpy's argmin gives it, as one of Python."""
    return value if isinstance(value, bool) or not isinstance(value, numbers.Integral) else int(value)


class Trained(ABC):
    """The weights of a run; `Run` adds all else."""

    id: str
    config: TrainConfig
    _follower: Follower

    def __init__(self, run_dir: RunDir, spec: dict[str, Any], model: nn.Module | None) -> None:
        self._files, self._spec, self._model = run_dir, spec, model
        self._load_pending = model is not None
        self._lock = threading.Lock()
        self._holds: str | None = None
        self.called = "run"
        """The variable of the notebook that holds this, for messages."""

    @property
    @abstractmethod
    def state(self) -> str:
        """starting, running, finished, stopped or failed."""

    @property
    def files(self) -> RunDir:
        return self._files

    @property
    def spec(self) -> dict[str, Any]:
        """What the run was asked for, with all that its weights are used by.

        Raises:
            UnreadableRun: where some of that is missing.
        """
        return self._files.used_spec(self._spec)

    @property
    def _stages(self) -> list[dict[str, Any]]:
        """The plans of the stages; an empty one where nothing is known of them."""
        return self._spec.get("plan", {}).get("stages") or [{}]

    @property
    def checkpoints(self) -> CheckpointTable:
        """The checkpoint files: name, path, epoch, step, value, bytes."""
        return CheckpointTable.of(self._files, self._follower.state.checkpoints)

    def load(self, model: nn.Module | str | int | None = None, which: nn.Module | str | int = "last") -> nn.Module:
        """Write the weights of a checkpoint into a model in place: `last`, `best`, `initial` or the number of an epoch.

        Args:
            model: default: the object that was bundled, whatever its name is bound to by now.
            which: the checkpoint; it may stand first: ``run.load("best")``, ``run.load("best", net)``.

        Returns:
            the model; its mode, device and tied weights stay.

        Raises:
            ConfigError: where there is no model to write to.
            CheckpointError: for a checkpoint that is missing, not finite, or does not fit; the model is unchanged then.
        """
        return self.load_named(model, which)

    def load_named(self, model: object, which: object, name: str | None = None) -> nn.Module:
        """The same for a model that the notebook calls `name`."""
        from torch import nn

        from nbddp.kernel import weights

        given: object = model
        if isinstance(model, str | numbers.Integral):
            given, which = which if isinstance(which, nn.Module) else None, model
        target = self._model if given is None else given
        if target is None:
            message = f"run {self.id} was started by another kernel: name the model, run.load(net), or rebuild it with run.model()"
            raise ConfigError(message)
        if not isinstance(target, nn.Module):
            message = f"run.load takes a torch.nn.Module, not a {type(target).__name__}"
            raise ConfigError(message)
        if isinstance(which, nn.Module):
            message = "run.load takes one module and one checkpoint, and was given two modules"
            raise ConfigError(message)
        ended = self._files.ended
        try:
            landed = weights.load_into(target, self._files, _plain(which))
        except CheckpointError as error:
            if given is None and (known := self._name_of(target)) != self._model_name:
                error.add_note(known)
            raise
        if target is self._model and ended:  # a look at weights in the making does not replace those of the end
            self._load_pending = False
        swapped = f"; {landed.swapped}" if landed.swapped else ""
        print(f"{name or self._name_of(target)}: {landed.at} of run {self.id}{swapped}")  # noqa: T201 - says what was written into the user's model
        return target

    @property
    def _model_name(self) -> str:
        """How the notebook called the model."""
        return str(self._spec.get("model_name") or "the model")

    def _name_of(self, target: nn.Module) -> str:
        """What a model is called in words; one that was bundled may have lost its name to another object since."""
        from nbddp.kernel.binding import is_bound

        if target is not self._model:
            return type(target).__name__
        name = self._model_name
        if is_bound(name, target):
            return name
        return f'{name} (the object that was bundled; {self.called}.load("last", {name}) loads into the one of that name now)'

    def model(self, which: str | int = "last") -> nn.Module:
        """Rebuild the module from the run's own bundle, with the weights of a checkpoint, in any kernel.

        Raises:
            CheckpointError: where the bundle or the checkpoint is gone.
        """
        import torch

        from nbddp.kernel import weights
        from nbddp.kernel.rebuild import rebuilt_model

        with torch.inference_mode(False):  # what is made within it can't be trained
            module = rebuilt_model(self._files)
            weights.load_into(module, self._files, _plain(which))
        return module

    def evaluate(
        self,
        data: object,
        which: str | int | None = None,
        *,
        model: nn.Module | None = None,
        batch_size: int | None = None,
        device: torch.device | str | int | None = None,
    ) -> dict[str, float]:
        """What the run's validation records, for any data: its steps, metrics and precision, in this process, from the run's own bundle.

        For the data that the run validated on, the numbers are those in `run.epochs`, up to the order of summation. The metric of a class that can't bring
        the states of ranks together is computed over all samples here. The model of the notebook, random streams and torch's settings stay as they are;
        steps that draw random numbers draw the same in each call.

        Args:
            data: a map-style dataset, a tuple of tensors of shape (n, ...), or a plain DataLoader, whose batch size and collate_fn hold; samples are taken in
                order, and fetched in this process.
            which: the checkpoint: last, best, initial or the number of an epoch; by default what the run loads, best if `patience` was set, else last.
            model: a module to evaluate as it is, in place of a checkpoint's.
            batch_size: samples per step; by default the batches are those that the run's ranks validated on.
            device: a torch.device, its name, or the index of a GPU; by default where `model` is, or the kind of device that the run trained on.

        Returns:
            `val_loss`, the scalars of the step and the metrics as `val_<name>`, in the order in which they are recorded.

        Raises:
            ConfigError: for data, a device or hooks that break a rule.
            CheckpointError: where the checkpoint or the bundle is gone, or the weights are not finite.
            BundleError: where hooks refer to staged data that are gone.
        """
        __tracebackhide__ = True
        from nbddp.kernel.evaluate import Asked, evaluate

        return evaluate(self, Asked("run.evaluate", data, _plain(which), model, _plain(batch_size), device))

    def predict(
        self,
        data: object,
        which: str | int | None = None,
        *,
        model: nn.Module | None = None,
        batch_size: int | None = None,
        device: torch.device | str | int | None = None,
    ) -> Any:
        """The outputs of all samples, in the order of the data, in the run's precision; arguments and what stays as it is are as in `evaluate`.

        With the hook `loss` the output is that of the model, no loss is computed, and data may be without targets: of a batch with several parts the last is
        the target, as in training, unless the model's `forward` needs all of them. With a step it is what that returns as `output`, for batches as in training.

        Returns:
            a tensor of shape (n, ...) on the CPU, or the dict, sequence, namedtuple or dataclass of tensors that the output is; half precision as float32.

        Raises:
            ConfigError: also where a step returns no output, or outputs are not one per sample.
            CheckpointError, BundleError: as `evaluate`.
        """
        __tracebackhide__ = True
        from nbddp.kernel.evaluate import Asked, predict

        return predict(self, Asked("run.predict", data, _plain(which), model, _plain(batch_size), device))

    def diff(self, other: object, which: str | int = "last") -> StateDiff:
        """Compare the weights of a checkpoint with others, entry by entry.

        Args:
            other: a run, its id or directory, a checkpoint file, a state dict or a module.
            which: `last`, `best`, `initial` or the number of an epoch, of this run, and of the other where it is one.

        Returns:
            a sequence of rows (name, kind, max_abs, relative, detail), those that differ most first, that displays as a table; with `equal`, `max_abs`, and
            `config`, the options that differ between two runs.

        Raises:
            CheckpointError: for checkpoints that are missing or can't be read.
            ConfigError: for a run that is not there, and for what has no weights.
        """
        from nbddp.kernel.diff import diff

        return diff(self, other, _plain(which))

    def take_weights(self) -> str | None:
        """Load the run's weights into the bundled model by the rules of `load`; return the line that says what it holds, None where nothing is to do."""
        from nbddp.kernel import weights

        with self._lock:
            pending, self._load_pending = self._load_pending, False
        which = weights.chosen(self.config, patient=self._stages[-1].get("patience") is not None)
        if not pending or self._model is None:
            return None
        weights.remember_initial(self._model, self._files)
        name = self._name_of(self._model)
        if self.state == "failed":
            have = [which for which in ("last", "best") if (self._files.checkpoints / f"{which}.pt").is_file()]
            self._holds = f"{name} is unchanged" + (f'; the {have[0]} checkpoint: {self.called}.load("{have[0]}")' if have else "")
            return self._holds
        if which is None:
            self._holds = f"{name} is unchanged, as asked; {self.called}.load() loads the last checkpoint"
            return self._holds
        state = self._follower.state
        try:
            landed = weights.load_into(self._model, self._files, which)
        except CheckpointError as error:
            self._holds = f"{name} is unchanged: {weights.nothing_of(self._files, state) or error}"
            return self._holds
        monitor = str(self._stages[min(state.stage, len(self._stages) - 1)].get("monitor", "value"))
        self._holds = weights.holds_line(name, landed, state, monitor, self.called)
        return self._holds

    def say_weights_wait(self) -> None:
        """For a run in the background that has ended: its card says that the model is as it was."""
        from nbddp.kernel import weights

        if self._load_pending and self.state != "failed":
            nothing = weights.nothing_of(self._files, self._follower.state)
            waits = f"is as it was: {self.called}.wait() or {self.called}.load() loads the weights"
            self._holds = f"{self._model_name} {f'is unchanged: {nothing}' if nothing else waits}"

    def trains(self, model: nn.Module) -> bool:
        """Whether this run goes on and was started with this very object."""
        return self._model is model and not self._follower.done.is_set()
