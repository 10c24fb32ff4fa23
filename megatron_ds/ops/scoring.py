"""`Scoring`: how the products of queries and keys become probabilities."""

from dataclasses import dataclass

import torch

from .alibi import Alibi


@dataclass(frozen=True, eq=False)
class Scoring:
    """p = softmax(cap tanh(scale * q kᵀ / cap) + bias), with a sink exp(s) / (exp(sink) + Σ exp(s)).

    scale  1 / sqrt(d) unless given
    cap    bound of the scores before the bias (Gemma Team 2024, arXiv:2408.00118, section 2); None: the scores
           themselves
    sink   [n]: a further score of each head, whose value is zero (Xiao et al. 2023, arXiv:2309.17453, section
           3.2; zero in Miller 2023, "Attention is off by one")
    alibi  of the heads: the bias falls with the distance; None: no bias
    """

    scale: float | None = None
    sink: torch.Tensor | None = None
    alibi: Alibi | None = None
    cap: float | None = None

    @property
    def has_places(self) -> bool:
        """Whether ALiBi has positions of its own, as of tokens that are no neighbours."""
        return self.alibi is not None and self.alibi.places is not None

    def scale_of(self, channels: int) -> float:
        """Return the scale, for heads of d channels."""
        return self.scale or channels**-0.5

    def capped(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores; with a cap, smoothly bounded by it."""
        return scores if self.cap is None else self.cap * (scores / self.cap).tanh()


PLAIN = Scoring()
