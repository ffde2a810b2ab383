"""Taking apart what the user named: wrapped models, DataLoaders, datasets. Everything taken is said."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    default_collate,
)

from nbddp.bundle.refusals import refusal_in
from nbddp.errors import BundleError, ConfigError
from nbddp.sampler import GlobalSampler, SamplerError
from nbddp.wrappers import inside

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
        BundleError: where a parameter has hooks of its own, which would be lost without a word, or a part of it can't be sent to another process.
    """
    model, notes = named.value, []
    while (inner := inside(model)) is not None:
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
    if (refusal := refusal_in(model, named.name)) is not None:
        raise BundleError(refusal)
    return model, notes


def take_data(named: Named, *, training: bool, sampler: object = None) -> Data:
    """The map-style dataset behind a name; a plain DataLoader is taken apart.

    Args:
        named: what the user named.
        training: whether it is to be trained on, or to validate.
        sampler: the hook of the cell, which replaces the loader's own.

    Raises:
        ConfigError: for data that can't be dealt to ranks by index.
    """
    data = _from_loader(named, named.value, training=training, sampler=sampler) if isinstance(named.value, DataLoader) else Data(named.value)
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


def _from_loader(named: Named, loader: DataLoader[Any], *, training: bool, sampler: object) -> Data:
    """What a plain DataLoader says: the batch is the global one, workers are the total over ranks."""
    if isinstance(loader.dataset, IterableDataset):
        return Data(loader.dataset)
    if type(loader.batch_sampler) is not BatchSampler:
        what = "no batches" if loader.batch_sampler is None else f"a batch sampler of its own ({type(loader.batch_sampler).__name__})"
        message = (
            f"{named.name} has {what}: batches that are not made of one index after the other can't be dealt to ranks; "
            "give the dataset, --batch-size and, where the order matters, sampler = ... in the cell"
        )
        raise ConfigError(message)
    batch_size, drop_last = loader.batch_sampler.batch_size, loader.batch_sampler.drop_last
    data = Data(loader.dataset, {"batch_size" if training else "val_batch_size": batch_size})
    if sampler is None:
        _take_sampler(named, loader.batch_sampler.sampler, data, training=training)
    if training:
        data.options.update(drop_last=drop_last or bool(data.options.get("drop_last")), num_workers=loader.num_workers)
        if loader.num_workers:
            data.options.update(prefetch_factor=loader.prefetch_factor or 2, persistent_workers=loader.persistent_workers)
        if loader.pin_memory:
            data.options["pin_memory"] = True
    if loader.collate_fn is not default_collate:
        data.hooks["collate_fn" if training else "val_collate_fn"] = loader.collate_fn
    if training and loader.worker_init_fn is not None:
        data.hooks["worker_init_fn"] = loader.worker_init_fn
    return data


def _take_sampler(named: Named, sampler: Any, data: Data, *, training: bool) -> None:
    """The order that a loader draws in: an option where it is torch's own of all samples, else a hook; which samples it draws, for a validation.

    Raises:
        ConfigError: for one that does not say which samples a validation counts, or that deals them to ranks in a way of its own.
    """
    whole = type(sampler) is SequentialSampler or (type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(data.dataset))
    if isinstance(sampler, DistributedSampler):
        _unwrap_distributed(named, sampler, data, training=training)
    elif whole and training:
        data.options["shuffle"] = type(sampler) is RandomSampler
    elif whole:
        return
    elif training:
        data.hooks["sampler"] = sampler
    elif type(sampler) is SubsetRandomSampler or isinstance(sampler, list | tuple | range):
        indices = sampler.indices if isinstance(sampler, SubsetRandomSampler) else sampler
        data.dataset = Subset(data.dataset, [int(index) for index in indices])
        data.notes.append(f"{named.name}: validates on the {len(data.dataset)} samples of its {type(sampler).__name__}")
    else:
        message = (
            f"{named.name} has a {type(sampler).__name__}: a validation counts each sample once, in order; "
            "give the dataset, or a torch.utils.data.Subset of it, in place of the loader"
        )
        raise ConfigError(message)


def _unwrap_distributed(named: Named, sampler: DistributedSampler[Any], data: Data, *, training: bool) -> None:
    """Ranks are dealt their samples by us: what remains of a DistributedSampler are its options. The batch of its loader is that of one rank."""
    if type(sampler) is not DistributedSampler:
        message = (
            f"{named.name} has a {type(sampler).__name__}, which deals samples to ranks in a way of its own: "
            "give the dataset, and sampler = ... in the cell for the order of the samples over all ranks"
        )
        raise ConfigError(message)
    per_rank = data.options.pop("batch_size" if training else "val_batch_size")
    if not training:
        data.options["val_batch_size"] = int(str(per_rank)) * sampler.num_replicas
        data.notes.append(f"{named.name}: its DistributedSampler is unwrapped; each sample counts once, on one of the ranks")
        return
    data.options["per_rank_batch_size"] = per_rank
    data.options.update(shuffle=sampler.shuffle, drop_last=sampler.drop_last)
    data.notes.append(f"{named.name}: its DistributedSampler is unwrapped; samples are dealt to the ranks here, and its batch size is that of a rank")


def count_sampled(sampler: object, dataset: Any, *, given: frozenset[str], val_split: float | None, seed: int) -> int:
    """The number of samples in an epoch that a sampler draws.

    Args:
        sampler: the hook, or what a DataLoader brought.
        dataset: what it draws from.
        given: names of the options that the user wrote.
        val_split: the option.
        seed: the option.

    Raises:
        ConfigError: for what is no sampler, and for options that it excludes.
    """
    if "shuffle" in given:
        message = "shuffle beside a sampler, which sets the order of the samples: keep one of the two"
        raise ConfigError(message)
    if val_split is not None:
        message = (
            f"val_split={val_split:g} beside a sampler, whose indices are of all samples: split the dataset before, with torch.utils.data.random_split, "
            "and give the parts as DATA and --val"
        )
        raise ConfigError(message)
    if isinstance(sampler, DistributedSampler):
        message = "sampler is a DistributedSampler: samples are dealt to the ranks here; leave it out, and give --shuffle or --no-shuffle"
        raise ConfigError(message)
    try:
        return len(GlobalSampler(sampler, dataset, seed=seed))
    except SamplerError as error:
        raise ConfigError(str(error)) from None
    except Exception as error:  # code of the user's, called as sampler(dataset) or for its length
        message = f"the sampler can't be asked for the number of its samples: {type(error).__name__}: {error}"
        raise ConfigError(message) from error


def stateful(named: Named, dataset: Any, sampler: object) -> list[str]:
    """What holds a state of its own that no checkpoint has, a line each: a resumed run is not, bit for bit, one that never stopped."""
    found: list[tuple[str, object]] = [(named.name, named.value)] if isinstance(named.value, DataLoader) else []
    inner, name = dataset, f"{named.name}.dataset" if isinstance(named.value, DataLoader) else named.name
    found.append((name, inner))
    while isinstance(inner, Subset):
        inner, name = inner.dataset, f"{name}.dataset"
        found.append((name, inner))
    found.append(("sampler", sampler))
    return [
        f"{name} ({type(value).__name__}) has a state of its own (state_dict), which checkpoints don't hold: this is not exactly a run that never stopped"
        for name, value in found
        if callable(getattr(type(value), "state_dict", None)) or callable(getattr(type(value), "load_state_dict", None))
    ]
