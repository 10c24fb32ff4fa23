"""A student learns from a teacher at every layout as in one process, which holds and sends what was planned."""

import pytest
import torch

from megatron_ds.config import parse
from megatron_ds.extensions.distillation import teacher_config as teachers
from megatron_ds.extensions.distillation.teacher import teach
from megatron_ds.extensions.dry_run.world_plan import plan_world
from megatron_ds.mpu.mesh import Mesh
from megatron_ds.training.build import build_replica
from tests.harness.layout_comparison import (
    Difference,
    difference,
    merge,
    mock_samples,
    parse_layout,
    train_layout,
)
from tests.harness.threads import run_ranks
from tests.harness.tiny_jobs import tiny_job

pytestmark = [pytest.mark.threads, pytest.mark.one_in(4)]

SIZE = 4
STEPS = 2
LIMIT = Difference(loss=1e-5, grad_norm=1e-5, weights=1e-5)
LORA = "--lora-rank 2 --lora-alpha 8"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --disable-bias-linear"
FULL = "--distill-weight 0.7 --distill-temperature 2"
LIKELIEST = f"{FULL} --distill-top-k 5"


@pytest.fixture(scope="module", autouse=True)
def teacher():
    """In place of a checkpoint: other layers, heads and widths than those of the students."""
    job = tiny_job("llama", "fp32", True, 0.0, 4, SIZE, 20)
    wider = "--hidden-size 48 --num-attention-heads 8 --num-query-groups 4".split()
    more = "--init-method-std 0.3 --micro-batch-size 1".split()
    model = parse([*job, *wider, *more], world_size=1).model
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(teachers, "saved_model", lambda folder: model)
        yield


@pytest.fixture(scope="module")
def one_process():
    """Runs of one process, by job and layout."""
    return {}


def configured(job: list[str], layout: str):
    request = parse_layout(layout, mbs="1")
    return parse([*job, *request.flags], world_size=request.world_size)


def run(job: list[str], layout: str):
    """(trace, weights), and of each rank (its traffic, the student, the teacher)."""
    config = configured(job, layout)
    grid = config.grid()
    samples = mock_samples(config, 4 * SIZE, 1)

    def main(rank, world):
        mesh = Mesh(grid, rank, world.connect, torch.device("cpu"))
        replicas = []

        def watch(student):
            theirs = teachers.teacher_config(config)
            teacher = build_replica(theirs, mesh, trains=False)
            teach(student, teacher)
            replicas.extend((student, teacher))
            mesh.traffic.clear()

        trace = train_layout(config, mesh, STEPS, samples, watch=watch)
        return trace, (mesh.traffic, *replicas)

    traces, ranks = zip(*run_ranks(config.world_size, main), strict=True)
    return merge(traces), ranks, config


@pytest.mark.parametrize(
    "style, layout, more",
    [
        ("llama", "tp=2,sp=1", FULL),
        ("gpt2", "pp=2,dp=2,zero=2", LIKELIEST),
        ("llama", "cp=2,tp=2", f"{LIKELIEST} {LORA}"),
        ("llama", "dp=2,zero=3,mbs=2", f"{FULL} --distill-divergence reverse"),
        ("gpt2", "dp=2,zero=1", f"{FULL} --calculate-per-token-loss"),
        ("llama", "pp=2,chunks=2,schedule=interleaved", FULL),
        ("llama", "pp=2,tp=2,sp=1,logits=2,recompute=full", LIKELIEST),
        ("llama", "ep=2,dp=2,zero=2", f"{FULL} {EXPERTS}"),
        ("llama", "pp=2,schedule=zb-v,dp=2,zero=3", FULL),
        ("gpt2", "cp=2,comm_type=a2a", FULL),
    ],
)
def test_a_student_learns_like_in_one_process(one_process, style, layout, more):
    layers = 4 if "schedule" in layout else 2
    job = tiny_job(style, "fp32", True, 0.0, layers, SIZE, 20)
    job = [*job, "--distill-from", "teacher", *more.split()]
    merged, ranks, config = run(job, layout)
    reference = parse_layout(layout, mbs="1").reference
    key = (*job, reference)
    if key not in one_process:
        one_process[key] = run(job, reference)[0]
    expected = one_process[key]
    apart = difference(merged, expected, config.model)
    assert apart.is_within(LIMIT), apart
    # Both losses, whose sum is that of the log, and none of the student's weights is the teacher's.
    for found, wanted in zip(merged[0].metrics, expected[0].metrics, strict=True):
        for name in ("language loss", "divergence"):
            assert found[name] == pytest.approx(wanted[name], rel=1e-5)
            assert found[name] > 0
    check_plan(config, ranks)


def check_plan(config, ranks) -> None:
    """Planned traffic and weights are those of the ranks."""
    plan = plan_world(config, 0, "cpu")
    for rank, (traffic, student, teacher) in enumerate(ranks):
        if student.mesh.coordinate("tp") or student.mesh.coordinate("cp"):
            continue
        planned = plan.rank_plan(rank)
        # What experts receive depends on the choices of their router.
        sent = {k: n for k, n in traffic.bytes.items() if k[0] != "all_to_all_v"}
        wanted = planned.traffic.bytes
        assert sent == {key: STEPS * wanted[key] for key in sent}
        assert planned.state == student.optimizer.memory()
        held = teacher.optimizer.memory()
        assert held.total == held.parameters
        assert planned.beside >= held.parameters
