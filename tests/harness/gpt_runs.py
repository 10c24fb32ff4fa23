"""Batches and runs of our GPT, as the model tests need them."""

from functools import partial

import torch

from megatron_ds.batch.batch import Batch

from . import model_runs

make_model, run_gpt = (
    partial(model_runs.make_model, "gpt"),
    partial(model_runs.run_model, "gpt"),
)


def make_batch(config, b: int = 3, s: int = 10, seed: int = 0, **changes) -> Batch:
    """Random tokens; the first sample counts only partly, so that a mean over samples would show."""
    draw = torch.Generator().manual_seed(seed)
    stream = torch.randint(config.vocab_size, (b, s + 1), generator=draw)
    loss_mask = torch.ones(b, s)
    loss_mask[0, s // 3 :] = 0
    return Batch(
        **{
            **dict(
                tokens=stream[:, :-1],
                labels=stream[:, 1:],
                loss_mask=loss_mask,
                position_ids=torch.arange(s).expand(b, s),
                sample_ids=tuple(range(100, 100 + b)),
            ),
            **changes,
        }
    )
