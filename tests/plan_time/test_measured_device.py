"""What measure_device.py writes is a cluster, and the benchmark of planned seconds on CPUs compares with it."""

import json
from dataclasses import replace

import pytest
import torch
import yaml

from megatron_ds.extensions.plan_time.cluster import read_cluster
from tools import measure_device

pytestmark = pytest.mark.plan


@pytest.fixture
def small(monkeypatch):
    """Sizes that take no time."""
    monkeypatch.setattr(measure_device, "REPEATS", 2)
    sizes = {"ROWS": 16, "WIDTH": 16, "MOVED": 1 << 10, "ATTENTION": (16, 1, 2, 8)}
    for name, size in sizes.items():
        monkeypatch.setattr(measure_device, name, {"cpu": size})


def test_measured_values_are_those_of_a_device(small, tmp_path):
    clock = measure_device.Clock(torch.device("cpu"))
    device = measure_device.measured_device(clock)
    device["constants"]["page"] = measure_device.page_seconds(clock)
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump({"device": device}))
    read = read_cluster(str(file)).device
    assert read.processors == 0 and read.constants.product == 1
    assert read.constants.launch > 0 and read.constants.page >= 0
    assert read.bandwidth > 0 and read.peak_of(torch.bfloat16) > 0


def test_a_clock_takes_the_median_without_the_first_call(monkeypatch):
    """The calls end at these seconds; the first of them loads something."""
    times = iter([0, 100, 200, 203, 300, 301, 400, 402])
    monkeypatch.setattr(measure_device, "REPEATS", 3)
    monkeypatch.setattr(measure_device.time, "perf_counter", lambda: float(next(times)))
    assert measure_device.Clock(torch.device("cpu")).seconds(lambda: None) == 2


@pytest.mark.rest
@pytest.mark.processes
def test_two_ranks_measure_their_links(tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    assert measure_device.main(["--ranks", "2", "--out", str(file)]) == 0
    cluster = read_cluster(str(file))
    assert cluster.devices_per_host == 2 and cluster.link == 1
    assert cluster.inside > 0 and cluster.activations > 0 and cluster.latency > 0
    # Memory is returned in processes of their own.
    assert cluster.overlap == 0 and cluster.device.constants.page > 0


@pytest.mark.rest
def test_the_benchmark_prints_planned_seconds_beside_measured_ones(tmp_path):
    from benchmarks import planned_cpu_times

    cluster = read_cluster("h100")
    [one, two] = [planned_cpu_times.LAYOUTS[at] for at in (0, 2)]
    planned = planned_cpu_times.planned(one, cluster).seconds
    file = tmp_path / "steps.jsonl"
    records = [
        {"layout": one.key, "seconds": [planned / 2, planned * 5]},
        {"layout": one.key, "seconds": [planned * 2]},
        {"layout": two.key, "seconds": [planned / 4] * 3},
    ]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    steps = planned_cpu_times.read_steps(file)
    head, _, first, _, summary, fastest = planned_cpu_times.lines(steps, cluster, False)
    assert "| -50.0% |" in first and one.key in first and "quarters" in head
    assert "largest" in summary and fastest.startswith(f"fastest: {two.key}; planned:")


def test_new_pages_take_time_only_where_memory_is_returned():
    from megatron_ds.config import parse
    from megatron_ds.extensions.dry_run.world_plan import plan_world
    from megatron_ds.extensions.plan_time.recorded_work import Allocated, WorkRecorder
    from megatron_ds.extensions.plan_time.step_time import step_time
    from megatron_ds.pipeline.instruction import Op

    # Hidden states of 1 MiB, the least of a block with pages of its own.
    flags = (
        "--num-layers 1 --hidden-size 256 --num-attention-heads 4 --seq-length 1024 --micro-batch-size 1 "
        "--global-batch-size 1 --vocab-size 100 --attention-dropout 0 --hidden-dropout 0 --mock-data --lr 1e-4 "
        "--train-iters 10 --dry-run cpu"
    )
    cluster = read_cluster("h100")
    constants = replace(cluster.device.constants, page=1.0)
    paged = replace(cluster, device=replace(cluster.device, constants=constants))
    for added, is_returned in (("", False), ("--recompute-granularity full", True)):
        config = parse(f"{flags} {added}".split(), world_size=1)
        plan = plan_world(config, 0, "cpu", WorkRecorder)
        [stage] = plan.stages
        blocks = [
            event.nbytes
            for op in (Op.F, Op.B)
            for event in stage.run.work.of(op)
            if isinstance(event, Allocated)
        ]
        assert min(blocks) == 1 << 20
        seconds = step_time(plan, paged).seconds - step_time(plan, cluster).seconds
        assert seconds == pytest.approx(sum(blocks) if is_returned else 0)
        on_gpu = plan_world(config, 0, "cuda", WorkRecorder)
        assert step_time(on_gpu, paged).seconds == step_time(on_gpu, cluster).seconds
