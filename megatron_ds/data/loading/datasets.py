"""From the data flags to the datasets of a run: mock data, one corpus, a blend, or a path for each part.

Without communication: every process opens the same files, and the first process builds the index maps
(`cache.py`), so all ranks raise the same error.
"""

import logging
from collections.abc import Sequence
from typing import NamedTuple

from ...config import RunConfig
from ..kind import DataKind, Dataset
from ..samples.gpt_data import GPT_DATA
from ..tokenizers import Tokenizer

logger = logging.getLogger(__name__)


class Datasets(NamedTuple):
    """A part is None if the run needs no samples of it, or if the split assigns it no documents."""

    train: Dataset | None
    valid: Dataset | None
    test: Dataset | None


def build_datasets(
    config: RunConfig,
    samples: Sequence[int],
    tokenizer: Tokenizer,
    kind: DataKind = GPT_DATA,
    *,
    one_epoch: bool = False,
    planned: Sequence[int] = (),
) -> Datasets:
    """Return the datasets of a run, each of at least the wanted number of samples.

    samples: (training, validation, test) wanted.
    planned: the numbers of training samples that the starts of the run planned, in rising order, whose order
    is kept; by default the wanted number.
    one_epoch: the training data are one epoch for any number of samples, for a `SampleOrder`, which
    numbers them. Raises DataError for missing or damaged files and for a part without text, except that the default
    split may leave validation or test without text; ConfigError for impossible flags.
    """
    data = config.data
    # Mock data need no files; each part has its own seed.
    if data.mock_data:
        return Datasets(
            *(
                kind.mock(n, config, tokenizer, config.train.seed + 1000 * i)
                if n
                else None
                for i, n in enumerate(samples)
            )
        )
    # Runs with a corpus load what reads it.
    from .corpora import open_parts

    return Datasets(*open_parts(config, samples, tokenizer, kind, one_epoch, planned))


def fit_default_split(
    config: RunConfig, samples: Sequence[int], kind: DataKind = GPT_DATA
) -> RunConfig:
    """Return the config with a split for a small corpus, if the default split leaves wanted validation without text.

    Then the last document of the largest corpus is for validation and the others for training. A --split that
    the user gave is kept, and so is the default of an order of samples, whose index numbers them under it. The
    split in the config is part of the identity of a checkpoint. Reads the corpora.  samples: (training,
    validation, test) wanted.
    """
    # Only the default split of a blend may be changed.
    data = config.data
    is_fixed = data.split is not None or config.sample_order is not None
    if is_fixed or not samples[1] or not data.is_divided_by_split:
        return config
    from .corpora import fitted_split

    return fitted_split(config, kind)


def identify(values: Sequence[str]) -> list[str]:
    """Return the values of a data path with the name of each corpus, without its folder, and a hash of its lengths
    in place of its path."""
    if not values:
        return []
    from .corpora import names_of

    return names_of(values)
