"""Digests of parameters: any bit and any order tell, and nothing else does."""

from __future__ import annotations

import pytest
import torch

from nbddp.worker.digest import Digester

CPU = torch.device("cpu")
DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.complex128,
    torch.int8,
    torch.int32,
    torch.bool,
]


def digest(tensor, **options):
    value = Digester(tensor.device, **options)(tensor)
    assert value.dtype == torch.int64
    return int(value)


def bits(tensor):
    return tensor.view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 3, 35, 561, 4096])
def test_every_single_bit_tells(dtype, n):
    raw = torch.randint(0, 2, (n * dtype.itemsize,), dtype=torch.uint8)
    made = raw.view(dtype)
    seen = {digest(made)}
    for place in {0, len(raw) // 2, len(raw) - 1}:
        for bit in range(8 if dtype != torch.bool else 1):
            other = raw.clone()
            other[place] ^= 1 << bit
            seen.add(digest(other.view(dtype)))
    assert len(seen) == 1 + len({0, len(raw) // 2, len(raw) - 1}) * (8 if dtype != torch.bool else 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_any_two_flipped_signs_tell(dtype):
    values = torch.randn(24).to(dtype)
    seen = set()
    for first in range(24):
        for second in range(first, 24):
            other = values.clone()
            other[first] *= -1
            if second != first:
                other[second] *= -1
            seen.add(digest(other))
    assert len(seen) == 24 * 25 // 2
    assert digest(values) not in seen


@pytest.mark.parametrize("words", [1, 2, 7, 64])
def test_any_two_elements_that_are_swapped_tell_in_one_part_and_in_several(words):
    values = torch.randn(30, dtype=torch.float64)
    seen = {digest(values, words=words)}
    for first in range(30):
        for second in range(first + 1, 30):
            other = values.clone()
            other[[first, second]] = values[[second, first]]
            seen.add(digest(other, words=words))
    assert len(seen) == 1 + 30 * 29 // 2


def test_zeros_of_either_sign_and_nans_of_any_kind_are_told_apart():
    plus, minus = torch.zeros(5), -torch.zeros(5)
    assert digest(plus) != digest(minus)
    nan = torch.full((5,), float("nan"))
    other = nan.clone()
    other.view(torch.int32)[3] ^= 1
    assert digest(nan) == digest(nan.clone())
    assert digest(nan) != digest(other)


def test_it_is_of_the_values_in_their_order_wherever_they_lie():
    matrix = torch.randn(5, 7)
    expected = digest(matrix)
    assert digest(matrix.T.contiguous().T) == expected
    assert digest(torch.nn.Parameter(matrix)) == expected
    assert digest(matrix.reshape(-1)) == expected
    assert digest(matrix.T) != expected
    flat = torch.cat([torch.zeros(1), matrix.reshape(-1)])
    assert digest(flat[1:]) == expected, "elements that do not begin at a whole word"
    complex_ = torch.randn(6, dtype=torch.complex64)
    assert digest(complex_.conj()) == digest(complex_.conj().resolve_conj()) != digest(complex_)


def test_one_digester_serves_parameters_of_any_size_in_any_order():
    sizes = [3, 5000, 1, 129, 70]
    tensors = [torch.randn(n) for n in sizes]
    one = Digester(CPU, words=64)
    assert [int(one(tensor)) for tensor in tensors] == [digest(tensor, words=64) for tensor in tensors]


@pytest.mark.gpu
def test_a_gpu_makes_the_same_digest_as_the_cpu_with_the_same_parts():
    tensor = torch.randn(1000, 77)
    for words in (1 << 10, 1 << 22):
        assert digest(tensor.cuda(), words=words) == digest(tensor, words=words)
