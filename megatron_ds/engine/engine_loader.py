"""`EngineLoader`: micro-batches of a dataset for one data-parallel rank, under DeepSpeed's conditions; `RepeatingLoader`.

Each rank gets other samples of the dataset (some twice where their number is not divisible by the ranks), in an order that
is shuffled once and the same in every epoch, as DeepSpeed's loader has it. `loader.set_epoch(n)` shuffles anew.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler

from ..mpu.group import Group


class EngineLoader:
    """Of `dataset`, a map-style or an iterable one.

    batch_size  samples of a micro-batch
    data        the data-parallel ranks
    drop_last   leave out the last micro-batch where it is smaller
    sampler     which samples this rank gets; None: its share of all
    options     further ones of torch's DataLoader
    """

    def __init__(self, dataset: Any, batch_size: int, data: Group, *, drop_last: bool, sampler: Sampler | None = None,
                 collate_fn: Callable[[list], Any] | None = None, **options: Any):
        if sampler is None and not isinstance(dataset, IterableDataset):
            sampler = DistributedSampler(dataset, data.size, data.rank)
        self.dataset, self.batch_size, self.data_sampler = dataset, batch_size, sampler
        self.dataloader = DataLoader(dataset, batch_size, sampler=sampler, drop_last=drop_last, collate_fn=collate_fn,
                                     **options)
        self._under_way: Iterator[Any] | None = None

    def __len__(self) -> int:
        """Micro-batches of an epoch, on each rank."""
        return len(self.dataloader)

    def __iter__(self) -> Iterator[Any]:
        self._under_way = iter(self.dataloader)
        return self._under_way

    def __next__(self) -> Any:
        """The next micro-batch of the iteration that was begun last."""
        if self._under_way is None:
            iter(self)
        return next(self._under_way)

    def set_epoch(self, epoch: int) -> None:
        """Another order of the samples for each epoch."""
        if hasattr(self.data_sampler, "set_epoch"):
            self.data_sampler.set_epoch(epoch)


class RepeatingLoader:
    """A loader that begins again when it is through: `batch = next(RepeatingLoader(loader))`."""

    def __init__(self, loader: Iterable[Any]):
        self.loader = loader
        self._under_way = iter(loader)

    def __iter__(self) -> "RepeatingLoader":
        return self

    def __next__(self) -> Any:
        try:
            return next(self._under_way)
        except StopIteration:
            self._under_way = iter(self.loader)
            return next(self._under_way)
