"""Newton-Schulz iterations: matrices → the nearest matrices with orthonormal rows or columns, about.

For X = U S Vᵀ an odd polynomial of X is U p(S) Vᵀ. With the Frobenius norm of the input divided out, singular
values are in [0, 1], and each iteration

    A = X Xᵀ        X ← a X + (b A + c A²) X          moves a singular value s to a s + b s³ + c s⁵

towards 1 (Björck and Bowie 1971; Jordan et al. 2024, "Muon"). The coefficients may differ from one iteration
to the next. Rows of zeros stay zero. X has no more rows than columns here: the transposed matrix otherwise.

    set            coefficients                                                     after the last
    simple         Jordan et al. 2024; torch.optim.Muon, DeepSpeed                  begins again
    quintic        steeper first, flatter later; Megatron's default                 begins again
    polar_express  Amsel et al. 2025, arXiv:2505.16932: best for each iteration     last again
    cans           Grishina et al. 2025, arXiv:2506.10935: Chebyshev's              last again
    aol            four of Megatron's                                               begins again
    deepseekv4     eight of simple, then two that converge to 1                     last again
    cubic5         five cubic polynomials, with a product less in each              five only
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

Coefficients = tuple[float, float, float]
SMALLEST_NORM = 1e-7  # a smaller norm is not divided out
SIMPLE = (3.4445, -4.7750, 2.0315)


@dataclass(frozen=True)
class CoefficientSet:
    """steps: (a, b, c) of the first iterations. then: of the following ones: "cycle" begins again, "last"
    repeats the last, "end" has none."""

    steps: tuple[Coefficients, ...]
    then: str = "cycle"

    def first(self, count: int) -> list[Coefficients]:
        """Return the coefficients of `count` iterations. Raises ValueError if the set has fewer."""
        if self.then == "end" and count != len(self.steps):
            raise ValueError(
                f"the set has coefficients of {len(self.steps)} iterations, not of {count}"
            )
        wrapped = {
            "cycle": lambda i: i % len(self.steps),
            "last": lambda i: min(i, len(self.steps) - 1),
        }
        return [self.steps[wrapped.get(self.then, int)(i)] for i in range(count)]


SETS: Mapping[str, CoefficientSet] = {
    "simple": CoefficientSet((SIMPLE,)),
    "quintic": CoefficientSet(
        (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        )
    ),
    "polar_express": CoefficientSet(
        (
            (8.2051, -22.9019, 16.4607),
            (4.0664, -2.8612, 0.5184),
            (3.9096, -2.8234, 0.5250),
            (3.2856, -2.4153, 0.4853),
            (2.2779, -1.6198, 0.3985),
            (1.8726, -1.2307, 0.3585),
            (1.8564, -1.2132, 0.3568),
            (1.875, -1.25, 0.375),
        ),
        "last",
    ),
    "cans": CoefficientSet(
        (
            (8.4703, -25.1081, 18.6293),
            (4.1828, -3.1087, 0.5806),
            (3.9619, -2.9541, 0.5630),
            (3.2866, -2.4647, 0.5074),
            (2.2737, -1.6447, 0.4162),
        ),
        "last",
    ),
    "aol": CoefficientSet(
        (
            (4.0098, -7.0585, 2.4635),
            (3.4585, -5.5479, 2.5959),
            (2.7573, -3.2939, 1.4254),
            (2.7215, -3.0494, 1.3169),
        )
    ),
    "deepseekv4": CoefficientSet((SIMPLE,) * 8 + ((2.0, -1.5, 0.5),) * 2, "last"),
    "cubic5": CoefficientSet(
        (
            (3.3656576, -3.3420992, 0.0),
            (2.5744352, -1.4957376, 0.0),
            (2.5368962, -1.4312570, 0.0),
            (2.4418906, -1.2764040, 0.0),
            (2.2230472, -0.9630650, 0.0),
        ),
        "end",
    ),
}


def newton_schulz(
    matrices: torch.Tensor,
    coefficients: list[Coefficients],
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return a batch [n, o, i] after the iterations, in its own dtype. Each product is one launch for all matrices.

    dtype: of the products; None: that of the batch. The norm is divided out before it is rounded to this.
    """
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices  # [n, r, k], r <= k
    norms = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True)
    x = (x / norms.clamp_min(SMALLEST_NORM)).to(dtype or matrices.dtype)
    for a, b, c in coefficients:
        gram = torch.bmm(x, x.mT)  # [n, r, r]
        if c:
            gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, gram, x, beta=a, alpha=1.0 if c else b)
    return (x.mT if is_tall else x).to(matrices.dtype)
