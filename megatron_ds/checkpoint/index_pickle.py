"""What a pickle may do before it is unpickled: a walk over its opcodes that executes none of them.

Python's unpickler allocates what some opcodes ask for: a memo of index 2**30 (`LONG_BINPUT`, one bit away from `REDUCE`)
takes 16 GB, a `BYTEARRAY8` its length. An index of chunks, as Python 3.8 and later pickle it, needs 28 opcodes, none of
them such. All others are refused, and so are lengths beyond the end.

Opcodes of fixed length, which are most, are skipped by a regular expression: `pickletools.genops` needs about eight times as
long, 20 s for the index of 640,000 chunks.
"""

import pickletools
import re
import struct

FIXED = ("PROTO", "FRAME", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "EMPTY_TUPLE", "TUPLE",
         "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS", "MEMOIZE",
         "BINGET", "LONG_BINGET", "STACK_GLOBAL", "NEWOBJ", "REDUCE", "BUILD")
LENGTHS = {"SHORT_BINUNICODE": "<B", "BINUNICODE": "<I", "LONG1": "<B"}      # the length, then so many bytes
STOP = b"."
_MOST_AT_ONCE = 10_000       # bounds the memory of the regular expression


def _bytes_of_argument(opcode: pickletools.OpcodeInfo) -> int:
    return opcode.arg.n if opcode.arg else 0


_OPCODES = {opcode.name: opcode for opcode in pickletools.opcodes}
_CODES = {name: _OPCODES[name].code.encode("latin-1") for name in (*FIXED, *LENGTHS)}
_LENGTH_OF = {_CODES[name]: struct.Struct(form) for name, form in LENGTHS.items()}
_RUN = re.compile(b"(?:" + b"|".join(
    b"[" + b"".join(re.escape(_CODES[name]) for name in FIXED if _bytes_of_argument(_OPCODES[name]) == n) + b"].{%d}" % n
    for n in sorted({_bytes_of_argument(_OPCODES[name]) for name in FIXED})) + b"){1,%d}+" % _MOST_AT_ONCE, re.DOTALL)


def check_opcodes(content: bytes) -> None:
    """Raises ValueError naming the first opcode that no index needs, or an argument that goes beyond the end."""
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
        return "it ends without the mark of an end"
    if code == STOP:
        return "it ends here, and more bytes follow"
    if known and known.name in FIXED:
        return f"it ends within {known.name}"
    return f"{known.name}, which no index needs" if known else f"no opcode of a pickle ({code.hex()})"
