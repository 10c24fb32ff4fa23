"""Experts over real gloo ranks: rows of unequal numbers, bytes of the all-to-alls, a rank that dies in one,
and a training run."""

import os
import platform
import re
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from megatron_ds.config import parse
from megatron_ds.errors import CommunicationError
from megatron_ds.mpu.group import Group
from megatron_ds.mpu.mesh import Mesh
from megatron_ds.mpu.process_groups import connect_torch
from megatron_ds.mpu.rows import (
    Waiting,
    all_gather_rows,
    all_to_all_rows,
    reduce_scatter_rows,
)
from megatron_ds.mpu.stuck_ranks import register_host
from tests.harness.layout_comparison import (
    merge,
    mock_samples,
    parse_layout,
    train_layout,
)
from tests.harness.limits import HUNG, VAIN
from tests.harness.moe_runs import watched_experts
from tests.harness.pretraining import MOCK, STEPS, records, saved_state, train
from tests.harness.processes import run_processes
from tests.harness.tiny_jobs import SEQ_LENGTH, tiny_job
from tests.mpu.test_rows import COUNTS, TABLES, differentiated, rows_of

pytestmark = pytest.mark.processes

GLOBAL_BATCH, FEW, HIDDEN = 4, 2, 32


# ------------------------------------------------------------------ rows
def move_rows(rank, world, size, dtype):
    """(result, gradient) of each movement whose table has `size` ranks."""
    group, results = world.group("ep", tuple(range(size)), rank), {}
    for name, table in TABLES.items():
        if len(table) != size:
            continue

        def move(x, table=table):
            waiting = Waiting()
            y = all_to_all_rows(
                x, table[rank], [row[rank] for row in table], group, waiting
            )
            waiting.wait()
            return y

        results[name] = differentiated(
            move, rows_of(rank, sum(table[rank]), dtype), 100 + rank
        )
    for counts in COUNTS:
        if len(counts) == size:
            results[counts] = (
                all_gather_rows(rows_of(rank, counts[rank], dtype), counts, group),
                reduce_scatter_rows(rows_of(rank, sum(counts), dtype), counts, group),
            )
    return results


@pytest.mark.quick
@pytest.mark.parametrize(
    "size, dtype", [(3, torch.bfloat16), (2, torch.float32)], ids=str
)
def test_rows_of_unequal_numbers_zero_included_arrive_as_they_were(size, dtype):
    results = run_processes(size, move_rows, size, dtype)
    for name, table in TABLES.items():
        if len(table) != size:
            continue
        sent = [rows_of(i, sum(table[i]), dtype).split(table[i]) for i in range(size)]
        arriving = [[row[j] for row in table] for j in range(size)]
        back = [
            rows_of(100 + j, sum(arriving[j]), dtype).split(arriving[j])
            for j in range(size)
        ]
        for rank in range(size):
            y, gradient = results[rank][name]
            assert torch.equal(y, torch.cat([sent[i][rank] for i in range(size)])), name
            assert torch.equal(
                gradient, torch.cat([back[j][rank] for j in range(size)])
            ), name
    for counts in (c for c in COUNTS if len(c) == size):
        whole = torch.cat([rows_of(i, counts[i], dtype) for i in range(size)])
        total = rows_of(0, sum(counts), dtype)
        for i in range(1, size):
            total = total + rows_of(i, sum(counts), dtype)
        for rank in range(size):
            gathered, scattered = results[rank][counts]
            assert torch.equal(gathered, whole)
            assert torch.equal(scattered, total.split(list(counts))[rank]), (
                "sums are in rank order"
            )


# ------------------------------------------------------------------ a training, and its traffic
def train_on_a_rank(rank, world, job, layout):
    """(trace, bytes by operation over ep, kept slots of each expert by call, seen loads)."""
    request = parse_layout(layout, mbs="1")
    config = parse([*job, *request.flags], world_size=request.world_size)
    mesh = Mesh(
        config.grid(request.world_size), rank, world.connect, torch.device("cpu")
    )
    slots = []
    with watched_experts() as seen:
        seen.add = lambda layer, batch, ctx, before, routing: slots.append(
            kept_rows(routing)
        )
        trace = train_layout(
            config, mesh, FEW, mock_samples(config, 4 * GLOBAL_BATCH, seed=1)
        )
    over_ep = {
        op: mesh.traffic.bytes[op, axes, n]
        for op, axes, n in mesh.traffic.bytes
        if axes == "ep"
    }
    return trace, over_ep, [rows.tolist() for rows in slots], mesh.group("ep").ranks


def kept_rows(routing):
    """Rows of each expert that this rank sends, in one micro-batch of one layer."""
    experts = routing.experts if routing.kept is None else routing.experts[routing.kept]
    return experts.flatten().bincount(minlength=routing.scores.shape[1])


