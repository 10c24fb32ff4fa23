"""ALiBi: scores fall linearly with the distance of the tokens (Press et al. 2021, arXiv:2108.12409).

    score(i, j) = q_i k_j / sqrt(d) - slope |i - j|

Each head has its own slope, a constant. There are no position embeddings, and a model reads sequences that
are longer than those it was trained with. Distances within a document are those within its sample, so
documents that are kept apart need nothing.
"""

from dataclasses import dataclass

import torch


def alibi_slopes(heads: int, device: torch.device | None = None) -> torch.Tensor:
    """Return the slope of each head, fp32 [heads]: 2^(-8/n), 2^(-16/n), …, 2^-8 for n heads if n is a power of two.
    Section 3.

    Other numbers, as in the authors' code and in BLOOM (Le Scao et al. 2022, arXiv:2211.05100): the slopes of
    the next lower power of two, then every second one of those of twice as many heads. Computed on the
    device, so the host waits for no copy.
    """
    power = 1 << (heads.bit_length() - 1)
    counted = torch.arange(1, power + 1, dtype=torch.float64, device=device)
    between = torch.arange(heads - power, dtype=torch.float64, device=device) + 0.5
    return (torch.cat((counted, between)) * (-8 / power)).exp2().float()


def alibi_bias(
    slopes: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    """Return what is added to the scores, [.., n, q, k] in the dtype of the slopes.

    slopes [n]; queries int64 [.., q] and keys int64 [.., k]: positions in the sequence
    """
    distance = (queries.unsqueeze(-1) - keys.unsqueeze(-2)).abs().to(slopes.dtype)
    return distance.unsqueeze(-3) * -slopes[:, None, None]


@dataclass(frozen=True, eq=False)
class Alibi:
    """ALiBi of some heads, for `core_attention.attention`.

    slopes  fp32 [n], of these heads
    places  positions of the tokens, int64 [b, s] or [s], where a batch holds only some of a sequence; None:
            tokens are neighbours, and fewer queries than keys are the last ones
    queries  positions of the queries, int64 [b, q], where they are not the last tokens; with `places`
    """

    slopes: torch.Tensor
    places: torch.Tensor | None = None
    queries: torch.Tensor | None = None

    def bias(self, queries: range, keys: range) -> torch.Tensor:
        """`alibi_bias` of some rows of the sequence, fp32 [b or 1, n, q, k]."""
        columns = self._positions(keys)
        rows = self._positions(queries) if self.queries is None else self.queries
        bias = alibi_bias(self.slopes, rows, columns)
        return bias if bias.dim() == 4 else bias[None]

    def _positions(self, part: range) -> torch.Tensor:
        if self.places is not None:
            return self.places[..., part.start : part.stop]
        return torch.arange(part.start, part.stop, device=self.slopes.device)
