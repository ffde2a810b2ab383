"""Memory that snapshots are copied into: bit for bit what was given, kept for the next snapshot, and given back when it is not needed."""

from __future__ import annotations

import collections

import pytest
import torch
from torch import nn

from nbddp.checkpoint import model_state, plain, read, write
from nbddp.worker.staging import Staging

CPU = torch.device("cpu")


def snapshot(staging, state):
    staging.begin()
    copied = plain(state, "state", staging.copy)
    staging.end()
    staging.wait()
    return copied


def base(n, dtype):
    return torch.randint(0, 255, (n * dtype.itemsize,), dtype=torch.uint8).view(dtype)


KINDS = {
    "float32": lambda: torch.randn(3, 5),
    "float64": lambda: torch.randn(3, dtype=torch.float64),
    "bfloat16 with every bit": lambda: base(100, torch.bfloat16),
    "float8": lambda: base(7, torch.float8_e4m3fn),
    "complex": lambda: torch.randn(4, dtype=torch.complex64),
    "conjugate": lambda: torch.randn(4, dtype=torch.complex64).conj(),
    "negative view": lambda: torch.randn(4, dtype=torch.complex64).conj().imag,
    "integers": lambda: torch.arange(5),
    "bool": lambda: torch.tensor([True, False]),
    "scalar": lambda: torch.tensor(3.0),
    "empty": lambda: torch.zeros(0, 4),
    "transposed": lambda: torch.randn(3, 5).T,
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "every other": lambda: torch.randn(10, 4)[::2, 1:3],
    "expanded": lambda: torch.randn(1, 3).expand(4, 3),
    "parameter": lambda: nn.Parameter(torch.randn(3)),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "view of something large": lambda: torch.randn(10_000)[17:19],
}


def bits(tensor):
    tensor = tensor.detach()
    tensor = tensor.to_dense() if tensor.layout is not torch.strided else tensor.resolve_conj().resolve_neg()
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_tensor_is_copied_bit_for_bit_again_and_again(name, tmp_path):
    staging = Staging(CPU)
    for number in range(3):
        tensor = KINDS[name]()
        copied = snapshot(staging, {"x": [tensor, 1], "y": {"deep": (tensor,)}})
        path = tmp_path / f"{number}.pt"
        write(path, {"model": {}, **copied})
        for copy in (copied["x"][0], copied["y"]["deep"][0], read(path)["x"][0]):
            assert (copy.shape, copy.dtype, copy.layout, copy.requires_grad) == (tensor.shape, tensor.dtype, tensor.layout, False)
            assert bits(copy).equal(bits(tensor))
            if tensor.layout is torch.strided and tensor.numel():
                assert copy.data_ptr() != tensor.data_ptr()
        assert path.stat().st_size < 5000, "no more than the tensor itself"


def test_the_memory_is_that_of_the_snapshot_before():
    staging, tensors = Staging(CPU), {"a": torch.randn(1000), "b": [torch.randn(10), torch.randn(3, 4).T]}
    first = snapshot(staging, tensors)
    places = [first["a"].data_ptr(), *(part.data_ptr() for part in first["b"])]
    tensors["a"] += 1
    second = snapshot(staging, tensors)
    assert [second["a"].data_ptr(), *(part.data_ptr() for part in second["b"])] == places
    assert second["a"].equal(tensors["a"])


def test_what_changes_its_shape_or_dtype_gets_new_memory_and_the_old_goes(monkeypatch):
    staging = Staging(CPU)
    for tensor in (torch.randn(3), torch.randn(4), torch.randn(4).double(), torch.randn(2, 2).T, torch.randn(2, 2)):
        assert snapshot(staging, [tensor])[0].equal(tensor)
        assert len(staging._kept) == 1


def test_a_growing_state_keeps_what_it_needs_and_no_more():
    """As LBFGS has it: a list of directions up to the size of its history."""
    staging = Staging(CPU)
    for size in (1, 3, 5, 5, 2, 0):
        state = {"old_dirs": [torch.randn(6) for _ in range(size)], "n": size}
        copied = snapshot(staging, state)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(copied["old_dirs"], state["old_dirs"], strict=True))
        assert len(staging._kept) == size


