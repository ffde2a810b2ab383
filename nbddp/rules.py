"""What options of a run exclude, and need, each other, and what a later version brings.

Each rule takes a whole configuration and returns what is wrong with it, or None. Used by `nbddp.config`; imports neither torch nor Jupyter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbddp.errors import suggest
from nbddp.values import NORMS

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbddp.config import TrainConfig


def _later(name: str, value: object) -> str:
    return f"{name}={value} is not available yet: leave {name} out"


# What a later version brings; refused rather than ignored.
_LATER: dict[str, Callable[[Any], bool]] = {
    "launcher": lambda v: v != "local",
    "nnodes": lambda v: v != 1,
    "max_restarts": lambda v: v != 0,
    "slurm": lambda v: v is not None,
    "requeue": bool,
    "extra_submit_lines": lambda v: v is not None,
    "prologue": lambda v: v is not None,
    "pass_env": lambda v: v is not None,
}


def not_yet(name: str) -> str:
    """What of an option is not available yet, in words for its help; empty where all of it is."""
    return "not available yet" if name in _LATER else ""


FUSED_OPTIMIZERS = ("adam", "adamw", "adagrad", "sgd")


def _one_batch_size(config: TrainConfig) -> str | None:
    if config.batch_size is not None and config.per_rank_batch_size is not None:
        return "batch_size is the global batch and per_rank_batch_size a rank's share of it: give one of the two"
    return None


def _fused_exists(config: TrainConfig) -> str | None:
    if config.fused and config.optimizer not in FUSED_OPTIMIZERS:
        return f"fused=True: {config.optimizer} has no fused kernels; {', '.join(FUSED_OPTIMIZERS)} have"
    return None


def _momentum_exists(config: TrainConfig) -> str | None:
    if config.momentum is not None and config.optimizer not in ("sgd", "rmsprop"):
        return f"momentum={config.momentum}: {config.optimizer} has none; sgd and rmsprop have"
    return None


def _weight_decay_exists(config: TrainConfig) -> str | None:
    if config.weight_decay is not None and config.optimizer == "lbfgs":
        return f"weight_decay={config.weight_decay:g}: lbfgs has none; the others have"
    return None


def _lbfgs_steps_back_never(config: TrainConfig) -> str | None:
    if config.optimizer == "lbfgs" and config.on_nan != "warn":
        return f"on_nan={config.on_nan} can't undo a step of lbfgs, which evaluates the model itself: --on-nan warn"
    return None


def _lbfgs_compares_gradients(config: TrainConfig) -> str | None:
    if config.optimizer == "lbfgs" and config.grad_compression == "powersgd":
        return "grad_compression=powersgd gives another gradient at each look at the same weights, and lbfgs compares them: bf16, fp16 or none"
    return None


def _scale_of_lr(config: TrainConfig) -> str | None:
    if config.lr_scale is not None and config.base_batch_size is None:
        return f"lr_scale={config.lr_scale} needs base_batch_size, the batch that lr was tuned for: --base-batch-size 256"
    if config.base_batch_size is not None and config.lr_scale is None:
        return f"base_batch_size={config.base_batch_size} without lr_scale: --lr-scale linear or sqrt says how lr grows with the batch"
    return None


def _compile_options(config: TrainConfig) -> str | None:
    if config.compile and not config.drop_last:
        return "compile=True with drop_last=False: the last batch of an epoch has another shape and would be compiled again: leave one of the two out"
    idle = [name for name in ("compile_mode", "compile_cache_dir", "compile_timeout_s") if name in config.given]
    if idle and "compile" in config.given and not config.compile:
        return f"{idle[0]}={getattr(config, idle[0])} with compile=False: there is nothing to compile"
    return None


def _initial_or_resumed(config: TrainConfig) -> str | None:
    if config.resume is not None and "init" in config.given:
        return f"resume={config.resume} brings the weights itself, and init={config.init} names others: give one of the two"
    return None


def _one_way_of_unused(config: TrainConfig) -> str | None:
    if config.static_graph and config.find_unused_parameters:
        return "static_graph says that every step uses the same parameters, find_unused_parameters searches them in each: give one of the two"
    return None


def _known_norm(config: TrainConfig) -> str | None:
    for value in [config.norm] if isinstance(config.norm, str) else config.norm.values():
        if value not in NORMS:
            return f"norm={value} must be one of {', '.join(NORMS)}, or pattern=value.{suggest(value, NORMS)}"
    return None


def _available(config: TrainConfig) -> str | None:
    for name, later in _LATER.items():
        if later(value := getattr(config, name)):
            return _later(name, value)
    return None


_RULES = (
    _one_batch_size,
    _fused_exists,
    _momentum_exists,
    _weight_decay_exists,
    _lbfgs_steps_back_never,
    _lbfgs_compares_gradients,
    _scale_of_lr,
    _compile_options,
    _initial_or_resumed,
    _one_way_of_unused,
    _known_norm,
    _available,
)


def broken_rule(config: TrainConfig) -> str | None:
    """What is wrong with options that are right each by itself: the first rule that they break."""
    return next((problem for rule in _RULES if (problem := rule(config)) is not None), None)
