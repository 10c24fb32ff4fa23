"""Layers of this package with experts in a user's module: what their routers remember moves after updates of
the engine, as in one process, and is in its checkpoints and in state_dict."""

import pytest
import torch
from torch import nn

import megatron_ds
from megatron_ds.batch.ledger import DISCARDING, NO_LEDGER, Ledger
from megatron_ds.config import parse
from megatron_ds.data.samples.gpt_data import blank_batch
from megatron_ds.errors import LedgerError
from megatron_ds.moe.mixture import MixtureOfExperts
from megatron_ds.mpu.context import ParallelContext
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.mesh import Mesh
from megatron_ds.tensor_parallel.init import initialize
from tests.harness.engine_runs import config_of
from tests.harness.threads import run_ranks

pytestmark = pytest.mark.threads

EXPERTS, WIDTH, LENGTH, STEPS, RANKS, RATE = 4, 8, 6, 4, 2, 0.125
FLAGS = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 6 --vocab-size 16 --mock-data "
    "--micro-batch-size 1 --train-iters 1 --lr 1e-3 --num-experts 4 --moe-ffn-hidden-size 5 "
    "--init-method-std 0.5 --moe-router-dtype fp64 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.125 "
    "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.3"
).split()


class Net(nn.Module):
    """x [s, b, h] → loss, a scalar."""

    def __init__(self, mesh=None, ledger=Ledger):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.make_ledger = ledger
        self.first = nn.Linear(WIDTH, WIDTH)
        for p in self.first.parameters():
            p.data.copy_(torch.randn(p.shape, generator=generator))
        self.mlp = MixtureOfExperts(
            parse(FLAGS).model, EXPERTS, "mlp", ParallelContext(mesh), output_std=0.5
        )
        initialize(self.mlp.parameters(), 7, mesh.coordinates if mesh else {})

    @property
    def balance(self):
        return self.mlp.router.balance

    def forward(self, x):
        ledger, x = self.make_ledger(), self.first(x.to(self.first.weight.dtype))
        y = self.mlp(x, blank_batch(x.shape[1], LENGTH).with_ledger(ledger))
        ledger.close()
        terms = [
            e.weight * e.value / e.count for e in ledger.take() if e.weight is not None
        ]
        return (x + y).float().square().mean() + sum(terms)


def micro_batches(rank=None):
    """Of each step: those of one rank, or of all ranks in turn."""
    generator = torch.Generator().manual_seed(8)
    data = torch.randn(STEPS, RANKS, LENGTH, 1, WIDTH, generator=generator)
    return data if rank is None else data[:, rank : rank + 1]


