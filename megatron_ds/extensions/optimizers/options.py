"""`OptimizerOptions`: the part of `OptimizerConfig` of the optimizers of this feature."""

from dataclasses import dataclass

from ...config.options.option import option
from .muon_options import MuonConfig


@dataclass(frozen=True)
class OptimizerOptions(MuonConfig):
    """Numbers of Lion, Adagrad and LAMB, after those of Muon."""

    lion_beta1: float = option(
        0.95,
        at_least=0,
        below=1,
        help="Weight of the momentum in the sign that is the update (lion only).",
        avoid="The paper has 0.9, with --lion-beta2 0.99.",
    )
    lion_beta2: float = option(
        0.98, at_least=0, below=1, help="Decay rate of the momentum (lion only)."
    )
    adagrad_eps: float = option(
        1e-10,
        above=0,
        help="Added to the root of the sum of squared gradients (adagrad only).",
    )
    lamb_form: str = option(
        "deepspeed",
        choices=("deepspeed", "paper"),
        help="Whether bias correction multiplies the step, as in DeepSpeed, which makes the first steps "
        "smaller, or the moments, as in the paper (lamb only).",
        avoid="A learning rate of one form does not suit the other.",
    )
    lamb_max_coeff: float = option(
        10.0,
        above=0,
        json="optimizer.params.max_coeff",
        help="Largest trust ratio, the norm of a weight over that of its update (lamb only).",
    )
    lamb_min_coeff: float = option(
        0.01,
        at_least=0,
        json="optimizer.params.min_coeff",
        help="Smallest trust ratio (lamb only).",
    )
    lamb_eps_inside_sqrt: bool = option(
        False,
        json="optimizer.params.eps_inside_sqrt",
        help="Add --adam-eps to the second moment, before its root is taken (lamb only).",
    )
