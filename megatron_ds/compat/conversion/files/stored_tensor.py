"""Tensors in files that are not read yet, and checkpoints made of them.

    RawCheckpoint        as the files name and pack them
    LogicalCheckpoint    under our names, packed as in a checkpoint of a training run

Both map kind → name → `StoredTensor`. The kinds are those of `checkpoint.pieces`: "weight", "exp_avg",
"exp_avg_sq", …; "master" is an fp32 copy of a weight that is stored in 16 bits.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ....errors import CheckpointError

WEIGHT = "weight"
MASTER = "master"
Tensors = Mapping[str, Mapping[str, "StoredTensor"]]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in files, not read yet.

    read   reads or maps the whole tensor: `shape` and `dtype`. May be called more than once, from any thread
    place  file and key, for messages
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]
    place: str

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def compared_with(weight: StoredTensor, master: StoredTensor, why: str) -> StoredTensor:
    """Return the master; reading it compares it with the weight that was rounded from it.

    why: end of the message of the CheckpointError where they differ
    """

    def read() -> torch.Tensor:
        values = master.read()
        rounded = weight.read()
        if not torch.equal(values.to(rounded.dtype), rounded):
            raise CheckpointError(
                f"{master.place} is not what the weight was rounded from: the largest "
                f"difference is {float((values - rounded).abs().max()):.3g}. {why}"
            )
        return values

    return replace(master, read=read)


def in_dtype(values: torch.Tensor, dtype: torch.dtype, place: str) -> torch.Tensor:
    """Return the values in a dtype. Raises CheckpointError where float16 has no number for a finite one.

    place: of the tensor, for messages
    """
    cast = values.to(dtype)
    if dtype == torch.float16 and cast.isinf().sum() > values.isinf().sum():
        raise CheckpointError(
            f"{place} has values that float16 cannot hold: the largest is "
            f"{values[values.isfinite()].abs().max():.6g}, that of float16 "
            f"{torch.finfo(torch.float16).max:.0f}. Use --dtype bfloat16."
        )
    return cast


@dataclass(frozen=True)
class AdapterTensors:
    """Adapters by our names, apart from the weights beside which they were trained.

    rank, scale, targets  as --lora-rank and the others give them
    base        folder of the frozen weights
    remembered  what routers remembered at the end, in place of the values below
    below       the frozen weights, by our names
    """

    tensors: Mapping[str, StoredTensor]
    rank: int
    scale: float
    targets: tuple[str, ...]
    base: Path
    remembered: Mapping[str, StoredTensor] = field(default_factory=dict)
    below: Mapping[str, StoredTensor] = field(default_factory=dict)

    @property
    def has_magnitudes(self) -> bool:
        """Whether the adapters are those of --use-dora."""
        return any(".lora_m." in name for name in self.tensors)


@dataclass(frozen=True)
class StoredProgress:
    """How far the training is that wrote the files. None where they do not record it.

    iteration      optimizer steps, including skipped ones
    samples        sequences consumed
    tokens         tokens consumed
    skipped_steps  steps skipped because a gradient was not finite
    num_updates    steps of the optimizer state: `step` of Adam
    scaler         numbers of the dynamic loss scaler, named as in run.json: "loss_scale", …
    """

    iteration: int | None = None
    samples: int | None = None
    tokens: int | None = None
    skipped_steps: int | None = None
    num_updates: int | None = None
    scaler: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RawCheckpoint:
    """The content of a folder of another program, merged over the ranks that wrote it.

    folder    for messages
    tensors   kind → name of the program → tensor. Logical: without shards of ranks
    settings  what the files record of the model and its training: config.json, arguments
    progress  how far the training is
    ignored   names of stored objects that are not used, to be listed
    """

    folder: Path
    tensors: Tensors
    settings: Mapping[str, Any]
    progress: StoredProgress = StoredProgress()
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True)
class LogicalCheckpoint:
    """A checkpoint in our terms.

    folder      for messages
    model       options of the model section of our configuration: name → value, without those at defaults
    tensors     kind → our name → tensor: logical, without padding of the vocabulary. Kind "weight" has all
                names; it holds the masters where the source has them
    progress    how far the training is
    optimizer   our name of the optimizer whose state is in `tensors`; None without state
    training    other options of our configuration that the source records, such as "optimizer.lr"
    tokenizer   files of the tokenizer: name in a Hugging Face folder → path of the file
    tokenizer_type  as --tokenizer-type takes it, where the source records it
    source      format and family of the source, and its settings, as they are kept in run.json: a target of
                the same family takes from them what is no option of ours
    ignored     stored objects that are not used
    unused      tensors that no row of the family's table names
    notes       sentences on settings of the source that a run does not follow
    adapters    those that are part of the weights, apart from them; None without adapters
    """

    folder: Path
    model: Mapping[str, Any]
    tensors: Tensors
    progress: StoredProgress = StoredProgress()
    optimizer: str | None = None
    training: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Mapping[str, Path] = field(default_factory=dict)
    source: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    tokenizer_type: str | None = None
    notes: tuple[str, ...] = ()
    adapters: AdapterTensors | None = None
