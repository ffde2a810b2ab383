"""Taking apart what the user named: wrapped models, DataLoaders, datasets. Everything taken is said."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, TensorDataset, default_collate

from nbddp.errors import BundleError, ConfigError

if TYPE_CHECKING:
    from nbddp.kernel.request import Named


@dataclass(slots=True)
class Data:
    """A dataset, the options and hooks that came with it, and a line for each thing that was done to get at it."""

    dataset: Any
    options: dict[str, object] = field(default_factory=dict)
    hooks: dict[str, object] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def take_model(named: Named) -> tuple[nn.Module, list[str]]:
    """The user's own module, out of DataParallel, DDP and torch.compile.

    Raises:
        ConfigError: where it is no module, or has nothing to train.
        BundleError: where a parameter has hooks of its own, which would be lost without a word.
    """
    model, notes = named.value, []
    while (inner := _inside(model)) is not None:
        wrapper, model = inner
        notes.append(f"{named.name} was wrapped in {wrapper}: unwrapped")
    if not isinstance(model, nn.Module):
        message = f"{named.name} is a {type(model).__name__}: the model must be a torch.nn.Module; the order is MODEL DATA"
        raise ConfigError(message)
    parameters = list(model.parameters())
    if not parameters:
        message = f"{named.name} has no parameters: there is nothing to train"
        raise ConfigError(message)
    if not any(parameter.requires_grad for parameter in parameters):
        message = f"no parameter of {named.name} requires a gradient: {named.name}.requires_grad_() makes all of them trainable"
        raise ConfigError(message)
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            message = f"{named.name}: {name} has a hook on the tensor itself, which can't be sent to another process: register it in optimizer(model)"
            raise BundleError(message)
    return model, notes


def _inside(model: object) -> tuple[str, object] | None:
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return type(model).__name__, model.module
    if isinstance(model, nn.Module) and "_orig_mod" in model._modules:
        return "torch.compile", model._modules["_orig_mod"]
    return None


def take_data(named: Named, *, training: bool) -> Data:
    """The map-style dataset behind a name; a plain DataLoader is taken apart.

    Raises:
        ConfigError: for data that can't be dealt to ranks by index.
    """
    data = _from_loader(named, named.value, training=training) if isinstance(named.value, DataLoader) else Data(named.value)
    dataset = data.dataset
    if isinstance(dataset, nn.Module):
        message = f"{named.name} is a model ({type(dataset).__name__}): the order is MODEL DATA"
        raise ConfigError(message)
    if isinstance(dataset, IterableDataset):
        message = (
            f"{named.name} is an IterableDataset: samples that can't be drawn by index can't be dealt to ranks; not available yet, use a map-style dataset"
        )
        raise ConfigError(message)
    if isinstance(dataset, tuple) and len(dataset) > 1 and all(isinstance(t, torch.Tensor) and t.ndim for t in dataset) and len({len(t) for t in dataset}) == 1:
        data.dataset = TensorDataset(*dataset)
        data.notes.append(f"{named.name} is a tuple of {len(dataset)} tensors: taken as a TensorDataset of {len(dataset[0])} samples")
        return data
    for method in ("__len__", "__getitem__"):
        if not hasattr(type(dataset), method):
            message = f"{named.name} is a {type(dataset).__name__} without {method}: the data must be a map-style dataset (__len__ and __getitem__)"
            raise ConfigError(message)
    if isinstance(dataset, dict | str | bytes):
        message = f"{named.name} is a {type(dataset).__name__}: the data must be a dataset or a DataLoader"
        raise ConfigError(message)
    return data


def _from_loader(named: Named, loader: DataLoader[Any], *, training: bool) -> Data:
    """What a plain DataLoader says: the batch is the global one, workers are the total over ranks."""
    if isinstance(loader.dataset, IterableDataset):
        return Data(loader.dataset)
    if loader.batch_size is None or loader.batch_sampler is None:
        message = f"{named.name} has a batch sampler of its own, or none: not available yet; give the dataset and --batch-size"
        raise ConfigError(message)
    plain = type(loader.sampler) is SequentialSampler or (
        type(loader.sampler) is RandomSampler and not loader.sampler.replacement and loader.sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]
    )
    if training and not plain:
        message = (
            f"{named.name} has a {type(loader.sampler).__name__}: samplers of your own are not available yet; give the dataset, and --shuffle or --no-shuffle"
        )
        raise ConfigError(message)
    options: dict[str, object] = {"batch_size" if training else "val_batch_size": loader.batch_size}
    if training:
        options.update(shuffle=type(loader.sampler) is RandomSampler, drop_last=loader.drop_last, num_workers=loader.num_workers)
        if loader.num_workers:
            options.update(prefetch_factor=loader.prefetch_factor or 2, persistent_workers=loader.persistent_workers)
        if loader.pin_memory:
            options["pin_memory"] = True
    hooks: dict[str, object] = {}
    if loader.collate_fn is not default_collate:
        hooks["collate_fn" if training else "val_collate_fn"] = loader.collate_fn
    if training and loader.worker_init_fn is not None:
        hooks["worker_init_fn"] = loader.worker_init_fn
    return Data(loader.dataset, options, hooks)