@pytest.mark.parametrize(
    "layout, extra",
    [
        ("dp=4,ep=2,zero=1", ""),
        ("tp=2,sp=1,dp=2,ep=2", "--moe-expert-capacity-factor 0.8"),
        # only the second stage has experts: ranks of the first must not be missed where groups are connected
        ("pp=2,dp=2,ep=2", "--moe-layer-freq [0,1]"),
    ],
)
def test_bytes_of_all_to_alls_follow_from_the_rows_and_processes_train_like_one(
    layout, extra
):
    job = [
        *tiny_job("llama", "fp32", True, 0.0, 2, GLOBAL_BATCH, FEW),
        *"--num-experts 4 --moe-router-dtype fp64 --moe-aux-loss-coeff 0.02".split(),
        *extra.split(),
    ]
    layers, t = (1 if "freq" in extra else 2), (2 if "tp=2" in layout else 1)
    results = run_processes(4, train_on_a_rank, job, layout)
    (alone,) = run_processes(1, train_on_a_rank, job, "mbs=1")
    (trace, weights), (trace0, weights0) = (
        merge([r[0] for r in runs]) for runs in (results, [alone])
    )
    assert trace.losses == pytest.approx(trace0.losses, rel=1e-6)
    assert trace.metrics == [
        pytest.approx(metrics, rel=2e-6) for metrics in trace0.metrics
    ]
    for name, w in weights0.items():
        torch.testing.assert_close(weights[name], w, rtol=1e-4, atol=1e-6)
    has_experts = [bool(slots) for _, _, slots, _ in results]
    for rank, (_, traffic, slots, ranks) in enumerate(results):
        if not slots:
            assert not any(traffic.values())
            continue
        mine = range(
            2 * ranks.index(rank), 2 * ranks.index(rank) + 2
        )  # of the four experts
        to_others = sum(rows[e] for rows in slots for e in range(4) if e not in mine)
        from_others = sum(
            rows[e]
            for peer in ranks
            if peer != rank
            for rows in results[peer][2]
            for e in mine
        )
        # There and back, forward and backward: h numbers a row.
        assert traffic["all_to_all_v"] == 2 * (to_others + from_others) * HIDDEN * 4
        # Numbers of rows of four experts; with sequence parallelism those of all tensor-parallel ranks.
        assert traffic["all_to_all"] == len(slots) * t * 4 * 8
        assert len(slots) == FEW * layers * GLOBAL_BATCH // (
            4 if "dp=4" in layout else 2
        )
        assert to_others != from_others and 0 < to_others < len(slots) * 2 * SEQ_LENGTH
    assert sum(has_experts) == (2 if "freq" in extra else 4)


# ------------------------------------------------------------------ a rank that dies, or hangs
def exchange_rows(rank, folder, before):
    """Five all-to-alls of rows of unequal numbers; what the rank ends with."""
    ranks = (0, 1, 2)
    group = Group(
        "ep",
        ranks,
        rank,
        connect_torch("ep", [ranks], rank, timeout=timedelta(seconds=VAIN)),
    )
    register_host()
    table = [[1, 4, 0], [0, 0, 3], [2, 5, 1]]
    try:
        for i in range(5):
            before(i)
            all_to_all_rows(
                rows_of(rank, sum(table[rank])),
                table[rank],
                [row[rank] for row in table],
                group,
            )
    except CommunicationError as error:
        return str(error)
    return "done"


def die_in_an_exchange(rank, world, folder):
    def before(i):
        if rank == 1 and i == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    story = exchange_rows(rank, folder, before)
    Path(folder, str(rank)).write_text(story)


def test_when_a_rank_is_killed_in_an_all_to_all_the_others_end_with_an_error(tmp_path):
    with pytest.raises(RuntimeError, match="rank 1 of 3 died"):
        run_processes(3, die_in_an_exchange, str(tmp_path), grace=HUNG)
    for rank in (0, 2):
        story = (tmp_path / str(rank)).read_text()
        assert (
            f"rank {rank}: all-to-all failed in the ep group of ranks [0, 1, 2]"
            in story
        )
        assert "peer exited" in story or "Look for the earliest error" in story, story


def sleep_in_an_exchange(rank, world, folder):
    def before(i):
        while (
            rank == 1
            and i == 3
            and not all((folder / str(other)).exists() for other in (0, 2))
        ):
            time.sleep(0.05)

    story = exchange_rows(rank, folder, before)
    (folder / str(rank)).touch()
    return story


def test_when_a_rank_hangs_the_others_end_within_the_timeout_and_name_it(tmp_path):
    stories = run_processes(3, sleep_in_an_exchange, tmp_path)
    for rank in (0, 2):
        assert (
            f"rank {rank}: all-to-all failed in the ep group of ranks [0, 1, 2]"
            in stories[rank]
        )
    assert any(
        f"rank 1 (host {platform.node()}) is stuck" in story
        or "rank 1 is stuck" in story
        for story in stories
    ), stories


# ------------------------------------------------------------------ pretrain_gpt.py
MOE = (
    "--num-experts 4 --expert-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel "
    "--moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001 --moe-expert-capacity-factor 1.0 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"
).split()


def test_a_run_logs_the_load_of_its_experts_and_saves_their_biases(tmp_path):
    ended = train(4, [*MOCK, *MOE, "--save", tmp_path, "--save-interval", STEPS])
    text = ended[0].out + ended[0].err
    lines = [line for line in text.splitlines() if re.search(r"iteration +\d+/", line)]
    assert len(lines) == STEPS
    assert "layers.0" not in lines[-1]
    balance, z, load, entropy, dropped = (
        float(re.search(rf"\| {name}: (\S+) \|", lines[-1])[1])
        for name in (
            "load balancing loss",
            "router z-loss",
            "largest max load",
            "smallest router entropy",
            "largest dropped",
        )
    )
    last = records(tmp_path)[-1]
    of_layers = lambda name: [last[f"decoder.layers.{i}_{name}"] for i in range(2)]
    assert load == pytest.approx(max(of_layers("max_load"))) and 1 <= load <= 4
    assert entropy == pytest.approx(min(of_layers("router_entropy")), rel=1e-5)
    assert (
        dropped == pytest.approx(max(of_layers("dropped")), rel=1e-5)
        and 0 < dropped < 1
    )
    assert balance == pytest.approx(last["load_balancing_loss"], rel=1e-5) and z > 0
    biases = {
        name: t
        for name, t in saved_state(tmp_path, STEPS).items()
        if name.endswith("expert_bias")
    }
    assert len(biases) == 2 and all(t.abs().sum() > 0 for t in biases.values())
