"""Objects that must arrive on a rank as they were: built alike in the test and in the process that opened the bundle, and compared there."""

from __future__ import annotations

import collections
import dataclasses
import enum
import io
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

if TYPE_CHECKING:
    from collections.abc import Callable

N = 3000


class Point(NamedTuple):
    """A sample as a named tuple."""

    x: torch.Tensor
    label: str


class Kind(enum.Enum):
    """A label."""

    CAT = 1
    DOG = 2


@dataclasses.dataclass
class Sample:
    """A sample as a dataclass."""

    image: torch.Tensor
    kind: Kind


class Squares(Dataset[int]):
    """A dataset over an array."""

    def __init__(self) -> None:
        self.values = np.arange(N) ** 2

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> int:
        return int(self.values[index])


class Slotted:
    """An object without a ``__dict__``."""

    __slots__ = ("a", "b")

    def __init__(self) -> None:
        self.a, self.b = torch.arange(5), {"c": np.arange(N)}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slotted) and bool((self.a == other.a).all()) and bool((self.b["c"] == other.b["c"]).all())

    __hash__ = None  # type: ignore[assignment]


class MyTensor(torch.Tensor):
    """A tensor of a class of its own."""


def numbers(*shape: int) -> Any:
    """Random numbers, the same each time."""
    return np.random.default_rng(0).standard_normal(shape or (N,))


def read_only() -> Any:
    """An array that nobody may write to."""
    array = numbers()
    array.flags.writeable = False
    return array


def structured(n: int = N) -> Any:
    """An array of records."""
    array = np.zeros(n, dtype=[("mass", "f8"), ("name", "S5"), ("spin", "f4", (3,))])
    array["mass"], array["name"] = np.arange(n), b"abc"
    return array


def with_attribute() -> torch.Tensor:
    """A tensor that carries an attribute."""
    tensor = torch.arange(10.0)
    tensor.unit = "m"  # type: ignore[attr-defined]
    return tensor


