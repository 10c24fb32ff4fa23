"""A layer with a loss of its own is one new file: this one.

The model below is a GPT whose feed-forward halves add the mean square of their output to the objective (the
form of a router z-loss) and record its mean as a metric. Runs of it under every schedule, ZeRO stage,
recomputation and precision are compared with one process that adds the same numbers to the loss by hand,
without a ledger that collects.
"""

import contextlib
import math
from dataclasses import dataclass, replace
from functools import cache, partial
from unittest import mock

import pytest
import torch
from torch import nn

from megatron_ds.batch.ledger import DISCARDING, Entry, Ledger
from megatron_ds.config import parse
from megatron_ds.errors import ConfigError, LedgerError
from megatron_ds.extensions.dry_run.world_plan import plan_world
from megatron_ds.models import MODELS, build_stage, gpt_loss, language_model
from megatron_ds.mpu.context import ParallelContext
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.group import solo
from megatron_ds.mpu.mesh import Mesh
from megatron_ds.mpu.regions import reduce_from_region
from megatron_ds.mpu.sequence_slice import RankPart, SequenceSlice
from megatron_ds.tensor_parallel.init import initialize
from megatron_ds.training.step_metrics import StepMetrics
from tests.harness.gpt_runs import make_batch
from tests.harness.layout_comparison import global_batch_share, mock_samples
from tests.harness.layout_runs import run_layout
from tests.harness.plain_gpt import STYLES
from tests.harness.pretraining import MOCK, records, train
from tests.harness.threads import run_ranks
from tests.harness.tiny_jobs import tiny_job

WEIGHT, LAYERS, BATCH, STEPS, RATE = 500.0, 4, 4, 2, 0.05


class Penalized(nn.Module):
    """mlp(x, batch), [s(/t), b, h], and its mean square in the objective."""

    def __init__(self, mlp: nn.Module):
        super().__init__()
        self.mlp = mlp

    def forward(self, x, batch):
        y, linear = self.mlp(x, batch), self.mlp.linear_fc2
        square, mean, count = y.float().square().sum(), y.float().sum(), y.numel()
        if linear.sequence_parallel:  # y is a slice of the sequence
            square, mean = (
                reduce_from_region(square, linear.group),
                reduce_from_region(mean, linear.group),
            )
            count *= linear.group.size
        batch.ledger.add("mlp penalty", square, count, weight=WEIGHT)
        batch.ledger.record("mlp mean", mean, count)
        return y


def penalized(make):
    block = make()
    block.mlp = Penalized(block.mlp)
    return block


@MODELS.register("penalized gpt")
@language_model
def penalized_layers(config, ctx):
    layers = MODELS["gpt"](config, ctx)
    return [
        replace(layer, make=partial(penalized, layer.make))
        if layer.kind == "block"
        else layer
        for layer in layers
    ]


@dataclass
class Result:
    """The numbers of each step of a run, and its final weights."""

    losses: list[float]
    norms: list[float]
    penalties: list[float]
    means: list[float]
    weights: dict[str, torch.Tensor]


def job_of(dtype: str = "fp32", per_token: bool = False) -> list[str]:
    """Plain gradient descent, so that the final weights show each gradient."""
    descent = (
        "--optimizer sgd --sgd-momentum 0 --lr-decay-style constant --lr-warmup-iters 0 "
        f"--lr {RATE} --min-lr 0 --weight-decay 0 --clip-grad 0"
    ).split()
    return [
        *tiny_job("gpt2", dtype, True, 0.0, LAYERS, BATCH, STEPS),
        "--model",
        "penalized gpt",
        *descent,
        *["--calculate-per-token-loss"] * per_token,
    ]


def train_layout(job: list[str], layout: str) -> Result:
    """Train a layout, and keep the reports of the ledger's sums that rank 0 gets."""
    reports, real = [], StepMetrics.report

    def report(self, *arguments):
        means = real(self, *arguments)
        if self.mesh.rank == 0:
            reports.append(means)
        return means

    with mock.patch.object(StepMetrics, "report", report):
        trace, weights = run_layout(job, layout, STEPS).merged
    return Result(
        trace.losses,
        trace.grad_norms,
        [report.terms["mlp penalty"] for report in reports],
        [report.metrics["mlp mean"] for report in reports],
        weights,
    )


