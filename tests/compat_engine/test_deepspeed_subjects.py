"""Small programs of tests/deepspeed_scripts/subjects.py compute what they compute under DeepSpeed 0.19.8,
after each update: losses, weights, and what checkpoints give back.

tests/golden/deepspeed_programs.json has DeepSpeed's numbers; tests/harness/deepspeed_subjects.py makes them.
`DIFFERENT` lists what is otherwise here, and what it equals instead.
"""

import json
import os
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import megatron_ds
from megatron_ds.mpu.mesh import set_mesh
from tests.deepspeed_scripts.subjects import RANKS
from tests.harness.deepspeed_subjects import GOLDEN, cases, run_one
from tests.harness.limits import HUNG
from tests.harness.processes import run_processes

pytestmark = pytest.mark.processes

EXPECTED = json.loads(GOLDEN.read_text())
ZERO_GRADS = [name for name, _ in cases() if name.startswith("zero_grad")]
# Programs with zero_grad and one micro-batch run at two stages, for their number.
RUN = [
    (name, stage)
    for name, stage in cases()
    if name not in ZERO_GRADS or name.endswith("_2") or stage in (0, 3)
]
# (program, stage) → why DeepSpeed has other numbers or an error, and whose numbers there are right.
DROPS = "DeepSpeed drops gradients of micro-batches; zero_grad never does so here"
DIFFERENT = {
    **{
        (name, stage): (DROPS, "plain 0" if name.endswith("_1") else "accumulation 0")
        for name in ZERO_GRADS
        for stage in (0, 1, 3)
    },
    ("gan", 0): (
        "DeepSpeed refuses modules that another engine freezes at stage 0",
        "gan 1",
    ),
    ("torchs_backward", 0): ("DeepSpeed refuses loss.backward() there", "plain 0"),
    ("compiled", 3): ("DeepSpeed fails there", "compiled 2"),
    ("custom_load", 3): (
        "DeepSpeed's shards are not whole in custom_load_fn",
        "custom_load 2",
    ),
}


@contextmanager
def as_launched(rank):
    """The environment that a launcher gives a rank; afterwards no mesh is left."""
    there = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
    }
    os.environ |= there
    try:
        yield
    finally:
        set_mesh(None)
        for name in there:
            del os.environ[name]


def run_all(rank, world, folder):
    with as_launched(rank):
        return {
            f"{name} {stage}": run_one(megatron_ds, name, stage, Path(folder), rank)
            for name, stage in RUN
        }


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What rank 0 has, of all programs."""
    return run_processes(
        RANKS, run_all, str(tmp_path_factory.mktemp("subjects")), timeout=HUNG
    )[0]


def assert_same(name, found, expected):
    limit = 2e-2 if name.startswith("bf16") else 1e-5
    assert len(found["numbers"]) == len(expected["numbers"])
    for update, (row, wanted) in enumerate(
        zip(found["numbers"], expected["numbers"], strict=True)
    ):
        torch.testing.assert_close(
            torch.tensor(row),
            torch.tensor(wanted),
            rtol=limit,
            atol=limit,
            msg=lambda text, update=update: f"{name}, update {update}: {text}",
        )
    assert found["facts"] == expected["facts"], name


def test_programs_compute_as_under_deepspeed(found):
    for name, stage in RUN:
        key = f"{name} {stage}"
        _, instead = DIFFERENT.get((name, stage), ("", key))
        assert_same(key, found[key], EXPECTED[instead])
    assert EXPECTED["client_state 1"]["facts"]["nothing"] == [None, None]


def test_what_is_listed_as_different_is_different_in_deepspeed():
    """In some of the places of zero_grad, and everywhere else."""

    def agrees(key, instead):
        if "error" in EXPECTED[key]:
            return False
        rows = (
            torch.tensor(EXPECTED[key]["numbers"]),
            torch.tensor(EXPECTED[instead]["numbers"]),
        )
        return torch.allclose(*rows, rtol=1e-3, atol=1e-3)

    same = [
        at
        for at, (why, instead) in DIFFERENT.items()
        if agrees(f"{at[0]} {at[1]}", instead)
    ]
    assert all(name in ZERO_GRADS for name, _ in same) and len(same) < len(DIFFERENT)