def on_ranks(ranks, main, stage, ep=1, net=Net, **more):
    """main(engine, its micro-batches) on each rank; one rank has those of all."""
    configuration = (
        config_of(stage, ranks)
        | {"train_batch_size": RANKS, "gradient_accumulation_steps": RANKS // ranks}
        | more
    )

    def run(rank, world):
        mesh = Mesh(Grid(dp=ranks, ep=ep), rank, world.connect)
        engine = megatron_ds.initialize(
            model=net(mesh), config=configuration, mpu=mesh
        ).engine
        return main(engine, micro_batches(rank if ranks > 1 else None))

    return run_ranks(ranks, run)


def train(engine, steps):
    for microbatches in steps:
        for x in microbatches:
            engine.backward(engine(x))
            engine.step()


def memories(engine):
    balance = engine.module.balance
    return balance.bias.clone(), balance.share.clone()


def trained(engine, steps):
    """(memories after each step, state)"""
    found = []
    for step in steps:
        train(engine, step[None])
        found.append(memories(engine))
    return found, engine.full_state_dict()


def assert_same(found, expected):
    """Counts are equal, so memories are too; weights but for the order of sums."""
    (memories, state), (others, reference) = found, expected
    assert all(
        torch.equal(a, b)
        for ours, theirs in zip(memories, others, strict=True)
        for a, b in zip(ours, theirs)
    )
    assert state.keys() == reference.keys()
    for name, value in state.items():
        torch.testing.assert_close(value, reference[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage, ep", [(0, 1), (1, 2), (2, 2), (3, 1), (3, 2)])
def test_bias_and_shares_follow_the_choices_of_all_ranks_as_in_one_process(stage, ep):
    net = Net()
    x = net.first(micro_batches()[0]).flatten(0, -2).double()
    chosen = (x @ net.mlp.router.weight.double().t()).sigmoid().topk(2).indices
    slots = chosen.flatten().bincount(minlength=EXPERTS)
    assert len(slots.unique()) > 2, "an uneven load"

    (expected,) = on_ranks(1, trained, 0)
    bias, share = expected[0][0]
    assert torch.equal(bias, RATE * (slots.double().mean() - slots).sign().float())
    assert torch.equal(share, slots / slots.sum())
    assert not torch.equal(expected[0][-1][0], bias), "later steps move it"
    for found in on_ranks(RANKS, trained, stage, ep)[:1]:
        assert_same(found, expected)


@pytest.mark.parametrize(
    "stage, ranks, ep", [(0, 1, 1), (3, RANKS, 1), (1, RANKS, RANKS)]
)
def test_checkpoints_have_the_memories_and_load_on_other_ranks(
    stage, ranks, ep, tmp_path
):
    def save(engine, steps):
        train(engine, steps[:2])
        engine.save_checkpoint(tmp_path)
        return trained(engine, steps[2:])

    def load(engine, steps):
        engine.load_checkpoint(tmp_path)
        before = memories(engine)
        return before, trained(engine, steps[2:])

    expected = on_ranks(RANKS, save, 2, RANKS)[0]
    before, found = on_ranks(ranks, load, stage, ep)[0]
    assert before[0].any() and before[1].sum() == 1
    assert_same(found, expected)


def test_a_skipped_update_moves_no_memory():
    def main(engine, steps):
        train(engine, steps[:1])
        skipped, before = engine.skipped_steps, memories(engine)
        while engine.skipped_steps == engine.global_steps:
            train(engine, steps[1:2])
        return skipped, before, memories(engine)

    overflowing = {
        "fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}
    }
    for skipped, before, after in on_ranks(RANKS, main, 1, 1, **overflowing):
        assert skipped == 1 and not before[0].any() and not before[1].any()
        assert after[0].any() and after[1].sum() == 1


def test_an_update_that_is_begun_again_counts_its_micro_batches_once():
    def main(engine, steps):
        engine.backward(engine(steps[1][0]))
        engine.step()
        engine.discard_gradients()
        for x in steps[0]:
            loss = engine(x)
            if not engine.has_gradients:
                engine.zero_grad()  # where programs for torch call it
            engine.backward(loss)
            engine.step()
        return memories(engine)

    (expected,) = on_ranks(
        1, lambda engine, steps: train(engine, steps[:1]) or memories(engine), 0
    )
    (found,) = on_ranks(1, main, 0)
    assert all(map(torch.equal, found, expected))


def test_the_state_dict_of_a_module_has_the_memories_in_fp32():
    def main(engine, steps):
        train(engine, steps)
        with engine.gathered_parameters():
            return (
                engine.full_state_dict(),
                engine.module.state_dict(),
                memories(engine),
            )

    (whole, local, expected), _ = on_ranks(RANKS, main, 3, 1, bf16={"enabled": True})
    names = ["mlp.router.expert_bias", "mlp.router.last_share"]
    for name, value in zip(names, expected):
        assert (
            torch.equal(whole[name], value)
            and torch.equal(local[name], value)
            and value.any()
        )
    net = Net()
    net.load_state_dict(whole)
    assert torch.equal(net.balance.bias, expected[0]) and torch.equal(
        net.balance.share, expected[1]
    )
    with pytest.raises(RuntimeError, match="Missing key.*mlp.router.expert_bias"):
        net.load_state_dict(
            {name: value for name, value in whole.items() if name != names[0]}
        )


def test_memories_shown_before_a_module_has_values_begin_with_zeros():
    context = ParallelContext(device=torch.device("meta"))
    layer = MixtureOfExperts(
        parse(FLAGS).model, EXPERTS, "mlp", context, output_std=0.5
    )
    assert layer.state_dict()["router.expert_bias"].is_meta
    layer.router.balance.place(torch.device("cpu"))
    assert torch.equal(layer.router.balance.bias, torch.zeros(EXPERTS))


def test_all_ranks_begin_with_the_memories_of_the_first():
    def net(mesh):
        made = Net(mesh)
        state = made.state_dict()
        made.load_state_dict(
            state | {"mlp.router.expert_bias": torch.arange(4.0) + mesh.rank}
        )
        return made

    for bias, _ in on_ranks(RANKS, lambda engine, steps: memories(engine), 1, net=net):
        assert torch.equal(bias, torch.arange(4.0))


def test_batches_without_a_ledger_are_refused_and_one_that_discards_counts_nothing():
    def main(engine, steps):
        outputs = engine(steps[0][0])
        engine.module.make_ledger = lambda: NO_LEDGER
        with pytest.raises(
            LedgerError, match="added to a batch that has no ledger, .*with_ledger"
        ):
            engine(steps[0][0])
        return outputs, engine.module.balance.tally.clone()

    [(_, tally)] = on_ranks(1, main, 0)
    assert tally.any()
    [(_, tally)] = on_ranks(1, main, 0, net=lambda mesh: Net(mesh, lambda: DISCARDING))
    assert not tally.any()
