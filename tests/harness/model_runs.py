"""One forward and backward of one of our models on threaded ranks that share its tensors, as the model tests need it."""

from types import SimpleNamespace

import torch

from megatron_ds.data.ledger import Ledger
from megatron_ds.models import MODELS, Placement, build_stage, run_layers, with_random_ltd

from .plain_gpt import gather_logical, load_logical
from .threads import run_ranks


def make_model(name, config, tp, weights, drops=(), **options):
    """The whole model as one stage, holding this rank's shards of the logical `weights`. drops: blocks that drop tokens."""
    placement = Placement(tp, options.get("sequence_parallel", False), torch.float32, "cpu", options.get("seed", 0))
    model = build_stage(with_random_ltd(MODELS[name](config, tp=tp, **options), drops, placement))
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
        shown = getattr(output, "logits", output).detach().clone()          # [s, b, Vp/t]
        loss = MODELS[name].loss(output, noted, tp=tp, vocab_size=config.vocab_size, per_token=per_token)
        ledger.close()                                                      # recomputed layers add nothing
        entries = ledger.take()
        means = [e.weight * e.value / max(e.count, 1) for e in entries if e.weight is not None]
        objective = loss.objective + sum(mean * loss.tokens if per_token else mean for mean in means)
        objective.backward()
        loss = SimpleNamespace(objective=objective, total=loss.total, tokens=loss.tokens, entries=entries)
        return loss, shown, [(p.spec, p.grad) for p in model.parameters()]

    ranks = run_ranks(tp_size, main)
    losses = [loss.objective.item() for loss, _, _ in ranks]
    assert len(set(losses)) == 1, f"the ranks disagree on the loss: {losses}"
    logits = torch.cat([shown for _, shown, _ in ranks], dim=-1)[..., :config.vocab_size].transpose(0, 1)
    return ranks[0][0], logits, gather_logical([grads for _, _, grads in ranks])
