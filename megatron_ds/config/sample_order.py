"""`SampleOrder`: what the core knows of an order of the training samples in place of --dataloader-type."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SampleOrder:
    """The order of the samples of one epoch.

    identity  entries of the identity of the data, in checkpoints
    prefixes  (description, prefix) of the index files that the order is made from
    make      (number of samples of an epoch) -> the order, as `data.loading.loader.Loader` takes it. Raises DataError
    """

    identity: Mapping[str, Any]
    prefixes: Sequence[tuple[str, str]]
    make: Callable[[int], Any]
