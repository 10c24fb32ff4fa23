"""How many samples a run wants of each split, and the loaders that deal them out."""

import math

from ..config import RunConfig
from ..data.loader import Loader
from ..progress import Progress
from ..ramps import make_batch_size
from .trainer import Loaders


def wanted_samples(config: RunConfig) -> tuple[int, int, int]:
    """(train, validation, test) samples the whole run draws, as Megatron counts them.

    Validation: one evaluation every `eval_interval` steps and one at the end, `eval_iters` global batches each.
    """
    train, size = config.train, config.train.global_batch_size
    steps = train.train_iters or math.ceil(train.train_samples / size)
    samples = train.train_samples or _samples_of(steps, config)
    evaluations = steps // train.eval_interval + 1 if train.eval_interval else 1
    one = (train.eval_iters or 0) * size
    return samples, evaluations * one, one


def _samples_of(steps: int, config: RunConfig) -> int:
    """Samples of `steps` steps; a batch-size ramp makes early steps smaller."""
    if not config.train.rampup_batch_size:
        return steps * config.train.global_batch_size
    batch_size, progress = make_batch_size(config), Progress()
    for _ in range(steps):
        progress = progress.after(batch_size(progress), 0)
    return progress.samples


def build_loaders(config: RunConfig, datasets, tokenizer) -> Loaders:
    """Loaders over the (train, validation, test) datasets; None where a split has no samples."""
    def loader(dataset):
        return None if dataset is None else Loader(
            dataset, seq_length=config.model.seq_length, micro_batch_size=config.train.micro_batch_size,
            eod=tokenizer.eod, eod_mask_loss=config.data.eod_mask_loss, vocab_size=tokenizer.vocab_size,
            dataloader_type=config.data.dataloader_type, num_workers=config.data.num_workers)

    return Loaders(*map(loader, datasets))
