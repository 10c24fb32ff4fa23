"""`LayerGathering`: which parameters are whole when (ZeRO 3), for the layers of one pipeline stage.

The order in which layers are used is the order of the list, or its reverse in backward; nothing has to be recorded.

    enter(i)   gather layer i and wait for it; start the layers after it (backward: before it), as far as prefetch allows
    leave(i)   free what no other layer has claimed; in backward, also reduce the gradients that are complete with it
    pin        all layers stay whole until unpin

A layer may need units of others: a head that shares the embedding's weight claims the embedding's unit, also where the two
are on different stages of one rank. Collectives start at
these calls and nowhere else, so they follow one another in the same order on all ranks.

Two gathers are spared. The last layer stays whole after its forward: whatever comes next on this stage, it is the layer that a
backward begins with. And a layer whose backward does not read its weights (an embedding) is not gathered for it. So a step of
m micro-batches gathers each layer 2m times, the last one m times, an embedding m times, at whatever schedule; a weight shared
by embedding and head 2m times like the others.
"""

from collections.abc import Callable, Sequence

from .units import Unit

PIN = "pin"


class LayerGathering:
    """needs: for each layer the units it uses; in backward: those that its backward reads.

    prefetch  elements that may be on their way for layers ahead; None: one layer ahead, of any size
    close     called with a layer when its backward is over
    stage     of the pipeline: claims of several stages to one unit are kept apart
    """

    def __init__(self, needs: Sequence[Sequence[Unit]], in_backward: Sequence[Sequence[Unit]], prefetch: int | None,
                 close: Callable[[int], None] = lambda layer: None, stage: int = 0):
        self.needs, self.in_backward, self.prefetch, self.close, self.stage = needs, in_backward, prefetch, close, stage
        self._pinned = False

    @property
    def units(self) -> list[Unit]:
        """Of all layers, each once, in forward order."""
        return list(dict.fromkeys(unit for layer in self.needs for unit in layer))

    def enter(self, layer: int, backward: bool) -> None:
        needs = self.in_backward if backward else self.needs
        self._claim(layer, needs)
        if not self._pinned:
            self._claim_ahead(layer, backward, needs)
        for unit in needs[layer]:
            unit.wait()

    def leave(self, layer: int, backward: bool) -> None:
        if backward:
            self._let_go(layer)
            self.close(layer)
        elif layer + 1 < len(self.needs):
            self._let_go(layer)

    def pin(self) -> None:
        """Begin to gather everything, in forward order, to stay until `unpin`."""
        self._pinned = True
        for units in self.needs:
            for unit in units:
                unit.claims.add((self.stage, PIN))
                unit.start()

    def wait(self) -> None:
        """Everything that was begun is whole on return."""
        for units in self.needs:
            for unit in units:
                unit.wait()

    def unpin(self) -> None:
        self._pinned = False
        self.reset()

    def reset(self) -> None:
        """Let go of everything, also after a step that failed."""
        for unit in self.units:
            unit.claims -= {claim for claim in unit.claims if claim[0] == self.stage}
            if not unit.claims:
                unit.free()

    def _claim(self, layer: int, needs: Sequence[Sequence[Unit]]) -> None:
        for unit in needs[layer]:
            unit.claims.add((self.stage, layer))
            unit.start()

    def _claim_ahead(self, layer: int, backward: bool, needs: Sequence[Sequence[Unit]]) -> None:
        ahead = range(layer - 1, -1, -1) if backward else range(layer + 1, len(needs))
        under_way = 0
        for i in ahead:
            full = under_way > 0 if self.prefetch is None else under_way + _numel(needs[i]) > self.prefetch
            if full:
                for unit in needs[i]:       # not gathered yet, but offloaded shards set out
                    unit.fetch()
                return
            under_way += _numel(needs[i])
            self._claim(i, needs)

    def _let_go(self, layer: int) -> None:
        for unit in self.needs[layer]:
            unit.claims.discard((self.stage, layer))
            if not unit.claims:
                unit.free()


def _numel(units: Sequence[Unit]) -> int:
    return sum(unit.numel for unit in units)
