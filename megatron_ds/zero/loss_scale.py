"""The loss scale, which falls when the norm is not finite.

fp16 gradients below 6e-8 vanish, so the loss is multiplied by a scale and the gradient divided by it in the
update. The dynamic scale follows DeepSpeed's ZeRO rule, for every precision and stage:

    overflow     one of `hysteresis` lives is lost; losing the last one halves the scale (and leaves one life)
    no overflow  after every `window` consecutive steps without one, the scale doubles and the lives are
                 restored

`ScalerState.after` is the rule, a pure function; `LossScale` holds the current state.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..config import OptimizerConfig
from ..errors import ConfigError

FACTOR = 2.0


@dataclass(frozen=True, slots=True)
class ScalerRule:
    """How the loss scale changes.

    dynamic      False: the scale never changes
    window       steps without overflow after which the scale is doubled
    hysteresis   overflows after which the scale is halved
    consecutive  only consecutive overflows count: a step without overflow restores the hysteresis
    """

    dynamic: bool = False
    window: int = 1000
    hysteresis: int = 2
    minimum: float = 1.0
    consecutive: bool = False


@dataclass(frozen=True, slots=True)
class ScalerState:
    """The scale, the number of overflows left until it is halved (`lives`), the iteration of the last
    overflow (-1: none yet), and the number of iterations so far."""

    scale: float
    lives: int
    last_overflow: int = -1
    iteration: int = 0

    def after(self, overflow: bool, rule: ScalerRule) -> "ScalerState":
        """Return the state after one more step. Raises ConfigError if the scale would fall below the minimum."""
        if not rule.dynamic:
            return self
        scale = self.scale
        lives = self.lives
        last_overflow = self.last_overflow
        if not overflow:
            # Steps without overflow before this one.
            stable = self.iteration - last_overflow - 1
            grows = stable > 0 and stable % rule.window == 0
            scale *= FACTOR if grows else 1.0
            lives = rule.hysteresis if grows or rule.consecutive else lives
            return ScalerState(scale, lives, last_overflow, self.iteration + 1)
        if lives > 1:
            return ScalerState(scale, lives - 1, self.iteration, self.iteration + 1)
        if scale <= rule.minimum:
            error: Any = ConfigError(
                f"gradients overflow at iteration {self.iteration} of the loss scaler although the loss "
                f"scale is at its minimum of {rule.minimum:g}: a lower scale would not help because the loss "
                "itself diverges. Lower the learning rate, train in bf16, or lower --min-loss-scale."
            )
            # Overflow is that of all ranks.
            error.on_all_ranks = True
            raise error
        return ScalerState(
            max(scale / FACTOR, rule.minimum), lives, self.iteration, self.iteration + 1
        )


class LossScale:
    """Holds the state. check_overflow False: a gradient that is not finite is applied anyway (never in fp16)."""

    def __init__(
        self,
        scale: float = 1.0,
        rule: ScalerRule | None = None,
        check_overflow: bool = True,
    ):
        self.rule = rule or ScalerRule()
        self.check_overflow = check_overflow or self.rule.dynamic
        self.state = ScalerState(float(scale), self.rule.hysteresis)

    @property
    def scale(self) -> float:
        """The current factor of the loss."""
        return self.state.scale

    def update(self, overflow: bool) -> None:
        """Count a step, and change the scale if it has to change."""
        self.state = self.state.after(overflow, self.rule)

    def numbers(self) -> dict[str, float]:
        """Return the state for a checkpoint. Empty if the scale never changes: then the configuration has it."""
        s = self.state
        if not self.rule.dynamic:
            return {}
        return {
            "loss_scale": s.scale,
            "loss_scale_lives": s.lives,
            "loss_scale_last_overflow": s.last_overflow,
            "loss_scale_iteration": s.iteration,
        }

    def load_numbers(self, numbers: Mapping[str, float]) -> None:
        """Restore what `numbers` returned; without numbers the state stays as configured."""
        if self.rule.dynamic and "loss_scale" in numbers:
            self.state = ScalerState(
                float(numbers["loss_scale"]),
                int(numbers["loss_scale_lives"]),
                int(numbers["loss_scale_last_overflow"]),
                int(numbers["loss_scale_iteration"]),
            )


def make_scaler(settings: OptimizerConfig) -> LossScale:
    """Dynamic for fp16 without a fixed `loss_scale`, else fixed."""
    if not settings.fp16:
        return LossScale(1.0)
    if settings.loss_scale:
        return LossScale(settings.loss_scale)
    rule = ScalerRule(
        True,
        settings.loss_scale_window,
        settings.hysteresis,
        settings.min_loss_scale,
        settings.consecutive_hysteresis,
    )
    return LossScale(settings.initial_loss_scale, rule)