@cache
def by_hand(dtype: str, per_token: bool, weight: float = WEIGHT) -> Result:
    """One process, no stage, nothing in a ledger: the objective is the sum of both losses over all
    micro-batches.
    """
    job, dtypes = (
        job_of(dtype, per_token),
        {"fp32": torch.float32, "fp16": torch.float16},
    )
    config = parse([*job, "--micro-batch-size", "1"])
    samples = mock_samples(config, 4 * BATCH, seed=1)
    model = build_stage(
        MODELS["penalized gpt"](config.model, ParallelContext(dtype=dtypes[dtype]))
    )
    initialize(model.parameters(), config.train.seed, {})
    masters = [p.detach().float().clone() for p in model.parameters()]
    outputs = []
    for module in model.modules():
        if isinstance(module, Penalized):
            module.mlp.register_forward_hook(
                lambda module, inputs, output: outputs.append(output.float())
            )
    result = Result([], [], [], [], {})
    for step in range(STEPS):
        batch = run_ranks(1, partial(batch_of_step, config, samples, step))[
            0
        ].with_ledger(DISCARDING)
        outputs.clear()
        objectives, losses, tokens = [], [], []
        for microbatch in batch.split(1):
            before, x = len(outputs), None
            for module in model:
                x = module(x, microbatch)
            loss = gpt_loss(
                x,
                microbatch,
                tp=solo(),
                vocab_size=config.model.vocab_size,
                per_token=per_token,
            )
            penalty = weight * sum(y.square().mean() for y in outputs[before:])
            objectives.append(
                loss.objective + penalty * (loss.tokens if per_token else 1)
            )
            losses.append(loss.total.item() / (1 if per_token else loss.tokens.item()))
            tokens.append(loss.tokens.item())
        share = 1 / (sum(tokens) if per_token else BATCH)
        scale = 65536 if dtype == "fp16" else 1
        gradients = [
            g.float() / scale
            for g in torch.autograd.grad(
                sum(objectives) * share * scale, list(model.parameters())
            )
        ]
        with torch.no_grad():
            for p, master, gradient in zip(
                model.parameters(), masters, gradients, strict=True
            ):
                p.copy_(master.sub_(RATE * gradient))
        result.losses.append(sum(losses) * share)
        result.norms.append(
            math.sqrt(sum(g.double().square().sum().item() for g in gradients))
        )
        result.penalties.append(
            sum(y.square().sum().item() for y in outputs)
            / sum(y.numel() for y in outputs)
        )
        result.means.append(
            sum(y.sum().item() for y in outputs) / sum(y.numel() for y in outputs)
        )
    result.weights = {
        p.spec.name: master[: p.spec.shape[0]]
        for p, master in zip(model.parameters(), masters)
    }
    return result


def batch_of_step(config, samples, step: int, rank: int, world):
    mesh = Mesh(Grid.fit(1), 0, world.connect, torch.device("cpu"))
    return global_batch_share(samples, step * BATCH, BATCH, config, mesh)


def assert_alike(result: Result, expected: Result, rel: float) -> None:
    assert result.losses == pytest.approx(expected.losses, rel=rel)
    assert result.norms == pytest.approx(expected.norms, rel=rel)
    assert result.penalties == pytest.approx(expected.penalties, rel=rel)
    assert result.means == pytest.approx(expected.means, rel=rel, abs=rel)
    assert set(result.weights) == set(expected.weights)
    for name, weight in expected.weights.items():
        torch.testing.assert_close(
            result.weights[name].float(),
            weight,
            rtol=0,
            atol=rel,
            msg=lambda m, n=name: f"{n}: {m}",
        )


LAYOUTS = [
    "",
    "pp=2",
    "pp=2,recompute=full",
    "pp=2,recompute=selective",
    "pp=2,schedule=interleaved,chunks=2",
    "pp=2,schedule=zb-h1",
    "pp=2,schedule=zb-v,chunks=2",
    "pp=2,schedule=zb-v,chunks=2,recompute=full",
    "dp=2,zero=2",
    "pp=2,dp=2,zero=2,schedule=zb-h2",
    "pp=2,dp=2,zero=3,recompute=full",
    "tp=2",
    "tp=2,sp=1",
    "tp=2,sp=1,pp=2,schedule=zb-h1,recompute=full",
]


# fp32 in another order of sums; the penalty of the first blocks is on stage 0.
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "per_token", [False, True], ids=["per micro-batch", "per token"]
)
def test_a_loss_of_any_stage_trains_and_is_reported_as_in_one_process(
    layout, per_token
):
    if per_token and layout not in LAYOUTS[::3]:
        pytest.skip("every third layout")
    assert_alike(
        train_layout(job_of("fp32", per_token), layout),
        by_hand("fp32", per_token),
        2e-6,
    )


@pytest.mark.parametrize(
    "layout", ["pp=2,schedule=zb-v,chunks=2", "pp=2,dp=2,zero=2,recompute=full"]
)
def test_a_side_loss_is_scaled_by_the_loss_scale_of_fp16(layout):
    assert_alike(train_layout(job_of("fp16"), layout), by_hand("fp16", False), 2e-3)


def test_the_comparison_notices_a_ledger_that_is_off():
    """Its weight is large enough: without the penalty the norms differ by far more than any tolerance
    above."""
    with_penalty, without = by_hand("fp32", False), by_hand("fp32", False, weight=0.0)
    assert with_penalty.norms[0] != pytest.approx(without.norms[0], rel=0.02)
    record = lambda self, name, value, count, weight: Ledger._append(
        self, name, value.detach(), count, weight
    )
    with mock.patch.object(Ledger, "add", record):  # reported, but not trained
        with pytest.raises(AssertionError, match="comparison failed"):
            assert_alike(train_layout(job_of(), "pp=2"), with_penalty, 2e-3)


