"""`OneBitOptions`: the part of `OptimizerConfig` of optimizers that exchange one bit for each element."""

from dataclasses import dataclass, fields

from ...config.options.option import option


def _param(default: float, *, name: str, **more):
    """Return an option whose JSON key is a parameter of the optimizer."""
    return option(default, json=f"optimizer.params.{name}", **more)


@dataclass(frozen=True)
class OneBitOptions:
    """Lengths are updates of the weights: skipped steps do not count. See docs/scale/optimizers.md."""

    freeze_step: int = _param(
        100_000,
        name="freeze_step",
        at_least=1,
        unit="steps",
        flags=["--onebit-freeze-step"],
        help="Steps with gradients in full precision, in which the second moment settles; after them it "
        "stays, and one bit is sent for each element of the momentum (onebit_adam, onebit_lamb).",
        avoid="The papers use 15 to 25 % of all steps, and not less than the warm-up of the learning rate.",
    )
    var_freeze_step: int = _param(
        100_000,
        name="var_freeze_step",
        at_least=1,
        unit="steps",
        help="Steps in which the second moment is refreshed; after them it stays, and ranks make steps of "
        "their own between exchanges (zero_one_adam).",
        avoid="Use at least the warm-up of the learning rate.",
    )
    var_update_scaler: int = _param(
        16,
        name="var_update_scaler",
        at_least=1,
        unit="refreshes",
        help="The interval between refreshes of the second moment doubles after this many (zero_one_adam).",
    )
    local_step_scaler: int = _param(
        32_678,
        name="local_step_scaler",
        at_least=1,
        unit="steps",
        help="The interval between exchanges after --var-freeze-step doubles after this many steps "
        "(zero_one_adam).",
        avoid="The paper uses the half-life of the learning rate.",
    )
    local_step_clipper: int = _param(
        16,
        name="local_step_clipper",
        at_least=1,
        unit="steps",
        help="Largest interval between exchanges; 1: one in each step (zero_one_adam).",
    )
    coeff_beta: float = _param(
        0.9,
        name="coeff_beta",
        at_least=0,
        below=1,
        help="Decay rate of the mean trust ratio, which replaces the ratio after --freeze-step "
        "(onebit_lamb).",
    )
    factor_max: float = _param(
        4.0,
        name="factor_max",
        above=0,
        help="Largest factor of the mean trust ratio (onebit_lamb).",
    )
    factor_min: float = _param(
        0.5,
        name="factor_min",
        above=0,
        help="Smallest factor of the mean trust ratio (onebit_lamb).",
    )
    factor_threshold: float = _param(
        0.1,
        name="factor_threshold",
        above=0,
        below=1,
        help="Largest relative change of that factor in a step (onebit_lamb).",
    )


ONEBIT_PATHS = tuple(f"optimizer.{field.name}" for field in fields(OneBitOptions))
