"""`CurriculumLoader`: micro-batches of a dataset, easy samples first, as DeepSpeed's loader gives them.

"data_efficiency.data_sampling" of an engine's JSON chooses the samples of each global batch; a micro-batch is
a part of it, and each data-parallel rank gets its share of the part. Every rank draws all batches, so nothing
is communicated.

A loader goes on where the last iteration ended: its position is the number of micro-batches that the program
has received, which checkpoints keep. Worker processes that read ahead do not change it.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Any

from torch.utils.data import DataLoader

from ...errors import ConfigError
from ...features import Provided, missing_wings
from ...mpu.group import Group

CURRICULUM_SAMPLER: Provided[Any] = Provided("curriculum sampler")


class CurriculumBatches:
    """The samples of this rank's micro-batches, for torch's DataLoader; DeepSpeed's data sampler.

    sampler  `CurriculumSampler` of the global batches
    samples  of the whole training
    sizes    (samples of a micro-batch on a rank, micro-batches of an update)
    data     the data-parallel ranks
    """

    def __init__(self, sampler: Any, samples: int, sizes: tuple[int, int], data: Group):
        self.sampler = sampler
        self.samples = samples
        self.data = data
        self._once = sizes[0] * data.size
        self._size = self._once * sizes[1]
        # What the program has received: samples on all ranks, and the step of the last ones.
        self._consumed = 0
        self._step = 1
        # (samples on all ranks, step) of micro-batches that were read ahead.
        self._ahead: deque[tuple[int, int]] = deque()

    def __len__(self) -> int:
        """Samples of the whole training, on all ranks."""
        return self.samples

    def __iter__(self) -> Iterator[list[int]]:
        """Micro-batches from the position on, until the training's samples are consumed."""
        self._ahead.clear()
        consumed = self._consumed
        share = lambda rank, samples: round(rank * samples / self.data.size)
        rank = self.data.rank
        for whole, step in self._after(consumed):
            samples = len(whole)
            self._ahead.append((samples, step))
            yield whole[share(rank, samples) : share(rank + 1, samples)]
            consumed += samples
            if consumed > self.samples:
                return

    def set_custom_curriculum_learning_schedule(
        self, functions: Mapping[str, Callable[[int], int]]
    ) -> None:
        """Set functions from the step, counted from 1, to the difficulty of metrics."""
        self.sampler.set_schedules(functions)

    def deliver(self) -> None:
        """Count a micro-batch that the program receives."""
        samples, self._step = self._ahead.popleft()
        self._consumed += samples

    def state_dict(self) -> dict[str, Any]:
        """Return where the program is; "current_difficulties" are those of its last micro-batch."""
        return {
            "consumed_samples": self._consumed,
            "curriculum_step": self._step,
            "current_difficulties": self.sampler.difficulties(self._step),
            "global_batch_size": self._size,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position. Raises ConfigError if the global batch has another size now."""
        size = state["global_batch_size"]
        if size != self._size:
            raise ConfigError(
                f"the checkpoint was saved with {size} samples in a global batch, and this run has {self._size}: the "
                "curriculum would draw other samples. Keep the product of micro-batch, accumulation steps and ranks, "
                "or load with load_optimizer_states=False."
            )
        self._consumed = state["consumed_samples"]
        self._step = state["curriculum_step"]

    def _after(self, consumed: int) -> Iterator[tuple[list[int], int]]:
        """(micro-batch of all ranks, step), from this number of samples on."""
        self.sampler.restart()
        passed = 0
        for step in count(1):
            batch = self.sampler.draw(self._size)
            for start in range(0, len(batch), self._once):
                part = batch[start : start + self._once]
                if passed >= consumed:
                    yield part, step
                passed += len(part)


class CurriculumLoader:
    """Iterates over micro-batches of this rank. Options are those of torch's DataLoader.

    post_process_func  None, or a function of a micro-batch and `data_sampler.state_dict()`
    """

    def __init__(
        self,
        dataset: Any,
        batches: CurriculumBatches,
        batch_size: int,
        collate_fn: Callable[[list], Any] | None = None,
        **options: Any,
    ):
        self.dataset = dataset
        self.batch_size = batch_size
        self.data_sampler = batches
        self.post_process_func: Callable[[Any, dict[str, Any]], Any] | None = None
        self.dataloader = DataLoader(
            dataset, batch_sampler=batches, collate_fn=collate_fn, **options
        )
        self._iteration: Iterator[Any] | None = None

    def __len__(self) -> int:
        """Samples of the whole training over those of a micro-batch, as in DeepSpeed."""
        return -(-len(self.data_sampler) // self.batch_size)

    def __iter__(self) -> "CurriculumLoader":
        self._iteration = iter(self.dataloader)
        return self

    def __next__(self) -> Any:
        """Return the next micro-batch of the last iteration that was begun."""
        if self._iteration is None:
            self._iteration = iter(self.dataloader)
        batch = next(self._iteration)
        self.data_sampler.deliver()
        if self.post_process_func is None:
            return batch
        return self.post_process_func(batch, self.data_sampler.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position. An iteration that was begun starts again there."""
        self.data_sampler.load_state_dict(state)
        self._iteration = None


def curriculum_loader(
    wish: Any,
    dataset: Any,
    sizes: tuple[int, int],
    data: Group,
    collate_fn: Callable[[list], Any] | None,
    **options: Any,
) -> CurriculumLoader:
    """Return the loader of a `DataEfficiency` with metrics.

    sizes: (samples of a micro-batch on a rank, micro-batches of an update)
    Raises ConfigError for a dataset without a length and for wrong metrics, DataError for index files of other
    data.
    """
    make = CURRICULUM_SAMPLER.find()
    if make is None:
        raise ConfigError(
            f"curricula over samples are not in this package.{missing_wings()}"
        )
    if not hasattr(dataset, "__len__"):
        raise ConfigError(
            f"a curriculum over samples reads them by number, and training_data, {type(dataset).__name__}, has no "
            "length. Give a map-style dataset."
        )
    sampler = make(wish.metrics, len(dataset), wish.seed)
    batches = CurriculumBatches(sampler, len(dataset) * wish.epochs, sizes, data)
    return CurriculumLoader(
        dataset,
        batches,
        sizes[0],
        collate_fn,
        num_workers=wish.workers,
        **options,
    )
