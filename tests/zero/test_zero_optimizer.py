"""ZeroOptimizer on threaded ranks against plain AdamW in one process, and its stages against each other."""

import math

import pytest
import torch
from torch import nn

from megatron_ds.config import OptimizerConfig
from megatron_ds.errors import MegatronDSError
from megatron_ds.mpu.group import solo
from megatron_ds.mpu.managed_parameter import accumulator_of
from megatron_ds.mpu.param_spec import DATA_AXES, Init, ParamSpec
from megatron_ds.optim import OPTIMIZERS, default_groups
from megatron_ds.zero.data_groups import DataGroups
from megatron_ds.zero.loss_scale import LossScale, ScalerRule
from megatron_ds.zero.optimizer import ZeroOptimizer
from megatron_ds.zero.set_plan import ParameterUse
from megatron_ds.zero.settings import STAGES, ZeroSettings
from tests.harness.gradients import contribute, taken
from tests.harness.threads import run_ranks

pytestmark = pytest.mark.threads

SETTINGS = OptimizerConfig(adam_beta2=0.95)
LR, DECAY, STEPS, SAMPLES = 0.01, 0.1, 4, 12
SHAPES = {
    "fc1.weight": (37, 11),
    "fc1.bias": (37,),
    "fc2.weight": (5, 37),
    "fc2.bias": (5,),
    "unused": (7,),
}


def make_parameters(dtype=torch.float32):
    generator, parameters = torch.Generator().manual_seed(1), []
    for name, shape in SHAPES.items():
        p = nn.Parameter((torch.randn(shape, generator=generator) * 0.3).to(dtype))
        p.spec = ParamSpec(name, shape, Init("normal", 0.3), decay=len(shape) > 1)
        parameters.append(p)
    return parameters


def loss_of(parameters, step, rank=0, size=1):
    """Mean over this rank's share of the step's samples."""
    x = torch.randn(
        SAMPLES, 11, generator=torch.Generator().manual_seed(100 + step)
    ).chunk(size)[rank]
    w1, b1, w2, b2, _ = parameters
    out = torch.tanh(x.to(w1.dtype) @ w1.T + b1) @ w2.T + b2
    return (out.float() - x[:, :5].sin()).square().mean()


def make_optimizer(
    parameters, data, *, stage, scaler=None, clip=1.0, counts=None, **options
):
    layers = {0: [parameters]} if stage == 3 else {}  # one layer, all of it in shards
    settings = ZeroSettings(
        default_groups(lambda g: OPTIMIZERS["adam"](g, SETTINGS)),
        STAGES[stage],
        bucket_elements=200,
        clip_grad=clip,
        make_scaler=lambda: scaler or LossScale(),
        persistence=0,
        **options,
    )
    return ZeroOptimizer(
        parameters,
        settings,
        DataGroups({DATA_AXES: data}),
        ParameterUse(layers, counts=counts or {}),
    )


def whole(optimizer, parameters):
    """Copies of the parameters, gathered where they live in shards."""
    with optimizer.gathered(0):
        return [p.detach().clone() for p in parameters]


def train_rank(
    rank,
    world,
    size,
    stage,
    dtype=torch.float32,
    scale=1.0,
    clip=1.0,
    overlap=True,
    sent_dtype=None,
):
    """The steps' norms and the final parameters of one rank."""
    parameters = make_parameters(dtype)
    optimizer = make_optimizer(
        parameters,
        world.group("dp-cp", range(size), rank),
        stage=stage,
        clip=clip,
        scaler=LossScale(scale),
        overlap=overlap,
        sent_dtype=sent_dtype,
    )
    norms = []
    for step in range(STEPS):
        optimizer.begin_step()
        optimizer.arm()
        with optimizer.gathered(0):
            (
                loss_of(parameters, step, rank, size) * (optimizer.loss_scale / size)
            ).backward()
        norms.append(optimizer.step(LR, DECAY).grad_norm)
    return norms, whole(optimizer, parameters)


def train(size, *args, **options):
    return run_ranks(
        size, lambda rank, world: train_rank(rank, world, size, *args, **options)
    )


def train_plainly(dtype=torch.float32, clip=1.0, size=1):
    """torch alone: fp32 masters, mean gradient of `size` shares, clip_grad_norm_, AdamW."""
    masters = [nn.Parameter(p.detach().float()) for p in make_parameters(dtype)]
    groups = [
        {"params": [p for p in masters if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in masters if p.dim() == 1], "weight_decay": 0.0},
    ]
    adam, norms = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), foreach=False), []
    for step in range(STEPS):
        total = [torch.zeros_like(m) for m in masters]
        for rank in range(size):
            model = [nn.Parameter(m.detach().to(dtype)) for m in masters]
            loss_of(model, step, rank, size).backward()
            for t, p in zip(total, model):
                t += 0.0 if p.grad is None else p.grad.float() / size
        for m, t in zip(masters, total):
            m.grad = t
        norms.append(
            nn.utils.clip_grad_norm_(masters, clip if clip else math.inf).item()
        )
        adam.step()
    return norms, [m.detach().to(dtype) for m in masters]


