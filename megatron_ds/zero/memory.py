"""`ZeroMemory`: bytes of the state of a rank, by kind."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ZeroMemory:
    """Bytes by kind of state."""

    parameters: int = 0
    gradients: int = 0
    masters: int = 0
    optimizer: int = 0

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return self.parameters + self.gradients + self.masters + self.optimizer

    def __add__(self, other: "ZeroMemory") -> "ZeroMemory":
        return ZeroMemory(
            self.parameters + other.parameters,
            self.gradients + other.gradients,
            self.masters + other.masters,
            self.optimizer + other.optimizer,
        )
