"""Digests of tensors' bits, for the comparison of replicas. Runs in the ranks."""

from __future__ import annotations

import torch

_MULTIPLIER = -7046029254386353131  # 2**64 divided by the golden ratio, as a signed number: its multiples look like noise
_WORDS = 1 << 17
"""Words per part on the CPU: a part and what is computed from it stay in the cache, so that a parameter is read once from memory."""
_WORDS_CUDA = 1 << 22
"""The same on a GPU, where a part costs launches."""


class Digester:
    """Makes digests on one device; holds what it computes with, a few parts' size.

    A digest is a sum over the parameter's 64-bit words, each multiplied with an odd number of its place and then folded: it tells any bit and any order,
    and it is exact in int64, so it does not depend on the order of summing. Without the folding, two flipped signs would cancel.
    """

    def __init__(self, device: torch.device, *, words: int | None = None) -> None:
        self._words = words if words is not None else _WORDS_CUDA if device.type == "cuda" else _WORDS
        self._weights = self._product = self._upper = torch.empty(0, dtype=torch.int64, device=device)

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """The digest of a tensor, an int64 of no dimension on its device."""
        flat = tensor.detach().resolve_conj().contiguous().view(-1)
        if flat.storage_offset() * flat.element_size() % 8:
            flat = flat.clone()  # or its bytes could not be read as words
        raw = (torch.view_as_real(flat).view(-1) if flat.is_complex() else flat).view(torch.uint8)
        whole = raw.numel() // 8 * 8
        sums = [self._sum(part) for part in raw[:whole].view(torch.int64).split(self._words)] if whole else []
        if rest := raw.numel() - whole:
            last = torch.zeros(8, dtype=torch.uint8, device=raw.device)
            last[:rest] = raw[whole:]
            sums.append(self._sum(last.view(torch.int64)))
        return torch.stack(sums).mul_(_odd(len(sums), raw.device)).sum()

    def _sum(self, part: torch.Tensor) -> torch.Tensor:
        n = part.numel()
        if n > self._weights.numel():
            self._weights = _odd(min(self._words, 1 << (n - 1).bit_length()), part.device)
            self._product, self._upper = torch.empty_like(self._weights), torch.empty_like(self._weights)
        product = torch.mul(part, self._weights[:n], out=self._product[:n])
        upper = torch.bitwise_right_shift(product, 32, out=self._upper[:n])
        return product.bitwise_xor_(upper).sum()


def _odd(n: int, device: torch.device) -> torch.Tensor:
    """Odd numbers that differ in many bits."""
    return torch.arange(1, 2 * n, 2, device=device).mul_(_MULTIPLIER)
