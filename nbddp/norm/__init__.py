"""Normalization layers that depend on the batch: what DDP makes of them, and what they can become. Runs in the kernel and in the ranks."""

from __future__ import annotations

from nbddp.norm.applied import apply, device_of, swapped, undo
from nbddp.norm.layers import BECOMES, KINDS, MIXING, Change, LayerNorm, batch_norm_layers, became, is_kind, is_synchronized, without_dropped
from nbddp.norm.masked import mixing
from nbddp.norm.report import Swapped, SwapReport
from nbddp.norm.swap import Choice, choose, few_features, swap_norm
from nbddp.norm.sync import BatchNorm, SyncBatchNorm, alone, counting, cut_compiled_code

__all__ = [
    "BECOMES",
    "KINDS",
    "MIXING",
    "BatchNorm",
    "Change",
    "Choice",
    "LayerNorm",
    "SwapReport",
    "Swapped",
    "SyncBatchNorm",
    "alone",
    "apply",
    "batch_norm_layers",
    "became",
    "choose",
    "counting",
    "cut_compiled_code",
    "device_of",
    "few_features",
    "is_kind",
    "is_synchronized",
    "mixing",
    "swap_norm",
    "swapped",
    "undo",
    "without_dropped",
]
