"""`OptimizerConfig`: update rule, schedule of the learning rate, and dtypes of weights and gradients."""

from dataclasses import dataclass

from .option import DTYPE_NAMES, option

LR_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD", "WarmupLR", "WarmupDecayLR",
             "WarmupCosineLR")


@dataclass(frozen=True)
class OptimizerConfig:
    """Spans are in iterations, samples or tokens; those in iterations and samples advance on steps that were
    not skipped.
    """

    optimizer: str = option(
        "adam", help="Name of a registered optimizer: adam (decoupled weight decay), sgd.")
    lr: float = option(required=True, above=0, json="optimizer.params.lr", help="Highest learning rate.")
    min_lr: float = option(0.0, at_least=0, help="Learning rate at the end of the decay and after it.")
    weight_decay: float = option(
        0.01, at_least=0, json="optimizer.params.weight_decay",
        help="Weight decay of matrices; biases and normalization weights never decay.")
    start_weight_decay: float | None = option(
        None, at_least=0, help="Weight decay at the first step, if it changes.")
    end_weight_decay: float | None = option(
        None, at_least=0, help="Weight decay at the last step, if it changes.")
    weight_decay_incr_style: str = option(
        "constant", choices=("constant", "linear", "cosine"),
        help="How the weight decay changes from --start-weight-decay to --end-weight-decay.")
    adam_beta1: float = option(0.9, at_least=0, below=1, help="Decay rate of Adam's first moment.")
    adam_beta2: float = option(
        0.999, at_least=0, below=1, help="Decay rate of Adam's second moment.",
        avoid="Large language models usually train with 0.95.")
    adam_eps: float = option(
        1e-8, above=0, json="optimizer.params.eps", help="Added to the square root of the second moment.")
    sgd_momentum: float = option(
        0.9, at_least=0, below=1, json="optimizer.params.momentum", help="Momentum (sgd only).")
    clip_grad: float = option(
        1.0, at_least=0, json="gradient_clipping",
        help="Gradients are scaled down to this global norm; 0: no clipping.")

    lr_decay_style: str = option(
        "linear", choices=LR_STYLES,
        help="How the learning rate decays after the warm-up. The three Warmup… styles are DeepSpeed's "
             "schedulers: WarmupDecayLR decays to --lr-warmup-init, WarmupCosineLR to --min-lr.")
    lr_decay_iters: int | None = option(
        None, at_least=1, unit="iterations",
        help="Iteration at which the decay ends. Default: the end of training.")
    lr_decay_samples: int | None = option(
        None, at_least=1, unit="samples", help="Consumed samples at which the decay ends.")
    lr_decay_tokens: int | None = option(
        None, at_least=1, unit="tokens",
        help="Consumed tokens at which the decay ends; the warm-up is then in tokens, too. With a "
             "curriculum, only tokens that were trained on count.")
    lr_warmup_iters: int = option(0, at_least=0, unit="iterations", help="Length of the warm-up.")
    lr_warmup_samples: int = option(0, at_least=0, unit="samples", help="Length of the warm-up in samples.")
    lr_warmup_tokens: int = option(
        0, at_least=0, unit="tokens",
        help="Length of the warm-up in consumed tokens, with --lr-decay-tokens or --train-tokens.")
    lr_warmup_fraction: float | None = option(
        None, at_least=0, at_most=1, help="Length of the warm-up as a fraction of the decay span.")
    lr_warmup_init: float = option(0.0, at_least=0, help="Learning rate at the first step of the warm-up.")
    lr_warmup_style: str = option(
        "linear", choices=("linear", "log"), help="Shape of the warm-up; log only with the Warmup… styles.")
    lr_wsd_decay_iters: int | None = option(
        None, at_least=1, unit="iterations", help="Length of the final decay (WSD only).")
    lr_wsd_decay_samples: int | None = option(
        None, at_least=1, unit="samples", help="Length of the final decay in samples (WSD only).")
    lr_wsd_decay_style: str = option(
        "exponential", choices=("exponential", "linear", "cosine", "minus_sqrt"),
        help="Shape of the final decay (WSD only).")

    fp16: bool = option(
        False, json="fp16.enabled", help="Weights and activations in fp16, fp32 masters, loss scaling.",
        avoid="Prefer --bf16, which needs no loss scaling, where the device supports it.")
    bf16: bool = option(
        False, json="bf16.enabled", help="Weights and activations in bfloat16, fp32 masters.",
        avoid="CPUs without bf16 instructions are slower in bf16 than in fp32.")
    loss_scale: float | None = option(
        None, above=0, help="Fixed loss scale (fp16 only). Default: dynamic.",
        avoid="A fixed scale that overflows skips every step.")
    initial_loss_scale: float = option(2.0**32, above=0, help="First dynamic loss scale (fp16 only).")
    min_loss_scale: float = option(
        1.0, above=0, json="fp16.min_loss_scale",
        help="Training stops with an error if the dynamic loss scale would fall below this (fp16 only).")
    loss_scale_window: int = option(
        1000, at_least=1, json="fp16.loss_scale_window", unit="iterations",
        help="Steps without overflow after which the scale doubles (fp16 only).")
    hysteresis: int = option(
        2, at_least=1, json="fp16.hysteresis", help="Overflows after which the scale is halved (fp16 only).")

    main_grads_dtype: str = option(
        "fp32", choices=("fp32", "bf16", "fp16"), json="data_types.grad_accum_dtype",
        switches={"--accumulate-allreduce-grads-in-fp32": "fp32"},
        help="Dtype in which gradients accumulate, and in which they are reduced unless "
             "--communication-data-type is given. It is fp32 or the dtype of the weights.",
        avoid="16 bits lose small contributions when many micro-batches or ranks are added up.")

    @property
    def gradient_dtype(self) -> str:
        """Dtype in which gradients accumulate, as torch names it."""
        return DTYPE_NAMES[self.main_grads_dtype]

    @property
    def params_dtype(self) -> str:
        """Dtype of weights and activations, as torch names it."""
        return "float16" if self.fp16 else "bfloat16" if self.bf16 else "float32"
