"""Between a logical tensor and the shards that ranks hold, by the boxes of a ParamSpec."""

import torch

from megatron_ds.mpu.param_spec import Coordinates, ParamSpec


def cut(
    logical: torch.Tensor, spec: ParamSpec, coordinates: Coordinates
) -> torch.Tensor:
    """The shard of the rank at `coordinates`; padding is zero."""
    local = torch.zeros(
        spec.local_shape({axis: size for axis, (_, size) in coordinates.items()}),
        dtype=logical.dtype,
    )
    for box in spec.boxes(coordinates):
        _at(local, box.local, box.sizes).copy_(_at(logical, box.logical, box.sizes))
    return local


def assemble(shards: list[torch.Tensor], spec: ParamSpec) -> torch.Tensor:
    """The logical tensor that the shards of tensor-parallel ranks 0, 1, .. mirror; NaN where no shard covers
    it."""
    logical = torch.full(spec.shape, torch.nan)
    for rank, shard in enumerate(shards):
        for box in spec.boxes(dict.fromkeys(("tp", "etp"), (rank, len(shards)))):
            _at(logical, box.logical, box.sizes).copy_(_at(shard, box.local, box.sizes))
    return logical


def _at(
    tensor: torch.Tensor, start: tuple[int, ...], sizes: tuple[int, ...]
) -> torch.Tensor:
    return tensor[tuple(slice(a, a + n) for a, n in zip(start, sizes))]
