"""Unpickle files of other programs: nothing in them is imported or executed.

Checkpoints of Megatron-LM and DeepSpeed are pickles that name classes of those programs. Guards:

    opcodes    those that allocate any amount of memory are refused before unpickling (`pickle_opcodes.py`)
    names      tensors become `StoredTensor`, not read yet; lists and tuples are real; dicts and sets become
               tables whose keys take little time to hash (`pickle_tables.py`); any other class becomes a
               `ForeignObject`, which keeps its arguments and state and does nothing; calls copy no more
               than the pickle has bytes (`pickle_guards.py`)
    nesting    shared values do not make the content many times the pickle (`pickle_nesting.py`)

Functions and classes of the standard library, and functions of any module, are refused except for those in
the tables below: no checkpoint needs `os.system`. The names of all stand-ins are listed in `ignored`.
"""

import io
import math
import pickle
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from ....checkpoint.pickle_guards import (
    COPIED,
    MOST_DIMENSIONS,
    Allowance,
    Function,
    size_of,
)
from ....checkpoint.pickle_opcodes import Opcodes
from ....checkpoint.pickle_tables import Keys, Table
from .pickle_nesting import check_nesting
from .stored_tensor import StoredTensor

_FIXED = (
    "PROTO",
    "FRAME",
    "MARK",
    "POP",
    "NONE",
    "NEWTRUE",
    "NEWFALSE",
    "BININT",
    "BININT1",
    "BININT2",
    "BINFLOAT",
    "EMPTY_TUPLE",
    "TUPLE",
    "TUPLE1",
    "TUPLE2",
    "TUPLE3",
    "EMPTY_LIST",
    "APPEND",
    "APPENDS",
    "EMPTY_DICT",
    "LIST",
    "SETITEM",
    "SETITEMS",
    "EMPTY_SET",
    "ADDITEMS",
    "MEMOIZE",
    "BINPUT",
    "BINGET",
    "LONG_BINGET",
    "STACK_GLOBAL",
    "NEWOBJ",
    "NEWOBJ_EX",
    "REDUCE",
    "BUILD",
    "BINPERSID",
)
_LENGTHS = {
    "SHORT_BINUNICODE": "<B",
    "BINUNICODE": "<I",
    "LONG1": "<B",
    "SHORT_BINSTRING": "<B",
    "BINSTRING": "<i",
    "SHORT_BINBYTES": "<B",
    "BINBYTES": "<I",
}
OPCODES = Opcodes("checkpoint", _FIXED, _LENGTHS, protocol2=True)

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
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e5m2",
    "uint16",
    "uint32",
    "uint64",
)
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "UntypedStorage": torch.uint8,
}
# Classes of the standard library, and lower-case names of other modules, that become stand-ins.
_STANDARD = {
    "argparse": ("Namespace",),
    "types": ("SimpleNamespace",),
    "signal": ("Signals", "Handlers"),
    "pathlib": ("Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"),
    "io": ("BytesIO",),
    "collections": ("deque", "Counter"),
    "functools": ("partial",),
    "datetime": ("datetime", "date", "timedelta", "timezone"),
}
_LOWER_CASE = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("torch", "device"),
    ("torch", "layout"),
    ("deepspeed.utils.tensor_fragment", "fragment_address"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy.core.multiarray", "scalar"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"),
    ("numpy.random._pickle", "__randomstate_ctor"),
    ("numpy.random._pickle", "__generator_ctor"),
    ("numpy.random._pickle", "__bit_generator_ctor"),
}


