"""What there is to say about a plan that is valid: what is slow, what comes to nothing, what is never reached; and its parts in words.

Used in the kernel by `nbddp.planning`. Imports neither torch nor Jupyter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbddp.stage import STAGE_FIELDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbddp.config import TrainConfig
    from nbddp.planning import Machine
    from nbddp.plans import StagePlan
    from nbddp.stage import Stage

ENOUGH_PER_RANK = 32
"""Samples per rank below which a step is mostly its fixed cost."""
SMALL_NORM_BATCH = 16
"""Samples below which the statistics that a BatchNorm takes of a batch are noise."""


def advice(config: TrainConfig, nproc: int, device: str, batches: Sequence[int], machine: Machine) -> list[str]:
    """What makes a run slower than it needs to be."""
    warnings = []
    per_rank = min(batches) // nproc
    if nproc > 1 and per_rank < ENOUGH_PER_RANK:
        warnings.append(f"{per_rank} samples per rank: same steps as on one {'GPU' if device == 'cuda' else 'rank'} plus all-reduce; raise --batch-size")
    if device == "cpu" and nproc > machine.cores:
        warnings.append(f"{nproc} ranks on {machine.cores} cores: they take turns; -n {machine.cores} is as fast")
    if config.num_workers > machine.cores:
        warnings.append(f"{config.num_workers} loader workers on {machine.cores} cores: more than the cores can serve")
    return warnings


def without_effect(configs: Sequence[TrainConfig], stages: Sequence[StagePlan], n_val: int, device: str, nproc: int) -> list[str]:
    """Options that were given and that nothing will come of."""
    config = configs[0]
    idle = [(name, "without loader workers: --num-workers") for name in ("prefetch_factor", "persistent_workers") if config.num_workers == 0]
    idle += [(name, "without validation data: --val or --val-split") for name in ("val_every", "val_batch_size") if n_val == 0]
    if device == "cpu":
        idle += [("cudnn_benchmark", "for ranks on the CPU")] + ([("pin_memory", "for ranks on the CPU")] if config.pin_memory else [])
    if not any(stage.compile for stage in stages):
        idle += [(name, "without --compile") for name in ("compile_mode", "compile_cache_dir", "compile_timeout_s")]
    if nproc == 1:
        idle += [(name, "on one rank") for name in ("grad_compression", "find_unused_parameters", "static_graph", "bucket_cap_mb", "gradient_as_bucket_view")]
    given = frozenset().union(*(each.given for each in configs))
    without = [f"{name} has no effect {why}" for name, why in idle if name in given]
    if any("matmul_precision" in each.given and each.matmul_precision != "highest" for each in configs) and all(s.precision != "fp32" for s in stages):
        without.append(f"matmul_precision changes little under {stages[0].precision}, whose matrix products are not in float32")
    return without


def overridden(config: TrainConfig, stages: Sequence[Stage]) -> list[str]:
    """Options of the run that no stage takes over."""
    if not stages:
        return []
    taken = frozenset().union(*(stage.config(config).given - set(stage.options) for stage in stages))
    idle = [name for name in type(config).model_fields if name in config.given and name in STAGE_FIELDS and name not in taken and name != "max_steps"]
    return [f"{', '.join(idle)} of the run {'has' if len(idle) == 1 else 'have'} no effect: every stage has its own"] if idle else []


def not_reached(config: TrainConfig, plans: Sequence[StagePlan]) -> list[str]:
    """Stages that come after the end of the run."""
    before = 0
    for plan in plans[:-1]:
        if plan.total_steps is None or config.max_steps is None:
            return []
        before += plan.total_steps
        if before >= config.max_steps:
            return [f"max_steps={config.max_steps} ends the run in stage {plan.name}: stage {plans[plan.index + 1].name} is not reached"]
    return []


def besides(config: TrainConfig, *, hooked: bool) -> str:
    """What of the optimisation is not the default, beside the learning rate; `hooked` says that a hook makes the optimizer."""
    parts: list[str] = [] if hooked or config.optimizer == "adamw" else [config.optimizer]
    if config.fused and not hooked:
        parts.append("fused")
    if config.schedule != "constant":
        parts.append(config.schedule)
    if config.warmup_steps:
        parts.append(f"warm-up {config.warmup_steps} step{'s' if config.warmup_steps > 1 else ''}")
    if config.clip_norm is not None:
        parts.append(f"clip {config.clip_norm:g}")
    if config.grad_compression is not None:
        parts.append(f"gradients {config.grad_compression}")
    if config.matmul_precision != "highest":
        parts.append(f"matmul {config.matmul_precision}")
    return ", ".join(parts)


def trains(stage: Stage | None) -> str:
    """What of the model a stage leaves out, in words; empty where all of it trains."""
    if stage is None:
        return ""
    parts = [f"trains {', '.join(stage.train_only)} only"] if stage.train_only else [f"freezes {', '.join(stage.freeze)}"] if stage.freeze else []
    return " and ".join([*parts, *(["holds BatchNorm"] if stage.freeze_batch_norm else [])])
