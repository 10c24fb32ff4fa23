"""A walk over the opcodes of a pickle, before it is unpickled.

Some opcodes make Python's unpickler allocate any amount of memory: 16 GB for a memo of index 2**30
(`LONG_BINPUT`, one bit away from `REDUCE`), any length for `BYTEARRAY8`. Those that a kind of file needs
allocate little. Others, lengths beyond the end, and memo indices larger than the file are refused. After
opcodes that make a dict or a set BINPERSID is inserted, which makes a `Table` of it (`pickle_tables.py`).

A regular expression skips opcodes of fixed length, which are most of them: `pickletools.genops` takes about
eight times as long, 20 s for the index of 640,000 chunks.
"""

import mmap
import pickletools
import re
import struct
from collections.abc import Mapping, Sequence

STOP = b"."
_MOST_AT_ONCE = 10_000  # bounds the memory that the regular expression takes
# Integers of more than 8 bytes: millions of them can have one hash, and fill a dict in quadratic time.
_MOST_WIDE = 10_000
_OPCODES = {opcode.name: opcode for opcode in pickletools.opcodes}
_OPCODE_OF = {opcode.code: opcode for opcode in pickletools.opcodes}
_TABLES = ("EMPTY_DICT", "EMPTY_SET")
_FRAME_LENGTH = struct.Struct("<Q")


def _code(name: str) -> bytes:
    return _OPCODES[name].code.encode("latin-1")


_MEMO = _code("LONG_BINPUT")
_GLOBAL = _code("GLOBAL")
_LONG = _code("LONG1")
_PERSISTENT = _code("BINPERSID")
_FRAME = _code("FRAME")


class Opcodes:
    """The opcodes that a kind of file, `noun`, needs.

    fixed      names of opcodes with an argument of fixed length, which allocate little
    lengths    {name of an opcode: struct format of the length of its argument}
    protocol2  also accept the opcodes of protocol 2 whose argument is a memo index or two lines of text
    """

    def __init__(
        self,
        noun: str,
        fixed: Sequence[str],
        lengths: Mapping[str, str],
        protocol2: bool = False,
    ):
        self._noun = noun
        self._fixed = fixed
        self._protocol2 = protocol2
        self._makes_table = {_code(name) for name in _TABLES if name in fixed}
        self._length_of = {
            _code(name): struct.Struct(form) for name, form in lengths.items()
        }
        # A run of opcodes of fixed length: for each length n, one of their codes and then n bytes.
        by_length: dict[int, list[bytes]] = {}
        for name in fixed:
            if name in _TABLES or name == "FRAME":
                continue
            argument = _OPCODES[name].arg
            length = argument.n if argument else 0
            by_length.setdefault(length, []).append(re.escape(_code(name)))
        kinds = []
        for length in sorted(by_length):
            codes = b"".join(by_length[length])
            kinds.append(b"[" + codes + b"].{%d}" % length)
        run = b"(?:" + b"|".join(kinds) + b"){1,%d}+" % _MOST_AT_ONCE
        self._run = re.compile(run, re.DOTALL)

    def check(self, content: bytes) -> bytes:
        """Return the pickle as one frame, with BINPERSID after each opcode that makes a dict or a set.

        Raises ValueError naming the first opcode that is not needed, or that extends beyond the end.
        """
        stop, kept = self._walk(content, 0)
        if stop != len(content):
            raise ValueError(
                f"byte {stop - 1} of {len(content)}: STOP, and more bytes follow"
            )
        parts = [content[start:end] + more for start, end, more in kept]
        changed = b"".join(parts)
        # The frames of the file would now be too short, and the unpickler reads a whole frame at once.
        length = _FRAME_LENGTH.pack(len(changed))
        return _FRAME + length + changed

    def end_of(self, content: bytes | mmap.mmap, at: int = 0) -> int:
        """Return the byte after the pickle that begins at byte `at`. Raises ValueError as `check` does."""
        return self._walk(content, at)[0]

    def _walk(
        self, content: bytes | mmap.mmap, at: int
    ) -> tuple[int, list[tuple[int, int, bytes]]]:
        """(the byte after the pickle; (begin, end, bytes to add) of the parts between frames and tables)."""
        end = len(content)
        wide = 0
        kept = []
        begin = at
        while True:
            while run := self._run.match(content, at):
                at = run.end()
            # Tables and frames end a part of the pickle that is kept.
            code = content[at : at + 1]
            if code in self._makes_table:
                at += 1
                kept.append((begin, at, _PERSISTENT))
                begin = at
                continue
            if code == _FRAME and at + 9 <= end:
                kept.append((begin, at, b""))
                at += 9
                begin = at
                continue
            if code == STOP:
                kept.append((begin, at + 1, b""))
                return at + 1, kept
            # These two have no length before their argument.
            if self._protocol2 and code in (_MEMO, _GLOBAL):
                at = _end_of_protocol2(content, at)
                continue
            if code not in self._length_of:
                raise ValueError(f"byte {at} of {end}: {self._name_of(code)}")
            # Its argument has a length, which must not extend beyond the end.
            length = self._length_of[code]
            if at + 1 + length.size > end:
                raise ValueError(f"byte {at} of {end}: it ends within a length")
            count = length.unpack_from(content, at + 1)[0]
            # Wide integers can have equal hashes, so there may be few of them.
            is_wide = code == _LONG and count > 8
            wide += is_wide
            if wide > _MOST_WIDE:
                raise ValueError(
                    f"byte {at} of {end}: more than {_MOST_WIDE} integers of over 8 bytes"
                )
            at += 1 + length.size + count
            if at > end:
                raise ValueError(f"a text in it would end at byte {at} of {end}")

    def _name_of(self, code: bytes) -> str:
        """Return what is wrong with a byte that is not accepted."""
        if code == b"":
            return "it ends without STOP"
        known = _OPCODE_OF.get(code.decode("latin-1"))
        if known is None:
            return f"not an opcode of a pickle ({code.hex()})"
        if known.name in self._fixed:
            return f"it ends within {known.name}"
        return f"{known.name}, which no {self._noun} needs"


def _end_of_protocol2(content: bytes | mmap.mmap, at: int) -> int:
    """Return the byte after LONG_BINPUT, whose index is at most the size of the file, or after GLOBAL."""
    end = len(content)
    if content[at : at + 1] == _GLOBAL:
        # Two lines of text follow: a module and a name in it.
        first = content.find(b"\n", at)
        stop = content.find(b"\n", first + 1) + 1
        if first < 0 or stop == 0:
            raise ValueError(f"byte {at} of {end}: it ends within a name")
        return stop
    # An index of four bytes follows.
    stop = at + 5
    index = int.from_bytes(content[at + 1 : stop], "little")
    if stop > end or index > end:
        raise ValueError(f"byte {at} of {end}: a memo of index {index}")
    return stop
