"""Unpickle the index of a checkpoint without executing anything in it.

torch.distributed.checkpoint ("DCP") pickles its index, and a pickle may call any function. Three guards stand
before it:

    opcodes    an index, as Python 3.8 and later pickle it, needs about 30 opcodes, which allocate little
               (`pickle_opcodes.py`)
    names      the unpickler resolves the names of the index's own dataclasses and refuses every other name;
               calls copy no more than the index has bytes, and fields have their types (`pickle_guards.py`)
    keys       are names of tensors and `MetadataIndex`, which take little time to hash (`pickle_tables.py`)
"""

import io
import pickle
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem as dcp_files
from torch.distributed.checkpoint import metadata as dcp

from .pickle_guards import Allowance, Constant, Function, Records, size_of
from .pickle_opcodes import Opcodes
from .pickle_tables import Keys, Table

FIXED = (
    "PROTO",
    "FRAME",
    "MARK",
    "NONE",
    "NEWTRUE",
    "NEWFALSE",
    "BININT",
    "BININT1",
    "BININT2",
    "EMPTY_TUPLE",
    "TUPLE",
    "TUPLE1",
    "TUPLE2",
    "TUPLE3",
    "EMPTY_LIST",
    "APPEND",
    "APPENDS",
    "EMPTY_DICT",
    "SETITEM",
    "SETITEMS",
    "MEMOIZE",
    "BINGET",
    "LONG_BINGET",
    "STACK_GLOBAL",
    "NEWOBJ",
    "REDUCE",
    "BUILD",
)
# Opcodes with a length n, and n bytes after it.
LENGTHS = {
    "SHORT_BINUNICODE": "<B",
    "BINUNICODE": "<I",
    "LONG1": "<B",
}
check_opcodes = Opcodes("index", FIXED, LENGTHS).check
_NONE = type(None)
# Fields of the dataclasses of the index, with the types of their values; `chunk_file.py` adds crc32.
_FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "Metadata": {
        "state_dict_metadata": dict,
        "planner_data": object,
        "storage_data": dict,
        "storage_meta": (dcp.StorageMeta, _NONE),
        "version": (str, _NONE),
    },
    "MetadataIndex": {"fqn": str, "offset": (torch.Size, _NONE), "index": (int, _NONE)},
    "TensorStorageMetadata": {
        "properties": dcp.TensorProperties,
        "size": torch.Size,
        "chunks": list,
    },
    "ChunkStorageMetadata": {"offsets": torch.Size, "sizes": torch.Size},
    "StorageMeta": {
        "checkpoint_id": (str, _NONE),
        "save_id": (str, _NONE),
        "load_id": (str, _NONE),
        "modules": list,
    },
    "_StorageInfo": {
        "relative_path": str,
        "offset": int,
        "length": int,
        "transform_descriptors": (list, tuple, _NONE),
        "crc32": tuple,
    },
}
_DTYPES = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
)
_FORMATS: type[dcp._MEM_FORMAT_ENCODING] = dcp._MEM_FORMAT_ENCODING


def unpickled(content: bytes) -> dcp.Metadata:
    """Return the pickled index. Raises almost any exception when `content` is damaged or not an index."""
    unpickler = _Unpickler(content)
    index = unpickler.load()
    unpickler.records.finish()
    if isinstance(index, dcp.Metadata):
        index.state_dict_metadata = dict(index.state_dict_metadata)
        index.storage_data = dict(index.storage_data)
    return index


class _Unpickler(pickle.Unpickler):
    """Refuses every name that no index needs, before anything is imported."""

    def __init__(self, content: bytes):
        super().__init__(io.BytesIO(check_opcodes(content)))
        allowance = Allowance(content)
        self.records = Records(allowance)
        formats = Function(_format, allowance)
        self._known: dict[tuple[str, str], Any] = {
            ("torch", name): getattr(torch, name) for name in _DTYPES
        }
        for name, fields in _FIELDS.items():
            module = dcp_files if name == "_StorageInfo" else dcp
            self._known[module.__name__, name] = self.records.class_of(
                getattr(module, name), fields
            )
        self._keys = Keys((self._known[dcp.__name__, "MetadataIndex"],))
        self._known |= {
            (dcp.__name__, "TensorProperties"): _TensorProperties,
            (dcp.__name__, "_MEM_FORMAT_ENCODING"): formats,
            ("torch", "Size"): Function(size_of, allowance),
            ("builtins", "getattr"): Function(partial(_member, formats), allowance),
            ("torch.serialization", "_get_layout"): Function(_layout, allowance),
        }

    def find_class(self, module: str, name: str) -> Any:
        """Return an object for the name. Raises UnpicklingError for one that no index needs."""
        if (module, name) not in self._known:
            raise pickle.UnpicklingError(
                f"it names {module}.{name}, which no index needs"
            )
        return self._known[module, name]

    def persistent_load(self, _: dict) -> Table:
        """Return the table that replaces a dict; BINPERSID, which `check_opcodes` has inserted, calls this."""
        return self._keys.table()


class _TensorProperties(dcp.TensorProperties):
    """Properties that become those of torch, with a `Constant` for the memory format in the pickle."""

    def __setstate__(self, state: Any) -> None:
        dtype, layout, requires_grad, memory_format, pin_memory = state
        if not (
            isinstance(dtype, torch.dtype)
            and isinstance(layout, torch.layout)
            and isinstance(memory_format, Constant)
        ):
            raise pickle.UnpicklingError(
                "the properties of a tensor are not described as torch does it"
            )
        super().__setstate__(
            (dtype, layout, bool(requires_grad), memory_format.value, bool(pin_memory))
        )
        # A second BUILD then calls torch's own method, which refuses a `Constant` as memory format.
        object.__setattr__(self, "__class__", dcp.TensorProperties)


def _format(number: int) -> Constant:
    """Return a member of the memory formats by its number."""
    if not isinstance(number, int):
        raise pickle.UnpicklingError(
            "it gives a memory format by something that is no number"
        )
    return Constant(_FORMATS(number))


def _member(formats: Function, owner: Any, name: str) -> Constant:
    """Return a member of the memory formats, which Python up to 3.11.3 pickles as a call of `getattr`."""
    if owner is not formats or not isinstance(name, str):
        raise pickle.UnpicklingError(
            "it reads an attribute of an object other than the memory formats"
        )
    return Constant(_FORMATS[name])


def _layout(name: str) -> torch.layout:
    """Return the layout of this name, by a look-up in a table of torch."""
    if not isinstance(name, str):
        raise pickle.UnpicklingError("the name of a layout is no text")
    try:
        return torch.serialization._get_layout(name)
    except KeyError:  # its text would hold the whole name
        raise pickle.UnpicklingError(
            "it names a layout that torch does not have"
        ) from None
