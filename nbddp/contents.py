"""What spec.json, result.json and the event files of a run hold.

Fields that are not named are left as they are: a later version may have written them. Used in every process; imports neither torch nor Jupyter.
"""

from __future__ import annotations

from nbddp.shapes import LATEST_S, TEXT, TRUTH, Anything, ListOf, MapOf, Maybe, OneOf, Real, Record, Shape, Shown, Whole
from nbddp.window import PHASES

MESSAGE_LETTERS, MESSAGE_LINES = 4_000, 40
TRACEBACK_LETTERS, TRACEBACK_LINES = 12_000, 100
"""As much as is kept of what an exception says, and of where it was raised: the log of its rank has all of it."""
SUPERVISOR = -1
"""The `rank` of events that the supervisor writes."""
MOST_RANKS = 4096

TERMINAL = ("finished", "stopped", "failed")
_COUNT, _NUMBER, _SECONDS, _LABEL = Whole(), Real(), Real(finite=True), Shown(200, 2)
_TIME = Real(finite=True, least=0.0, most=LATEST_S)
_RANK, _ANY_RANK = Whole(most=MOST_RANKS - 1), Whole(least=SUPERVISOR, most=MOST_RANKS - 1)
_SIGNED = Whole(least=-(1 << 31), most=1 << 31)
_FLAGS = ListOf(Whole(most=1))
_PROCESS = ListOf(_COUNT)
_OBJECT = MapOf(Anything())
_MESSAGE = Shown(MESSAGE_LETTERS, MESSAGE_LINES)
_TRACEBACK = Shown(TRACEBACK_LETTERS, TRACEBACK_LINES)

# -- spec.json

_STAGE: dict[str, Shape] = {
    "index": _COUNT,
    "name": _LABEL,
    **dict.fromkeys(("batch_size", "per_rank_batch_size", "micro_batch_size", "accumulate"), Whole(least=1)),
    "default_batch_size": TRUTH,
    "steps_per_epoch": _COUNT,
    "dropped": _COUNT,
    "epochs": Maybe(_COUNT),
    "max_steps": Maybe(_COUNT),
    "lr": Maybe(_SECONDS),
    "scaled_lr": _LABEL,
    "precision": _LABEL,
    "default_precision": TRUTH,
    "compile": TRUTH,
    "monitor": _LABEL,
    "patience": Maybe(_COUNT),
    "besides": Shown(),
    "trains": Shown(),
}
_PLAN: dict[str, Shape] = {
    "nproc": Whole(least=1, most=MOST_RANKS),
    "device": OneOf(("cpu", "cuda")),
    "device_indices": ListOf(_RANK),
    "device_name": _LABEL,
    "backend": OneOf(("gloo", "nccl")),
    "threads": Whole(least=1),
    "n_train": _COUNT,
    "n_val": _COUNT,
    "val_batch_size": Whole(least=1),
    "max_steps": Maybe(_COUNT),
    "workers_per_rank": _COUNT,
    "stages": ListOf(Record(_STAGE)),
    "warnings": ListOf(Shown()),
}
_INTERPRETER: dict[str, Shape] = {
    "sys_path": ListOf(TEXT),
    "cwd": TEXT,
    "default_dtype": OneOf(("float32", "float64", "float16", "bfloat16")),
    "default_device": TEXT,
    "float32_matmul_precision": Maybe(TEXT),
}
SPEC = Record(
    {
        "run": TEXT,
        "name": Maybe(TEXT),
        "model_name": Shown(200, 2),
        "model_type": Shown(200, 2),
        "data_name": Shown(200, 2),
        "val_name": Maybe(Shown(200, 2)),
        "hooks": ListOf(TEXT),
        "config": _OBJECT,
        "plan": Record(_PLAN),
        "plan_line": Shown(),
        "remarks": ListOf(Shown()),
        "note": Maybe(Shown(20_000, 200)),
        "host": TEXT,
        "kernel": Maybe(_PROCESS),
        "visible_devices": TEXT,
        "created": _TIME,
        "times": Record({"requested": _TIME, "bundled": Maybe(_TIME)}, needed=("requested",)),
        "cell": Maybe(Record({"number": Maybe(_COUNT), "source": TEXT})),
        "data": ListOf(Record({"hash": TEXT}, needed=("hash",))),
        "parent": Maybe(TEXT),
        "resume": Maybe(TEXT),
        "resume_step": Maybe(_COUNT),
        "resume_best": Maybe(TEXT),
        "interpreter": Record(_INTERPRETER),
        "matmul_precision": OneOf(("highest", "high", "medium")),
        "norm": Maybe(MapOf(TEXT)),
        "initial": Maybe(TEXT),
    }
)
OPENED = SPEC.needing("config", "plan_line", "times")
"""Without these a run can't be shown."""
USED = OPENED.needing(
    "model_name",
    "plan",
    "interpreter",
    "matmul_precision",
    plan=Record(
        {**_PLAN, "stages": ListOf(Record(_STAGE, needed=tuple(name for name in _STAGE if name not in ("patience", "besides", "trains"))), least=1)}
    ).needing(*_PLAN),
    interpreter=Record(_INTERPRETER, needed=("sys_path", "default_dtype")),
)
"""Without these its weights can't be used: what a model's checkpoints are evaluated and continued by."""

