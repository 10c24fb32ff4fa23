"""How many samples a run wants of each split, and the loaders that deal them out."""

from ..config import RunConfig
from ..data.loader import Loader
from ..models import MODELS
from ..ramps import make_batch_size, planned_steps
from .trainer import Loaders


def wanted_samples(config: RunConfig) -> tuple[int, int, int]:
    """(train, validation, test) samples the whole run draws, as Megatron counts them.

    Validation: one evaluation every `eval_interval` steps and one at the end, `eval_iters` global batches each.
    """
    train, size = config.train, config.train.global_batch_size
    steps = planned_steps(train, make_batch_size(config))
    samples = train.train_samples or steps * size
    evaluations = steps // train.eval_interval + 1 if train.eval_interval else 1
    one = (train.eval_iters or 0) * size
    return samples, evaluations * one, one


def build_loaders(config: RunConfig, datasets, tokenizer) -> Loaders:
    """Loaders over the (train, validation, test) datasets; None where a split has no samples."""
    def loader(dataset):
        return None if dataset is None else Loader(
            dataset, seq_length=config.model.seq_length, micro_batch_size=config.train.micro_batch_size,
            eod=tokenizer.eod, eod_mask_loss=config.data.eod_mask_loss, vocab_size=tokenizer.vocab_size,
            dataloader_type=config.data.dataloader_type, num_workers=config.data.num_workers,
            collate=MODELS[config.model.model].data.collate)

    return Loaders(*map(loader, datasets))
