"""The table "DeepSpeed → here" of docs/use/engine.md: each name in it exists, as a method or as a value, as
it is written."""

import re
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from torch import nn

import megatron_ds
import megatron_ds.compat.deepspeed.zero_to_fp32
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.mesh import Mesh

pytestmark = pytest.mark.threads

PAGE = (Path(__file__).parents[2] / "docs" / "use" / "engine.md").read_text(
    encoding="utf-8"
)
OBJECTS = ("deepspeed", "megatron_ds", "engine", "optimizer", "loader")


def rows():
    table = PAGE.split("| DeepSpeed | here |\n|---|---|\n")[1].split("\n\n")[0]
    return [
        tuple(cell.strip() for cell in line.strip("|").split(" | "))
        for line in table.splitlines()
    ]


def names_in(cell):
    """("engine", "get_lr", True) of `engine.get_lr()`"""
    found = re.findall(r"`(\w+)\.([\w.]+)(\(\))?`", cell)
    return [
        (owner, name, bool(call)) for owner, name, call in found if owner in OBJECTS
    ]


@pytest.fixture(scope="module")
def objects():
    module = nn.Linear(2, 2)
    engine, optimizer, loader, _ = megatron_ds.initialize(
        model=module,
        mpu=Mesh(Grid(), 0),
        training_data=[torch.ones(2)] * 4,
        config={
            "train_batch_size": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        },
    )
    return {
        "deepspeed": megatron_ds,
        "megatron_ds": megatron_ds,
        "engine": engine,
        "optimizer": optimizer,
        "loader": loader,
    }


@pytest.mark.parametrize("theirs, ours", rows(), ids=lambda cell: cell[:30])
def test_every_name_in_the_table_exists(theirs, ours, objects):
    names = (names_in(theirs) if ours.startswith("the same") else []) + names_in(ours)
    assert names
    for owner, name, is_called in names:
        value = attrgetter(name)(objects[owner])
        if (
            isinstance(value, type)
            or owner == "engine"
            and name in ("module", "optimizer", "training_dataloader")
        ):
            continue
        assert callable(value) is is_called, (
            f"{owner}.{name} is written as a {'method' if is_called else 'value'}"
        )


def test_the_table_is_not_empty():
    assert len(rows()) > 15 and sum(len(names_in(theirs)) for theirs, _ in rows()) > 50
