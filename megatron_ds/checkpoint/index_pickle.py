"""Unpickle the index of a checkpoint without executing anything in it.

torch.distributed.checkpoint ("DCP") pickles its index, and a pickle may call any function. Two guards stand
before it:

    opcodes    `check_opcodes` walks over the pickle first, because some opcodes make Python's unpickler
               allocate any amount of memory: 16 GB for a memo of index 2**30 (`LONG_BINPUT`, one bit away
               from `REDUCE`), any length for `BYTEARRAY8`. An index, as Python 3.8 and later pickle it, needs
               about 30 opcodes, which allocate little. Others and lengths beyond the end are refused.
    names      the unpickler resolves the names of the index's own dataclasses and refuses every other name

A regular expression skips opcodes of fixed length, which are most of them: `pickletools.genops` takes about
eight times as long, 20 s for the index of 640,000 chunks.
"""

import io
import pickle
import pickletools
import re
import struct
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem as dcp_files
from torch.distributed.checkpoint import metadata as dcp

FIXED = ("PROTO", "FRAME", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2",
         "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "APPEND", "APPENDS",
         "EMPTY_DICT", "SETITEM", "SETITEMS", "MEMOIZE", "BINGET", "LONG_BINGET", "STACK_GLOBAL", "NEWOBJ",
         "REDUCE", "BUILD")
LENGTHS = {"SHORT_BINUNICODE": "<B", "BINUNICODE": "<I", "LONG1": "<B"}      # the length, then so many bytes
STOP = b"."
_MOST_AT_ONCE = 10_000       # bounds the memory that the regular expression takes


_OPCODES = {opcode.name: opcode for opcode in pickletools.opcodes}
_CODES = {name: _OPCODES[name].code.encode("latin-1") for name in (*FIXED, *LENGTHS)}
_LENGTH_OF = {_CODES[name]: struct.Struct(form) for name, form in LENGTHS.items()}
# A run of opcodes of fixed length: for each length n, one of their codes and then n bytes.
_ARGUMENT_BYTES = {name: _OPCODES[name].arg.n if _OPCODES[name].arg else 0 for name in FIXED}
_FIXED_BY_LENGTH = {n: b"".join(re.escape(_CODES[name]) for name in FIXED if _ARGUMENT_BYTES[name] == n)
                    for n in sorted(set(_ARGUMENT_BYTES.values()))}
_RUN = re.compile(b"(?:" + b"|".join(b"[" + codes + b"].{%d}" % n for n, codes in _FIXED_BY_LENGTH.items())
                  + b"){1,%d}+" % _MOST_AT_ONCE, re.DOTALL)


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


def check_opcodes(content: bytes) -> None:
    """Raises ValueError naming the first opcode that no index needs, or that extends beyond the end."""
    at, end = 0, len(content)
    while True:
        while run := _RUN.match(content, at):
            at = run.end()
        code = content[at:at + 1]
        if code == STOP and at + 1 == end:
            return
        if code not in _LENGTH_OF:
            raise ValueError(f"byte {at} of {end}: {_name_of(code)}")
        length = _LENGTH_OF[code]
        if at + 1 + length.size > end:
            raise ValueError(f"byte {at} of {end}: it ends within a length")
        at += 1 + length.size + length.unpack_from(content, at + 1)[0]
        if at > end:
            raise ValueError(f"a text in it would end at byte {at} of {end}")


def _name_of(code: bytes) -> str:
    known = pickletools.code2op.get(code.decode("latin-1"))
    if code == b"":
        return "it ends without STOP"
    if code == STOP:
        return "STOP, and more bytes follow"
    if known and known.name in FIXED:
        return f"it ends within {known.name}"
    return f"{known.name}, which no index needs" if known else f"not an opcode of a pickle ({code.hex()})"