@pytest.mark.parametrize("clip", [0.0, 0.05])
@pytest.mark.parametrize(
    "size, stage",
    [
        (1, 0),
        (1, 1),
        (2, 0),
        (3, 1),
        (4, 1),
        (1, 2),
        (2, 2),
        (3, 2),
        (1, 3),
        (2, 3),
        (3, 3),
    ],
)
def test_zero_equals_plain_adamw_on_the_whole_batch(size, stage, clip):
    expected_norms, expected = train_plainly(clip=clip)
    assert min(expected_norms) > 0.05, "clipping is in force"
    for norms, parameters in train(size, stage, clip=clip):
        # Summation order: per rank, then over ranks.
        assert norms == pytest.approx(expected_norms, rel=2e-6)
        for p, e in zip(parameters, expected):
            torch.testing.assert_close(p, e, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    "dtype, scale", [(torch.bfloat16, 1.0), (torch.float16, 1024.0)]
)
def test_sixteen_bit_training_keeps_fp32_masters(dtype, scale, stage):
    _, expected = train_plainly(dtype, size=2)
    for _, parameters in train(2, stage, dtype, scale):
        for p, e in zip(parameters, expected):
            # One unit in the last place of the 16-bit type, where the last bits of the masters round the
            # other way.
            torch.testing.assert_close(p, e, rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "dtype, scale",
    [(torch.float32, 1.0), (torch.bfloat16, 1.0), (torch.float16, 768.0)],
)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_stage_is_bit_equal_to_stage_0_within_one_micro_batch(
    stage, size, dtype, scale
):
    """With clipping too where the layout, and so the order in which squares are added, is the same."""
    clip = 0.05 if stage < 3 else 0.0
    for (norms0, whole), (norms1, split) in zip(
        train(size, 0, dtype, scale, clip), train(size, stage, dtype, scale, clip)
    ):
        assert (
            norms0 == norms1 or stage == 3 and norms0 == pytest.approx(norms1, rel=1e-6)
        )
        assert all(torch.equal(a, b) for a, b in zip(whole, split))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_overlapping_reductions_changes_no_bit(stage):
    for (norms0, one), (norms1, other) in zip(
        train(2, stage, overlap=True), train(2, stage, overlap=False)
    ):
        assert norms0 == norms1
        assert all(torch.equal(a, b) for a, b in zip(one, other))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_all_ranks_skip_when_one_gradient_of_one_rank_overflows(stage):
    def main(rank, world):
        parameters = make_parameters(torch.float16)
        scaler = LossScale(2.0**16, ScalerRule(True, hysteresis=1))
        optimizer = make_optimizer(
            parameters, world.group("dp-cp", range(3), rank), stage=stage, scaler=scaler
        )
        before, seen = whole(optimizer, parameters), []
        for step in range(2):
            optimizer.begin_step()
            optimizer.keep_gathered(0)
            (loss_of(parameters, step, rank, 3) * optimizer.loss_scale).backward()
            if rank == 1 and step == 0:
                taken(parameters[3])[4] = math.inf
            result = optimizer.step(LR, DECAY)
            unchanged = all(
                torch.equal(p, b) for p, b in zip(whole(optimizer, parameters), before)
            )
            seen.append(
                (
                    result.skipped,
                    result.loss_scale,
                    optimizer.loss_scale,
                    unchanged,
                    math.isfinite(result.grad_norm),
                )
            )
        return seen, optimizer.extra_state()["num_updates"]

    for seen, updates in run_ranks(3, main):
        assert seen == [
            (True, 2.0**16, 2.0**15, True, False),
            (False, 2.0**15, 2.0**15, False, True),
        ]
        assert updates == 1


def test_a_gradient_that_is_not_finite_is_applied_when_nobody_checks():
    parameters = make_parameters()
    optimizer = make_optimizer(
        parameters, solo("dp-cp"), stage=0, scaler=LossScale(check_overflow=False)
    )
    optimizer.begin_step()
    taken(parameters[0])[0, 0] = math.nan
    assert not optimizer.step(LR, DECAY).skipped
    assert parameters[0].isnan().any()