class ForeignObject:
    """A stand-in for an object of another program's class.

    foreign_name  "module.Class"
    args          of the call that made it
    state         what its class would have received to restore it, usually a dict of attributes
    """

    foreign_name = ""
    allowance: Allowance | None = None
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any, **keywords: Any) -> "ForeignObject":
        self = object.__new__(cls)
        if cls.allowance is not None:
            cls.allowance.take(1 + len(args) + len(keywords))
        self.args = args
        self.state = keywords or None
        return self

    def __init__(self, *args: Any, **keywords: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        if self.allowance is not None:
            self.allowance.take(_elements_of(state))
        self.state = state

    def __setitem__(self, name: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        """Nothing: the elements of foreign containers are not needed."""

    extend = append

    def __repr__(self) -> str:
        return f"<{self.foreign_name}>"


def fields_of(value: Any) -> dict[str, Any]:
    """Return the attributes of a stand-in, such as a Namespace or a dataclass, or the items of a dict; else {}."""
    state = value.state if isinstance(value, ForeignObject) else value
    if isinstance(state, tuple) and len(state) == 2:  # (__dict__, values of __slots__)
        state = {**(state[0] or {}), **(state[1] or {})}
    return dict(state) if isinstance(state, Mapping) else {}


def _elements_of(state: Any) -> int:
    """Return the elements that `fields_of` copies."""
    parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
    return 1 + sum(len(part) for part in parts if isinstance(part, COPIED))


class FileTensor(StoredTensor):
    """A tensor in one file. A pickle cannot change it after its sizes were checked."""

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("it changes a tensor after it was made")


class Storage(NamedTuple):
    """A storage that was found in the file: a pickle cannot make one, nor change it.

    read   maps its bytes as uint8 [numel · itemsize]
    place  file and key, for messages
    """

    dtype: torch.dtype
    numel: int
    read: Callable[[], torch.Tensor]
    place: str


class ForeignUnpickler(pickle.Unpickler):
    """Unpickles bytes that `OPCODES` accepts.

    storage_of  (dtype, key, number of elements) → the storage, checked against the file; None where a pickle
                holds no tensors
    allowed     {(module, name): object} in addition
    """

    def __init__(
        self,
        content: bytes,
        storage_of: Callable[[torch.dtype, str, int], Storage] | None = None,
        allowed: Mapping[tuple[str, str], Any] | None = None,
    ):
        super().__init__(io.BytesIO(OPCODES.check(content)), encoding="latin-1")
        self._storage_of = storage_of
        self._allowance = Allowance(content)
        self._keys = Keys((*_ATOMS, ForeignObject), _ATOMS)
        called = _CALLED | _tables_called(self._keys)
        self._known: dict[tuple[str, str], Any] = {
            name: Function(value, self._allowance) for name, value in called.items()
        }
        self._known |= _DTYPE_NAMES | dict(allowed or {})
        self._stand_ins: dict[str, type] = {}

    @property
    def ignored(self) -> tuple[str, ...]:
        """Names of the classes that became stand-ins."""
        return tuple(sorted(self._stand_ins))

    def find_class(self, module: str, name: str) -> Any:
        """Return an object of the tables, or a stand-in. Raises UnpicklingError for code."""
        if (module, name) in self._known:
            return self._known[module, name]
        full = f"{module}.{name}"
        root = module.partition(".")[0]
        is_standard = root in sys.stdlib_module_names or root in (
            "__builtin__",
            "copy_reg",
        )
        is_class = name.rpartition(".")[2].lstrip("_")[:1].isupper()
        if (
            name not in _STANDARD.get(module, ())
            if is_standard
            else not (is_class or (module, name) in _LOWER_CASE)
        ):
            raise pickle.UnpicklingError(
                f"it names {full}, which no checkpoint needs: loading it with another program would run "
                "code. Do not use this file"
            )
        if full not in self._stand_ins:
            self._stand_ins[full] = type(
                name,
                (ForeignObject,),
                {"foreign_name": full, "allowance": self._allowance},
            )
        return self._stand_ins[full]

    def persistent_load(self, identifier: Any) -> Storage | Table:
        """Return the storage that pickles of torch name: ("storage", type, key, location, elements, …). A dict or
        set gets a table in its place here, because BINPERSID was inserted behind the opcode that makes it."""
        if type(identifier) in (dict, set):
            return self._keys.table()
        if (
            self._storage_of is None
            or not isinstance(identifier, tuple)
            or len(identifier) < 5
        ):
            raise pickle.UnpicklingError("it refers to data outside of the pickle")
        kind, dtype, key, _, numel = identifier[:5]
        if (
            kind != "storage"
            or not isinstance(dtype, torch.dtype)
            or not isinstance(key, str | int)
            or not _is_count(numel)
            or len(identifier) > 5
            and identifier[5] is not None
        ):
            raise pickle.UnpicklingError(
                "a storage is not described as torch.save does it"
            )
        self._allowance.take(len(identifier))
        return self._storage_of(dtype, str(key), numel)


def unpickled(
    content: bytes,
    storage_of: Callable[[torch.dtype, str, int], Storage] | None = None,
    allowed: Mapping[tuple[str, str], Any] | None = None,
) -> tuple[Any, tuple[str, ...]]:
    """Return (content, names of the classes that became stand-ins); arguments as of `ForeignUnpickler`.

    Raises almost any exception when `content` is damaged; UnpicklingError if it names code.
    """
    unpickler = ForeignUnpickler(content, storage_of, allowed)
    found = unpickler.load()
    check_nesting(found, len(content), _parts_of)
    return found, unpickler.ignored


def _parts_of(value: Any) -> Iterable | None:
    """Return the elements of a container, and what a stand-in keeps."""
    if isinstance(value, ForeignObject):
        return value.args, value.state
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else None


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**62


def _tensor(
    storage: Storage, offset: int, size: tuple, stride: tuple, *_: Any
) -> FileTensor:
    if not isinstance(storage, Storage):
        raise pickle.UnpicklingError("a tensor in it has no storage of the file")
    dtype, numel, read_bytes, place = storage
    if not (
        _is_count(offset)
        and len(size) == len(stride) <= MOST_DIMENSIONS
        and all(map(_is_count, (*size, *stride)))
    ):
        raise pickle.UnpicklingError(
            f"{place}: the shape or the strides of a tensor are not counts of elements"
        )
    size = tuple(size)
    stride = tuple(stride)
    count = math.prod(size)
    last = offset + sum((n - 1) * step for n, step in zip(size, stride))
    if count > numel or count and last >= numel:
        raise pickle.UnpicklingError(
            f"{place}: a tensor of shape {list(size)} from element {offset} on "
            f"exceeds its storage of {numel} elements"
        )

    def read() -> torch.Tensor:
        return read_bytes().view(dtype).as_strided(size, stride, offset)

    # The place is unique, so that tensors which share their memory are recognised.
    return FileTensor(
        size, dtype, read, f"{place}, element {offset}" if offset else place
    )


def _from_type(function: Callable, _: Any, args: tuple, *__: Any) -> FileTensor:
    if not (isinstance(function, Function) and function.function is _tensor):
        raise pickle.UnpicklingError("a tensor is not described as torch.save does it")
    return _tensor(*args)


def _first(tensor: Any, *_: Any) -> Any:
    return tensor


def _member(owner: Any, name: str) -> ForeignObject:
    """Return a member of an enumeration, which some versions of Python pickle as a call of `getattr`."""
    if not (
        isinstance(owner, type)
        and issubclass(owner, ForeignObject)
        and isinstance(name, str)
    ):
        raise pickle.UnpicklingError(
            "it takes an attribute of a value that is not a class"
        )
    return owner(name)


def _reconstructed(kind: Any, *_: Any) -> ForeignObject:
    if not (isinstance(kind, type) and issubclass(kind, ForeignObject)):
        raise pickle.UnpicklingError(
            "it makes an object from a value that is not a class"
        )
    return kind()


def _latin_bytes(text: str, encoding: str) -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError("it encodes text, and not as latin-1")
    return text.encode("latin-1")


def _layout(name: str) -> str:
    if not isinstance(name, str):
        raise pickle.UnpicklingError("the name of a layout is no text")
    return name


def _tables_called(keys: Keys) -> dict[tuple[str, str], Callable]:
    """Return the functions that make dicts and sets. The factory of a defaultdict is not needed."""
    return {
        ("collections", "OrderedDict"): keys.table,
        ("collections", "defaultdict"): lambda *_: keys.table(),
        **{(module, "dict"): keys.table for module in _BUILTINS},
        **{(module, "set"): keys.elements for module in _BUILTINS},
        **{(module, "frozenset"): keys.elements for module in _BUILTINS},
    }


_ATOMS = (str, bytes, int, float, type(None), torch.dtype)
_BUILTINS = ("builtins", "__builtin__")
_CALLED: dict[tuple[str, str], Callable] = {
    **{(module, "list"): list for module in _BUILTINS},
    **{(module, "tuple"): tuple for module in _BUILTINS},
    **{(module, "object"): object for module in _BUILTINS},
    **{(module, "getattr"): _member for module in _BUILTINS},
    **{
        (module, "_reconstructor"): _reconstructed for module in ("copyreg", "copy_reg")
    },
    ("_codecs", "encode"): _latin_bytes,
    ("torch", "Size"): size_of,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _first,
    ("torch._utils", "_rebuild_parameter_with_state"): _first,
    ("torch._tensor", "_rebuild_from_type_v2"): _from_type,
    ("torch.serialization", "_get_layout"): _layout,
}
_DTYPE_NAMES: dict[tuple[str, str], torch.dtype] = {
    **{
        ("torch", name): getattr(torch, name)
        for name in _DTYPES
        if hasattr(torch, name)
    },
    **{("torch", name): dtype for name, dtype in _STORAGES.items()},
    **{("torch.cuda", name): dtype for name, dtype in _STORAGES.items()},
    **{("torch.storage", name): dtype for name, dtype in _STORAGES.items()},
}
