"""`LayerGathering`: which parameters are whole when (ZeRO 3), for the layers of one pipeline stage.

The order in which layers are used is the order of the list, or its reverse in backward; nothing has to be recorded.

    enter(i)   gather layer i and wait for it; start the layers after it (backward: before it), as far as prefetch allows
    leave(i)   free what no other layer has claimed; in backward, also reduce the gradients that are complete with it
    pin        all layers stay whole until unpin

A layer may need units of others: a head that shares the embedding's weight claims the embedding's unit. Collectives start at
these calls and nowhere else, so they follow one another in the same order on all ranks.
"""

from collections.abc import Callable, Sequence

from .units import Unit

PIN = "pin"


class LayerGathering:
    """needs: for each layer the units it uses.

    prefetch  elements that may be on their way for layers ahead; None: one layer ahead, of any size
    close     called with a layer when its backward is over
    """

    def __init__(self, needs: Sequence[Sequence[Unit]], prefetch: int | None, close: Callable[[int], None]):
        self.needs, self.prefetch, self._close = needs, prefetch, close
        self._pinned = False

    def enter(self, layer: int, backward: bool) -> None:
        self._claim(layer)
        if not self._pinned:
            self._claim_ahead(layer, backward)
        for unit in self.needs[layer]:
            unit.wait()

    def leave(self, layer: int, backward: bool) -> None:
        for unit in self.needs[layer]:
            unit.claims.discard(layer)
            if not unit.claims:
                unit.free()
        if backward:
            self._close(layer)

    def pin(self) -> None:
        """Gather everything, in forward order, to stay until `unpin`."""
        self._pinned = True
        for units in self.needs:
            for unit in units:
                unit.claims.add(PIN)
                unit.start()

    def unpin(self) -> None:
        self._pinned = False
        self.reset()

    def reset(self) -> None:
        """Free everything, also after a step that failed."""
        for units in self.needs:
            for unit in units:
                unit.claims.clear()
                unit.free()

    def _claim(self, layer: int) -> None:
        for unit in self.needs[layer]:
            unit.claims.add(layer)
            unit.start()

    def _claim_ahead(self, layer: int, backward: bool) -> None:
        ahead = range(layer - 1, -1, -1) if backward else range(layer + 1, len(self.needs))
        under_way = 0
        for i in ahead:
            if self.prefetch is not None:
                under_way += sum(unit.numel for unit in self.needs[i])
                if under_way > self.prefetch:
                    return
            self._claim(i)
            if self.prefetch is None and self.needs[i]:
                return
