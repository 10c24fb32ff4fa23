"""Unpickle the index of a checkpoint without executing anything in it.

torch.distributed.checkpoint ("DCP") pickles its index, and a pickle may call any function. Two guards stand
before it:

    opcodes    an index, as Python 3.8 and later pickle it, needs about 30 opcodes, which allocate little
               (`pickle_opcodes.py`)
    names      the unpickler resolves the names of the index's own dataclasses and refuses every other name
"""

import io
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem as dcp_files
from torch.distributed.checkpoint import metadata as dcp

from .pickle_opcodes import Opcodes

FIXED = ("PROTO", "FRAME", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2",
         "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "APPEND", "APPENDS",
         "EMPTY_DICT", "SETITEM", "SETITEMS", "MEMOIZE", "BINGET", "LONG_BINGET", "STACK_GLOBAL", "NEWOBJ",
         "REDUCE", "BUILD")
LENGTHS = {"SHORT_BINUNICODE": "<B", "BINUNICODE": "<I", "LONG1": "<B"}      # the length, then so many bytes
check_opcodes = Opcodes("index", FIXED, LENGTHS).check


def _member(enumeration: type, name: str) -> Any:
    """A member of the memory formats, which Python up to 3.11.3 pickles as a call of `getattr`."""
    if enumeration is not dcp._MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(f"it names an attribute of {enumeration!r}, which no index needs")
    return enumeration[name]


_DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
_CLASSES = ("Metadata", "MetadataIndex", "TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
            "StorageMeta", "_MEM_FORMAT_ENCODING")
_ALLOWED = {
    **{(dcp.__name__, name): getattr(dcp, name) for name in _CLASSES},
    **{("torch", name): getattr(torch, name) for name in (*_DTYPES, "Size")},
    (dcp_files.__name__, "_StorageInfo"): dcp_files._StorageInfo,
    ("builtins", "getattr"): _member,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,      # a look-up in a table
}


def unpickled(content: bytes) -> dcp.Metadata:
    """The pickled index. Raises almost any exception when `content` is damaged or not an index."""
    check_opcodes(content)
    return _Unpickler(io.BytesIO(content)).load()


class _Unpickler(pickle.Unpickler):
    """Refuses every name that no index needs, before anything is imported."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no index needs")
        return _ALLOWED[module, name]
