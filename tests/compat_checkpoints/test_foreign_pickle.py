"""Files of other programs are read without importing or executing anything in them."""

import argparse
import collections
import enum
import io
import os
import pickle
import struct
import sys
import types
import zipfile

import numpy as np
import pytest
import torch

from megatron_ds.compat.conversion.files.foreign_pickle import ForeignObject, fields_of
from megatron_ds.compat.conversion.files.torch_file import read_torch_file
from megatron_ds.errors import CheckpointError

pytestmark = pytest.mark.plan

FORMATS = {"archive": True, "sequence": False}


@pytest.fixture(params=FORMATS)
def save(request, tmp_path):
    def write(content):
        torch.save(
            content,
            tmp_path / "file.pt",
            _use_new_zipfile_serialization=FORMATS[request.param],
        )
        return tmp_path / "file.pt"

    return write


def foreign_class(name, base=object):
    """A class of a module that exists only while it is pickled."""
    module = sys.modules.setdefault("other_program", types.ModuleType("other_program"))
    members = {"Mode": {"A": 1, "B": 2}}.get(name)
    kind = enum.Enum(name, members) if members else type(name, (base,), {})
    kind.__module__ = module.__name__
    setattr(module, name, kind)
    return kind


def test_tensors_of_every_sort_are_the_saved_ones(save):
    base = torch.arange(24.0).view(4, 6)
    tensors = {
        "plain": torch.randn(3, 5),
        "half": torch.randn(7).half(),
        "bf16": torch.randn(2, 3).bfloat16(),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(3),
        "view": base[1:3, 2:5],
        "turned": base.t(),
        "parameter": torch.nn.Parameter(torch.randn(2, 2)),
        "bits": torch.tensor([True, False]),
    }
    found = read_torch_file(
        save({"model": collections.OrderedDict(tensors), "list": [tensors["half"]]})
    )
    assert found.ignored == ()
    for name, tensor in tensors.items():
        stored = found.content["model"][name]
        assert (stored.shape, stored.dtype) == (tuple(tensor.shape), tensor.dtype)
        assert torch.equal(stored.read(), tensor.detach())
    assert torch.equal(found.content["list"][0].read(), tensors["half"])


def test_an_archive_inside_a_larger_file_is_read(tmp_path):
    content = io.BytesIO()
    torch.save(torch.arange(9), content)
    (tmp_path / "whole").write_bytes(b"x" * 101 + content.getvalue() + b"y" * 77)
    found = read_torch_file(tmp_path / "whole", 101, len(content.getvalue()))
    assert torch.equal(found.content.read(), torch.arange(9))


def test_objects_of_other_programs_become_stand_ins_that_are_listed(save):
    address, mode = foreign_class("Address"), foreign_class("Mode")
    item = address()
    item.numel, item.start = 7, 3
    args = argparse.Namespace(num_layers=2, mode=mode.B, where=address)
    state = np.random.RandomState(1).get_state()
    path = save({"args": args, "items": [item], "random": state, "set": {1, 2}})
    for name in [name for name in sys.modules if name.startswith("other_program")]:
        del sys.modules[name]
    found = read_torch_file(path)
    assert fields_of(found.content["args"])["num_layers"] == 2
    assert fields_of(found.content["args"])["mode"].args in ((2,), ("B",))
    assert fields_of(found.content["items"][0]) == {"numel": 7, "start": 3}
    assert found.content["set"].keys() == {1, 2}
    assert isinstance(found.content["random"][1], ForeignObject)
    assert {"other_program.Address", "other_program.Mode", "argparse.Namespace"} <= set(
        found.ignored
    )
    assert "other_program" not in sys.modules


class Calls:
    """Pickled as a call of a function."""

    def __init__(self, function, *args):
        self.function, self.args = function, args

    def __reduce__(self):
        return self.function, self.args


