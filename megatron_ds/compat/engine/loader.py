"""`EngineLoader`: micro-batches of a dataset for one data-parallel rank, as DeepSpeed's loader gives them;
`RepeatingLoader`.

Each rank gets different samples of the dataset (some twice where their number is not divisible by the ranks),
in a shuffled order that is the same in every epoch. `loader.set_epoch(n)` shuffles again.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler

from ...mpu.group import Group


class EngineLoader:
    """Iterates over `dataset`, a map-style or an iterable one. Options are those of torch's DataLoader.

    data     the data-parallel ranks
    sampler  of this rank's samples; None: its share of all samples
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        data: Group,
        *,
        drop_last: bool,
        sampler: Sampler | None = None,
        collate_fn: Callable[[list], Any] | None = None,
        **options: Any,
    ):
        if sampler is None and not isinstance(dataset, IterableDataset):
            sampler = DistributedSampler(dataset, data.size, data.rank)
        self.dataset = dataset
        self.batch_size = batch_size
        self.data_sampler = sampler
        self.dataloader = DataLoader(
            dataset,
            batch_size,
            sampler=sampler,
            drop_last=drop_last,
            collate_fn=collate_fn,
            **options,
        )
        self._iteration: Iterator[Any] | None = None

    def __len__(self) -> int:
        """Micro-batches of an epoch, on each rank."""
        return len(self.dataloader)

    def __iter__(self) -> Iterator[Any]:
        self._iteration = iter(self.dataloader)
        return self._iteration

    def __next__(self) -> Any:
        """Return the next micro-batch of the last iteration that was begun."""
        return next(iter(self) if self._iteration is None else self._iteration)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the samples; each epoch has another one."""
        choose = getattr(self.data_sampler, "set_epoch", None)
        if choose is not None:
            choose(epoch)


class RepeatingLoader:
    """A loader that restarts at its end: `batch = next(RepeatingLoader(loader))`."""

    def __init__(self, loader: Iterable[Any]):
        self.loader = loader
        self._iteration = iter(loader)

    def __iter__(self) -> "RepeatingLoader":
        return self

    def __next__(self) -> Any:
        try:
            return next(self._iteration)
        except StopIteration:
            self._iteration = iter(self.loader)
            return next(self._iteration)
