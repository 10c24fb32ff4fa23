"""`ZLossConfig`: the option of the loss of the normalizer."""

from dataclasses import dataclass

from ...config.options.option import option


@dataclass(frozen=True)
class ZLossConfig:
    """Off unless --z-loss-strength is above 0."""

    z_loss_strength: float = option(
        0.0,
        at_least=0,
        help="Weight A of the z-loss: the loss of a token is its cross entropy + A × log² Z, where Z is the sum of the "
        "exponentials of its logits (PaLM, 1e-4).",
        avoid="It is for runs whose logits drift. Evaluations have the cross entropy alone.",
    )

    @property
    def is_on(self) -> bool:
        """Whether the loss has this term."""
        return self.z_loss_strength > 0
