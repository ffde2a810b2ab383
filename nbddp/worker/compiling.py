"""Compiling the step: a phase of its own before a stage trains, on every rank, and a count of what is compiled again afterwards.

A micro-batch goes forward and backward through the step before DDP is built around it, so no rank waits in an all-reduce while another still compiles; then all
wait for each other, up to `compile_timeout_s`. The phase leaves nothing behind: random streams, buffers, gradients and the plain attributes of modules are as
they were. Every stage starts from an empty cache in memory, so that what is compiled does not depend on earlier stages; the one on disk makes that quick.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch._dynamo.callback import CallbackArgs, CallbackTrigger, callback_handler
from torch.nn.parallel import DistributedDataParallel

from nbddp import norm
from nbddp.evaluation.errors import StepError
from nbddp.precision import autocast_context
from nbddp.worker.compile_cache import NETWORK, file_system, rank_folder
from nbddp.worker.compiled import CompiledStep, explained, in_compiled_code, scope_of_its_own
from nbddp.worker.trial import trial

if TYPE_CHECKING:
    from types import FrameType

    from nbddp.worker.context import Context, RankStage
    from nbddp.worker.step import StepModule

LATE_S = 5.0
"""A rank that has run out of time says so itself; the others give it this long."""
MOST_HELPERS = 8
"""Processes of the compiler, for each rank: torch's own default of 32 is meant for one rank."""
_POLL_S = 0.05
_phases = itertools.count()


