"""One forward and backward of our GPT on one rank, as the model tests need it."""

import torch

from megatron_ds.data.batch import Batch
from megatron_ds.models import MODELS, Placement, build_stage, gpt_loss, run_layers, with_random_ltd

from .plain_gpt import gather_logical, load_logical
from .threads import run_ranks


def make_batch(config, b: int = 3, s: int = 10, seed: int = 0, **changes) -> Batch:
    """Random tokens; the first sample counts only partly, so that a mean over samples would show."""
    draw = torch.Generator().manual_seed(seed)
    stream = torch.randint(config.vocab_size, (b, s + 1), generator=draw)
    loss_mask = torch.ones(b, s)
    loss_mask[0, s // 3:] = 0
    return Batch(**{**dict(tokens=stream[:, :-1], labels=stream[:, 1:], loss_mask=loss_mask,
                           position_ids=torch.arange(s).expand(b, s), sample_ids=tuple(range(100, 100 + b))), **changes})


def make_model(config, tp, weights, drops=(), **options):
    """The whole model as one stage, holding this rank's shards of the logical `weights`. drops: blocks that drop tokens."""
    placement = Placement(tp, options.get("sequence_parallel", False), torch.float32, "cpu", options.get("seed", 0))
    model = build_stage(with_random_ltd(MODELS["gpt"](config, tp=tp, **options), drops, placement))
    load_logical(model.parameters(), weights, tp)
    return model


def run_gpt(config, weights, batch, tp_size=1, **options):
    """(loss, logits [b, s, v], logical gradients) of `tp_size` threaded ranks."""

    def main(rank, world):
        tp = world.group("tp", tuple(range(tp_size)), rank)
        model = make_model(config, tp, weights, **options)
        logits = run_layers(model, None, batch)                             # [s, b, Vp/t]
        shown = logits.detach().clone()
        loss = gpt_loss(logits, batch, tp=tp, vocab_size=config.vocab_size)
        loss.objective.backward()
        return loss, shown, [(p.spec, p.grad) for p in model.parameters()]

    ranks = run_ranks(tp_size, main)
    losses = [loss.objective.item() for loss, _, _ in ranks]
    assert len(set(losses)) == 1, f"the ranks disagree on the loss: {losses}"
    logits = torch.cat([shown for _, shown, _ in ranks], dim=-1)[..., :config.vocab_size].transpose(0, 1)
    return ranks[0][0], logits, gather_logical([grads for _, _, grads in ranks])
