"""`CachedStates`: states of constant size of the texts under way.

    layer → any number of tensors [rows, ..]        row i is that of text i

A text that begins in a row writes all of its states, so rows need no clearing.
"""

from torch import Tensor

from ...batch.recurrence import States


class CachedStates:
    """rows: texts at once. Memory is taken with the first batch."""

    def __init__(self, rows: int):
        self.rows = rows
        self._layers: dict[str, States] = {}

    @property
    def layers(self) -> list[str]:
        """Names of the layers whose states are here."""
        return [*self._layers]

    def write(self, name: str, first: int, states: States) -> None:
        """Write states of texts, tensors [texts, ..] of a layer, to rows from `first` on."""
        if name not in self._layers:
            self._layers[name] = tuple(map(self._allocated, states))
        of_layer = self._layers[name]
        for kept, new in zip(of_layer, states, strict=True):
            stop = first + len(new)
            kept[first:stop].copy_(new)

    def read(self, name: str, first: int, count: int) -> States:
        """Return the states of so many rows of a layer, views."""
        rows = slice(first, first + count)
        of_layer = self._layers[name]
        return tuple(kept[rows] for kept in of_layer)

    def move(self, source: int, target: int) -> None:
        """Copy the states of a row to another row."""
        for states in self._layers.values():
            for kept in states:
                kept[target] = kept[source]

    def _allocated(self, new: Tensor) -> Tensor:
        shape = (self.rows, *new.shape[1:])
        return new.new_zeros(shape)