class Compiler:
    """Compiles the steps of a run on this rank. `recompiles` counts what was compiled outside of the phases, `recompile_s` the seconds that it took."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.recompiles = 0
        self.recompile_s = 0.0
        self._prepared = self._in_phase = False
        self._began: tuple[float, str] | None = None

    def compile(self, stage: RankStage, module: StepModule, precision: str, first_batch: Callable[[], Any]) -> None:
        """Have the stage's step compiled, if its options say so; call it after freezing and before the replica is made.

        Args:
            stage: says whether and how.
            module: its step is exchanged for the compiled one.
            precision: in effect.
            first_batch: makes a micro-batch as the stage's steps will get it, on the rank's device.

        Raises:
            StepError: where the compiler fails, and where a rank is not done within `compile_timeout_s`.
        """
        if not stage.config.compile:
            return
        context, began = self._context, time.monotonic()
        timeout_s = context.config.compile_timeout_s
        self._phase(inside=True)
        self._prepare()
        torch._dynamo.reset()
        callback_handler.register_start_callback(self._compile_starts)
        callback_handler.register_end_callback(self._compile_ends)
        scope_of_its_own(context.hooks.training_step, context.hooks.loss)
        module.call = CompiledStep(module.step, stage.config.compile_mode)
        with _time_limit(timeout_s, context.ranks.rank), trial(context.ranks.device, module, context.hooks.loss):
            self._rehearse(stage, module, precision, first_batch)
        seconds = time.monotonic() - began
        if context.ranks.world_size > 1:
            self._wait(began + timeout_s)
        self._phase(inside=False)
        context.message(f"compiled in {seconds:.1f} s" + (f" for the stage {stage.name}" if len(context.plan.stages) > 1 else ""))

    def _rehearse(self, stage: RankStage, module: StepModule, precision: str, first_batch: Callable[[], Any]) -> None:
        """One micro-batch forward and backward, as in a step but without the other ranks."""
        ranks, batch = self._context.ranks, first_batch()
        with norm.alone():  # in the backward pass too, where checkpointed parts of a model go forward again
            with _cut_at_buckets(stage.config.bucket_cap_mb, ranks.world_size), autocast_context(precision, ranks.device):
                loss = module(batch)
            module.results.clear()
            try:
                loss.backward()
            except RuntimeError as error:
                if not in_compiled_code(error):
                    raise
                raise explained(error) from None
        if ranks.device.type == "cuda":
            torch.cuda.synchronize(ranks.device)

    def _prepare(self) -> None:
        """Once in a process, before anything is compiled."""
        if self._prepared:
            return
        self._prepared = True
        norm.cut_compiled_code()
        context = self._context
        folder = rank_folder(context.config.compile_cache_dir, context.ranks.rank)
        os.environ["TORCHINDUCTOR_CACHE_DIR"], os.environ["TRITON_CACHE_DIR"] = str(folder), str(folder / "triton")
        if (kind := file_system(folder)) in NETWORK:
            text = f"compiled code is kept in {folder.parent}, on a network file system ({kind}): slow, and locks may fail; --compile-cache-dir on a local disk"
            context.message(text, level="warning")
        import torch._inductor.config as inductor  # here, since it takes a second that runs without compile need not wait for

        if "CXX" in os.environ:  # which inductor asks for when it is imported, and that may have been before this run was ordered
            inductor.cpp.cxx = (None, os.environ["CXX"])
        if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
            inductor.compile_threads = min(context.plan.threads, MOST_HELPERS)  # with one, as on small machines, no processes are started for it
        torch._dynamo.config.automatic_dynamic_local_pgo = False  # or a run would compile other code than the one before it
        if "TORCH_LOGS" not in os.environ:
            torch._logging.set_logs(recompiles=True)  # type: ignore[attr-defined]  # the reasons, in the rank's log

    def _phase(self, *, inside: bool) -> None:
        self._in_phase = inside
        self._context.position.phase = "compiling" if inside else "training"
        if inside and self._context.ranks.rank == 0:
            self._context.events.emit("phase", phase="compiling")

    def _wait(self, deadline: float) -> None:
        """Until every rank is done: outside of any collective, whose time limit is another."""
        ranks, store, number = self._context.ranks, dist.distributed_c10d._get_default_store(), next(_phases)
        keys = [f"nbddp/compiled/{number}/{rank}" for rank in range(ranks.world_size)]
        store.set(keys[ranks.rank], "done")
        late = list(range(ranks.world_size))
        while late := [rank for rank in late if not store.check([keys[rank]])]:
            if time.monotonic() > deadline + LATE_S:
                who = f"rank{'s' if len(late) > 1 else ''} {', '.join(map(str, late))}"
                raise StepError(_out_of_time(self._context.config.compile_timeout_s, who))
            time.sleep(_POLL_S)

    def _compile_starts(self, about: CallbackArgs) -> None:
        position = self._context.position
        if self._in_phase or position.phase == "validation":
            return
        self._began = time.monotonic(), position.phase
        position.phase = "compiling"
        if about.callback_trigger is CallbackTrigger.DYNAMO:
            self.recompiles += 1

    def _compile_ends(self, about: CallbackArgs) -> None:
        if self._began is None:
            return
        (began, phase), self._began = self._began, None
        self._context.position.phase = phase
        self.recompile_s += time.monotonic() - began
        if self.recompiles == 1 and about.callback_trigger is CallbackTrigger.DYNAMO:
            self._context.message(
                f"step {self._context.position.step + 1}: the step was compiled again, in {self.recompile_s:.1f} s, since what it was compiled for changed: "
                "rank 0's log has the reason. Batches of one shape (pad them), and no plain numbers that change between steps, keep the code; "
                "where that can't be, training without --compile may be faster",
                level="warning",
            )


def _out_of_time(timeout_s: float, who: str) -> str:
    return f"compiling took longer than compile_timeout_s={timeout_s:g} s on {who}: raise --compile-timeout-s, or leave --compile out"


class _TimeUp(BaseException):
    """Ends compiling. No Exception, which the compiler would take for a failure of its own."""


@contextlib.contextmanager
def _time_limit(seconds: float, rank: int) -> Iterator[None]:
    """Raise StepError in the main thread after a time.

    Again every second, since an exception that a signal raises is lost in some places, such as finalizers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def up(_number: int, _frame: FrameType | None) -> None:
        raise _TimeUp

    before = signal.signal(signal.SIGALRM, up)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    except _TimeUp:
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise StepError(_out_of_time(seconds, f"rank {rank}")) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _cut_at_buckets(bucket_cap_mb: float, world_size: int) -> Iterator[None]:
    """Let dynamo cut the step where DDP's buckets end, as it does within DDP: else all gradients come at once, and no all-reduce overlaps the backward pass.

    It asks for the replica whose forward pass is under way, and of that for the size of the buckets; it refuses those smaller than DDP's first one.
    """

    class Replica:
        bucket_bytes_cap = int(bucket_cap_mb * 1024 * 1024)

    cuts = world_size > 1 and Replica.bucket_bytes_cap >= dist._DEFAULT_FIRST_BUCKET_BYTES  # type: ignore[attr-defined]
    torch._dynamo.config.optimize_ddp = cuts  # also for what is compiled again later
    before = DistributedDataParallel._active_ddp_module
    DistributedDataParallel._active_ddp_module = Replica if cuts else None  # type: ignore[assignment]
    try:
        yield
    finally:
        DistributedDataParallel._active_ddp_module = before
