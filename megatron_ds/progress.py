"""Where training stands: the one number every `Ramp` is a function of, and all that resuming the data needs.
"""

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """Counters of a run; replaced, never changed.

    step               optimizer steps tried, skipped ones included ("iteration" in Megatron's log line)
    samples            sequences consumed, over all data-parallel ranks
    tokens             tokens consumed
    scheduled_samples  the samples of steps that were not skipped: learning rate and weight decay advance on
                       these, as in Megatron, where a step skipped for overflow does not advance the scheduler
    skipped_steps      steps skipped because a gradient was not finite
    nan_steps          steps whose loss was not finite
    layer_tokens       tokens consumed, counted once for each block that saw them
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    scheduled_samples: int = 0
    skipped_steps: int = 0
    nan_steps: int = 0
    layer_tokens: int = 0

    def after(self, samples: int, tokens: int, *, skipped: bool = False, nan: bool = False,
              layer_tokens: int = 0) -> "Progress":
        """The progress after one more step that consumed `samples` sequences and `tokens` tokens."""
        return Progress(
            step=self.step + 1, samples=self.samples + samples, tokens=self.tokens + tokens,
            scheduled_samples=self.scheduled_samples + (0 if skipped else samples),
            skipped_steps=self.skipped_steps + skipped, nan_steps=self.nan_steps + nan,
            layer_tokens=self.layer_tokens + layer_tokens)

    def to_dict(self) -> dict[str, int]:
        return asdict(self)
