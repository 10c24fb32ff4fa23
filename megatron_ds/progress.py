"""`Progress`: the counters of a run. Ramps and the position in the data are functions of them."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """Counters of a run, immutable: each step makes a new one.

    step               optimizer steps, including skipped ones ("iteration" in Megatron's log line)
    samples            sequences consumed, over all data-parallel ranks
    tokens             tokens consumed
    scheduled_samples  samples of steps that were not skipped: learning rate and weight decay advance on
                       these, as in Megatron
    skipped_steps      steps skipped because a gradient was not finite
    nan_steps          steps whose loss was not finite
    layer_tokens       tokens consumed, counted once for each block that processed them
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
        """Plain values for run.json."""
        return asdict(self)