def test_tensors_that_go_by_one_name_are_kept_apart():
    keys = [torch.full((2,), float(number)) for number in range(3)]
    copied = snapshot(Staging(CPU), {key: number for number, key in enumerate(keys)})
    assert {float(key[0]): number for key, number in copied.items()} == {0.0: 0, 1.0: 1, 2.0: 2}
    assert snapshot(Staging(CPU), {1: "a", "1": "b"}) == {1: "a", "1": "b"}
    several = snapshot(Staging(CPU), {1: keys[0], "1": keys[1]})
    assert (several[1][0], several["1"][0]) == (0.0, 1.0)


def test_tied_tensors_are_one_copy_and_views_of_one_buffer_are_several():
    net = nn.Module()
    flat = torch.arange(6.0)
    net.a, net.b, net.c = nn.Parameter(flat[:4]), nn.Parameter(flat[2:]), nn.Parameter(flat[:4])
    net.d = net.a
    staging = Staging(CPU)
    for _ in range(2):
        staging.begin()
        state = model_state(net, staging.copy)
        staging.end()
        assert state["a"].data_ptr() == state["d"].data_ptr() == state["c"].data_ptr() != state["b"].data_ptr()
        flat += 1
        assert (state["a"] + 1).equal(flat[:4])
        assert (state["b"] + 1).equal(flat[2:])


def test_the_copy_of_a_tensor_is_found_and_else_is_made():
    staging, inside, outside = Staging(CPU), torch.randn(4), torch.randn(4)
    copied = snapshot(staging, [inside])
    before = outside.clone()
    found, made = staging.copy_of(inside), staging.copy_of(outside)
    assert found is copied[0]
    outside.zero_()
    assert made.equal(before)
    assert staging.copy_of(inside.view(2, 2)).equal(inside.view(2, 2)), "another shape is another tensor"
    snapshot(staging, [outside])
    assert staging.copy_of(inside) is not copied[0], "that is of a snapshot that is over"


def test_provided_memory_is_used_and_what_holds_something_is_left_alone():
    staging = Staging(CPU)
    held = snapshot(staging, {"a": torch.ones(3)})["a"]
    layout = [(f"state[{name!r}]", torch.empty(shape, device="meta")) for name, shape in (("a", 3), ("b", (2, 2)), ("c", 0))]
    staging.provide(layout)
    assert held.equal(torch.ones(3))
    place = staging._kept["state['b']"][1].data_ptr()
    copied = snapshot(staging, {"a": torch.zeros(3), "b": torch.ones(2, 2), "c": torch.ones(0)})
    assert (copied["b"].data_ptr(), copied["a"].data_ptr()) == (place, held.data_ptr())


def test_where_memory_cannot_be_pinned_it_is_ordinary():
    """As on a machine without a GPU, or where the limit for pinned memory is reached."""
    from nbddp.worker.staging import _allocate

    if not torch.cuda.is_available():
        made = _allocate(torch.ones(3, 2).T, pinned=True)
        assert (made.is_pinned(), made.stride(), made.device.type) == (False, (1, 2), "cpu")


@pytest.mark.gpu
def test_steps_that_follow_on_a_gpu_do_not_reach_into_the_snapshot():
    device = torch.device("cuda", 0)
    staging, weight = Staging(device), torch.zeros(1 << 24, device=device)
    counter = collections.Counter()
    for number in range(5):
        weight.fill_(float(number))
        staging.begin()
        copy = staging.copy(weight, "weight")
        host = staging.copy(torch.ones(2), "host")
        staging.end()
        for _ in range(50):
            weight.add_(1)  # the next steps, which the host puts on the stream without waiting
        staging.wait()
        counter[bool((copy == number).all())] += 1
        assert copy.is_pinned()
        assert host.equal(torch.ones(2))
    assert counter == {True: 5}
