"""`OptimizerOptions`: the part of `OptimizerConfig` of the optimizers of this feature."""

from dataclasses import dataclass

from ...config.options.option import option

COEFFICIENT_SETS = (
    "simple",
    "quintic",
    "polar_express",
    "cans",
    "aol",
    "deepseekv4",
    "cubic5",
)
SCALE_MODES = ("spectral", "unit_rms_norm", "shape_scaling", "match_rms_adamw")
SCALAR_OPTIMIZERS = ("adam", "lion")


@dataclass(frozen=True)
class MuonConfig:
    """Options of Muon; names and defaults are Megatron's."""

    muon_momentum: float = option(
        0.9,
        at_least=0,
        below=1,
        help="Decay rate of the momentum (muon only); 0.95 unless given in a DeepSpeed JSON.",
    )
    muon_use_nesterov: bool = option(
        False,
        help="Make a mean of gradient and momentum orthogonal, not the momentum (muon only); on in a "
        "DeepSpeed JSON.",
    )
    muon_coefficient_type: str = option(
        "quintic",
        choices=COEFFICIENT_SETS,
        help="Coefficients of the Newton-Schulz iterations (muon only); simple, those of torch, in a "
        "DeepSpeed JSON.",
    )
    muon_num_ns_steps: int = option(
        5,
        at_least=1,
        unit="iterations",
        help="Newton-Schulz iterations of a step (muon only).",
        avoid="polar_express and deepseekv4 need 8 and 10 for singular values near 1.",
    )
    muon_scale_mode: str = option(
        "spectral",
        choices=SCALE_MODES,
        help="How the update of a matrix of o rows and i columns is scaled: by √max(o, i), √(o/i), "
        "√max(1, o/i) or 0.2 √max(o, i) (muon only); shape_scaling in a DeepSpeed JSON.",
        avoid="A learning rate of one scale does not suit another one: they differ by up to 60.",
    )
    muon_extra_scale_factor: float = option(
        1.0, above=0, help="Updates of matrices are multiplied by it (muon only)."
    )
    muon_split_qkv: bool = option(
        True,
        switches={"--muon-no-split-qkv": False},
        help="Queries, keys and values of a layer are three matrices, not one (muon only).",
    )
    muon_per_head: bool = option(
        False,
        json="optimizer.params.per_head_muon",
        help="Each head of queries, keys and values is a matrix (muon only).",
    )
    muon_ns_dtype: str = option(
        "auto",
        choices=("auto", "fp32", "bf16"),
        flags=["--muon-fp32-matmul-prec"],
        values={"medium": "bf16", "high": "fp32", "highest": "fp32"},
        help="Dtype of the products of the iterations; auto is bf16 on GPUs and fp32 on CPUs (muon only).",
        avoid="bf16 moves singular values by about a hundredth, and layouts differ by as much.",
    )
    muon_scalar_optimizer: str = option(
        "adam",
        choices=SCALAR_OPTIMIZERS,
        help="Optimizer of embeddings, the output layer, routers, norms and biases (muon only).",
    )
    muon_lr: float | None = option(
        None,
        above=0,
        json="optimizer.params.muon_lr",
        help="Highest learning rate of the matrices; warm-up and decay are those of --lr. Default: --lr "
        "(muon only).",
    )
    muon_scalar_lr: float | None = option(
        None,
        above=0,
        json="optimizer.params.adam_lr",
        help="Highest learning rate of what is not a matrix; warm-up and decay are those of --lr. Default: "
        "--lr (muon only).",
    )


@dataclass(frozen=True)
class SlowMomentumOptions:
    """Options of AdEMAMix; names and defaults are those of swiss-ai's fork of Megatron-LM."""

    ademamix_alpha: float = option(
        5.0,
        at_least=0,
        help="Weight of the slow momentum in a step (ademamix only).",
    )
    ademamix_beta3: float = option(
        0.999,
        above=0,
        below=1,
        help="Decay rate of the slow momentum (ademamix only).",
        avoid="The paper has 0.9999, which pays off in long runs.",
    )
    ademamix_alpha_warmup: int = option(
        -1,
        at_least=-1,
        unit="iterations",
        help="Steps in which --ademamix-alpha grows linearly from 0; -1: none (ademamix only).",
    )
    ademamix_beta3_warmup: int = option(
        -1,
        at_least=-1,
        unit="iterations",
        help="Steps in which the decay rate grows from --adam-beta1 to --ademamix-beta3, so that its half-life grows "
        "linearly; -1: none (ademamix only).",
    )


@dataclass(frozen=True)
class OptimizerOptions(MuonConfig, SlowMomentumOptions):
    """Numbers of Lion, Adagrad and LAMB, after those of Muon and AdEMAMix."""

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
