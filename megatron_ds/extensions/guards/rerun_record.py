"""The record of a step that --rerun-bad-steps computed again."""

from dataclasses import dataclass

from ...training.observe.records import Record


@dataclass(frozen=True)
class RerunRecord(Record):
    """A step that --rerun-bad-steps computed again.

    samples    consumed so far, with those of this step
    why        it was computed again
    verdict    "deterministic", "transient" or "unrepeatable"
    ranks      of a transient fault: those whose own gradients differed, "3 (host)"
    loss, loss_again            of the first two runs
    grad_norm, grad_norm_again  of their scaled gradients
    """

    step: int
    samples: int
    why: str
    verdict: str
    ranks: tuple[str, ...]
    loss: float
    loss_again: float
    grad_norm: float
    grad_norm_again: float

    kind = "rerun"

    def line(self) -> str:
        """Return what was found, and what follows from it."""
        return (
            f"iteration {self.step} was computed again ({self.why}): {self.verdict}. loss {self.loss!r} and "
            f"{self.loss_again!r}, grad norm {self.grad_norm!r} and {self.grad_norm_again!r}. "
            + RERUN_TEXTS[self.verdict].format(self._place())
        )

    def _place(self) -> str:
        if not self.ranks:
            return "between ranks or in the loss, as the gradients that each rank computed are the same"
        plural = "s" if len(self.ranks) > 1 else ""
        return f"on rank{plural} {', '.join(self.ranks)}, whose own gradients differ"

    def curves(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return (nothing, the norm) by the tag of its curve: the step has no loss of its own there."""
        return {}, {f"{self.kind}-grad-norm": self.grad_norm}


RERUN_TEXTS = {
    "deterministic": "The bits are the same: the data or the model is the cause, or a device that fails alike "
    "each time. A start from the last checkpoint on other devices distinguishes the two",
    "transient": "Two of three runs have the same bits: a fault of the hardware {}. Training goes on with the "
    "gradients that were the same twice",
    "unrepeatable": "All three runs differ: operations add in a changing order (--deterministic-mode prevents "
    "that), or the hardware fails often. Training goes on with the gradients of the third run",
}