def test_grad_divisor_and_micro_batches_give_the_gradient_of_all_samples():
    parameters, reference = make_parameters(), make_parameters()
    optimizer = make_optimizer(parameters, solo("dp-cp"), stage=1, clip=0.0)
    optimizer.begin_step()
    for microbatch in range(3):
        if microbatch == 2:
            optimizer.arm(0)
        loss_of(parameters, 0, microbatch, 3).backward()
    result = optimizer.step(LR, DECAY, grad_divisor=3.0)
    loss_of(reference, 0).backward()
    grads = torch.cat([p.grad.flatten() for p in reference if p.grad is not None])
    assert result.grad_norm == pytest.approx(grads.norm().item(), rel=1e-6)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_rank_whose_shard_is_all_padding_takes_part(stage):
    def main(rank, world):
        p = nn.Parameter(torch.ones(5))
        p.spec = ParamSpec("five", (5,), Init("ones"), decay=False)
        optimizer = make_optimizer(
            [p], world.group("dp-cp", range(3), rank), stage=stage
        )
        optimizer.begin_step()
        taken(p).fill_((1.0 + rank) / 3)
        result = optimizer.step(0.5, 0.0)
        return result.grad_norm, *whole(optimizer, [p]), len(list(optimizer.pieces()))

    for rank, (norm, p, pieces) in enumerate(run_ranks(3, main)):
        assert norm == pytest.approx(2 * 5**0.5)
        torch.testing.assert_close(
            p, torch.full((5,), 0.5)
        )  # Adam's first step is lr times the sign
        assert pieces == (3 if rank == 0 else 0)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_frozen_parameter_is_kept_and_saved_and_never_moves(stage):
    def main(rank, world):
        parameters = make_parameters(torch.bfloat16)
        parameters[1].requires_grad = False
        before = parameters[1].detach().clone()
        optimizer = make_optimizer(
            parameters, world.group("dp-cp", range(2), rank), stage=stage
        )
        optimizer.begin_step()
        optimizer.keep_gathered(0)
        (loss_of(parameters, 0, rank, 2) / 2).backward()
        optimizer.release_gathered(0)
        optimizer.step(LR, DECAY)
        saved = [
            (p.kind, p.start, p.tensor.clone())
            for p in optimizer.pieces()
            if p.spec.name == "fc1.bias"
        ]
        after = whole(optimizer, parameters)
        return (
            torch.equal(after[1], before),
            any(torch.equal(a, b) for a, b in zip(after, make_parameters()[2:3])),
            saved,
        )

    results = run_ranks(2, main)
    assert [(same, moved) for same, moved, _ in results] == [(True, False)] * 2
    pieces = (
        results[0][2]
        if stage == 0
        else [piece for _, _, saved in results for piece in saved]
    )
    assert {kind for kind, _, _ in pieces} == {"weight"}
    saved = torch.cat(
        [tensor for _, start, tensor in sorted(pieces, key=lambda piece: piece[1])]
    )
    assert torch.equal(saved.bfloat16(), make_parameters(torch.bfloat16)[1])


