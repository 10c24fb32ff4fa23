"""Pickles of a few bytes whose keys or shared values take for ever, or overflow the stack, are refused."""

import pickle
import struct
import zipfile
from functools import partial

import pytest
import torch
from torch.distributed.checkpoint import metadata as dcp

from megatron_ds.checkpoint.index_pickle import unpickled
from megatron_ds.compat.conversion.files.foreign_pickle import ForeignObject
from megatron_ds.compat.conversion.files.foreign_pickle import (
    unpickled as foreign_unpickled,
)
from megatron_ds.compat.conversion.files.torch_file import read_torch_file
from megatron_ds.errors import CheckpointError
from tests.harness.limits import bounded, refusal_in_child

pytestmark = [pytest.mark.plan, pytest.mark.one_in(2, together=True)]

REFUSED = (pickle.UnpicklingError, ValueError, TypeError)
START = b"\x80\x04"


def text(value):
    encoded = value.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def name_of(module, name):
    return text(module) + text(name) + b"\x93"


def doubled(levels, make=b"\x86", first=b")"):
    """Each value holds the one before it twice: 2**levels elements. make: TUPLE2 by default."""
    return (
        first
        + b"\x94"
        + b"".join(b"h" + bytes([level]) + make + b"\x94" for level in range(levels))
    )


SHARED = doubled(60)
DEEP = b")" + b"\x85" * 1_000_000
LONG = b"(" + b"K\x01" * 150_000 + b"t\x94"
LISTS = b"]\x94" + b"".join(
    b"](h" + bytes([n]) + b"h" + bytes([n]) + b"e\x94" for n in range(60)
)
MEMBERS = b"".join(b"h\x00" + b"N" for _ in range(150_000))
INDEX_NAME = name_of(dcp.__name__, "MetadataIndex") + b")\x81"


def one_hash(count):
    """Pairs of numbers that have equal hashes."""
    # Of the hash of a tuple (xxHash): the second lane that undoes what the first has changed.
    p1, p2, mask = 11400714785074694791, 14029467366897019727, 2**64 - 1
    rotate = lambda value, by: (value << by | value >> 64 - by) & mask
    pairs, first, inverse = [], 0, pow(p2, -1, 2**64)
    step = lambda acc, lane: rotate(acc + lane * p2 & mask, 31) * p1 & mask
    wanted = (step(2870177450012600261, 0) + 5 * p2) & mask
    while len(pairs) < count:
        first += 1
        second = (wanted - step(2870177450012600261, first)) * inverse & mask
        if second < 2**60:
            pairs.append((first, second))
    assert len({hash(pair) for pair in pairs}) == 1
    return pairs


ATTACKS = {
    "a shared tuple as key": b"}" + SHARED + b"Ns.",
    "a deep tuple as key": b"}" + DEEP + b"Ns.",
    "a long tuple as key, often": b"(" + LONG + b"}(" + MEMBERS + b"ut.",
    "a name of a layout": name_of("torch.serialization", "_get_layout")
    + SHARED
    + b"\x85R.",
}
INDEX_ATTACKS = ATTACKS | {
    "a memory format": name_of(dcp.__name__, "_MEM_FORMAT_ENCODING")
    + SHARED
    + b"\x85R.",
    "a long shape": name_of("torch", "Size") + LONG + b"\x85R.",
    "names of tensors in shared tuples": b"}"
    + INDEX_NAME
    + b"}"
    + text("fqn")
    + SHARED
    + b"sbNs.",
}
FOREIGN_ATTACKS = ATTACKS | {
    "an element of a set": b"\x8f(" + SHARED + b"\x90.",
    "an element of a frozenset": b"(" + SHARED + b"\x91.",
    **{
        f"an element of {name}": name_of("builtins", name) + b"]" + SHARED + b"a\x85R."
        for name in ("set", "frozenset")
    },
    **{
        f"a pair of {name}": name_of(module, name) + b"]" + SHARED + b"N\x86a\x85R."
        for module, name in (("builtins", "dict"), ("collections", "OrderedDict"))
    },
    "a dict of the stack": b"(" + SHARED + b"Nd.",
    "shared tuples as a value": SHARED + b".",
    "shared lists as a value": b"(" + LISTS + b"t.",
    "a deep value": DEEP + b".",
    "shared tuples in a stand-in": name_of("other", "Class")
    + b")\x81"
    + SHARED
    + b"b.",
    "one state of many stand-ins": b"("
    + LONG
    + name_of("other", "Class")
    + b"\x94"
    + b"h\x01)\x81h\x00b" * 20_000
    + b"t.",
}


