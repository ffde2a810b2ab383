"""Settings files with `gpus`, `dataloaders` and `trainer`, read as options of ours.

A component is a class and its `config`, the arguments of that class: what is left out means the default of torch's class. Batches are global, loader
workers are counted per rank. Runs in the kernel; imports neither torch nor Jupyter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbddp.errors import ConfigError, suggest
from nbddp.kernel.foreign import Found, Section, take_optimizer, take_scheduler

if TYPE_CHECKING:
    from collections.abc import Collection


def read_trainer(values: dict[str, Any], hooks: Collection[str]) -> Found:
    """A file with `gpus`, `dataloaders` and `trainer`.

    Raises:
        ConfigError: for wrong values and contradictions.
    """
    found = Found(hooks)
    root = Section(values, "", found)
    _gpus(root, found)
    if (loaders := root.section("dataloaders")) is not None:
        if (train := loaders.section("train")) is not None:
            _train_loader(train, found)
        if (test := loaders.section("test")) is not None:
            _test_loader(test, found)
        loaders.close()
    if (trainer := root.section("trainer")) is not None:
        _class(trainer, ("Trainer",), found)
        _trainer(trainer.section("config") or Section({}, "trainer.config", found), found)
        trainer.close()
    else:
        _trainer(Section({}, "trainer.config", found), found)
    if (optimizer := root.section("optimizer")) is not None:
        kind, config = optimizer.word("type"), optimizer.section("config") or Section({}, "optimizer.config", found)
        optimizer.take("module")
        take_optimizer(config, kind, found.options, found)
        optimizer.close()
    if (scheduler := root.section("scheduler")) is not None:
        kind, config = scheduler.word("type"), scheduler.section("config") or Section({}, "scheduler.config", found)
        scheduler.take("module")
        take_scheduler(config, kind, found.options.get("epochs"), found.options, found)
        scheduler.close()
    if (target := root.section("target")) is not None:
        target.put("checkpoints_to_keep", "keep_last")
        target.close()
    root.close()
    return found


def _gpus(root: Section, found: Found) -> None:
    device, gpus = root.word("device"), root.take("gpus")
    if device is not None and device not in ("cpu", "cuda"):
        message = f"device={device} must be cpu or cuda.{suggest(device, ('cpu', 'cuda'))}"
        raise ConfigError(message)
    if gpus is not None and not (isinstance(gpus, list) and gpus):
        message = f"gpus={gpus!r} must be a list of GPU indices, such as [0, 1]"
        raise ConfigError(message)
    if gpus is not None and device == "cpu":
        message = f"gpus={gpus} with device=cpu: leave one of the two out; -n sets the number of ranks on the CPU"
        raise ConfigError(message)
    if device == "cpu":
        found.options["devices"] = "cpu"
    if gpus is not None:
        found.put(found.options, "devices", gpus, "gpus")
        found.options["nproc"] = len(gpus)
    root.refuse("precision", "that of its evaluation; trainer.config.precision is the training's")
    root.refuse("device_ids", "its system does not use it either")


def _class(section: Section, known: tuple[str, ...], found: Found) -> None:
    """The class of a component: listed where it is not the one that ours stands for."""
    path, module, kind = section.path("type"), section.take("module"), section.take("type")
    if kind is not None and kind not in known:
        found.unmapped.append(f"{path}: {module}.{kind}" if module else f"{path}: {kind}")


def _train_loader(train: Section, found: Found) -> None:
    _class(train, ("DataLoader",), found)
    config = train.section("config") or Section({}, train.path("config"), found)
    for name, default in (("batch_size", 1), ("shuffle", False), ("drop_last", False)):
        if name in config:
            config.put(name, name)
        else:
            found.default(name, default)
    found.workers_per_rank = config.count("num_workers", 0) or None
    if found.workers_per_rank:
        config.put("prefetch_factor", "prefetch_factor")
        if "persistent_workers" in config:
            config.put("persistent_workers", "persistent_workers")
        else:
            found.default("persistent_workers", value=False)
    config.put("pin_memory", "pin_memory")
    for name in ("prefetch_factor", "persistent_workers"):
        config.refuse(name, "there are no loader workers")
    config.close()
    train.close()


def _test_loader(test: Section, found: Found) -> None:
    if not {"config", "module", "type"} & set(test.keys):  # several, by name
        test.close("one validation set is given with --val")
        return
    _class(test, ("DataLoader",), found)
    if (config := test.section("config")) is not None:
        config.put("batch_size", "val_batch_size")
        if config.flag("shuffle"):
            found.unmapped.append(f"{config.path('shuffle')}: the validation counts every sample once, in any order")
        if config.flag("drop_last"):
            found.unmapped.append(f"{config.path('drop_last')}: the validation counts every sample")
        workers = config.count("num_workers", 0)
        if workers is not None and workers != (found.workers_per_rank or 0):
            found.unmapped.append(f"{config.path('num_workers')}: the validation has as many loader workers as the training")
        config.close("the validation's loader is like the training's")
    test.close()


def _trainer(config: Section, found: Found) -> None:
    config.put("epochs", "epochs")
    if "precision" in config:
        config.put("precision", "precision")
    else:
        found.default("precision", "auto")
    if "tf32" in config:
        config.put("tf32", "matmul_precision")
    else:
        found.default("matmul_precision", "high")
    if "cudnn_benchmark" in config:
        config.put("cudnn_benchmark", "cudnn_benchmark")
    config.put("compile", "compile")
    if found.options.get("compile"):
        config.put("compile_mode", "compile_mode")
        if found.options.get("drop_last") is False:
            del found.options["drop_last"]
            found.note("drop_last true: a compiled step needs whole batches")
    config.refuse("compile_mode", "nothing is compiled")
    if "ddp_find_unused_parameters" in config:
        config.put("ddp_find_unused_parameters", "find_unused_parameters")
    else:
        found.default("find_unused_parameters", value=True)
    if config.take("times_to_validate_per_epoch") not in (None, 1):
        found.unmapped.append(f"{config.path('times_to_validate_per_epoch')}: --val-every takes a number of steps")
    config.refuse("keep_best_on", "--monitor val_NAME --mode max keeps the best by a metric of the cell")
    config.close()
