"""What a dry run says of every rank, against real ranks that train: traffic call for call and byte for byte,
state to the byte."""

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from megatron_ds.config import Source
from megatron_ds.extensions.dry_run.world_plan import plan_world
from megatron_ds.mpu.group import Traffic
from megatron_ds.mpu.mesh import Mesh
from megatron_ds.pipeline.schedules import SCHEDULES
from tests.harness.alive_bytes import AliveBytes
from tests.harness.engines import config_of, on_engines
from tests.harness.layout_comparison import random_samples, train_layout
from tests.harness.samples import in_turns
from tests.harness.threads import ThreadTransport, run_ranks
from tests.harness.tiny_jobs import VOCAB, tiny_job

pytestmark = [pytest.mark.threads, pytest.mark.one_in(6)]

LAYERS, BATCH, STEPS = 4, 12, 2
MICROBATCHES = 3  # on each rank, whatever the layout
LAYOUTS = [
    "tp=2",
    "tp=2,sp=1",
    "pp=3,dp=2",
    "dp=3,mbs=2",
    "tp=2,pp=2,dp=2,sp=1,zero=1",
    "tp=2,sp=1,pp=2,dp=2,zero=2",
    "tp=2,sp=1,pp=2,dp=2,zero=3",
    "pp=2,dp=2,zero=3,pin=on",
    "dp=4,zero=3,hpz=2",
    "dp=2,zero=2,accumulate=full,comm=bf16",
    "tp=2,pp=2,recompute=full",
    "tp=2,sp=1,recompute=selective,zero=3,dp=2",
    "pp=2,dp=2,zero=3,bucket=1000,prefetch=0",
    "tp=2,dp=2,zero=3,persist=0,accumulate=full",
    "pp=4,schedule=gpipe,zero=1,dp=2,layout=E|t|t*3|L",
    "dp=2,zero=1,grads=bf16",
    "cp=2,dp=2,zero=2",
    "cp=2,comm_type=a2a,tp=2,sp=1,recompute=selective",
    "cp=2,comm_type=all_gather,pp=2,zero=3",
    "cp=3,recompute=full,mbs=2",
    "cp=4,comm_type=a2a,zero=1",
    "tp=2,pp=2,dp=2,zero=3,qw=1,qg=1",
]


def parsed(job: list[str], layout: str):
    """The config of a job whose batch is as large as the layout needs."""
    config = config_of(job, layout)
    samples = config.train.micro_batch_size * config.data_parallel_size
    return config.with_values(
        {"train.global_batch_size": MICROBATCHES * samples},
        Source("derived", "the test"),
    )


def run(config, samples=None):
    """Per rank what its mesh counted, and its engine.  samples: random ones, unless they are given"""
    grid = config.grid()
    samples = samples or random_samples(
        4 * config.train.global_batch_size, config.model.seq_length, VOCAB, seed=1
    )

    def main(rank, world):
        mesh, engines = Mesh(grid, rank, world.connect, torch.device("cpu")), []

        def watch(engine):
            engines.append(engine)
            mesh.traffic.clear()

        train_layout(config, mesh, STEPS, samples, watch=watch)
        return mesh.traffic, engines[0]

    return run_ranks(config.world_size, main)


def check(job: list[str], layout: str, samples=None) -> Traffic:
    """Compare every rank; the planned traffic of rank 0.  samples: those of `run`"""
    config = parsed(job, layout)
    stages = config.grid().size(
        "tp", "cp"
    )  # ranks that hold the same stage in all plans
    worlds = [plan_world(config, rank, "cpu") for rank in range(stages)]
    for rank, (traffic, engine) in enumerate(run(config, samples)):
        plan = worlds[rank % stages].rank_plan(rank)
        assert {
            key: STEPS * count for key, count in plan.traffic.bytes.items()
        } == dict(traffic.bytes)
        assert {
            key: STEPS * count for key, count in plan.traffic.calls.items()
        } == dict(traffic.calls)
        assert plan.state == engine.optimizer.memory()
        assert plan.parameters == sum(p.numel() for p in engine.parameters)
    return worlds[0].rank_plan(0).traffic