def seeded(module: Callable[[], nn.Module], *example: int) -> Callable[[], nn.Module]:
    """Return a function that makes the module always alike, and runs it once on ``example``."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        built = module()
        if example:
            built(torch.ones(example))  # what a forward leaves behind must travel as well
        return built

    return build


def buffered() -> nn.Module:
    """A module with buffers of both kinds."""
    module = nn.BatchNorm1d(4)
    module.register_buffer("scale", torch.ones(3), persistent=False)
    return module


def chained() -> nn.Module:
    """A module with one parametrization on top of another."""
    layer = parametrizations.weight_norm(nn.Linear(4, 4))
    nn.utils.parametrize.register_parametrization(layer, "weight", nn.Tanh())
    return nn.utils.parametrize.register_parametrization(layer, "bias", nn.Softplus())


TENSORS: dict[str, Callable[[], Any]] = {
    "float32": lambda: torch.linspace(0, 1, N),
    "scalar": lambda: torch.tensor(3.5),
    "empty": lambda: torch.empty(0, 7),
    "bool": lambda: torch.arange(N) % 3 == 0,
    "bfloat16": lambda: torch.linspace(0, 1, N).bfloat16(),
    "float8": lambda: torch.linspace(0, 1, N).to(torch.float8_e4m3fn),
    "complex": lambda: torch.complex(torch.arange(9.0), torch.arange(9.0)),
    "conjugate": lambda: torch.complex(torch.arange(9.0), torch.arange(9.0)).conj(),
    "negative view": lambda: torch.complex(torch.arange(9.0), torch.arange(9.0)).conj().imag,
    "transposed": lambda: torch.arange(12.0).reshape(3, 4).T,
    "expanded": lambda: torch.arange(4.0).expand(1000, 4),
    "unfolded": lambda: torch.arange(N).unfold(0, 50, 1),
    "small slice": lambda: torch.arange(100_000)[500:520],
    "leaf with gradient": lambda: torch.ones(4, requires_grad=True),
    "parameter": lambda: nn.Parameter(torch.ones(4)),
    "attribute": with_attribute,
    "subclass": lambda: torch.arange(6.0).as_subclass(MyTensor),
    "sparse": lambda: torch.eye(5).to_sparse(),
    "sparse_csr": lambda: torch.eye(5).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "quantized": lambda: torch.quantize_per_tensor(torch.arange(6.0), 0.5, 3, torch.qint8),
}

ARRAYS: dict[str, Callable[[], Any]] = {
    "float64": numbers,
    "small": lambda: np.arange(4),
    "empty array": lambda: np.zeros((0, 3)),
    "zero-dimensional": lambda: np.array(2.5),
    "fortran": lambda: np.asfortranarray(numbers(30, 100)),
    "small fortran": lambda: np.asfortranarray(numbers(3, 4)),
    "transposed array": lambda: numbers(20, 30, 5).transpose(2, 0, 1),
    "reversed": lambda: numbers()[::-1],
    "every other": lambda: numbers()[::2],
    "column": lambda: numbers(N, 50)[:, 3],
    "windows": lambda: np.lib.stride_tricks.sliding_window_view(numbers(), 100),
    "broadcast": lambda: np.broadcast_to(numbers(), (500, N)),
    "structured": structured,
    "small structured": lambda: structured(3),
    "structured field": lambda: structured()["mass"],
    "datetime": lambda: np.arange("2000-01-01", "2020-01-01", dtype="datetime64[D]"),
    "big-endian": lambda: numbers().astype(">f4"),
    "strings": lambda: np.array(["abc", "defgh"] * N),
    "complex array": lambda: numbers() * 1j,
    "bool array": lambda: numbers() > 0,
    "read-only": read_only,
    "small read-only": lambda: np.broadcast_to(np.arange(3), (2, 3)),
    "objects": lambda: np.array([{"a": 1}, "b", None], dtype=object),
    "recarray": lambda: structured().view(np.recarray),
    "masked": lambda: np.ma.masked_greater(numbers(), 0.5),
}

MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (seeded(lambda: nn.Linear(4, 3)), (2, 4)),
    "batch norm": (seeded(buffered, 3, 4), (2, 4)),
    "weight_norm": (seeded(lambda: parametrizations.weight_norm(nn.Linear(4, 3))), (2, 4)),
    "spectral_norm": (seeded(lambda: parametrizations.spectral_norm(nn.Linear(4, 3)), 2, 4), (2, 4)),
    "orthogonal": (seeded(lambda: parametrizations.orthogonal(nn.Linear(4, 4))), (2, 4)),
    "chained parametrizations": (seeded(chained), (2, 4)),
    "pruned": (seeded(lambda: prune.random_unstructured(nn.Linear(4, 3), "weight", 0.5), 2, 4), (2, 4)),
    "materialized lazy": (seeded(lambda: nn.LazyLinear(3), 2, 4), (2, 4)),
    "lstm": (seeded(lambda: nn.LSTM(4, 3, 2), 5, 4), (5, 4)),
    "lstm with weight_norm": (seeded(lambda: parametrizations.weight_norm(nn.LSTM(4, 3), "weight_hh_l0")), (5, 4)),
    "hooked": (seeded(lambda: _hooked(nn.Linear(4, 3))), (2, 4)),
}

OTHERS: dict[str, Callable[[], Any]] = {
    "namedtuple": lambda: Point(torch.arange(3), "a"),
    "dataclass": lambda: Sample(torch.arange(3), Kind.DOG),
    "containers": lambda: {"a": [1, (2.5, None)], 3: {4, 5}, "c": collections.OrderedDict(x=collections.deque([1])), "d": collections.defaultdict(list, a=[1])},
    "slots": Slotted,
    "bytes in memory": lambda: io.BytesIO(b"abc"),
    "text in memory": lambda: io.StringIO("abc"),
    "generator of random numbers": lambda: torch.Generator().manual_seed(5),
    "numpy generator": lambda: np.random.default_rng(5),
    "tensor dataset": lambda: TensorDataset(torch.arange(N), torch.arange(N) * 2),
    "subset": lambda: Subset(TensorDataset(torch.arange(N)), [5, 3, 1]),
    "concatenated": lambda: ConcatDataset([TensorDataset(torch.arange(5)), TensorDataset(torch.arange(3))]),
    "custom dataset": Squares,
    "list of samples": lambda: [(torch.full((3,), i), i) for i in range(500)],
    "storage": lambda: torch.arange(5.0).untyped_storage(),
}


def _hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(_double)
    return module


def _double(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def build_all() -> dict[str, Any]:
    """Build every case."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls some of these kinds beta, or deprecated
        return _build_all()


def _build_all() -> dict[str, Any]:
    built = {name: build() for cases in (TENSORS, ARRAYS, OTHERS) for name, build in cases.items()}
    return {**built, **{name: build() for name, (build, _) in MODULES.items()}}


