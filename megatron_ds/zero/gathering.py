"""ZeRO 3: `LayerGathering`, when the parameters of a pipeline stage's layers are whole; `Unit`, the
parameters that one layer owns of a set, gathered and freed together.

Layers are used in the order of their list, in backward in reverse; nothing is traced. A layer may need units
of other layers: a head that shares the embedding's weight claims the embedding's unit, also if the two are on
different stages of one rank. Collectives start in `enter`, `leave` and `keep_gathered` only, so their order
is the same on all ranks.

Two gathers are avoided. The last layer stays whole after its forward, because the next backward of this stage
begins with it. A layer whose backward does not read its weights (an embedding) is not gathered for it. So a
step of m micro-batches gathers each layer 2m times, the last one m times, an embedding m times, for any
schedule; a weight shared by embedding and head 2m times like the others.

Terms:  a *unit* is a run of whole buckets: what is gathered at a time. Its *flat* buffer holds the parameters
        while they are whole; they are views of it all the time. *Free* means that the flat buffer has a
        storage of no bytes, or addresses without memory; *whole*, that it is gathered.

Note: why the storage and not the tensor. Autograd, saved tensors and layers hold the parameter, or views of
it, from forward to backward. Shrinking the storage to nothing and growing it again leaves all of them valid.
Refilling goes through `flat`, whose version counter is not that of the parameters: to autograd, a parameter
that was freed and gathered again has not changed. (Nor has it: no graph is alive during an update.)

Ranks of one host can share the memory of their parts (`SharedParts`). A unit is then gathered by mapping the
pages of its parts next to each other: nothing is copied and no rank waits. A part has the same offset in a
page of its owner's memory as in the flat buffer:

    flat buffer     |---- part of rank 0 ----|---- part of rank 1 ----|
    pages           |       |       |       |       |       |       |
    rank 0's        |---- part of rank 0 ----|
    rank 1's                                |---- part of rank 1 ----|
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import nn

from ..host.large_pages import aligned_empty
from ..host.side_streams import side_stream
from ..mpu.collectives import all_gather_into_
from ..mpu.group import DONE, Group, Waitable
from .arrays import Array
from .set_plan import ParameterUse, SetPlan


class GatherUnit:
    """What `LayerGathering` gathers: a `Unit`, or a stand-in that counts (prediction.py).

    claims   layers that need it whole: it is freed when the last claim is removed
    """

    def __init__(self, numel: int, is_free: bool):
        self.numel = numel
        self.is_free = is_free
        self.claims: set = set()

    def fetch(self) -> None:
        """Begin to bring offloaded shards to the device, unless they are there or the unit is whole."""

    def start(self) -> None:
        """Begin to gather, unless the unit is whole or a gather has begun. Collective."""

    def wait(self) -> None:
        """Wait for the gather, if it was started: then the parameters are whole."""

    def free(self) -> None:
        """Free the flat buffer."""


class Unit(GatherUnit):
    """A `GatherUnit` of the parameters that layer `layer` owns in a set.

    buckets  for each bucket of the unit: its view of `flat`, this rank's part of it
    nbytes   of the flat buffer, when whole
    """

    def __init__(
        self,
        layer: int,
        first_bucket: int,
        last_bucket: int,
        flat: torch.Tensor,
        group: Group,
    ):
        super().__init__(flat.numel(), is_free=False)
        self.layer = layer
        self.first_bucket = first_bucket
        self.last_bucket = last_bucket
        self.flat = flat
        self.nbytes = flat.nbytes
        self.group = group
        self.buckets: list[tuple[torch.Tensor, Array]] = []
        self._works: list[Waitable] = []
        # Shards on the device, or on their way.
        self._near: list[tuple[torch.Tensor, Waitable]] | None = None

    @property
    def gather_bytes(self) -> int:
        """Bytes of the flat buffer and of what a gather receives in another format."""
        return self.nbytes

    def fetch(self) -> None:
        if self.is_free and self._near is None:
            self._near = [self._fetch(array) for _, array in self.buckets]

    def start(self) -> None:
        if not self.is_free:
            return
        # They are kept until the gathers, which may run on after this call, have read them.
        self.fetch()
        near = self._near
        assert near is not None, "`fetch` makes them"
        self.flat.untyped_storage().resize_(self.nbytes)
        self.is_free = False
        stream = side_stream(self.flat.device, "gathers")
        with stream.behind_current():
            for (whole, _), (shard, work) in zip(self.buckets, near):
                work.wait()
                self._works.append(
                    all_gather_into_(whole, shard, self.group, async_op=True)
                )
        self._works.append(stream.mark())  # a group of one copies on that stream

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []
        if not self.is_free:
            self._near = None  # gathered, no longer read

    def _fetch(self, array: Array) -> tuple[torch.Tensor, Waitable]:
        if array.is_at(self.flat.device, self.flat.dtype):
            return array.tensor, DONE
        on_cpu = self.flat.device.type == "cpu"
        make = (
            aligned_empty if on_cpu else partial(torch.empty, device=self.flat.device)
        )
        buffer = make(array.padded_numel, dtype=self.flat.dtype)
        return buffer[: array.tensor.numel()], array.read(buffer)

    def free(self) -> None:
        self.wait()
        for _, work in self._near or ():  # fetched but not gathered
            work.wait()
        self._near = None
        if not self.is_free:
            self.flat.untyped_storage().resize_(0)
            self.is_free = True


KEPT = "kept"  # the claim of a stage that keeps all its layers gathered


class LayerGathering:
    """Gathers the weights of each layer before the layer runs, and frees them after it.

    needs        the units that each layer uses
    in_backward  the units that the backward of each layer reads
    prefetch     elements that may be gathered ahead of their layers; None: one layer ahead, of any size
    close        called with a layer when its backward has ended
    stage        of the pipeline: several stages can claim one unit
    path         names of the layers in the order in which a step used them, for modules of an unknown order
    """

    def __init__(
        self,
        needs: Sequence[Sequence[GatherUnit]],
        in_backward: Sequence[Sequence[GatherUnit]],
        prefetch: int | None,
        close: Callable[[int], None] = lambda layer: None,
        stage: int = 0,
    ):
        self.needs = needs
        self.in_backward = in_backward
        self.prefetch = prefetch
        self.close = close
        self.stage = stage
        self._keeps_all = False
        self.path: list[str] = []

    @property
    def units(self) -> list[GatherUnit]:
        """The units of all layers, each once, in forward order."""
        return list(dict.fromkeys(unit for layer in self.needs for unit in layer))

    def enter(self, layer: int, backward: bool) -> None:
        """Gather the parameters of a layer before its forward or backward. Collective."""
        needs = self.in_backward if backward else self.needs
        self._claim(layer, needs)
        if not self._keeps_all:
            self._claim_ahead(layer, backward, needs)
        for unit in needs[layer]:
            unit.wait()

    def leave(self, layer: int, backward: bool) -> None:
        """Free the parameters of a layer after its forward or backward, unless still needed. Collective."""
        if backward:
            self._release(layer)
            self.close(layer)
        elif layer + 1 < len(self.needs):
            self._release(layer)

    def keep_gathered(self) -> None:
        """Begin to gather everything, in forward order; it stays whole until `release_gathered`."""
        self._keeps_all = True
        for unit in self.units:
            unit.claims.add((self.stage, KEPT))
            unit.start()

    def wait(self) -> None:
        """All units whose gather was started are whole on return."""
        for unit in self.units:
            unit.wait()

    def release_gathered(self) -> None:
        """End of `keep_gathered`: free everything."""
        self._keeps_all = False
        self.reset()

    def reset(self) -> None:
        """Begin a step, also after one that failed."""
        self.path.clear()
        self.drop_claims()

    def drop_claims(self) -> None:
        """Remove all claims of this stage, and free what no other has claimed."""
        for unit in self.units:
            unit.claims -= {claim for claim in unit.claims if claim[0] == self.stage}
            if not unit.claims:
                unit.free()

    def _claim(self, layer: int, needs: Sequence[Sequence[GatherUnit]]) -> None:
        for unit in needs[layer]:
            unit.claims.add((self.stage, layer))
            unit.start()

    def _claim_ahead(
        self, layer: int, backward: bool, needs: Sequence[Sequence[GatherUnit]]
    ) -> None:
        ahead = range(layer - 1, -1, -1) if backward else range(layer + 1, len(needs))
        under_way = 0
        for i in ahead:
            numel = sum(unit.numel for unit in needs[i])
            full = (
                under_way > 0
                if self.prefetch is None
                else under_way + numel > self.prefetch
            )
            if full:
                # Not gathered yet, but offloaded shards are fetched.
                for unit in needs[i]:
                    unit.fetch()
                return
            under_way += numel
            self._claim(i, needs)

    def _release(self, layer: int) -> None:
        for unit in self.needs[layer]:
            unit.claims.discard((self.stage, layer))
            if not unit.claims:
                unit.free()


def units_by_parameter(
    sets: Iterable[tuple[SetPlan, Sequence[nn.Parameter], Sequence[GatherUnit]]],
) -> dict[nn.Parameter, GatherUnit]:
    """Return the unit with which each parameter is gathered.

    sets: (plan, its parameters by slot, its units in order)
    """
    unit_of = {}
    for plan, parameters, units in sets:
        for p, slot in zip(parameters, plan.layout.slots):
            for i, (_, first, stop) in enumerate(plan.units):
                if first <= slot.bucket < stop:
                    unit_of[p] = units[i]
    return unit_of


def gathering_over(
    use: ParameterUse,
    stage: int,
    units: Mapping[nn.Parameter, GatherUnit],
    prefetch: int | None,
    close: Callable[[int], None] = lambda layer: None,
) -> LayerGathering:
    """Return the gathering of a stage over the units of a run, or over units that only count, for a plan."""
    needs = [
        list(dict.fromkeys(units[p] for p in layer if p in units))
        for layer in use.layers[stage]
    ]
    in_backward = [
        [] if (stage, i) in use.not_read_in_backward else wanted
        for i, wanted in enumerate(needs)
    ]
    return LayerGathering(needs, in_backward, prefetch, close, stage)
