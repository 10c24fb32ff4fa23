"""One forward and backward of one of our models on threaded ranks that share its tensors, as the model tests need it."""

import torch

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
    """(loss, logits [b, s, v], logical gradients) of `tp_size` threaded ranks."""

    def main(rank, world):
        tp = world.group("tp", tuple(range(tp_size)), rank)
        model = make_model(name, config, tp, weights, **options)
        output = run_layers(model, None, batch)
        shown = getattr(output, "logits", output).detach().clone()          # [s, b, Vp/t]
        loss = MODELS[name].loss(output, batch, tp=tp, vocab_size=config.vocab_size, per_token=per_token)
        loss.objective.backward()
        return loss, shown, [(p.spec, p.grad) for p in model.parameters()]

    ranks = run_ranks(tp_size, main)
    losses = [loss.objective.item() for loss, _, _ in ranks]
    assert len(set(losses)) == 1, f"the ranks disagree on the loss: {losses}"
    logits = torch.cat([shown for _, shown, _ in ranks], dim=-1)[..., :config.vocab_size].transpose(0, 1)
    return ranks[0][0], logits, gather_logical([grads for _, _, grads in ranks])
