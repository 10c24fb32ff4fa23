"""Seconds of products, messages, phases and steps: closed forms, a published table, and files that are refused."""

import json
from dataclasses import replace

import pytest
import torch

from benchmarks.published_times import TABLES, plan_of
from megatron_ds.config import parse
from megatron_ds.errors import ConfigError
from megatron_ds.extensions.dry_run.world_plan import plan_world
from megatron_ds.extensions.plan_time.cluster import Cluster, read_cluster
from megatron_ds.extensions.plan_time.device import Constants, Device, device_of
from megatron_ds.extensions.plan_time.link_time import Links
from megatron_ds.extensions.plan_time.recorded_work import (
    Awaited,
    Begun,
    Call,
    WorkRecorder,
)
from megatron_ds.extensions.plan_time.stage_time import phase_time
from megatron_ds.extensions.plan_time.step_time import StepTime, step_time
from megatron_ds.extensions.plan_time.work_time import seconds_of
from megatron_ds.mpu.grid import Grid
from megatron_ds.ops.work import CallWork, Product
from tests.harness.limits import HUNG

pytestmark = pytest.mark.plan

# A device on which one FLOP and one byte take a second, and a launch nothing.
UNIT = Device("unit", 1e9, {"float32": 1.0}, 1.0, 0, Constants(1.0, 1.0, 1.0, 0.0))
CLUSTER = Cluster(UNIT, 4, inside=10.0, outside=1.0, latency=0.0, link=1.0)
SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --micro-batch-size 1 "
    "--global-batch-size 8 --vocab-size 1000 --attention-dropout 0 --mock-data --lr 1e-4 --train-iters 10"
)


def timed(flags: str, world: int, cluster: Cluster = CLUSTER) -> StepTime:
    """Return the time of a step of a small model."""
    config = parse(f"{SMALL} {flags}".split(), world_size=world)
    return step_time(plan_world(config, 0, "cuda", WorkRecorder), cluster)


# ---- CallWork.


def test_a_product_takes_its_flops_where_it_is_not_cut_into_tiles():
    assert seconds_of(CallWork((Product(3, 4, 5, 6),)), UNIT) == 2 * 3 * 4 * 5 * 6


def test_the_last_round_of_tiles_keeps_all_processors_busy():
    tiled = replace(UNIT, processors=100)
    one = 2.0 * 256 * 128 * 64
    whole = seconds_of(CallWork((Product(1, 2560, 1280, 64),)), tiled)
    assert whole == 100 * one
    # One row more begins a second round: with smaller tiles less is idle.
    more = seconds_of(CallWork((Product(1, 2561, 1280, 64),)), tiled)
    assert 1.3 * whole < more <= 2 * whole


def test_work_is_not_faster_than_its_bytes():
    assert seconds_of(CallWork((Product(1, 1, 1, 1),), nbytes=50), UNIT) == 50
    slow = replace(UNIT, constants=Constants(1.0, 1.0, 0.5, 7.0))
    assert seconds_of(CallWork(nbytes=50), slow) == 107


# ---- Links.


@pytest.mark.parametrize(
    "axes, size, speed",
    [("tp", 2, 10.0), ("tp", 4, 10.0), ("dp", 4, 2.0), ("dp-cp", 4, 2.0)],
)
def test_rings_have_the_links_of_the_hosts_that_they_visit(axes, size, speed):
    grid = Grid(tp=size, dp=4) if axes == "tp" else Grid(tp=2, dp=4)
    seconds = Links(CLUSTER, grid).seconds("all_reduce", axes, size, 100.0)
    assert seconds == pytest.approx(100.0 * 2 * (size - 1) / size / speed)


def test_activations_within_a_host_may_have_a_speed_of_their_own():
    links = Links(replace(CLUSTER, activations=20.0), Grid(tp=2, dp=2))
    assert links.seconds("all_gather", "tp", 2, 40.0) == pytest.approx(1.0)
    assert links.seconds("all_gather", "dp", 2, 40.0) == pytest.approx(2.0)


# ---- Phases.


def test_a_message_overlaps_with_what_is_computed_before_the_wait():
    links = Links(CLUSTER, Grid(tp=2))
    computed = lambda flops: Call("p", "torch", CallWork(scores=flops))
    message = Begun("all_gather", "tp", 2, 100, 0)  # five seconds
    at_once = phase_time([message, Awaited(0), computed(8.0)], UNIT, links)
    assert at_once.seconds == 13.0 and at_once.waits == {"tp": 5.0}
    later = phase_time([message, computed(3.0), Awaited(0), computed(5.0)], UNIT, links)
    assert later.seconds == 10.0 and later.waits == {"tp": 2.0}
    hidden = phase_time([message, computed(8.0), Awaited(0)], UNIT, links)
    assert hidden.seconds == 8.0 and hidden.waits == {}


def test_a_message_keeps_its_device_for_the_part_that_does_not_overlap():
    computed = Call("p", "torch", CallWork(scores=8.0))
    message = Begun("all_gather", "tp", 2, 100, 0)  # five seconds
    for overlap, seconds in ((1.0, 8.0), (0.6, 10.0), (0.0, 13.0)):
        links = Links(replace(CLUSTER, overlap=overlap), Grid(tp=2))
        time = phase_time([message, computed, Awaited(0)], UNIT, links)
        assert time.seconds == pytest.approx(seconds)
        assert sum(time.waits.values()) == pytest.approx(seconds - 8.0)


