"""The samples of a run: the number of samples of each split, their order, and the loaders that read them.

With --data-readers first, the first rank of a tensor-parallel group reads each batch and broadcasts it: for
disks that many ranks would overload, and for samples that are expensive to build. If files are mapped from a
fast disk, it is faster when each rank reads the batch itself.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ..batch.batch import Batch
from ..config import RunConfig
from ..config.options.data import DataConfig
from ..data.kind import Collator, Dataset
from ..data.loading.datasets import Datasets
from ..data.loading.loader import Loader
from ..data.tokenizers.base import Tokenizer
from ..errors import CheckpointError
from ..features import changed_samples
from ..mpu.agree import on_one_rank
from ..mpu.collectives import broadcast_
from ..mpu.group import Group
from ..mpu.mesh import Mesh
from ..planning.run_model import data_kind
from ..planning.training_length import make_length
from .from_checkpoint import saved_config
from .loaders import Loaders

logger = logging.getLogger(__name__)
NEED_ENDS = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask")
LOOKED_AT = 32  # training samples that are searched for an end of document


def wanted_samples(config: RunConfig) -> tuple[int, int, int]:
    """(train, validation, test) samples of the whole run, as Megatron counts them.

    Validation: one evaluation every `eval_interval` steps and one at the end, of `eval_iters` global batches.
    """
    train = config.train
    size = config.train.global_batch_size
    assert size is not None, "parsing sets it"
    length = make_length(config)
    steps = length.steps_after()
    # A length in samples or iterations, also where it is only a bound, decides the order of the samples, as
    # in Megatron.
    samples = train.train_samples or (
        length.samples_after()
        if train.train_iters is None
        else train.train_iters * size
    )
    evaluations = steps // train.eval_interval + 1 if train.eval_interval else 1
    one = (train.eval_iters or 0) * size
    return samples, evaluations * one, one


def planned_samples(run: Mapping, config: RunConfig) -> list[int]:
    """Return the numbers of training samples that the starts of a run planned, in rising order; see
    `ContinuedDataset`.

    run: the values of run.json of the checkpoint that it continues, or {}
    """
    wanted = wanted_samples(config)[0]
    checkpoint = config.checkpoint
    # Another program's checkpoint has no options of its training.
    if not run or checkpoint.finetune or "converted_from" in run:
        return [wanted]
    before = run.get("planned_samples")
    if before is None:
        saved = replace(
            saved_config(run, checkpoint.load), world_size=run["world_size"]
        )
        before = [wanted_samples(saved)[0]]
    is_list = isinstance(before, list) and before
    if not is_list or not all(isinstance(n, int) and n >= 0 for n in before):
        raise CheckpointError(
            f"--load {checkpoint.load}: planned_samples of its run.json is {before!r}, and no list of numbers of "
            "samples. Copy the checkpoint again."
        )
    return before if wanted <= before[-1] else [*before, wanted]


def rearranged(config: RunConfig, datasets: Datasets, tokenizer: Tokenizer) -> Datasets:
    """Return the datasets, with the changes of features."""
    for changed in changed_samples(config):
        datasets = changed.change(datasets, config, tokenizer)
    return datasets


def warn_without_ends(data: DataConfig, dataset: Dataset | None, eod: int) -> None:
    """Warn that options which act on ends of documents have no effect, if no document has an end."""
    named = [f"--{name.replace('_', '-')}" for name in NEED_ENDS if getattr(data, name)]
    if not named or data.pack_documents or dataset is None:
        return
    looked_at = min(len(dataset), LOOKED_AT)
    if not any((dataset[i]["tokens"] == eod).any() for i in range(looked_at)):
        logger.warning(
            "none of the first %d training samples contains the end-of-document token %d, so %s "
            "had no effect on them. Was the corpus made without --append-eod?",
            looked_at,
            eod,
            " and ".join(named),
        )


def build_loaders(
    config: RunConfig, datasets: Datasets, tokenizer: Tokenizer, mesh: Mesh
) -> Loaders:
    """Loaders over the (train, validation, test) datasets; None where a split has no samples."""
    data = config.data
    collate = data_kind(config).collator(config, tokenizer)
    if mesh.rank == 0:
        warn_without_ends(data, datasets.train, tokenizer.eod)
    tp = mesh.group("tp")
    # On the ranks of a tensor-parallel group one may read for all.
    shared = data.data_readers == "first" and tp.size > 1

    def loader(dataset, order=None):
        if dataset is None:
            return None
        own = Loader(
            dataset,
            collate,
            micro_batch_size=config.train.micro_batch_size,
            dataloader_type=data.dataloader_type,
            order=order,
            num_workers=data.num_workers,
            pin=mesh.device.type == "cuda",
        )
        return SharedReader(own, tp, mesh.device) if shared else own

    # Training samples alone may have an order of their own.
    own = config.sample_order
    order = None
    if own is not None and datasets.train is not None:
        order = own.make(len(datasets.train))
    return Loaders(loader(datasets.train, order), *map(loader, datasets[1:]))


READER = 0  # position in the group


class SharedReader:
    """The interface of `Loader` for every rank of a tensor-parallel group. Batches are on `device`."""

    def __init__(self, loader: Loader, tp: Group, device: torch.device):
        self.loader = loader
        self.tp = tp
        self.device = device

    def batch(
        self, first: int, size: int, rank: int, ranks: int, training: bool = True
    ) -> Batch:
        """Return the batch of `Loader.batch`, on all ranks of the group. Collective over the group: an exchange of
        shapes, then a broadcast per tensor.

        An error of the reading rank is raised on all ranks.
        """
        made: Batch | None = None

        def read() -> tuple[Batch, dict]:
            nonlocal made
            own = self.loader.batch(first, size, rank, ranks, training=training)
            made = own.to(self.device)
            tensors = made.tensors()
            emptied: dict[str, Any] = dict.fromkeys(tensors)
            forms = {name: _form(tensor) for name, tensor in tensors.items()}
            return replace(made, **emptied), forms

        frame, forms = on_one_rank(self.tp, read, READER)
        held = {} if made is None else vars(made)
        sent: dict[str, Any] = {
            name: self._send(held.get(name), *form) for name, form in forms.items()
        }
        return replace(frame, **sent)

    @property
    def is_reader(self) -> bool:
        """Whether this rank reads, and sends to the others."""
        return self.tp.rank == READER

    @property
    def dataset(self) -> Dataset:
        """The samples that are read, of this rank."""
        return self.loader.dataset

    @property
    def collate(self) -> Collator:
        """The function that makes batches of them."""
        return self.loader.collate

    def indices(self, first: int, size: int) -> list[int]:
        """Return the indices of the loader, which every rank has. Not collective."""
        return self.loader.indices(first, size)

    def close(self) -> None:
        """Stop the threads of the loader."""
        self.loader.close()

    def _send(
        self,
        tensor: torch.Tensor | None,
        shape: torch.Size,
        rows: int,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Broadcast a tensor. A row that is expanded over all samples is sent once."""
        sent = torch.empty(rows, *shape[1:], dtype=dtype, device=self.device)
        if tensor is not None:
            sent.copy_(tensor[:rows])
        broadcast_(sent, self.tp, READER)
        return sent.expand(shape)


def _form(tensor: torch.Tensor) -> tuple[torch.Size, int, torch.dtype]:
    return tensor.shape, 1 if tensor.stride(0) == 0 else tensor.shape[0], tensor.dtype
