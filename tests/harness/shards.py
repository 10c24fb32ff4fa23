"""Between a logical tensor and the shards that tensor-parallel ranks hold, by the boxes of a ParamSpec."""

import torch

from megatron_ds.mpu.param_spec import ParamSpec


def cut(logical: torch.Tensor, spec: ParamSpec, rank: int, size: int) -> torch.Tensor:
    """The shard of tensor-parallel rank `rank` of `size`; padding is zero."""
    local = torch.zeros(spec.local_shape(size), dtype=logical.dtype)
    for box in spec.boxes(rank, size):
        _at(local, box.local, box.sizes).copy_(_at(logical, box.logical, box.sizes))
    return local


def assemble(shards: list[torch.Tensor], spec: ParamSpec) -> torch.Tensor:
    """The logical tensor that the shards of ranks 0, 1, .. mirror; NaN where no shard covers it."""
    logical = torch.full(spec.shape, torch.nan)
    for rank, shard in enumerate(shards):
        for box in spec.boxes(rank, len(shards)):
            _at(logical, box.logical, box.sizes).copy_(_at(shard, box.local, box.sizes))
    return logical


def _at(tensor: torch.Tensor, start: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    return tensor[tuple(slice(a, a + n) for a, n in zip(start, sizes))]
