"""`Recurrence`: a layer whose piece of the past of generated texts is a state of constant size."""

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