def test_the_plan_of_a_step_counts_the_names():
    def report_sent(model):
        config = parse(
            [
                *job_of(),
                "--model",
                model,
                *"--micro-batch-size 1 --pipeline-model-parallel-size 2".split(),
            ],
            world_size=2,
        )
        plan = plan_world(config, 0, "cpu")
        return plan.metrics, plan.rank_plan(0).traffic.bytes[
            "all_reduce", "tp-cp-dp-pp", 2
        ]

    (none, plain), (names, bytes_sent) = (
        report_sent("gpt"),
        report_sent("penalized gpt"),
    )
    assert (
        not none
        and names == {"mlp penalty", "mlp mean"}
        and bytes_sent == plain + 2 * 16
    )


# ---- names


def reduced(entries_of_step, world_size: int = 2):
    """The reports of all ranks; entries_of_step: one function (rank) → entries a step."""

    def main(rank, world):
        mesh = Mesh(
            Grid.fit(world_size, pp=world_size),
            rank,
            world.connect,
            torch.device("cpu"),
        )
        metrics = StepMetrics(mesh, per_token=False)
        return [
            metrics.reduce([], entries(rank), stop=False) for entries in entries_of_step
        ]

    return run_ranks(world_size, main)


def entry(name, value=3.0, count=2, weight=1.0):
    return Entry(name, torch.tensor(value), count, weight)


def test_names_of_any_rank_are_agreed_at_the_first_step_and_when_a_new_one_comes():
    first = lambda rank: (
        [entry("of rank 0")]
        if rank == 0
        else [entry("of rank 1", 5.0, 1), entry("of rank 1", 1.0, 1)]
    )
    later = lambda rank: [*first(rank), *[entry("late", 8.0, 4, None)] * (rank == 1)]
    for one, two, three in reduced([first, later, first]):
        assert (
            one.terms
            == two.terms
            == three.terms
            == {"of rank 0": 1.5, "of rank 1": 3.0}
        )
        assert (
            not one.metrics
            and two.metrics == {"late": 2.0}
            and three.metrics == {"late": 0.0}
            and not two.stop
        )


def test_a_side_loss_that_is_not_finite_counts_as_such_and_a_metric_does_not():
    [(report,)] = reduced(
        [lambda rank: [entry("penalty", math.nan), entry("peak", math.inf, 1, None)]], 1
    )
    assert not report.is_finite
    [(report,)] = reduced([lambda rank: [entry("peak", math.inf, 1, None)]], 1)
    assert report.is_finite


@pytest.mark.parametrize(
    "entries, words",
    [
        ([entry("grad norm")], "'grad norm' are fields of the log already"),
        (
            [entry("load"), entry("load", weight=None)],
            "'load' is both a loss term and a metric",
        ),
    ],
)
def test_a_name_that_cannot_be_reported_is_refused_on_all_ranks(entries, words):
    with pytest.raises(ConfigError, match=words):
        reduced([lambda rank: entries])


def test_a_value_that_is_no_scalar_is_refused():
    with pytest.raises(
        ValueError, match=r"'load' is \[3\] torch.float32.*Add a scalar"
    ):
        Ledger().add("load", torch.ones(3))


def test_what_a_ledger_would_lose_is_refused():
    one, ledger = torch.ones(()), Ledger()
    ledger.add("load", one)
    ledger.close()
    ledger.add("load", one)  # of a layer that runs again
    assert [e.name for e in ledger.take()] == ["load"]
    with pytest.raises(
        LedgerError, match="'peak' is added to a ledger that was closed without it"
    ):
        ledger.record("peak", one)
    batch = make_batch(STYLES["gpt2"], s=12)
    for lost in (
        batch,
        batch.cut(SequenceSlice(context=RankPart(1, 2))).with_ledger(Ledger()).whole,
    ):
        with pytest.raises(
            LedgerError, match="'load' is added to a batch that has no ledger"
        ):
            lost.ledger.add("load", one)
    DISCARDING.add("load", one)
    assert not DISCARDING.take()


# ---- where a user sees them


@contextlib.contextmanager
def registered(rank):
    """Importing this file in a training process registers the model."""
    yield


def test_log_tensorboard_and_metrics_file_have_a_side_loss_of_training_and_of_evaluation(
    tmp_path,
):
    argv = [
        *MOCK,
        "--model",
        "penalized gpt",
        *"--eval-interval 3 --eval-iters 2".split(),
        "--metrics-path",
        tmp_path / "metrics.jsonl",
        "--tensorboard-dir",
        tmp_path / "board",
    ]
    [ended] = train(1, argv, spoil=registered)
    for kind in ("train", "validation"):
        found = records(tmp_path, kind)
        assert found and all(
            0 < record["mlp_penalty"] < 1 and "mlp_mean" in record for record in found
        )
    assert (
        "| mlp penalty: " in ended.out
        and "| mlp penalty value: " in ended.out
        and "| mlp mean: " in ended.out
    )
    events = b"".join(
        path.read_bytes() for path in (tmp_path / "board").glob("events*")
    )
    assert b"mlp penalty" in events and b"mlp mean validation" in events
