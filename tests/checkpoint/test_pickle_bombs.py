"""Small pickles that ask for gigabytes, or change classes and functions of the process, are refused."""

import pickle
import struct
import zipfile

import pytest
import torch
from torch.distributed.checkpoint import filesystem as dcp_files
from torch.distributed.checkpoint import metadata as dcp

from megatron_ds.checkpoint.index_pickle import unpickled
from megatron_ds.compat.conversion.files.foreign_pickle import (
    unpickled as foreign_unpickled,
)
from megatron_ds.compat.conversion.files.torch_file import read_torch_file
from megatron_ds.errors import CheckpointError
from tests.harness.limits import bounded

pytestmark = pytest.mark.plan

METADATA = dcp.__name__
START = b"\x80\x04"
COPIES = 20_000


def text(value):
    encoded = value.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def name_of(module, name):
    """STACK_GLOBAL."""
    return text(module) + text(name) + b"\x93"


def kept(content):
    """The content, which the pickle keeps under the next number from 0 on."""
    return content + b"\x94"


BIG_TUPLE = b"(" + b"K\x01" * 150_000 + b"t"
BIG_LIST = b"](" + b"K\x01" * 150_000 + b"e"
BIG_DICT = (
    b"}(" + b"".join(b"J" + struct.pack("<i", n) + b"N" for n in range(50_000)) + b"u"
)
STATE = b"}(" + b"".join(text(f"name{n}") + b"N" for n in range(10_000)) + b"u"


def called_often(module, name, argument, more=b""):
    """A list of calls of a function with one argument, which is in the pickle once."""
    call = b"h\x01h\x00" + (b"\x85" if not more else more + b"\x86") + b"R"
    return (
        START
        + b"]"
        + b"("
        + kept(argument)
        + kept(name_of(module, name))
        + call * COPIES
        + b"e."
    )


def built_often(made, state):
    """A list of objects that get the same state."""
    return START + b"](" + kept(state) + (made + b"h\x00b") * COPIES + b"e."


INDEX = {
    "torch.Size of a tuple": called_often("torch", "Size", BIG_TUPLE),
    "a layout of a long name": called_often(
        "torch.serialization", "_get_layout", text("x" * 100_000)
    ),
    "objects with one large state": built_often(
        name_of(METADATA, "MetadataIndex") + b")\x81", STATE
    ),
    "properties with one large state": built_often(
        name_of(METADATA, "TensorProperties") + b")\x81", BIG_TUPLE
    ),
}
FOREIGN = {
    "torch.Size of a tuple": called_often("torch", "Size", BIG_TUPLE),
    "a list of a tuple": called_often("builtins", "list", BIG_TUPLE),
    "a tuple of a list": called_often("builtins", "tuple", BIG_LIST),
    "a set of a list": called_often("builtins", "set", BIG_DICT),
    "a dict of a dict": called_often("builtins", "dict", BIG_DICT),
    "an OrderedDict of a dict": called_often("collections", "OrderedDict", BIG_DICT),
    "bytes of a text": called_often(
        "_codecs", "encode", text("x" * 900_000), text("latin1")
    ),
    "stand-ins with one argument tuple": START
    + b"]("
    + kept(BIG_TUPLE)
    + kept(name_of("other", "Class"))
    + b"h\x01h\x00\x81" * COPIES
    + b"e.",
    "a layout of nested lists": START
    + kept(b"]")
    + kept(name_of("torch.serialization", "_get_layout"))
    + b"".join(b"](" + (b"h" + bytes([n])) * 10 + b"e\x94" for n in [0, *range(2, 40)])
    + b"h\x01h\x28\x85R.",
    "integers with one hash": START
    + b"}("
    + b"".join(
        b"\x8a\x0c" + ((2**61 - 1) * n).to_bytes(12, "little") + b"N"
        for n in range(1, 60_000)
    )
    + b"u.",
}


@pytest.mark.parametrize("content", INDEX.values(), ids=list(INDEX))
def test_an_index_that_copies_more_than_it_has_is_refused(content):
    with bounded(), pytest.raises((pickle.UnpicklingError, ValueError)) as error:
        unpickled(content)
    assert str(error.value)


@pytest.mark.parametrize("content", FOREIGN.values(), ids=list(FOREIGN))
def test_a_foreign_pickle_that_copies_more_than_it_has_is_refused(content):
    with bounded(), pytest.raises((pickle.UnpicklingError, ValueError)) as error:
        foreign_unpickled(content)
    assert str(error.value)


