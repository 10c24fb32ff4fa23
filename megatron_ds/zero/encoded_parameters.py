"""Frozen weights that a rank keeps in few bits: `EncodedParameters`, a `ParameterStore` (Dettmers et al. 2023,
arXiv:2305.14314, section 3).

    codes, scales   of every bucket                       with ZeRO 3 of this rank's part of it
    flat            what they mean, in the model's dtype  while a layer is at work, forward or backward

Layers are decoded as ZeRO 3 gathers them, by the same hooks; below ZeRO 3 without a message. All ranks decode the
same codes. A block lies in one parameter, and in a row of it where its length divides the columns.

Nothing is updated. A checkpoint is loaded into memory of the host, as wide as the weights are, and encoded from it.
"""

from collections.abc import Sequence

import torch
from torch import nn

from ..mpu.managed_parameter import spec_of
from .data_groups import Hierarchy
from .layout import Layout, SlotPiece
from .number_blocks import Blocks
from .param_store import Draw, fill
from .quantized_parameters import BlockParameters
from .state_piece import StatePiece

HOST = torch.device("cpu")


class EncodedParameters(BlockParameters):
    """A `ParameterStore` of frozen parameters.

    unit_plans  (layer, first bucket, last bucket + 1), in the order of the buckets
    blocks      the format; a multiple of its length divides every part
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        layout: Layout,
        ranks: Hierarchy,
        unit_plans: Sequence[tuple[int, int, int]],
        device: torch.device,
        blocks: Blocks,
        draw: Draw | None,
    ):
        is_sharded = ranks.data.size > 1
        super().__init__(parameters, layout, ranks, is_sharded, device, blocks)
        self._opened: list[torch.Tensor] = []
        here = ranks.inner.rank, ranks.inner.size
        self._places = layout.shard_pieces(*here)
        self._held = layout.slot_intersections(*here)
        # Initial values, one bucket at a time.
        for bucket, _ in enumerate(layout.buckets):
            wide = self._wide(bucket, device)
            for piece, values in self._values(bucket, wide):
                fill(values, parameters[piece.slot], piece.start, draw)
            self._parts.append(blocks.encode(wide))
        self.units = [self._make_unit(*plan, parameters) for plan in unit_plans]

    def opened(self, parameters: Sequence[nn.Parameter]) -> list[StatePiece]:
        data = self.ranks.data
        # Where the ranks divide the weights, each writes and reads its own.
        replica = (0, 1) if self.sharded else (data.rank, data.size)
        self._opened = []
        pieces = []
        for bucket, _ in enumerate(self._parts):
            wide = self._wide(bucket, HOST)
            self._opened.append(wide)
            for piece, values in self._values(bucket, wide):
                spec = spec_of(parameters[piece.slot])
                span = piece.start, piece.stop
                state = StatePiece(spec, "weight", *span, values, *replica)
                pieces.append(state)
        return pieces

    def refresh(self) -> None:
        """Encode what was opened, and free all layers."""
        self._free_all()
        for part, wide in zip(self._parts, self._opened):
            near = wide.to(self._device)
            encoded = self._blocks.encode(near)
            part.copy_(encoded)
        self._opened = []

    def _wide(self, bucket: int, device: torch.device) -> torch.Tensor:
        place = self._places[bucket]
        numel = place.stop - place.start
        return torch.zeros(numel, dtype=self._dtype, device=device)

    def _values(
        self, bucket: int, wide: torch.Tensor
    ) -> list[tuple[SlotPiece, torch.Tensor]]:
        """Each piece of a bucket's part, and its numbers in `wide`."""
        start = self._places[bucket].start
        slots = self.layout.slots
        found = []
        for piece in self._held:
            if slots[piece.slot].bucket != bucket:
                continue
            first = piece.flat - start
            stop = first + piece.stop - piece.start
            found.append((piece, wide[first:stop]))
        return found
