"""Loss scaling: one semantics for every precision and ZeRO stage.

fp16 gradients below 6e-8 vanish, so the loss is multiplied by a scale and the gradient divided by it in the
update. The dynamic scale follows DeepSpeed's ZeRO rule:

    overflow     one of `hysteresis` lives is lost; losing the last one halves the scale (and leaves one life)
    no overflow  after every `window` consecutive steps without one, the scale doubles and the lives are
    restored

`ScalerState.after` is the rule, a pure function; `LossScaler` holds the current state.
"""

from dataclasses import dataclass, replace

from ..config import OptimizerConfig
from ..errors import ConfigError

FACTOR = 2.0


@dataclass(frozen=True, slots=True)
class ScalerRule:
    """window: steps between increases. hysteresis: overflows after which the scale is halved.

    consecutive: lives are restored by each step without overflow, so only consecutive overflows count.
    dynamic False: the scale never changes.
    """

    dynamic: bool = False
    window: int = 1000
    hysteresis: int = 2
    minimum: float = 1.0
    consecutive: bool = False


@dataclass(frozen=True, slots=True)
class ScalerState:
    """scale, lives left, the iteration of the last overflow (-1: none yet) and the number of iterations so
    far."""

    scale: float
    lives: int
    last_overflow: int = -1
    iteration: int = 0

    def after(self, overflow: bool, rule: ScalerRule) -> "ScalerState":
        """The state after one more step. Raises ConfigError if the scale would have to fall below the
        minimum."""
        if not rule.dynamic:
            return self
        state = self._after_overflow(rule) if overflow else self._after_success(rule)
        return replace(state, iteration=self.iteration + 1)

    def _after_overflow(self, rule: ScalerRule) -> "ScalerState":
        if self.lives > 1:
            return replace(self, lives=self.lives - 1, last_overflow=self.iteration)
        if self.scale <= rule.minimum:
            raise ConfigError(
                f"gradients overflow at iteration {self.iteration} of the loss scaler although the loss "
                f"scale is at its minimum of {rule.minimum:g}: a lower scale would not help because the loss "
                "itself diverges. Lower the learning rate, train in bf16, or lower --min-loss-scale.")
        return replace(self, scale=max(self.scale / FACTOR, rule.minimum), last_overflow=self.iteration)

    def _after_success(self, rule: ScalerRule) -> "ScalerState":
        stable = self.iteration - self.last_overflow - 1        # steps without overflow before this one
        grows = stable > 0 and stable % rule.window == 0
        return replace(self, scale=self.scale * FACTOR if grows else self.scale,
                       lives=rule.hysteresis if grows or rule.consecutive else self.lives)


class LossScaler:
    """Holds the state. `check_overflow` False: a gradient that is not finite is applied anyway (never for
    fp16)."""

    def __init__(self, scale: float = 1.0, rule: ScalerRule | None = None, check_overflow: bool = True):
        self.rule = rule or ScalerRule()
        self.check_overflow = check_overflow or self.rule.dynamic
        self.state = ScalerState(float(scale), self.rule.hysteresis)

    @property
    def scale(self) -> float:
        """The current factor of the loss."""
        return self.state.scale

    def update(self, overflow: bool) -> None:
        """One more step."""
        self.state = self.state.after(overflow, self.rule)

    def numbers(self) -> dict[str, float]:
        """For a checkpoint; empty for a scale that never changes, because the configuration has it."""
        s = self.state
        if not self.rule.dynamic:
            return {}
        return {"loss_scale": s.scale, "loss_scale_lives": s.lives,
                "loss_scale_last_overflow": s.last_overflow, "loss_scale_iteration": s.iteration}

    def load_numbers(self, numbers: dict[str, float]) -> None:
        """Restore what `numbers` returned; a run that was saved without dynamic scaling leaves the state as
        configured."""
        if self.rule.dynamic and "loss_scale" in numbers:
            self.state = ScalerState(float(numbers["loss_scale"]), int(numbers["loss_scale_lives"]),
                                     int(numbers["loss_scale_last_overflow"]),
                                     int(numbers["loss_scale_iteration"]))


def make_scaler(settings: OptimizerConfig) -> LossScaler:
    """From the optimizer's section of the config: dynamic for fp16 without a fixed `loss_scale`, else
    fixed."""
    if not settings.fp16:
        return LossScaler(1.0)
    if settings.loss_scale:
        return LossScaler(settings.loss_scale)
    rule = ScalerRule(True, settings.loss_scale_window, settings.hysteresis, settings.min_loss_scale)
    return LossScaler(settings.initial_loss_scale, rule)