def test_attributes_that_torch_gives_to_many_dictionaries_are_not_copied():
    call = name_of("collections", "OrderedDict") + b")R"
    content = START + b"](" + kept(STATE) + (call + b"h\x00b") * COPIES + b"e."
    with bounded():
        found, _ = foreign_unpickled(content)
    assert len(found) == COPIES + 1
    assert all(value == {} and not hasattr(value, "name1") for value in found[1:])


def test_the_error_of_a_file_is_never_empty(tmp_path):
    with zipfile.ZipFile(tmp_path / "file.pt", "w") as archive:
        archive.writestr("x/data.pkl", FOREIGN["a list of a tuple"])
    with (
        bounded(),
        pytest.raises(
            CheckpointError, match="refused or damaged: its calls ask for more memory"
        ),
    ):
        read_torch_file(tmp_path / "file.pt")


SLOTS = b"N}" + text("offset") + b"K\x07s\x86b"  # BUILD with (None, {"offset": 7})
DEFAULTS = b"N}" + text("__defaults__") + b"K\x07\x85s\x86b"
EQUALITY = b"N}" + text("__eq__") + name_of("torch", "Size") + b"s\x86b"
TARGETS = {
    "a class": name_of(dcp_files.__name__, "_StorageInfo") + SLOTS,
    "a class by its dict": name_of(dcp_files.__name__, "_StorageInfo")
    + b"}"
    + text("offset")
    + b"K\x07sb",
    "a function": name_of("torch.serialization", "_get_layout") + DEFAULTS,
    "equality": name_of(METADATA, "MetadataIndex") + EQUALITY,
    "an enumeration": name_of(METADATA, "_MEM_FORMAT_ENCODING") + SLOTS,
    "a member": name_of(METADATA, "_MEM_FORMAT_ENCODING") + b"K\x00\x85R" + SLOTS,
    "torch.Size": name_of("torch", "Size") + SLOTS,
    "a dtype": name_of("torch", "float32") + SLOTS,
    "getattr": name_of("builtins", "getattr") + SLOTS,
    "an object, twice": name_of(METADATA, "MetadataIndex")
    + b")\x81}"
    + text("fqn")
    + text("x")
    + b"sb"
    + SLOTS,
}


def process_state():
    classes = (
        dcp_files._StorageInfo,
        dcp.MetadataIndex,
        dcp.TensorProperties,
        dcp._MEM_FORMAT_ENCODING,
    )
    members = [dict(vars(member)) for member in dcp._MEM_FORMAT_ENCODING]
    return (
        [dict(vars(kind)) for kind in classes],
        members,
        torch.serialization._get_layout.__defaults__,
    )


@pytest.mark.parametrize("load", [unpickled, foreign_unpickled])
@pytest.mark.parametrize("opcodes", TARGETS.values(), ids=list(TARGETS))
def test_no_class_or_function_of_the_process_is_changed(opcodes, load):
    before = process_state()
    try:
        load(START + opcodes + b".")
    except (pickle.UnpicklingError, TypeError, AttributeError) as error:
        assert str(error)
    else:
        assert load is foreign_unpickled  # where classes are stand-ins of this pickle
    assert process_state() == before


def test_an_index_of_this_program_is_read_as_it_was_pickled():
    key = dcp.MetadataIndex("weight", torch.Size([2, 3]), 4)
    chunk = dcp.ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 3]))
    tensor = dcp.TensorStorageMetadata(
        dcp.TensorProperties(torch.bfloat16), torch.Size([2, 3]), [chunk]
    )
    place = dcp_files._StorageInfo("__0_0.distcp", 0, 12)
    index = dcp.Metadata(
        {"weight": tensor}, None, {key: place}, dcp.StorageMeta(save_id="s")
    )
    found = unpickled(pickle.dumps(index, 4))
    assert found == index and found.storage_data[key] == place
    assert {
        type(part)
        for part in (
            found,
            *found.storage_data,
            *found.storage_data.values(),
            *vars(found.state_dict_metadata["weight"]).values(),
        )
    } <= {
        dcp.Metadata,
        dcp.MetadataIndex,
        dcp_files._StorageInfo,
        dcp.TensorProperties,
        torch.Size,
        list,
    }
