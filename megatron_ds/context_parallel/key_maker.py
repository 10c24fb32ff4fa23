"""`KeyMaker`: how a rank makes keys and values of two parts of a block's tokens, which travel in their place."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

# (keys, values, fp32 tensors of their shapes to which the gradients are to be added)
AddOfBlock = Callable[[torch.Tensor, torch.Tensor, Sequence[torch.Tensor]], None]


class KeyMaker(Protocol):
    """Keys [s, b, g, d] and values [s, b, g, e] are made of each block, forward and once more in backward."""

    @property
    def value_width(self) -> int:
        """Return e."""

    @property
    def trained(self) -> tuple[torch.Tensor, ...]:
        """The parameters that it reads, and that have gradients."""

    def made(self, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of a block, contiguous. Its collectives run once for each block, forward and
        backward, in the same order on all ranks of their group."""

    def sums(self) -> AbstractContextManager[Any]:
        """Return a context with sums of gradients of `trained` over blocks, which has `deliver`."""

    def add_gradients(
        self,
        parts: Sequence[torch.Tensor],
        totals: Sequence[torch.Tensor],
        add: AddOfBlock,
        weights: Any,
    ) -> None:
        """Make keys and values of a block again, and add the gradients of its parts to `totals`, fp32.

        Those of `trained` are added to `weights`, of `sums`.
        """
