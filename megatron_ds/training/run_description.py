"""The values of run.json that all checkpoints of a run share."""

from .. import __version__
from ..config import RunConfig, Source
from ..config.saved_values import to_dict
from ..data.loading.datasets import identify
from ..data.loading.sources import parse_split, read_sources
from ..data.tokenizers import Tokenizer
from ..features import changed_samples, record
from ..models.identity import model_identity
from ..planning.run_model import data_kind


def describe_run(
    config: RunConfig, as_given: RunConfig, tokenizer: Tokenizer, run_id: str
) -> dict:
    """Return the values of run.json that all checkpoints of a run share: how to start it, and its identity.

    as_given: the config as the user wrote it; `config` also has the size of the tokenizer's vocabulary.
    --overwrite-save is left out: it permits one start, not later ones with run.json as --config.
    """
    once = as_given.with_values(
        {"checkpoint.overwrite_save": False}, Source("derived", "for one start only")
    )
    identity = {
        "model": model_identity(config.model),
        "tokenizer": {"fingerprint": tokenizer.fingerprint},
        "data": _data_identity(config),
    }
    added = config.added_weights
    if added is not None:
        identity[added.noun] = dict(added.identity)
    return {
        "version": __version__,
        "run_id": run_id,
        "identity": identity,
        "config": to_dict(once if as_given.checkpoint.overwrite_save else as_given),
        "world_size": config.world_size,
        "features": record(),
    }


def _data_identity(config: RunConfig) -> dict:
    """Return the values that determine the training samples and their order.

    Corpora are identified by content, since they may be moved, or the same split written differently.
    Validation data is left out: it may change between starts.
    """
    data = config.data
    sources = read_sources(config.data)
    whole = sources.whole.values if sources.whole else ()
    train = sources.parts[0].values if sources.parts else ()
    identity = {
        "data_path": identify(whole),
        "train_data_path": identify(train),
        "split": list(parse_split(data.splits)) if whole else None,
        "mock_data": data.mock_data,
        "dataloader_type": data.dataloader_type,
        "seq_length": config.model.seq_length,
        "seed": config.train.seed,
    }
    if data.blend_weights != "samples":
        identity["blend_weights"] = data.blend_weights
    if config.sample_order is not None:
        identity |= config.sample_order.identity
    for changed in changed_samples(config):
        identity |= changed.identity(config)
    return identity | data_kind(config).identity(config)