@pytest.mark.parametrize("content", INDEX_ATTACKS.values(), ids=list(INDEX_ATTACKS))
def test_an_index_of_a_few_bytes_that_takes_for_ever_is_refused(content):
    assert refusal_in_child(partial(unpickled, START + content), REFUSED)


@pytest.mark.parametrize("content", FOREIGN_ATTACKS.values(), ids=list(FOREIGN_ATTACKS))
def test_a_foreign_pickle_of_a_few_bytes_that_takes_for_ever_is_refused(content):
    assert refusal_in_child(partial(foreign_unpickled, START + content), REFUSED)


@pytest.mark.rest
def test_keys_that_were_chosen_to_have_one_hash_are_refused():
    pairs = one_hash(30_000)
    content = pickle.dumps(dict.fromkeys(pairs[:100]), 4)
    assert foreign_unpickled(content)[0] == dict.fromkeys(pairs[:100])
    items = b"".join(pickle.dumps(pair, 4)[11:-1] + b"N" for pair in pairs)
    load = partial(foreign_unpickled, START + b"}(" + items + b"u.")
    assert "are tuples" in refusal_in_child(load, REFUSED)
    size = name_of("torch", "Size")
    names = b"".join(
        INDEX_NAME
        + b"}("
        + text("fqn")
        + text("w")
        + text("offset")
        + size
        + pickle.dumps(pair, 4)[11:-1]
        + b"\x85RubN"
        for pair in pairs
    )
    load = partial(unpickled, START + b"}(" + names + b"u.")
    assert "more memory" in refusal_in_child(load, REFUSED)


def test_a_pickle_cannot_describe_a_storage_that_the_file_does_not_hold(tmp_path):
    many = b"J" + struct.pack("<i", 2**30)
    forged = b"(" + name_of("torch", "float32") + many + b"N" + text("place") + b"t"
    tensor = (
        name_of("torch._utils", "_rebuild_tensor_v2")
        + b"("
        + forged
        + b"K\x00"
        + many
        + b"\x85K\x01\x85\x89NtR."
    )
    with zipfile.ZipFile(tmp_path / "file.pt", "w") as archive:
        archive.writestr("x/data.pkl", START + tensor)
    with pytest.raises(CheckpointError, match="has no storage of the file"):
        read_torch_file(tmp_path / "file.pt")


def test_the_error_names_the_file(tmp_path):
    with zipfile.ZipFile(tmp_path / "file.pt", "w") as archive:
        archive.writestr("x/data.pkl", START + ATTACKS["a shared tuple as key"])
    call = partial(read_torch_file, tmp_path / "file.pt")
    why = "a key of a table in it is a tuple that holds a tuple"
    assert (
        refusal_in_child(call, CheckpointError)
        == f"{tmp_path / 'file.pt'} is refused or damaged: {why}."
    )


class Linked:
    """An object that refers to itself."""

    def __init__(self):
        self.parts = [self, {"whole": self}]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_tables_that_programs_write_are_read(protocol):
    shared = {f"option{n}": n for n in range(300)}
    content = {
        (1, "layer", None): 2,
        3: {4: (5, 6)},
        1.5: [True],
        None: b"7",
        torch.float32: 8,
        "set": {9, (10, 11)},
        "many": [shared] * 500,
        "nested": {"a": [{"b": ({"c": []},)}]},
        "large": {n: n for n in range(70_000)},
        "text": "x" * 100_000,
    }
    with bounded():
        found, ignored = foreign_unpickled(pickle.dumps(content, protocol))
    assert not ignored
    assert found.pop("set").keys() == content.pop("set")
    assert found == content
    linked, _ = foreign_unpickled(pickle.dumps(Linked(), protocol))
    assert (
        isinstance(linked, ForeignObject)
        and linked.state["parts"][1]["whole"] is linked
    )


@pytest.mark.parametrize("protocol", [2, 4])
def test_the_state_of_a_trained_optimizer_is_read(protocol, tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(5, 3)).sum().backward()
    optimizer.step()
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(content, tmp_path / "file.pt", pickle_protocol=protocol)
    found = read_torch_file(tmp_path / "file.pt").content
    assert found["optimizer"]["param_groups"] == content["optimizer"]["param_groups"]
    for number, state in content["optimizer"]["state"].items():
        for name, tensor in state.items():
            assert torch.equal(found["optimizer"]["state"][number][name].read(), tensor)
    assert list(found["model"]) == list(content["model"])


def test_a_table_becomes_a_dict_where_it_is_pickled_again():
    found, _ = foreign_unpickled(pickle.dumps({"a": {1: 2}}))
    assert type(pickle.loads(pickle.dumps(found))) is dict
