"""Values of a program in a checkpoint's run.json: `plain` makes JSON of them, `restored` makes them again.

Types come back as they were: tuples, sets, keys that are numbers, tensors, arrays and numbers of numpy,
Namespaces. A value that JSON has itself stays as it is, a list becomes a list, and anything else a table of
one entry, its kind and its content:

    (1, 2)                   {"tuple": [1, 2]}
    {3: "a"}                 {"dict": [[3, "a"]]}
    torch.zeros(2)           {"tensor": {"dtype": "float32", "shape": [2], "data": base64}}

Nothing that is read is executed: kinds are those of a table in this file. Sizes are compared with the data.
"""

import base64
import math
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path, PosixPath
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from ...errors import CheckpointError, ConfigError

# Bytes of tensors and arrays in one state; every rank reads run.json, and all of it.
MOST_BYTES = 2**28
DEEPEST = 100  # containers inside one another
# Factories of a defaultdict that can be stored.
FACTORIES = {kind.__name__: kind for kind in (int, float, str, list, dict, set)}


def plain(value: Any, name: str = "the state") -> Any:
    """`value` as JSON. Raises ConfigError with the place in `name` of what has no such form."""
    return _Writer().write(value, name)


class _Writer:
    """Writes one state. It counts the bytes of tensors and arrays."""

    def __init__(self):
        self._bytes = self._depth = 0

    def write(self, value: Any, name: str) -> Any:
        """`value`, which is at the place `name` in the state, as JSON."""
        kind = type(value)
        if (
            value is None
            or kind in (bool, int, str)
            or kind is float
            and math.isfinite(value)
        ):
            return value
        if self._depth > DEEPEST:
            raise ConfigError(
                f"{name[:200]}… is more than {DEEPEST} containers deep, or contains itself: it "
                "cannot be saved. Leave it out, or save a flatter form."
            )
        self._depth += 1
        try:
            return self._container(value, name)
        finally:
            self._depth -= 1

    def _container(self, value: Any, name: str) -> Any:
        # Containers of exactly these types; a subclass would lose its type.
        kind = type(value)
        if kind is list:
            return self._items(value, name)
        if kind in ITEMS:
            return {ITEMS[kind]: self._items(value, name)}
        if kind in TABLES:
            return {TABLES[kind]: self._table(value, name)}
        if kind in NAMESPACES:
            return {NAMESPACES[kind]: self._table(vars(value), name)}
        if kind is defaultdict and FACTORIES.get(
            getattr(value.default_factory, "__name__", "")
        ) in (value.default_factory,):
            return {
                "defaultdict": [
                    value.default_factory.__name__,
                    self._table(value, name),
                ]
            }
        # Texts and bytes.
        if kind in TEXTS:
            return {TEXTS[kind]: str(value)}
        if kind is bytes:
            return {"bytes": self._data(value, name)}
        # Arrays.
        if isinstance(value, torch.Tensor):
            return {"tensor": self._tensor(value, name)}
        if isinstance(value, np.ndarray | np.generic):
            return {
                "array" if kind is np.ndarray else "number": self._array(value, name)
            }
        raise _unknown(value, name)

    def _items(self, values: Any, name: str) -> list:
        return [self.write(item, f"{name}[{i}]") for i, item in enumerate(values)]

    def _table(self, values: Mapping, name: str) -> list:
        return [
            [self.write(key, f"a key of {name}"), self.write(item, f"{name}[{key!r}]")]
            for key, item in values.items()
        ]

    def _tensor(self, value: torch.Tensor, name: str) -> dict[str, Any]:
        if value.layout != torch.strided or value.is_meta or value.is_quantized:
            raise _unknown(
                value, f"{name}, a tensor that is sparse, quantized or without values,"
            )
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return {
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": list(value.shape),
            "data": self._data(flat.tobytes(), name),
        }

    def _array(self, value: np.ndarray | np.generic, name: str) -> dict[str, Any]:
        array = np.asarray(value)
        if (
            array.dtype.hasobject
            or array.dtype.fields
            or not isinstance(value, np.generic)
            and type(value) is not np.ndarray
        ):
            raise _unknown(value, name)
        return {
            "dtype": array.dtype.str,
            "shape": list(array.shape),
            "data": self._data(np.ascontiguousarray(array).tobytes(), name),
        }

    def _data(self, content: bytes, name: str) -> str:
        self._bytes += len(content)
        if self._bytes > MOST_BYTES:
            raise ConfigError(
                f"tensors and arrays up to {name} have {self._bytes / 2**20:.0f} MiB, and a "
                f"checkpoint holds at most {MOST_BYTES >> 20} MiB of them besides the module "
                "and its optimizer. Register large tensors as buffers of the module, or save "
                "them in a file of your own."
            )
        return base64.b64encode(content).decode()


