"""The record of a step whose update --skip-spikes dropped."""

from dataclasses import dataclass

from ...training.observe.records import Record


@dataclass(frozen=True)
class SpikeRecord(Record):
    """A step whose update --skip-spikes dropped.

    samples       consumed so far, with those of this step
    grad_norm     of the gradient; norm_bound: the largest that is no spike
    in_a_row      spikes since the last update
    first_sample  position in the stream of the run of the step's first sample; the others follow it
    sample_ids    their indices in the training dataset, in this order
    """

    step: int
    samples: int
    loss: float
    grad_norm: float
    norm_bound: float
    in_a_row: int
    first_sample: int
    sample_ids: tuple[int, ...]

    kind = "spike"

    def line(self) -> str:
        """Return the step, its norm, and the positions of its samples."""
        return (
            f"iteration {self.step} is a spike: grad norm {self.grad_norm:.4g} is beyond {self.norm_bound:.4g} "
            f"(loss {self.loss:.4g}); its update is dropped (--skip-spikes). Samples {self.first_sample} to "
            f"{self.samples - 1} of the run"
        )

    def curves(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return (nothing, the norm) by the tag of its curve: the step has no loss of its own there."""
        return {}, {f"{self.kind}-grad-norm": self.grad_norm}