@pytest.mark.parametrize(
    "code",
    [
        Calls(os.system, "touch executed"),
        Calls(eval, "open('executed', 'w')"),
        Calls(exec, "1"),
        Calls(bytearray, 10),
        Calls(__import__, "os"),
        Calls(torch.load, "x"),
        Calls(np.load, "x"),
        Calls(torch.hub.load, "x", "y"),
        Calls(io.open, "executed", "w"),
        Calls(zipfile.ZipFile, "executed", "w"),
    ],
    ids=lambda code: code.function.__name__,
)
def test_a_file_that_names_code_is_refused_and_nothing_runs(
    code, save, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    path = save({"model": {"weight": torch.ones(2)}, "args": code})
    with pytest.raises(
        CheckpointError,
        match=r"which no checkpoint needs: loading it with another program "
        r"would run code",
    ):
        read_torch_file(path)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "opcode",
    [
        b"r" + struct.pack("<I", 2**30),
        b"\x96" + struct.pack("<Q", 2**40),
        b"\x8b" + struct.pack("<i", 2**30),
        b"(i os\nsystem\n",
        b"\x84\0\0\0\1",
    ],
)
def test_opcodes_that_allocate_or_call_are_refused(opcode, tmp_path):
    with zipfile.ZipFile(tmp_path / "file.pt", "w") as archive:
        archive.writestr("x/data.pkl", b"\x80\x02N" + opcode + b".")
    with pytest.raises(
        CheckpointError, match=r"file\.pt is refused or damaged: byte [34] of"
    ):
        read_torch_file(tmp_path / "file.pt")


def test_every_truncation_is_an_error(save):
    path = save({"model": {"weight": torch.ones(300)}, "iteration": 3})
    whole = path.read_bytes()
    for length in (*range(0, len(whole), 97), len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"file\.pt is refused or damaged"):
            read_torch_file(path)


@pytest.mark.parametrize(
    "shape, strides, offset",
    [
        ((10**12,), (1,), 0),
        ((4, 4), (1, 1), 0),
        ((2, 2), (2, 1), 7),
        ((3,), (-1,), 2),
        ((2**40, 0), (0, 0), 0),
        ((2**32, 2**32), (0, 0), 0),
        ((8,), (0,), -1),
    ],
)
def test_a_tensor_larger_than_its_storage_is_refused(shape, strides, offset, tmp_path):
    class Stored:
        def __reduce_ex__(self, _):
            return torch._utils._rebuild_tensor_v2, (
                Storage(),
                offset,
                shape,
                strides,
                False,
                None,
            )

    class Storage:
        pass

    class Pickler(pickle.Pickler):
        def persistent_id(self, item):
            return (
                ("storage", torch.FloatStorage, "0", "cpu", 8)
                if isinstance(item, Storage)
                else None
            )

    content = io.BytesIO()
    Pickler(content, protocol=2).dump(Stored())
    with zipfile.ZipFile(tmp_path / "file.pt", "w") as archive:
        archive.writestr("x/data.pkl", content.getvalue())
        archive.writestr("x/data/0", bytes(32))
    if shape == (2**40, 0):
        assert read_torch_file(tmp_path / "file.pt").content.read().numel() == 0
        return
    with pytest.raises(
        CheckpointError,
        match="exceeds its storage of 8 elements|the shape or the strides",
    ):
        read_torch_file(tmp_path / "file.pt")


def test_a_storage_larger_than_its_record_is_refused(tmp_path):
    torch.save(torch.ones(50), tmp_path / "file.pt")
    with zipfile.ZipFile(tmp_path / "file.pt") as archive:
        records = {
            record.filename: archive.read(record) for record in archive.infolist()
        }
    with zipfile.ZipFile(tmp_path / "short.pt", "w") as archive:
        for name, value in records.items():
            archive.writestr(name, value[:-1] if name.endswith("data/0") else value)
    with pytest.raises(
        CheckpointError, match="data/0 is 199 bytes long, and a tensor needs 200"
    ):
        read_torch_file(tmp_path / "short.pt")
    with zipfile.ZipFile(
        tmp_path / "deflated.pt", "w", zipfile.ZIP_DEFLATED
    ) as archive:
        for name, value in records.items():
            archive.writestr(name, value)
    with pytest.raises(CheckpointError, match="is compressed"):
        read_torch_file(tmp_path / "deflated.pt")