@pytest.mark.parametrize("number, layout", list(enumerate(LAYOUTS)), ids=str)
def test_every_rank_sends_and_holds_what_was_planned(number, layout):
    """GPT-2 style in fp32, tied, and Llama style in bf16, untied, in turns."""
    style = (
        ("llama", "bf16", True, 0.0)
        if number % 2 or "16" in layout
        else ("gpt2", "fp32", False, 0.1)
    )
    # Plans of ranks that share sequences are the longest, and their layers are alike.
    layers = 2 if layout.startswith("cp") else LAYERS
    check(tiny_job(*style, layers, BATCH, STEPS), layout)


DROP = "--random-ltd --random-ltd-min-tokens 12 --random-ltd-max-tokens 12 --random-ltd-steps 1".split()


def test_context_ranks_that_drop_tokens_send_what_was_planned():
    check(
        [*tiny_job("llama", "fp32", True, 0.1, LAYERS, BATCH, STEPS), *DROP],
        "cp=2,recompute=full",
    )


@pytest.mark.parametrize(
    "layout", ["tp=2,sp=1,pp=2", "tp=2,sp=1,recompute=full", "tp=2,pp=2,schedule=zb-h1"]
)
def test_blocks_that_drop_tokens_send_what_was_planned(layout):
    """Each step keeps the same number of tokens, as the last one does, for which the plan is."""
    job = tiny_job("llama", "fp32", True, 0.1, LAYERS, BATCH, STEPS)
    dropping = check([*job, *DROP], layout)
    whole = plan_world(parsed(job, layout), 0, "cpu").rank_plan(0).traffic
    assert sum(whole.bytes.values()) > sum(dropping.bytes.values())


# ZeRO 3 gathers at the instructions of a schedule; below it a schedule orders messages of stages alone.
@pytest.mark.parametrize(
    "schedule, zero",
    [(name, 3) for name in SCHEDULES.names()] + in_turns(SCHEDULES.names(), [0, 2]),
)
def test_so_it_does_under_every_schedule(schedule, zero):
    ranks = "tp=2,sp=1,pp=2" if zero == 0 else "dp=2,pp=2"
    check(
        tiny_job("gpt2", "fp32", False, 0.0, LAYERS, BATCH, STEPS),
        f"{ranks},zero={zero},schedule={schedule}",
    )


@pytest.mark.parametrize(
    "layout", ["tp=2,pp=2,dp=2,zero=1", "dp=4,zero=3,hpz=2", "tp=2,zero=0"]
)
def test_matrices_that_an_optimizer_gathers_are_planned(layout):
    """In each step with a learning rate above 0."""
    check(
        [
            *tiny_job("llama", "fp32", True, 0.0, 2, BATCH, STEPS),
            *"--optimizer muon --lr-warmup-iters 0".split(),
        ],
        layout,
    )


@pytest.mark.parametrize(
    "layout", ["tp=2,pp=2,dp=2,zero=1", "dp=2,zero=0", "dp=2,zero=2,offload=cpu"]
)
def test_norms_that_an_optimizer_asks_for_are_planned(layout):
    check(
        [*tiny_job("gpt2", "fp32", False, 0.0, 2, BATCH, STEPS), "--optimizer", "lamb"],
        layout,
    )


@pytest.mark.parametrize("layout", ["tp=2,dp=2,zero=1,sp=1", "dp=3,zero=2,grads=bf16"])
def test_an_update_of_matrices_needs_the_planned_bytes(layout, monkeypatch):
    """Bytes of all tensors that are alive during the update besides the state, of each rank. What threads
    copy to one another does not count."""
    send = ThreadTransport.all_to_all
    dtype = "bf16" if "bf16" in layout else "fp32"
    config = parsed(
        [*tiny_job("llama", dtype, True, 0.0, 2, BATCH, STEPS), "--optimizer", "muon"],
        layout,
    )

    def uncounted(transport, *tensors):
        with _disable_current_modes():
            return send(transport, *tensors)

    def main(engine):
        with AliveBytes(peak=True) as alive:
            engine.optimizer.resident.step(1e-3, 0.1, 2.0)
        return alive.peak

    monkeypatch.setattr(ThreadTransport, "all_to_all", uncounted)
    most = on_engines(config, main)
    for rank in (0, config.world_size - 1):
        plan = plan_world(config, rank, "cpu").rank_plan(rank)
        assert plan.in_update == most[rank] > 0
        assert plan.peak >= plan.state.total + plan.buffers + plan.in_update
