"""`NoiseShare`: the share of noise in the squared norm of the mean gradient of data-parallel ranks."""

from dataclasses import dataclass

KEPT = 0.95     # weight of the earlier measurements at each new one


@dataclass
class NoiseShare:
    """A running mean ν of measurements, as state of a run.

    With gradients g_i = G + noise_i of P ranks, E ‖mean‖² = ‖G‖² + σ²/P and E ‖g_i‖² = ‖G‖² + σ². So the mean
    of ‖g_i‖² over ranks is 1 + (P - 1) ν times ‖mean‖² with ν = (σ²/P) / ‖mean‖² (McCandlish et al. 2018,
    arXiv:1812.06162, appendix A.1). At a given global batch ν does not depend on P.
    """

    value: float = 0.0
    count: int = 0

    def add(self, excess: float, ranks: int) -> None:
        """excess: the mean of ‖g_i‖² over `ranks` ranks, over ‖mean‖²."""
        self.count += 1
        share = min(max((excess - 1) / (ranks - 1), 0.0), 1.0)
        self.value += (share - self.value) * max(1 / self.count, 1 - KEPT)

    def ratio(self, ranks: int) -> float:
        """The root of the mean of ‖g_i‖², over the norm of the mean."""
        return (1 + (ranks - 1) * self.value) ** 0.5
