"""`Arrivals`: each layer of a pipeline stage waits for its updated weights of other ranks (ZeRO 1 and 2).

    update   gather of the bucket with layer 0   gather of layers 1 and 2    gather of layer 3
                                              ↓ layer 0       ↓ layer 1 layer 2         ↓ layer 3

The gathers begin in `WholeParameters.refresh`, those of the first layers first. Not on CPUs: gathers there
are messages between the cores that compute, and all ranks must wait for them in the order of their start.
"""

from collections.abc import Iterable, Sequence

from torch import nn

from .param_store import WholeParameters
from .parameter_set import ParameterSet


class Arrivals:
    """layers: the parameters of each layer of a stage. sets: of the rank."""

    def __init__(
        self, layers: Sequence[Iterable[nn.Parameter]], sets: Iterable[ParameterSet]
    ):
        self._stores: list[WholeParameters] = []
        bucket_of = {}
        for s in sets:
            if not s.store.is_gathered_whole:
                continue
            assert isinstance(s.store, WholeParameters), (
                "`is_gathered_whole` has checked it"
            )
            self._stores.append(s.store)
            for p, slot in zip(s.parameters, s.plan.layout.slots, strict=True):
                bucket_of[p] = s.store, slot.bucket
        self._needs = [
            list(dict.fromkeys(bucket_of[p] for p in layer if p in bucket_of))
            for layer in layers
        ]

    def begin(self) -> None:
        """From now on `wait` is called before the forward of each layer."""
        for store in self._stores:
            store.waits_later = True

    def wait(self, layer: int) -> None:
        """The weights of a layer are there for what is queued from now on."""
        for store, bucket in self._needs[layer]:
            store.wait((bucket,))
