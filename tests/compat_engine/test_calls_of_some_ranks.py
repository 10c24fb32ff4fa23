"""Calls that only some ranks make end on all of them within the program's timeout, and are named."""

import os
import re
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import nn

import megatron_ds
from megatron_ds.errors import CommunicationError
from megatron_ds.mpu.mesh import set_mesh
from tests.harness.limits import HUNG, VAIN
from tests.harness.processes import run_processes

pytestmark = pytest.mark.processes


def start(rank, folder):
    """Start torch.distributed, as a program that does so itself."""
    import torch.distributed as dist

    store = dist.FileStore(os.path.join(folder, "store"), 2)
    # Both ranks are here before the timeout of the group counts.
    store.set(f"rank {rank}", "here")
    store.wait(["rank 0", "rank 1"], timedelta(seconds=HUNG))
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=VAIN)
    )


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x, chosen):
        return sum(self.experts[i](x) for i in chosen)


def make_engine(stage, **zero):
    torch.manual_seed(0)
    engine, *_ = megatron_ds.initialize(
        model=Experts(),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {
                "stage": stage,
                "stage3_param_persistence_threshold": 0,
                **zero,
            }
            if stage == 3
            else {"stage": stage},
        },
    )
    return engine


def train(engine, chosen=(0, 1, 2, 3)):
    engine.backward(engine(torch.ones(2, 8), chosen).square().mean())
    engine.step()


def gather(engine):
    with engine.gathered_parameters():
        pass


CALLS = {
    "save_checkpoint": lambda engine: engine.save_checkpoint(tempfile.mkdtemp()),
    "full_state_dict": lambda engine: engine.full_state_dict(),
    "gathered_parameters": gather,
    "step": train,
}


def call_on_one_rank(rank, world, folder, calls, stage, shares, chosen=None):
    """The error of this rank."""
    import torch.distributed as dist

    if not shares:  # as on two hosts
        from megatron_ds.mpu import transport

        transport.share_pages, kept = lambda *_: None, transport.share_pages
    start(rank, folder)
    try:
        engine = make_engine(stage)
        if chosen is None:
            train(engine)
        if chosen is None:
            CALLS[calls[rank]](engine)
            train(engine)
        else:
            train(engine, chosen[rank])
    except CommunicationError as error:
        return str(error)
    finally:
        if not shares:
            transport.share_pages = kept
        set_mesh(None)
        dist.destroy_process_group()
    return ""


@pytest.mark.parametrize(
    "calls, stage, shares",
    [
        (("save_checkpoint", "step"), 1, True),
        (("step", "full_state_dict"), 3, False),
        (("gathered_parameters", "step"), 3, False),
    ],
)
def test_a_call_that_one_rank_makes_ends_within_the_timeout_and_is_named(
    calls, stage, shares, tmp_path
):
    ended = run_processes(
        2, call_on_one_rank, str(tmp_path), calls, stage, shares, joined=False
    )
    for rank, call in enumerate(calls):
        name = (
            "(forward|backward|step)"
            if call in ("step", "gathered_parameters")
            else call
        )
        named = [re.search(rf"rank {rank} in engine\.{name} ", text) for text in ended]
        # The error of a rank whose peer has ended before it names its own call alone.
        assert any(named)


@pytest.mark.parametrize(
    "chosen", [([0, 1], [1, 2]), ([0, 1], [1, 2, 3]), ([0, 1], [1, 0])]
)
def test_layers_that_ranks_gather_in_different_orders_are_an_error_with_advice(
    chosen, tmp_path
):
    for text in run_processes(
        2, call_on_one_rank, str(tmp_path), (), 3, False, chosen, joined=False
    ):
        assert "megatron_ds.utils.set_z3_leaf_modules(model, [Class])" in text


def initialize_on_rank_0(rank, world, folder):
    import torch.distributed as dist

    start(rank, folder)
    try:
        if rank:
            while not Path(folder, "error").exists():
                time.sleep(0.05)
        else:
            make_engine(1)
    except CommunicationError as error:
        Path(folder, "error").touch()
        return str(error)
    finally:
        set_mesh(None)
        dist.destroy_process_group()


def test_an_engine_that_one_rank_makes_ends_within_the_timeout(tmp_path):
    text, _ = run_processes(2, initialize_on_rank_0, str(tmp_path), joined=False)
    assert text.startswith("rank 0 in initialize: the ") and "rank 1 is stuck" in text
