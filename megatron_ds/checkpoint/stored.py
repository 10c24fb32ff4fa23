"""`StoredTensors`: the logical tensors of a checkpoint, read one at a time, by a process that has no model."""

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from ..mpu.param_spec import Init, ParamSpec
from .load import find_checkpoint, way_back
from .pieces import ParameterPiece
from .safetensors_folder import TensorEntry


class StoredTensors:
    """The tensors of some kinds ("weight", "exp_avg", …) of the checkpoint of `step`, by their names.

    Raises CheckpointError when there is none, or it is damaged.
    """

    def __init__(self, directory: str | os.PathLike, step: int, kinds: tuple[str, ...]):
        from .storage import Reader

        self._folder, self._step = Path(directory), step
        path = find_checkpoint(self._folder, step)
        with way_back(self._folder, step):
            self._reader = Reader(path)
        self._kind_of: dict[str, str] = {}
        self.entries: list[TensorEntry] = []
        for key, stored in self._reader.index.state_dict_metadata.items():
            kind, _, name = key.partition("/")
            if kind in kinds:
                self._kind_of[name] = kind
                self.entries.append(TensorEntry(name, tuple(stored.size), stored.properties.dtype))

    def read(self, entry: TensorEntry) -> torch.Tensor:
        """The whole tensor, in the dtype of `entry`, which need not be that of the checkpoint."""
        from .storage import PieceLoadPlanner

        flat = torch.empty(torch.Size(entry.shape).numel(), dtype=entry.dtype)
        piece = ParameterPiece(ParamSpec(entry.name, entry.shape, Init("zeros")), flat, self._kind_of[entry.name])
        planner = PieceLoadPlanner([piece], {}, exact=False)
        planner.set_up_planner({}, self._reader.index)
        with way_back(self._folder, self._step):
            self._reader.read_data(planner.create_local_plan(), planner).wait()
        return flat.view(entry.shape)

    def read_all(self, entries: list[TensorEntry]) -> Iterator[torch.Tensor]:
        return (self.read(entry) for entry in entries)
