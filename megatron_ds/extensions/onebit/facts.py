"""The rows of `config/optimizer_facts.py` for these optimizers."""

from ...config.optimizer_facts import MOMENTS, NORMS, OptimizerFacts
from ..optimizers.facts import trust_ratios

# DeepSpeed's choice of a transport has no effect here.
ONE_BIT = MOMENTS | {"cuda_aware": (), "comm_backend_name": ()}


def _same(*names: str) -> dict[str, tuple[str, ...]]:
    """Keys that are fields of the same name."""
    return {name: (name,) for name in names}


ONE_BIT_ADAM = OptimizerFacts(
    "onebit_adam",
    ("OneBitAdam",),
    ONE_BIT | _same("freeze_step"),
    ("exp_avg", "exp_avg_sq"),
)
ZERO_ONE_ADAM = OptimizerFacts(
    "zero_one_adam",
    ("ZeroOneAdam",),
    ONE_BIT
    | _same(
        "var_freeze_step",
        "var_update_scaler",
        "local_step_scaler",
        "local_step_clipper",
    ),
    ("exp_avg", "exp_avg_sq", "local_sum"),
)
ONE_BIT_LAMB = OptimizerFacts(
    "onebit_lamb",
    ("OneBitLamb",),
    ONE_BIT
    | {"max_coeff": ("lamb_max_coeff",), "min_coeff": ("lamb_min_coeff",)}
    | _same(
        "freeze_step",
        "coeff_beta",
        "factor_max",
        "factor_min",
        "factor_threshold",
    ),
    ("exp_avg", "exp_avg_sq", "exp_avg_sq_fresh"),
    depends=NORMS,
    rules=(trust_ratios,),
)
