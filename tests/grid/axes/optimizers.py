"""Optimizers whose update does not depend on how state is divided.

Lion is not among them: where a gradient is nearly zero, the sign of its update is that of rounding. Neither
are those that exchange one bit, which depend on the number of workers (tests/onebit).
"""

from tests.harness.layout_comparison import Difference
from tests.harness.tiny_jobs import TOLERANCE

from .axis import Axis

# LAMB moves each weight by lr times its own norm: the gradient of a step follows the rounding of the last.
# Iterations of Muon enlarge the rounding of small singular values.
LOOSE = Difference(loss=1e-5, grad_norm=1e-5, weights=1e-4)
LOOSE_OPTIMIZERS = ("lamb", "muon")
# Else an element whose gradient is rounding alone moves as far as others.
STEADY = {"--adam-eps": 1e-4}
STEADY_ADAGRAD = {"--adagrad-eps": 1e-4}
LAMB = {
    "--optimizer": "lamb",
    "--lamb-min-coeff": 0,
    **STEADY,
    "--lr": "1e-2",
    "--lr-warmup-iters": 0,
}
MUON = {
    "--optimizer": "muon",
    "--muon-scale-mode": "match_rms_adamw",
    "--muon-use-nesterov": "",
    "--lr": "1e-2",
    "--muon-scalar-lr": "1e-3",
    "--lr-warmup-iters": 0,
}
# A second moment that falls within a few steps; the rate and the first beta change at each step.
AMSGRAD = {
    **STEADY,
    "--amsgrad": "",
    "--adam-beta2": 0.5,
    "--lr-warmup-iters": 0,
    "--lr-decay-style": "OneCycle",
    "--cycle-first-step-size": 2,
    "--cycle-second-step-size": 1,
    "--decay-step-size": 2,
    "--decay-lr-rate": 0.5,
    "--cycle-min-mom": 0.5,
}

AXES = (
    Axis(
        "optimizer",
        {
            "adam": {},
            "amsgrad": AMSGRAD,
            "uncorrected": {"--no-adam-bias-correction": ""},
            "adagrad": {"--optimizer": "adagrad"},
            "lamb": LAMB,
            "muon": MUON,
        },
        needs=(
            lambda optimizer, dtype: dtype == "fp32" or optimizer == "adam",
            lambda optimizer, offload: offload == "none" or optimizer != "muon",
        ),
    ),
)


def tolerance(case) -> Difference:
    """How far a case may stray from one process."""
    loose = case["optimizer"] in LOOSE_OPTIMIZERS
    return LOOSE if loose else TOLERANCE[case["dtype"]]
