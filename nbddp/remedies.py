"""Remedies: what the rules of `nbddp.advice` say where they hold, in words with figures, and the option that helps.

Pure functions of the evidence. Used in the kernel; imports neither torch nor Jupyter.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from nbddp.remarks import ENOUGH_PER_RANK

if TYPE_CHECKING:
    from nbddp.evidence import Evidence

Told = tuple[str, str | None]

FEW_STEPS = 10
"""A batch that leaves an epoch fewer steps than this is not advised."""
SHORT_EPOCH_S = 60.0
"""Where epochs are shorter, starting the loader workers anew in each of them shows."""
PLENTY_PER_RANK = 4 * ENOUGH_PER_RANK
"""The batch grows with the ranks as far as this: of many ranks the samples of each are enough before."""
MANY_BATCHES_AHEAD = 4
SLACK = 0.05
"""Of a loader worker: as much less than a whole one is not worth another."""
COMPILE_PAYS_S = 300.0
"""Compiling takes about a minute: steps that take less than this altogether do not bring it back."""
MUCH_GRADIENT = 1 << 20
"""Bytes of gradients from which on it is their size, and not the number of exchanges, that takes the time."""
TENSOR_CORES, NATIVE_BF16 = 7.0, 8.0
"""Compute capability from which on a GPU has tensor cores, for fp16, and then for bf16 and TF32."""
DEFAULT_BUCKET_MB = 25.0
_OF = {"data": "its data", "forward": "its forward pass", "backward": "its backward pass"}


def _percent(share: float) -> str:
    return "<1 %" if 0 < share < 0.005 else f"{100 * share:.0f} %"


def _seconds(seconds: float) -> str:
    """In the unit in which it has three digits."""
    limits = ((0.9995e-3, 1e-6, "µs"), (0.9995, 1e-3, "ms"), (120, 1, "s"), (7200, 60, "min"), (math.inf, 3600, "h"))
    return next(f"{seconds / scale:.3g} {unit}" for limit, scale, unit in limits if seconds < limit)


def _of_step(evidence: Evidence, *phases: str) -> str:
    """`41 % of a step (0.2 of 0.5 s)`."""
    recent = evidence.recent
    return f"{_percent(recent.share(*phases))} of a step ({_seconds(recent.share(*phases) * recent.step_s)} of {_seconds(recent.step_s)})"


def _number_of(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


# -- data


def _workers_needed(evidence: Evidence) -> int:
    """Workers per rank that make batches as quickly as steps use them up: those there are work all the time, where steps wait for them."""
    recent = evidence.recent
    rest_s = max(recent.step_s - recent.phase_s("data"), 1e-9)
    busy_s = evidence.workers * recent.step_s if evidence.workers else recent.phase_s("data")
    return max(evidence.workers + 1, min(math.ceil(busy_s / rest_s - SLACK), 1000))


def _more_workers(evidence: Evidence) -> str | None:
    """The option that adds as many loader workers as are needed and as the cores can serve."""
    per_rank = min(_workers_needed(evidence), evidence.most_workers())
    return evidence.written(num_workers=per_rank * evidence.nproc) if per_rank > evidence.workers else None


def loader_bound(evidence: Evidence) -> Told:
    """Loader workers, or more of them, where there are cores for them."""
    seen = f"{_of_step(evidence, 'data')} is waiting for data"
    more, cores = _more_workers(evidence), "" if evidence.cores is None else f" ({_number_of(evidence.cores, 'core')})"
    cheaper = "make a sample cheaper: decode it beforehand, or fetch whole batches by __getitems__"
    if not evidence.workers:
        if more is None:
            return f"{seen}, which the ranks make themselves, and no core is left for loader workers{cores}: {cheaper}", None
        return f"{seen}, which the ranks make themselves between their steps: loader workers make it meanwhile", more
    epoch_s = evidence.stage.get("steps_per_epoch", math.inf) * evidence.recent.step_s
    if not evidence.config.persistent_workers and epoch_s < SHORT_EPOCH_S:
        return f"{seen}, and the loader workers start anew in every epoch of {_seconds(epoch_s)}: let them stay", evidence.written(persistent_workers=True)
    has = f"{_number_of(evidence.workers, 'loader worker')} per rank"
    if more is not None:
        return f"{seen}: {has} can't keep up, and there are cores for more{cores}", more
    if evidence.config.prefetch_factor < MANY_BATCHES_AHEAD:
        ahead = evidence.written(prefetch_factor=MANY_BATCHES_AHEAD)
        return f"{seen}: {has} can't keep up, and no core is left{cores}: more batches ahead even out those that take long; else {cheaper}", ahead
    return f"{seen}: {has} can't keep up, and no core is left{cores}: {cheaper}", None


def too_many_workers(evidence: Evidence) -> Told:
    """As many as the cores can serve."""
    total, fit = evidence.config.num_workers, evidence.most_workers() * evidence.nproc
    seen = f"{total} loader workers share {_number_of(evidence.cores or 0, 'core')} with {_number_of(evidence.nproc, 'rank')}"
    share = _percent(evidence.recent.share("data"))
    keep_up = "fewer leave the cores to the ranks, and keep up unless they mostly wait for a disk or a network"
    return f"{seen}, and data takes {share} of a step: {keep_up}", evidence.written(num_workers=fit)


# -- ranks


def straggler(evidence: Evidence) -> Told:
    """Which rank, in which phase, and what that hints at."""
    recent, rank, phase = evidence.recent, evidence.late, evidence.late_in
    assert rank is not None, "the rule applies to several ranks"
    row = evidence.state.ranks.get(rank)
    name = f"rank {rank}" + (f" ({row.device})" if row is not None and row.device else "")
    if evidence.meet_early:
        waited_s = evidence.excess_s(recent, "data")
        seen = f"{name} is late, and the others wait {_seconds(waited_s)} of {_seconds(recent.step_s)} for it in their first synchronised BatchNorm"
    else:
        often, waited_s = _percent(recent.slowest[rank] / recent.steps), recent.wait_s / recent.steps
        seen = f"{name} is the slowest in {often} of the steps, and the others wait {_seconds(waited_s)} of {_seconds(recent.step_s)} for it"
    both = f"{_OF[phase]} takes {_seconds(recent.rank_s(rank, phase))}, that of the others {_seconds(evidence.others_s(recent, phase))}"
    stacks = None if evidence.state.done else "%ddp_stacks"
    if phase == "data":
        more = _more_workers(evidence)
        return f"{seen}: {both}. It reads from a slower place, or its samples take longer" + ("; loader workers hide that" if more else ""), more or stacks
    passes = [evidence.excess_s(recent, part) for part in ("forward", "backward")]
    if min(passes) > 0.25 * sum(passes):
        own, others = _seconds(recent.rank_s(rank, "forward", "backward")), _seconds(evidence.others_s(recent, "forward", "backward"))
        slower = "Its GPU is slower, or shared" if evidence.on_gpu else "Its cores are shared"
        return f"{seen}: its forward and backward passes take {own}, those of the others {others}. {slower} with another process", None
    return f"{seen}: {both}. Its step does what the others' does not, or its samples are larger", stacks


def _bigger_batch(evidence: Evidence, factor: int, **more: object) -> str | None:
    """The option that multiplies the batch; None where the data is too short for that."""
    if factor < 2 or not evidence.batch_size or evidence.stage.get("steps_per_epoch", 0) < factor * FEW_STEPS:
        return None
    if evidence.config.per_rank_batch_size is not None:
        return evidence.written(per_rank_batch_size=factor * evidence.per_rank, **more)
    return evidence.written(batch_size=factor * evidence.batch_size, **more)


def _fixed(evidence: Evidence) -> str:
    """What of a step does not shrink with the batch."""
    starved = evidence.recent.starved / evidence.recent.steps
    if starved > evidence.recent.share("sync", "optimizer"):
        return f"in {_percent(starved)} of them the GPU waits for the host to start its kernels"
    return f"{_of_step(evidence, 'sync', 'optimizer')} is all-reduce and update"


def unscaled_batch(evidence: Evidence) -> Told:
    """A batch that grows with the ranks, and lr with it; one rank, where the data is too short for that."""
    nproc, batch, config = evidence.nproc, evidence.batch_size, evidence.config
    alone = "GPU" if evidence.on_gpu else "rank"
    per_rank = _number_of(evidence.per_rank, "sample")
    shares = f"{per_rank} per rank ({batch} = {nproc} x {evidence.per_rank})"
    seen = f"{shares}: as many steps as on one {alone}, and {_fixed(evidence)}: more ranks do not shorten that"
    factor = max(math.ceil(ENOUGH_PER_RANK / evidence.per_rank), min(nproc, math.ceil(PLENTY_PER_RANK / evidence.per_rank)))
    scaled = config.lr_scale is not None or evidence.stage.get("lr") is None or config.optimizer == "lbfgs"
    # In proportion for SGD; with the root for optimizers that divide by the gradient's size.
    scales = {} if scaled else {"lr_scale": "linear" if config.optimizer == "sgd" else "sqrt", "base_batch_size": batch}
    option = _bigger_batch(evidence, factor, **scales)
    if option is not None:
        return f"{seen}. A batch {factor} times as large takes {factor} times fewer steps" + ("; lr grows with it" if scales else ""), option
    return f"{seen}. The data is too short for a larger batch ({_number_of(evidence.stage.get('steps_per_epoch', 0), 'step')} an epoch)", _one_rank(evidence)


def _one_rank(evidence: Evidence) -> str:
    """The options for one rank with the same batch."""
    config = evidence.config
    by_devices = [f"--devices {config.devices[0]}"] if isinstance(config.devices, tuple) else []
    by_number = ["-n 1"] if "nproc" in config.given or not by_devices else []
    batch = [] if config.per_rank_batch_size is None else [f"--per-rank-batch-size {evidence.batch_size}"]
    return " ".join([*by_number, *by_devices, *batch])


def sync_bound(evidence: Evidence) -> Told:
    """Less to exchange, or less often."""
    config = evidence.config
    seen = f"{_of_step(evidence, 'sync')} is the exchange of gradients, though no rank is late"
    if config.bucket_cap_mb < DEFAULT_BUCKET_MB:
        text = f"{seen}: in buckets of {config.bucket_cap_mb:g} MB each exchange is short, and there are many"
        return text, evidence.written(bucket_cap_mb=DEFAULT_BUCKET_MB)
    size = 4 * evidence.facts.get("trainable", MUCH_GRADIENT)
    halves = config.grad_compression is None and evidence.facts.get("float32", True)  # others are in 16 bits already, or in 64 for a reason
    if halves and size >= MUCH_GRADIENT:
        return f"{seen}: {size / 1e6:.3g} MB of them in every step. In bf16 they are half as large", evidence.written(grad_compression="bf16")
    accumulate = 2 * evidence.accumulate
    return f"{seen}: a larger batch exchanges them less often; in micro-batches it needs no more memory", _bigger_batch(evidence, 2, accumulate=accumulate)


def small_batch_norm(evidence: Evidence) -> Told:
    """Statistics of more samples."""
    layers, samples = _number_of(evidence.facts["batch_norm"], "BatchNorm layer"), _number_of(evidence.stage["micro_batch_size"], "sample")
    seen = f"{layers} take{'s' if evidence.facts['batch_norm'] == 1 else ''} statistics of each rank's {samples} alone, which is mostly noise"
    if evidence.config.norm == "keep":
        return f"{seen}: synchronised, they are those of the global batch", "--norm sync"
    return f"{seen}: a larger batch helps, or a normalization of each sample, such as GroupNorm", None


# -- compiling and precision


def compile_cannot_pay(evidence: Evidence) -> Told:
    """Train without, where the run is too short."""
    steps, stage_s = evidence.stage_steps, evidence.stage_s or 0.0
    by_time = steps is None or steps * evidence.state.window.total.step_s > stage_s
    rest = "the run is to take" if by_time else f"the {steps} steps take"
    text = f"compiling took {_seconds(evidence.state.compile_s)}, and {rest} {_seconds(stage_s)}: even if it halves their time, that can't make up for it"
    return text, _uncompiled(evidence)


def _uncompiled(evidence: Evidence) -> str:
    """What to write, or to leave out, for a step that is not compiled: options of compiling are refused without it."""
    also = [name for name in ("compile_mode", "compile_cache_dir", "compile_timeout_s") if name in evidence.config.given]
    flags = [f"--{name.replace('_', '-')}" for name in ("compile", *also)]
    return f"leave out {', '.join(flags)}" if also else evidence.written(compile=False)


def recompiling(evidence: Evidence) -> Told:
    """Batches of one shape, or train without."""
    times = evidence.state.window.total.recompiles
    again = f"the step was compiled again {_number_of(times, 'time')}, since what it was compiled for changes (rank 0's log says what)"
    return f"{again}; after 8 versions torch runs it uncompiled. Pad batches to one shape, or train without", _uncompiled(evidence)


def launch_bound(evidence: Evidence) -> Told:
    """Fewer kernels, or more to compute in each."""
    recent, config = evidence.recent, evidence.config
    seen = f"in {_percent(recent.starved / recent.steps)} of the steps the GPU was done before it was asked for more: starting its kernels takes the time"
    if evidence.stage.get("compile"):
        if config.compile_mode in (None, "default"):
            return f"{seen}, compiled as the step is; CUDA graphs start all of them at once", evidence.written(compile_mode="reduce-overhead")
        return f"{seen}, compiled as the step is; a larger batch computes more in each", _bigger_batch(evidence, 2)
    long = evidence.stage_s is None or evidence.stage_s >= COMPILE_PAYS_S
    if long and config.drop_last:
        return f"{seen}, not computing. A compiled step has fewer of them", evidence.written(compile=True)
    return f"{seen}, not computing. A larger batch computes more in each", _bigger_batch(evidence, 2)


def precision(evidence: Evidence) -> Told:
    """What the tensor cores of this GPU can do."""
    seen = f"{_of_step(evidence, 'forward', 'backward')} is computing, in float32"
    if evidence.facts["capability"] < NATIVE_BF16:
        return f"{seen}: this GPU multiplies matrices several times as fast in fp16 (with loss scaling)", evidence.written(precision="fp16")
    tf32 = evidence.written(matmul_precision="high")
    fast = "matrix products are several times as fast in TF32, which rounds their factors only (convolutions are in it already)"
    return f"{seen}: {fast}, and all of it more so with --precision bf16", tf32
