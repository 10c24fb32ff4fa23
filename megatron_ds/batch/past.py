"""`Past`: what a batch of generated text needs besides its tokens, kept by the generator between batches."""

from typing import Any, Protocol

import torch

States = tuple[torch.Tensor, ...]
"""What a layer keeps of the tokens of each text, in any number of tensors [texts, ..]."""


class Recurrence(Protocol):
    """A layer that passes a state of constant size from token to token."""

    def begin(
        self, x: torch.Tensor, batch: Any, ends: torch.Tensor
    ) -> tuple[torch.Tensor, States]:
        """Read texts from their first tokens, x [s, 1, ..], each a document of the batch. Return the output, of the
        same tokens, and the states after the tokens at the places `ends`, int64 [texts]."""

    def proceed(self, x: torch.Tensor, states: States) -> tuple[torch.Tensor, States]:
        """Read a token of each text, x [1, texts, ..], after its state. Return the output, [1, texts, ..], and the new
        states, in tensors of the same shapes and dtypes."""


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
        self, name: str, layer: Recurrence, x: torch.Tensor, batch: Any
    ) -> torch.Tensor:
        """Run a layer, whose name is `name`, on x [s, 1, ..] from the states of the texts, and keep the new ones →
        its output [s, 1, ..]."""