def _unknown(value: Any, name: str) -> ConfigError:
    kind = type(value)
    return ConfigError(
        f"{name} is of type {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold: reading "
        "it again could execute code. It holds None, numbers, texts, bytes, tuples, lists, sets, dicts, "
        "tensors, arrays of numpy, Namespaces and paths. Leave it out, or convert it, for instance with "
        "vars() or state_dict()."
    )


def restored(value: Any) -> Any:
    """Return the value from which `plain` made `value`. Raises CheckpointError where it made none."""
    try:
        return _restored(value)
    except (
        AttributeError,
        LookupError,
        OverflowError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise CheckpointError(
            f"run.json is damaged: it has a value that this package does not write "
            f"({type(error).__name__}: {str(error)[:200]})."
        ) from error


def _restored(value: Any) -> Any:
    if isinstance(value, list):
        return list(map(_restored, value))
    if not isinstance(value, dict):
        return value
    [(kind, content)] = value.items()
    return READERS[kind](content)


def _pairs(content: list) -> Iterator[tuple[Any, Any]]:
    return ((_restored(key), _restored(item)) for key, item in content)


def _read_default(content: list) -> defaultdict:
    name, table = content
    return defaultdict(FACTORIES[name], _pairs(table))


def _read_tensor(content: Mapping[str, Any]) -> torch.Tensor:
    dtype = getattr(torch, content["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{content['dtype']} is no dtype")
    data = _checked(content, dtype.itemsize)
    if not data:
        return torch.empty(content["shape"], dtype=dtype)
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        .view(dtype)
        .reshape(content["shape"])
    )


def _read_array(content: Mapping[str, Any]) -> np.ndarray:
    dtype = np.dtype(content["dtype"])
    if dtype.hasobject:
        raise ValueError(f"arrays of {dtype} are not stored")
    return (
        np.frombuffer(_checked(content, dtype.itemsize), dtype)
        .reshape(content["shape"])
        .copy()
    )


def _checked(content: Mapping[str, Any], itemsize: int) -> bytes:
    """Return the data. Raises ValueError where the shape needs another number of bytes."""
    shape = content["shape"]
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"{shape!r} is no shape")
    data = _read_bytes(content["data"])
    if len(data) != math.prod(shape) * itemsize:
        raise ValueError(f"{len(data)} bytes for shape {shape}")
    return data


def _read_bytes(content: str) -> bytes:
    return base64.b64decode(content, validate=True)


def _read_dtype(content: str) -> torch.dtype:
    dtype = getattr(torch, content.removeprefix("torch."))
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{content} is no dtype")
    return dtype


def _read_items(kind: Callable[[Any], Any], content: list) -> Any:
    return kind(map(_restored, content))


def _read_table(kind: Callable[[Any], Any], content: list) -> Any:
    return kind(dict(_pairs(content)))


def _read_namespace(kind: type, content: list) -> Any:
    made = kind()
    for key, value in _pairs(content):
        setattr(made, key, value)
    return made


ITEMS: dict[type, str] = {
    tuple: "tuple",
    set: "set",
    frozenset: "frozenset",
    torch.Size: "size",
}
TABLES: dict[type, str] = {
    dict: "dict",
    OrderedDict: "ordered_dict",
    Counter: "counter",
}
NAMESPACES: dict[type, str] = {
    Namespace: "namespace",
    SimpleNamespace: "simple_namespace",
}
TEXTS: dict[type, str] = {
    float: "float",
    complex: "complex",
    PosixPath: "path",
    torch.dtype: "dtype",
    torch.device: "device",
}
READERS: dict[str, Callable[[Any], Any]] = {
    **{name: partial(_read_items, kind) for kind, name in ITEMS.items()},
    "size": lambda content: torch.Size(list(map(_restored, content))),
    **{name: partial(_read_table, kind) for kind, name in TABLES.items()},
    **{name: partial(_read_namespace, kind) for kind, name in NAMESPACES.items()},
    "defaultdict": _read_default,
    "bytes": _read_bytes,
    "tensor": _read_tensor,
    "array": _read_array,
    "number": lambda content: _read_array(content)[()],
    "float": float,
    "complex": complex,
    "path": Path,
    "dtype": _read_dtype,
    "device": torch.device,
}
