"""`Past`: what a batch of generated text needs besides its tokens, kept by the generator between batches."""

from typing import Any, Protocol

import torch


class Past(Protocol):
    """Keys and values, or states, of the tokens before those of a batch.

    wanted  int64 [r], positions in the batch whose logits are needed; the head computes no others
    """

    @property
    def wanted(self) -> torch.Tensor: ...

    def attend(
        self,
        name: str,
        core: Any,  # a `CoreAttention`, of a later floor
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | int,
        batch: Any,  # the `Batch` that has this past
    ) -> torch.Tensor:
        """Keep k and v [s, 1, g, d] of the attention layer `name`, and attend with q [s, 1, n, d] to all tokens
        that each query sees → [s, 1, n * d].

        v: also a number of first channels of k, which are the values then, and are kept once
        """

    def recur(
        self,
        name: str,
        layer: Any,  # a `Recurrence`
        x: torch.Tensor,
        batch: Any,
    ) -> torch.Tensor:
        """Run a layer, whose name is `name`, on x [s, 1, ..] from the states of the texts, and keep the new ones →
        its output [s, 1, ..]."""
