"""The rows of `config/optimizer_facts.py` for these optimizers."""

from collections.abc import Iterator

from ...config.messages import given
from ...config.optimizer_facts import MATRIX, MOMENTS, NORMS, OptimizerFacts
from ...config.run import RunConfig


def trust_ratios(config: RunConfig) -> Iterator[str]:
    """The smallest trust ratio of LAMB is not above the largest."""
    if config.optimizer.lamb_min_coeff > config.optimizer.lamb_max_coeff:
        yield "[lamb_min_coeff] is above [lamb_max_coeff]: no trust ratio is between them. Lower the minimum."


def parts_of_muon(config: RunConfig) -> Iterator[str]:
    """Options of Muon and of the optimizer of what is not a matrix."""
    o = config.optimizer
    lion = ("optimizer.lion_beta1", "optimizer.lion_beta2")
    adam = [f"optimizer.{name}" for names in MOMENTS.values() for name in names]
    others = adam if o.muon_scalar_optimizer == "lion" else lion
    # Defaults of a JSON are no wish.
    wished = [
        path
        for path in others
        if path in config.sources and config.sources[path].kind != "deepspeed"
    ]
    yield from given(
        config,
        wished,
        "is not an option of [muon_scalar_optimizer], which updates what is not "
        "a matrix. Remove it.",
    )
    if o.muon_coefficient_type == "cubic5" and o.muon_num_ns_steps != 5:
        yield "[muon_coefficient_type] has coefficients of 5 iterations, but [muon_num_ns_steps]. Use 5."
    if o.muon_per_head and not o.muon_split_qkv:
        yield "[muon_per_head] divides what [muon_split_qkv] leaves in one. Remove one of them."


LION = OptimizerFacts(
    "lion",
    ("Lion", "FusedLion", "DeepSpeedCPULion"),
    {"betas": ("lion_beta1", "lion_beta2")},
    ("exp_avg",),
    defaults={"lion_beta1": 0.9, "lion_beta2": 0.999},
)
ADAGRAD = OptimizerFacts(
    "adagrad",
    ("Adagrad", "DeepSpeedCPUAdagrad"),
    {"eps": ("adagrad_eps",)},
    ("sum",),
)
ADEMAMIX = OptimizerFacts(
    "ademamix",
    (),
    {"betas": ("adam_beta1", "adam_beta2"), "eps": ("adam_eps",)},
    ("exp_avg", "exp_avg_slow", "exp_avg_sq"),
    (
        "ademamix_alpha",
        "ademamix_beta3",
        "ademamix_alpha_warmup",
        "ademamix_beta3_warmup",
    ),
)
LAMB = OptimizerFacts(
    "lamb",
    ("Lamb", "FusedLamb"),
    MOMENTS
    | {
        "eps_inside_sqrt": ("lamb_eps_inside_sqrt",),
        "max_coeff": ("lamb_max_coeff",),
        "min_coeff": ("lamb_min_coeff",),
    },
    ("exp_avg", "exp_avg_sq"),
    ("lamb_form",),
    depends=NORMS,
    rules=(trust_ratios,),
)
MUON = OptimizerFacts(
    "muon",
    ("Muon",),
    MOMENTS
    | {
        "adam_w_mode": ("decoupled_weight_decay",),
        "momentum": ("muon_momentum",),
        "muon_lr": ("muon_lr",),
        "adam_lr": ("muon_scalar_lr",),
        "per_head_muon": ("muon_per_head",),
    },
    ("momentum_buffer",),
    (
        "muon_use_nesterov",
        "muon_coefficient_type",
        "muon_num_ns_steps",
        "muon_scale_mode",
        "muon_extra_scale_factor",
        "muon_split_qkv",
        "muon_ns_dtype",
        "muon_scalar_optimizer",
        "lion_beta1",
        "lion_beta2",
    ),
    {
        "muon_momentum": 0.95,
        "muon_use_nesterov": True,
        "muon_coefficient_type": "simple",
        "muon_scale_mode": "shape_scaling",
        "adam_beta2": 0.95,
        "adam_eps": 1e-10,
    },
    MATRIX,
    rules=(parts_of_muon,),
)