# ---- Steps.


def test_a_step_of_one_rank_is_its_micro_batches_and_the_update():
    time = timed("", 1)
    [phases] = time.phases
    assert time.pipeline == pytest.approx(8 * sum(p.seconds for p in phases.values()))
    state = time.plan.worst.state
    assert (
        time.update
        == 2 * (state.masters + state.optimizer + state.gradients) + state.parameters
    )
    assert time.reduction == time.gather == 0
    assert sum(time.shares.values()) == pytest.approx(1)


def test_a_pipeline_waits_for_its_slowest_rank_and_is_filled_once():
    fast = replace(CLUSTER, inside=1e30, outside=1e30)
    time = timed("--pipeline-model-parallel-size 4", 4, fast)
    of_stage = [sum(p.seconds for p in phases.values()) for phases in time.phases]
    slowest = max(of_stage)
    assert 8 * slowest < time.pipeline <= 7 * slowest + sum(of_stage)
    idle = 1 - 8 * sum(of_stage) / 4 / time.pipeline
    assert time.shares["bubble"] == pytest.approx(idle * time.pipeline / time.seconds)


def test_data_parallel_gradients_are_exposed_without_overlap():
    hidden = timed("--reduce-bucket-size 20000", 4)
    exposed = timed("--no-overlap-grad-reduce", 4)
    nbytes = sum(
        count
        for (operation, axes, _), count in exposed.plan.worst.traffic.bytes.items()
        if axes == "dp-cp" and operation == "all_reduce"
    )
    assert exposed.reduction == pytest.approx(nbytes * 2 * 3 / 4 / 10.0)
    assert hidden.reduction < exposed.reduction / 5


def test_without_overlap_data_parallel_messages_are_exposed():
    overlapped = replace(CLUSTER, inside=1e4, outside=1e4)
    exposed = replace(overlapped, overlap=0.0)
    for stage in (0, 1, 3):
        flags = f"--reduce-bucket-size 20000 --zero-stage {stage}"
        hidden = timed(flags, 4, overlapped).seconds
        time = timed(flags, 4, exposed)
        without = timed(f"{flags} --no-overlap-grad-reduce", 4, exposed)
        assert time.seconds > hidden
        assert time.seconds == pytest.approx(without.seconds)
        assert sum(time.shares.values()) == pytest.approx(1)


def test_stage_3_waits_for_gathers_on_slow_links():
    slow = replace(CLUSTER, inside=1e-3)
    assert timed("--zero-stage 3", 4, slow).pipeline > 10 * timed("", 4, slow).pipeline


# ---- The command, and its files.


def test_the_plan_prints_seconds_and_writes_them(tmp_path, capfd):
    from megatron_ds.training.pretrain import pretrain

    file = tmp_path / "plan.json"
    flags = f"{SMALL} --dry-run --world-size 2 --plan-time --cluster a100-80g --plan-json {file}"
    assert pretrain(flags.split()) == 0
    text = "".join(capfd.readouterr())
    values = json.loads(file.read_text())
    assert "time of a step on 2 x NVIDIA A100 SXM4 80GB" in text
    assert f"{values['seconds']:.3f} s" in text
    assert values["fits"] and "fits 80 GB" in text


@pytest.mark.parametrize(
    "values, named",
    [
        ({"name": "x", "memory": 1, "peak": {"float16": 1}, "bandwidth": 1}, "float32"),
        ({"name": "x", "memory": -1, "peak": {"float32": 1}, "bandwidth": 1}, "memory"),
        ({"name": "x", "peak": {"float32": 1}, "bandwidth": 1}, "memory"),
        ({"name": "x", "color": 1, "peak": {"float32": 1}}, "color"),
        ({"name": "x", "constants": [1]}, "constants"),
    ],
)
def test_files_of_devices_are_checked(values, named):
    with pytest.raises(ConfigError, match=named):
        device_of(values, "x.yaml")


def test_a_share_of_messages_is_at_most_one(tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text("device: h100\noverlap: 1.5\n")
    with pytest.raises(ConfigError, match="overlap is 1.5"):
        read_cluster(str(file))


def test_all_clusters_of_the_package_can_be_read():
    from megatron_ds.extensions.plan_time.cluster import FOLDER

    names = [path.stem for path in FOLDER.glob("*.yaml")]
    assert len(names) >= 7
    for name in names:
        assert read_cluster(name).device.peak_of(torch.float32) > 0


def test_an_unknown_cluster_is_named_with_those_of_the_package():
    with pytest.raises(ConfigError, match="a100-80g.*h100"):
        read_cluster("a1000")


# Small enough to be planned in a test.
PUBLISHED = {row.name: row for row in TABLES["narayanan-2021"].rows[:3]}


@pytest.mark.rest
@pytest.mark.timeout(HUNG)
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_speeds_are_planned_within_four_percent(name):
    row = PUBLISHED[name]
    time = step_time(plan_of(row, is_of_2021=True), read_cluster("a100-80g"))
    assert time.seconds == pytest.approx(row.seconds, rel=0.04)
