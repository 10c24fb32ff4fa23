"""The parameters of one set, in flat buffers: whole on every rank (`WholeParameters`) or in shards
(sharded_parameters.py).

    fp32 model     flat  |w2|b2| w1 |     the update writes the model itself
    16-bit model   flat  |w2|b2| w1 |     the update writes fp32 masters and rounds them into flat

If optimizer state is sharded, each rank updates its shard, and the ranks gather the rest: bucket by bucket in
place, or in ZeRO 3 layer by layer when it is needed.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..host.large_pages import huge_page_zeros
from ..mpu.collectives import all_gather_into_
from ..mpu.group import DONE, Waitable
from ..mpu.managed_parameter import spec_of
from ..mpu.param_spec import ParamSpec
from .arrays import Array
from .data_groups import Hierarchy
from .layout import Layout, SlotPiece
from .state_piece import StatePiece

if TYPE_CHECKING:
    from .gathering import Unit

Draw = Callable[[ParamSpec, int, torch.Tensor], None]
"""Fills a flat tensor with the initial values of elements [start, start + len) of a local parameter."""


class ParameterStore:
    """The weights of one set. Its parameters, in the order of layout.slots, become views of flat buffers.

    ranks    ranks that hold the same parameters
    sharded  each rank updates its shard only
    pieces   what this rank updates
    units    what is gathered layer by layer; empty if parameters are whole
    tier_bytes  bytes of weights that may be in an offload tier
    """

    units: "Sequence[Unit]" = ()
    tier_bytes = 0

    def __init__(self, layout: Layout, ranks: Hierarchy, sharded: bool):
        self.layout = layout
        self.ranks = ranks
        self.sharded = sharded
        self.pieces = (
            layout.slot_intersections(ranks.shard) if sharded else layout.whole_slots()
        )

    @property
    def nbytes(self) -> int:
        """Bytes of parameters held now, in any tier."""
        raise NotImplementedError

    @property
    def is_shared(self) -> bool:
        """Whether other ranks map the memory of this rank's parts."""
        return False

    def values_of(self, piece: SlotPiece) -> torch.Tensor:
        """Return the model's weights of a piece, padding included: a view."""
        raise NotImplementedError

    def array_of(self, first: SlotPiece, numel: int) -> Array:
        """`numel` weights from the beginning of a piece on, in one bucket."""
        raise NotImplementedError

    def opened(self, parameters: Sequence[nn.Parameter]) -> list[StatePiece]:
        """Return what is kept encoded, in new memory of the host, which `refresh` encodes. parameters: by slot."""
        return []

    def refresh(self) -> None:
        """Make the updates of all ranks visible, after each rank has updated its pieces: on return, or when
        units are gathered, or after `wait`."""

    def wait(self, buckets: Iterable[int] | None = None) -> None:
        """The weights of these buckets (None: of all) are there for what is queued from now on."""


class WholeParameters(ParameterStore):
    """A `ParameterStore` of parameters that are whole on every rank, in one flat buffer.

    waits_later  `refresh` only begins to gather, and `wait` is called before weights are read
    """

    waits_later = False

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        layout: Layout,
        ranks: Hierarchy,
        sharded: bool,
        device: torch.device | None = None,
        draw: Draw | None = None,
    ):
        super().__init__(layout, ranks, sharded)
        first = parameters[0]
        self._under_way: dict[int, Waitable] = {}  # gathers by bucket
        self.flat = huge_page_zeros(
            layout.numel, dtype=first.dtype, device=device or first.device
        )
        for slot, p in zip(layout.slots, parameters):
            view = self.flat[slot.start : slot.stop]
            fill(view, p, 0, draw)
            become(p, view.view(p.shape))

    @property
    def nbytes(self) -> int:
        return self.flat.nbytes

    def values_of(self, piece: SlotPiece) -> torch.Tensor:
        return self.flat[piece.flat : piece.flat + piece.padded_numel]

    def array_of(self, first: SlotPiece, numel: int) -> Array:
        return Array(self.flat[first.flat : first.flat + numel])

    def refresh(self) -> None:
        """Make the updates of all ranks visible. Collective if sharded."""
        if not self.sharded:
            return
        layout = self.layout
        ranks = self.ranks
        shards = layout.shard_pieces(ranks.shard)
        parts = layout.shard_pieces(ranks.inner.rank, ranks.inner.size)
        for wholes, mine, group in (
            (parts, shards, ranks.outer),
            (layout.buckets, parts, ranks.inner),
        ):
            self.wait()
            # The first layers have the last buckets.
            for bucket in reversed(range(len(mine))):
                whole = wholes[bucket]
                own = mine[bucket]
                self._under_way[bucket] = all_gather_into_(
                    self.flat[whole.start : whole.stop],
                    self.flat[own.start : own.stop],
                    group,
                    async_op=True,
                )
        if not self.waits_later:
            self.wait()

    def wait(self, buckets: Iterable[int] | None = None) -> None:
        for bucket in [*self._under_way] if buckets is None else buckets:
            self._under_way.pop(bucket, DONE).wait()


@torch.no_grad()
def fill(
    out: torch.Tensor, parameter: nn.Parameter, start: int, draw: Draw | None
) -> None:
    """Elements [start, start + len(out)) of the flattened parameter; drawn if it is on the meta device."""
    if not parameter.is_meta:
        out.copy_(parameter.detach().reshape(-1)[start : start + out.numel()])
    else:
        assert draw is not None, (
            f"{spec_of(parameter).name} is on the meta device and there is no `draw`"
        )
        draw(spec_of(parameter), start, out)


def become(parameter: nn.Parameter, view: torch.Tensor) -> None:
    """Make the parameter a view of `view`; it keeps a version counter of its own."""
    if not parameter.is_meta:
        parameter.data = view
        return
    # .data: a version counter of its own.
    real = nn.Parameter(view.data, requires_grad=parameter.requires_grad)
    real.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, real)
