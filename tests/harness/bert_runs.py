"""One forward and backward of our BERT on threaded ranks, and batches of it, as the model tests need them."""

import torch

from megatron_ds.data.batch import Batch
from megatron_ds.models import MODELS, build_stage, run_layers

from .plain_gpt import gather_logical, load_logical
from .threads import run_ranks


def random_bert_batch(vocab_size: int, ids: tuple[int, ...], s: int, seed: int = 0, **changes) -> Batch:
    """Samples of different lengths, a pure function of their ids: the first is full, others end earlier."""
    rows = [_sample(vocab_size, i, s, seed) for i in ids]
    tokens, labels, loss_mask, token_types, padding, order = map(torch.stack, zip(*rows))
    batch = dict(tokens=tokens, labels=labels, loss_mask=loss_mask, position_ids=torch.arange(s).expand(len(ids), s),
                 sample_ids=tuple(ids), token_types=token_types, attention_mask=padding[:, None, None, :],
                 sentence_order=order)
    return Batch(**{**batch, **changes})


def _sample(vocab_size, i, s, seed):
    draw = torch.Generator().manual_seed(1000 * seed + i)
    number = lambda low, high: int(torch.randint(low, high, (1,), generator=draw))
    length = s if i % 3 == 0 else number(s // 2, s)
    places, pivot = torch.arange(s), number(2, length - 1)
    tokens = torch.randint(vocab_size, (s,), generator=draw)
    labels = torch.randint(vocab_size, (s,), generator=draw)
    loss_mask = ((torch.rand(s, generator=draw) < 0.3) & (places < length)).float()
    loss_mask[1] = 1.0
    types = ((places >= pivot) & (places < length)).long()
    return tokens, labels, loss_mask, types, places >= length, torch.tensor(number(0, 2))


def run_bert(config, weights, batch, tp_size=1, per_token=False, **options):
    """(loss, logits [b, s, v], logical gradients) of `tp_size` threaded ranks."""

    def main(rank, world):
        tp = world.group("tp", tuple(range(tp_size)), rank)
        model = build_stage(MODELS["bert"](config, tp=tp, **options))
        load_logical(model.parameters(), weights, tp)
        output = run_layers(model, None, batch)
        shown = output.logits.detach().clone()
        loss = MODELS["bert"].loss(output, batch, tp=tp, vocab_size=config.vocab_size, per_token=per_token)
        loss.objective.backward()
        return loss, shown, [(p.spec, p.grad) for p in model.parameters()]

    ranks = run_ranks(tp_size, main)
    losses = [loss.objective.item() for loss, _, _ in ranks]
    assert len(set(losses)) == 1, f"the ranks disagree on the loss: {losses}"
    logits = torch.cat([shown for _, shown, _ in ranks], dim=-1)[..., :config.vocab_size].transpose(0, 1)
    return ranks[0][0], logits, gather_logical([grads for _, _, grads in ranks])