def difference(name: str, arrived: Any, sent: Any) -> str | None:
    """Say how what arrived differs from what was sent; None if it does not."""
    try:
        return _compare(name, arrived, sent)
    except Exception as error:  # noqa: BLE001 - reported for its case; the others are compared all the same
        return f"{type(error).__name__}: {error}"


def _compare(name: str, arrived: Any, sent: Any) -> str | None:
    if name in MODULES:
        return _module_difference(arrived, sent, MODULES[name][1])
    return _difference(arrived, sent)


def _module_difference(a: nn.Module, b: nn.Module, example: tuple[int, ...]) -> str | None:
    if [type(m).__name__ for m in a.modules()] != [type(m).__name__ for m in b.modules()]:
        return f"classes {a} {b}"
    if found := _difference(dict(a.state_dict()), dict(b.state_dict())):
        return found
    if [(name, p.requires_grad) for name, p in a.named_parameters()] != [(name, p.requires_grad) for name, p in b.named_parameters()]:
        return "parameters"
    outputs = []
    for module in (a, b):
        torch.manual_seed(1)
        output = module(torch.ones(example))
        output = output[0] if isinstance(output, tuple) else output
        output.sum().backward()
        outputs.append((output.detach(), [p.grad for p in module.parameters()]))
    return _difference(outputs[0], outputs[1])


def _difference(a: Any, b: Any) -> str | None:
    if type(a) is not type(b):
        return f"{type(a)} is not {type(b)}"
    if isinstance(a, torch.Tensor):
        return _tensor_difference(a, b)
    if isinstance(a, np.ndarray):
        return _array_difference(a, b)
    if isinstance(a, dict):
        if list(a) != list(b):
            return f"keys {list(a)} {list(b)}"
        return next((f"[{key}] {found}" for key in a if (found := _difference(a[key], b[key]))), None)
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return "length"
        return next((f"[{i}] {found}" for i, (x, y) in enumerate(zip(a, b, strict=True)) if (found := _difference(x, y))), None)
    if isinstance(a, Dataset):
        return _difference([a[i] for i in range(len(a))], [b[i] for i in range(len(b))])  # type: ignore[arg-type]
    if isinstance(a, (io.BytesIO, io.StringIO)):
        return None if a.getvalue() == b.getvalue() else "content"
    if isinstance(a, torch.Generator):
        return _difference(a.get_state(), b.get_state())
    if isinstance(a, np.random.Generator):
        return None if a.bit_generator.state == b.bit_generator.state else "state"
    if isinstance(a, torch.UntypedStorage):
        return None if list(a) == list(b) else "content"
    if dataclasses.is_dataclass(a):
        return _difference(vars(a), vars(b))
    return None if a == b else f"{a!r} != {b!r}"


def _tensor_difference(a: torch.Tensor, b: torch.Tensor) -> str | None:
    for what in ("dtype", "layout", "requires_grad", "is_leaf", "is_quantized", "is_nested"):
        if getattr(a, what) != getattr(b, what):
            return what
    if vars(a) != vars(b):
        return f"attributes {vars(a)}"
    if a.is_nested:
        return next((found for x, y in zip(a.unbind(), b.unbind(), strict=True) if (found := _tensor_difference(x, y))), None)
    if a.size() != b.size() or (a.layout is torch.strided and a.stride() != b.stride()):
        return f"size {a.size()} {b.size()}"
    if a.is_conj() != b.is_conj() or a.is_neg() != b.is_neg():
        return "conjugate or negative bit"
    if a.layout is not torch.strided or a.is_quantized or a.dtype.itemsize == 1:
        a, b = (x.dequantize() if x.is_quantized else x.to_dense() if x.layout is not torch.strided else x.float() for x in (a, b))
    return None if torch.equal(a, b) else "values"


def _array_difference(a: Any, b: Any) -> str | None:
    for what in ("dtype", "shape"):
        if getattr(a, what) != getattr(b, what):
            return f"{what} {getattr(a, what)}"
    for flag in ("writeable", "f_contiguous", "c_contiguous"):
        if getattr(a.flags, flag) != getattr(b.flags, flag) and a.size > 1 and not (flag != "writeable" and b.strides != np.array(b).strides):
            return f"{flag} {getattr(a.flags, flag)}"
    if isinstance(a, np.ma.MaskedArray):
        return _array_difference(a.data, b.data) or _array_difference(a.mask, b.mask)
    if a.dtype == object:
        return _difference(a.tolist(), b.tolist())
    return None if a.tobytes() == b.tobytes() else "values"
