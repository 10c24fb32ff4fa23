"""Options of the optimizer muon, a part of the section "optimizer"."""

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