# -- result.json

_ERROR = Record(
    {
        "kind": TEXT,
        "message": _MESSAGE,
        "rank": Maybe(_ANY_RANK),
        "type_name": _LABEL,
        "cell": Maybe(_COUNT),
        "line": Maybe(_COUNT),
        "traceback": _TRACEBACK,
        "signal": Maybe(_SIGNED),
        "exit_code": Maybe(_SIGNED),
    },
    needed=("kind", "message"),
)
_BEST = Record({"value": Maybe(_NUMBER), "epoch": Maybe(_COUNT), "step": Maybe(_COUNT)})
RESULT = Record(
    {
        "state": OneOf(TERMINAL),
        "time": _TIME,
        "error": Maybe(_ERROR),
        "step": Maybe(_COUNT),
        "epoch": Maybe(_COUNT),
        "stop_reason": Maybe(_LABEL),
        "summary": Maybe(Record({"step": Maybe(_COUNT), "epoch": Maybe(_COUNT), "loss": Maybe(_NUMBER), "best": Maybe(_BEST)})),
    },
    needed=("state", "time"),
)

# -- event files

EVENT = Record(
    {
        "run": TEXT,
        "rank": _ANY_RANK,
        "attempt": _COUNT,
        "seq": _COUNT,
        "time": _TIME,
        "mono": _SECONDS,
        "kind": TEXT,
        "data": Record({}),
    },
    needed=("run", "rank", "seq", "time", "mono", "kind"),
)
_PHASE_TIMES: dict[str, Shape] = {f"{phase}_s": _SECONDS for phase in PHASES}
_COLUMNS: dict[str, Shape] = {
    "step": ListOf(_COUNT),
    "epoch": ListOf(_COUNT),
    "stage": ListOf(_COUNT),
    "loss": ListOf(_NUMBER),
    "lr": ListOf(_NUMBER),
    "samples": ListOf(_COUNT),
    "warmup": _FLAGS,
    **{name: ListOf(_SECONDS) for name in (*_PHASE_TIMES, "wait_s")},
    "slowest_rank": ListOf(_RANK),
}
_REPORT = Record(
    {
        **dict.fromkeys(("step", "epoch", "samples", "samples_per_epoch"), _COUNT),
        **dict.fromkeys(("loss", "epoch_loss"), _NUMBER),
        **{f"{mean}{name}": _SECONDS for mean in ("", "mean_") for name in ("data_s", "network_s", "aggregation_s")},
    }
)
_ROW = Record({"rank": _RANK, "memory": _COUNT, "samples_per_s": _SECONDS, **_PHASE_TIMES}, needed=("rank", *_PHASE_TIMES))
_VALUES = MapOf(_NUMBER, but=frozenset({"epoch", "step", "stage"}))
_AT: dict[str, Shape] = {"epoch": _COUNT, "step": _COUNT, "stage": _COUNT}
_VALUED = Record({**_AT, "values": _VALUES, "duration_s": _SECONDS}, needed=("step", "values"))
EVENTS: dict[str, Record] = {
    "started": Record({"device": _LABEL, "backend": _LABEL, "process": _PROCESS}),
    "plan": Record({**_PLAN, "line": Shown(), "total_steps": Maybe(_COUNT), "epochs": Maybe(_COUNT)}),
    "phase": Record({"phase": _LABEL, "first_step": TRUTH}),
    "steps": Record(
        {
            **_COLUMNS,
            "network_s": ListOf(_SECONDS),
            "overflow": _FLAGS,
            "recompiles": _COUNT,
            "starved": _SECONDS,
            "scalars": MapOf(ListOf(_NUMBER), but=frozenset(_COLUMNS)),
            "ranks": ListOf(_ROW),
            "report": _REPORT,
        },
        needed=tuple(_COLUMNS),
        alike=(*_COLUMNS, "network_s", "overflow", "scalars"),
    ),
    "epoch": Record(
        {**_AT, "loss": _NUMBER, "duration_s": _SECONDS, "values": _VALUES, "samples": _COUNT, "whole": TRUTH},
        needed=("epoch", "step", "stage", "loss", "duration_s"),
    ),
    "validation": _VALUED,
    "reported": _VALUED,
    "stage": Record(
        {
            **_AT,
            "name": _LABEL,
            "total_steps": Maybe(_COUNT),
            "epochs": Maybe(_COUNT),
            "batch_size": _COUNT,
            "lr": Maybe(_SECONDS),
            "precision": _LABEL,
            "trainable": _COUNT,
            "float32": TRUTH,
            "batch_norm": _COUNT,
            "synced_norm": _COUNT,
            "matmul_precision": _LABEL,
            "cores": Whole(least=1),
            "capability": Maybe(_SECONDS),
            "options": Maybe(_OBJECT),
        },
        needed=("stage", "name", "step"),
    ),
    "checkpoint": Record(
        {"name": _LABEL, "file": _LABEL, **_AT, "value": Maybe(_NUMBER), "bytes": _COUNT, "removed": ListOf(TEXT)},
        needed=("name", "file", "epoch", "step"),
    ),
    "message": Record({"level": _LABEL, "text": Shown()}, needed=("text",)),
    "heartbeat": Record({"phase": _LABEL, "step": _COUNT, "position": Maybe(ListOf(_COUNT)), "memory": _COUNT}),
    "stopping": Record({"reason": Maybe(_LABEL), "text": Maybe(Shown()), "step": _COUNT}),
    "failed": Record(
        {
            "type": _LABEL,
            "message": _MESSAGE,
            "traceback": _TRACEBACK,
            "file": Maybe(TEXT),
            **dict.fromkeys(("cell", "line"), Maybe(_COUNT)),
            **dict.fromkeys(("about_rank", "exit_code"), Maybe(_SIGNED)),
        }
    ),
    "finished": Record({"step": _COUNT, "epoch": _COUNT, "reason": Maybe(_LABEL)}),
    "launched": Record({"process": _PROCESS, "fork_server": Maybe(_PROCESS)}),
    "exited": Record(
        {"state": OneOf(TERMINAL), "exits": _OBJECT, "error": Maybe(_ERROR), **dict.fromkeys(("step", "epoch"), Maybe(_COUNT)), "stop_reason": Maybe(_LABEL)},
        needed=("state",),
    ),
}
"""The data of each kind of event; other kinds are of a later version."""
