"""`Scoring`: how the products of queries and keys become probabilities."""

from dataclasses import dataclass

import torch

from .alibi import Alibi


@dataclass(frozen=True, eq=False)
class Scoring:
    """p = softmax(scale * q kᵀ + bias), with a sink exp(s) / (exp(sink) + Σ exp(s)).

    scale  1 / sqrt(d) unless given
    sink   [n]: a further score of each head, whose value is zero (Xiao et al. 2023, arXiv:2309.17453, section
           3.2; zero in Miller 2023, "Attention is off by one")
    alibi  of the heads: the bias falls with the distance; None: no bias
    """

    scale: float | None = None
    sink: torch.Tensor | None = None
    alibi: Alibi | None = None

    @property
    def has_places(self) -> bool:
        """Whether ALiBi has positions of its own, as of tokens that are no neighbours."""
        return self.alibi is not None and self.alibi.places is not None

    def scale_of(self, channels: int) -> float:
        """The scale, for heads of d channels."""
        return self.scale or channels**-0.5


PLAIN = Scoring()
