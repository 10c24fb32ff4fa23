"""One forward and backward of one of our models on threaded ranks that share its tensors, as the model tests
need it."""

from types import SimpleNamespace

import torch

from megatron_ds.batch.ledger import Ledger
from megatron_ds.extensions.data_efficiency.random_ltd import with_random_ltd
from megatron_ds.models import MODELS, build_stage, run_layers
from megatron_ds.mpu.context import ParallelContext, Recompute
from megatron_ds.mpu.group import solo

from .plain_gpt import gather_logical, load_logical
from .threads import run_ranks


class TensorGroup:
    """A mesh with one axis, the given tensor-parallel group, which divides experts as well."""

    def __init__(self, tp):
        self.tp = tp

    def group(self, *axes):
        return self.tp if axes in (("tp",), ("etp",)) else solo("-".join(axes))


def context_of(
    tp=None,
    *,
    sequence_parallel=False,
    dtype=torch.float32,
    device="cpu",
    seed=0,
    recompute_granularity=None,
    recompute_num_layers=None,
) -> ParallelContext:
    """A context of the ranks of one tensor-parallel group; of one process without a group."""
    return ParallelContext(
        tp and TensorGroup(tp),
        sequence_parallel,
        dtype,
        torch.device(device),
        seed,
        Recompute(recompute_granularity, recompute_num_layers),
    )


def make_model(name, config, tp, weights, drops=(), **options):
    """The whole model as one stage, holding this rank's shards of the logical `weights`. drops: blocks that
    drop tokens."""
    ctx = context_of(tp, **options)
    model = build_stage(with_random_ltd(MODELS[name](config, ctx), drops, ctx))
    load_logical(model.parameters(), weights, tp)
    return model


def run_model(name, config, weights, batch, tp_size=1, per_token=False, **options):
    """(loss, logits [b, s, v], logical gradients) of `tp_size` threaded ranks.

    The objective of the returned loss includes the terms in the ledger, and `entries` are these.
    """

    def main(rank, world):
        tp = world.group("tp", tuple(range(tp_size)), rank)
        model = make_model(name, config, tp, weights, **options)
        ledger = Ledger()
        noted = batch.with_ledger(ledger)
        output = run_layers(model, None, noted)
        shown = getattr(output, "logits", output).detach().clone()  # [s, b, Vp/t]
        loss = MODELS[name].loss(
            output, noted, tp=tp, vocab_size=config.vocab_size, per_token=per_token
        )
        ledger.close()  # recomputed layers add nothing
        entries = ledger.take()
        means = [
            e.weight * e.value / max(e.count, 1)
            for e in entries
            if e.weight is not None
        ]
        objective = loss.objective + sum(
            mean * loss.tokens if per_token else mean for mean in means
        )
        objective.backward()
        loss = SimpleNamespace(
            objective=objective, total=loss.total, tokens=loss.tokens, entries=entries
        )
        return loss, shown, [(p.spec, p.grad) for p in model.parameters()]

    ranks = run_ranks(tp_size, main)
    losses = [loss.objective.item() for loss, _, _ in ranks]
    assert len(set(losses)) == 1, f"the ranks disagree on the loss: {losses}"
    logits = torch.cat([shown for _, shown, _ in ranks], dim=-1)[
        ..., : config.vocab_size
    ].transpose(0, 1)
    return ranks[0][0], logits, gather_logical([grads for _, _, grads in ranks])