@pytest.mark.parametrize("accumulate", ["sharded", "full"])
@pytest.mark.parametrize("stage", [2, 3])
def test_micro_batches_add_up_in_shards(stage, accumulate):
    def main(rank, world):
        parameters = make_parameters()
        optimizer = make_optimizer(
            parameters, world.group("dp-cp", range(2), rank), stage=stage, clip=0.0
        )
        reductions = lambda: world.traffic[rank].calls["reduce_scatter", "dp-cp", 2]
        seen = []
        for step in range(2):
            optimizer.begin_step()
            optimizer.keep_gathered(0)
            for k in range(3):
                if accumulate == "sharded" or k == 2:
                    optimizer.arm()
                (loss_of(parameters, step, 3 * rank + k, 6) / 6).backward()
            optimizer.release_gathered(0)
            optimizer.step(LR, DECAY)
            seen.append(reductions())
        return seen, whole(optimizer, parameters)

    reference = make_parameters()
    optimizer = make_optimizer(reference, solo("dp-cp"), stage=0, clip=0.0)
    for step in range(2):
        optimizer.begin_step()
        loss_of(reference, step).backward()
        optimizer.step(LR, DECAY)
    results = run_ranks(2, main)
    (first, second), _ = results[0]
    once, rest = divmod(first, 3 if accumulate == "sharded" else 1)
    assert rest == 0 and second == 2 * first and once == 4  # buckets
    for _, parameters in results:
        for p, e in zip(parameters, reference):
            torch.testing.assert_close(p, e.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_sixteen_bit_gradients_are_held_and_sent_in_sixteen_bits(stage):
    def main(rank, world):
        parameters = make_parameters(torch.bfloat16)
        optimizer = make_optimizer(
            parameters,
            world.group("dp-cp", range(2), rank),
            stage=stage,
            grad_dtype=torch.bfloat16,
        )
        optimizer.begin_step()
        optimizer.arm()
        optimizer.keep_gathered(0)
        (loss_of(parameters, 0, rank, 2) / 2).backward()
        grads = [taken(p).dtype for p in parameters]
        norm = optimizer.step(LR, DECAY).grad_norm
        operation = "all_reduce" if stage == 0 else "reduce_scatter"
        return (
            norm,
            set(grads),
            optimizer.memory().gradients,
            world.traffic[rank].bytes[operation, "dp-cp", 2],
        )

    def wide(rank, world):
        parameters = make_parameters(torch.bfloat16)
        optimizer = make_optimizer(
            parameters, world.group("dp-cp", range(2), rank), stage=stage
        )
        return optimizer.memory().gradients

    [(expected, *_), _] = train_plainly(torch.bfloat16, size=2)
    for (norm, dtypes, held, sent), held_wide in zip(
        run_ranks(2, main), run_ranks(2, wide)
    ):
        assert norm == pytest.approx(expected, rel=0.02)  # sums rounded to 8 bits
        assert dtypes == {torch.bfloat16} and held * 2 == held_wide
        # the norm travels by all_reduce
        assert sent - (24 if stage == 0 else 0) == held * (1 if stage < 2 else 2)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_rank_that_gives_no_gradient_to_a_parameter_is_told_by_name(stage):
    def main(rank, world):
        parameters = make_parameters()
        optimizer = make_optimizer(
            parameters, world.group("dp-cp", range(3), rank), stage=stage
        )
        optimizer.begin_step()
        optimizer.arm()
        optimizer.keep_gathered(0)
        loss = loss_of(parameters, 0, rank, 3) + (
            0.0 if rank == 1 else parameters[4].sum()
        )
        loss.backward()
        with pytest.raises(
            MegatronDSError,
            match=r"unused received a gradient on rank\(s\) 0, 2 but not on 1",
        ):
            optimizer.step(LR, DECAY)

    run_ranks(3, main)


def test_a_step_that_failed_in_the_middle_leaves_the_next_one_whole():
    def main(rank, world):
        results = []
        for fails in (False, True):
            parameters = make_parameters()
            optimizer = make_optimizer(
                parameters, world.group("dp-cp", range(2), rank), stage=3
            )
            for attempt in range(1 + fails):
                optimizer.begin_step()
                optimizer.arm()
                optimizer.gathering_of(0).enter(0, False)
                loss = loss_of(parameters, 0, rank, 2) / 2
                if attempt < fails:
                    taken(parameters[0]).fill_(3.0)  # then an error is raised
                    continue
                loss.backward()
                optimizer.step(LR, DECAY)
            results.append(whole(optimizer, parameters))
        return all(torch.equal(a, b) for a, b in zip(*results))

    assert run_ranks(2, main) == [True, True]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_contribution_more_than_announced_is_an_error_where_gradients_are_sharded(
    stage,
):
    def main(rank, world):
        parameters = make_parameters()
        optimizer = make_optimizer(
            parameters, world.group("dp-cp", range(2), rank), stage=stage
        )
        optimizer.begin_step()
        optimizer.arm()
        for p in reversed(parameters):
            contribute(p, 1.0)
        if stage == 3:
            optimizer.gathering_of(0).leave(0, True)
        contribute(parameters[2], 1.0)
        with pytest.raises(
            MegatronDSError, match="for one of .*fc2.weight.*more contributions"
        ):
            optimizer.step(LR, DECAY)

    run_ranks(2, main)


def test_a_contribution_more_than_announced_is_an_error():
    parameters = make_parameters()
    optimizer = make_optimizer(
        parameters, solo("dp-cp"), stage=0, counts={parameters[0]: 2}
    )
    optimizer.begin_step()
    ready = accumulator_of(parameters[0]).ready
    ready()  # not armed yet: earlier micro-batches are not counted
    optimizer.arm()
    ready(), ready()
    with pytest.raises(MegatronDSError, match="fc1.weight received more than the 2"):
        ready()


def test_a_layer_that_adds_its_gradient_itself_contributes_once_per_backward():
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x)
            ctx.weight = weight
            return x * weight

        @staticmethod
        def backward(ctx, grad):
            contribute(ctx.weight, grad * ctx.saved_tensors[0])
            return grad * ctx.weight, None

    weight, bias = nn.Parameter(torch.ones(7)), nn.Parameter(torch.zeros(7))
    weight.spec, bias.spec = (
        ParamSpec("weight", (7,), Init("ones")),
        ParamSpec("bias", (7,), Init("zeros")),
    )
    optimizer = make_optimizer([weight, bias], solo("dp-cp"), stage=0)
    optimizer.begin_step()
    optimizer.arm()
    (Scale.apply(torch.full((7,), 2.0), weight) + bias).sum().backward()
    assert taken(weight).tolist() == [2.0] * 7 and taken(bias).tolist() == [1.0] * 7
    assert weight.grad is None and bias.grad is None
