"""`UpdateHook`: the moments of a step, and of a checkpoint, at which an `UpdateRule` takes part.

`ZeroOptimizer` calls every method, for every optimizer. `UpdateHook` itself does what an optimizer needs that
reads the sum of the gradients. Methods that communicate are collective.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch

from .norm import squared_norm
from .state_piece import StatePiece


class UpdateHook:
    """Called in this order in a step: begin, measure, norm_of, before_update, after_update.

    nbytes  bytes that it holds besides the state of the leaves
    """

    nbytes = 0

    def begin(self) -> None:
        """A step begins."""

    def measure(
        self, views: Iterable[Sequence[torch.Tensor]], device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(this rank's addend of the square of the norm, that of a further number for `norm_of` or None):
        float64. views: of each set, the gradients that this rank counts."""
        squares = torch.zeros((), dtype=torch.float64, device=device)
        for of_set in views:
            squares += squared_norm(of_set, device)
        return squares, None

    def norm_of(self, measured: Sequence[float]) -> float:
        """Return the norm of the gradient from the sums over all ranks: squares, flag of paths, the further
        number.
        """
        return math.sqrt(measured[0])

    def before_update(self, divisor: float) -> None:
        """The optimizers make their step next, unless it is skipped. divisor: of the gradients."""

    def after_update(self) -> None:
        """The optimizers have made their step; weights are not gathered yet."""

    def own_kinds(
        self, saving: bool, saved: Mapping[str, float] | None
    ) -> Collection[str]:
        """Kinds of state whose pieces are those of `own_pieces`, not those of the leaves.

        saving, saved: as of `ZeroOptimizer.pieces`
        """
        return ()

    def own_pieces(self, own: Collection[str], saving: bool) -> Iterator[StatePiece]:
        """Pieces besides those of the leaves. own: of `own_kinds`. saving: to write."""
        return iter(())

    def pieces_of_worker(self) -> Iterator[StatePiece]:
        """Pieces that this rank alone may have in a later checkpoint, to count their bytes."""
        return iter(())

    def numbers(self) -> dict[str, float]:
        """Numbers of a checkpoint, equal on all ranks of a stage."""
        return {}

    def load_numbers(self, numbers: Mapping[str, float]) -> None:
        """Restore what `numbers` returned."""

    def after_load(self) -> None:
        """Pieces were loaded, and the weights of the model were set from the masters."""
